"""One request on its way through a simulated replica, and what is kept of it."""

from __future__ import annotations

from array import array

from scheduling.request import RequestState
from simulator.workload import Arrival, Service


class Track:
    """A request: the state that policies see, and what the host alone knows.

    ``ready_us`` is when its first token was computed, ``first_us`` when it was released; 0 before. ``due_us`` is when
    its newest token was due: arrival + TTFT + index * TBT. ``late_gaps`` and
    ``late_tokens`` count tokens after the first: gaps between releases above TBT, and tokens released after
    arrival + TTFT + index * TBT.
    """

    __slots__ = (
        "admitted_us",
        "arrival",
        "due_us",
        "ended_us",
        "first_us",
        "gaps",
        "hold_max_us",
        "late_gaps",
        "late_tokens",
        "outputs",
        "preempted",
        "ready_us",
        "replica",
        "service",
        "shared",
        "shed",
        "state",
        "worst_gap_us",
    )

    def __init__(self, request_id: str, arrival: Arrival, service: Service) -> None:
        self.arrival = arrival
        self.service = service
        self.state = RequestState(
            request_id=request_id,
            service=service.name,
            arrival_us=arrival.at_us,
            ttft_us=service.ttft_us,
            tbt_us=service.tbt_us,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens or arrival.output_tokens,
            adapter=service.adapter,
            release=service.release,
            streaming=arrival.streaming,
        )
        self.outputs = arrival.output_tokens
        self.hold_max_us = service.hold_max_us
        self.due_us = 0
        self.admitted_us = 0
        self.ready_us = 0
        self.first_us = 0
        self.ended_us = 0
        self.late_gaps = 0
        self.late_tokens = 0
        self.worst_gap_us = 0
        self.preempted = 0
        self.shared = 0
        self.replica = -1
        self.shed = False
        self.gaps: array[int] = array("q")

    @property
    def prefix_key(self) -> str:
        """What the prefix cache files its beginning under: cached blocks belong to one adapter."""
        return f"{self.state.adapter}:{self.arrival.prefix_key}" if self.arrival.prefix_key else ""

    @property
    def done(self) -> bool:
        """Whether every token was generated."""
        return self.state.generated_tokens >= self.outputs

    @property
    def ttft_met(self) -> bool:
        """Whether the first token came in time."""
        return self.first_us > 0 and self.first_us <= self.arrival.at_us + self.service.ttft_us

    @property
    def met(self) -> bool:
        """Whether TTFT and every gap were kept."""
        return self.done and self.ttft_met and not self.late_gaps
