"""``qoserve``: earliest deadline first and a batch that follows the strictest TBT (HALO 2.4.2, 6.1.4, Figure 4c).

Requests enter by TTFT deadline. The batch B meets the strictest TBT of all services; in a step whose decodes all have
relaxed targets it grows.

Left open by HALO and chosen here: the batch grows in proportion, ``batch * strictest running TBT / strictest TBT``,
which is safe when step time is affine in tokens with a non-negative constant; it goes to prompt chunks only, while the
number of running requests stays within ``batch``, for a request with a strict target may arrive at any time and the
running ones cannot leave. A step without decodes has no TBT to keep and takes all the engine allows. QoServe's deferral
of offline work does not apply where every service faces users (HALO 2.4.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.chunked_prefill import ChunkedPrefill
from scheduling.policy import View
from scheduling.request import RequestState


class QoServe(ChunkedPrefill):
    """Earliest deadline first with dynamic chunk size.

    ``tbt_min_us`` is the strictest TBT of any service; without it, the strictest seen so far.
    """

    name = "qoserve"

    def __init__(self, *, batch: int, tbt_min_us: int | None = None) -> None:
        super().__init__(batch=batch)
        self._tbt_min_us = tbt_min_us

    def waiting_order(self, view: View) -> Iterator[RequestState]:
        """Yield waiting requests by deadline, the order of the view."""
        return iter(view.waiting)

    def may_enter(self, running: int) -> bool:
        """Keep the decodes of the coming steps within the batch."""
        return running < self.batch

    def step_tokens(self, view: View, decodes: list[RequestState]) -> int:
        """Return the batch that fits the strictest TBT among the decodes."""
        if not decodes:
            return view.limits.step_tokens
        strictest_us = min(state.tbt_us for state in decodes)
        if self._tbt_min_us is None or strictest_us < self._tbt_min_us:
            self._tbt_min_us = strictest_us
        return self.batch * strictest_us // self._tbt_min_us
