"""``fcfs``: first come, first served (HALO sections 2.4.2 and 6.1.4, SLoRA; Figure 4a).

What S-LoRA and stock vLLM and SGLang do: see :mod:`scheduling.chunked_prefill`. The paper leaves open what happens to
a preempted request; it returns to the queue with its own arrival, ahead of everyone younger.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.chunked_prefill import ChunkedPrefill, one_group
from scheduling.policy import View
from scheduling.queues import ArrivalQueues
from scheduling.request import RequestState


class Fcfs(ChunkedPrefill):
    """First come, first served."""

    name = "fcfs"

    def __init__(self, *, batch: int) -> None:
        super().__init__(batch=batch)
        self._waiting = ArrivalQueues(one_group)

    def waiting_order(self, view: View) -> Iterator[RequestState]:
        """Yield waiting requests by arrival."""
        self._waiting.sync(view.waiting)
        return self._waiting.walk("")
