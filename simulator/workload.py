"""Services and the requests they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduling.request import ReleasePolicy


class WorkloadError(ValueError):
    """A workload, trace or option that cannot be used; the message names where and why."""


@dataclass(frozen=True, slots=True)
class Service:
    """A LoRA service and its promise. ``adapter`` 0 is the base model; times are microseconds.

    ``shed`` drops a request whose first-token deadline passes while it waits for a replica (``overload: shed``).
    """

    name: str
    ttft_us: int
    tbt_us: int
    adapter: int = 0
    release: ReleasePolicy = ReleasePolicy.BOUNDED
    hold_max_us: int = 250_000
    shed: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, to which service, how long it is.

    ``prefix_key`` names the text that its first ``prefix_tokens`` tokens share with other requests of the service, for
    the prefix cache; empty means that it shares nothing. ``max_tokens`` is the limit the client asked for, which
    policies see; 0 stands for ``output_tokens``, the number that is really generated.
    """

    at_us: int
    service: str
    prompt_tokens: int
    output_tokens: int
    prefix_key: str = ""
    prefix_tokens: int = 0
    streaming: bool = True
    max_tokens: int = 0


def check_arrivals(arrivals: Sequence[Arrival], services: Sequence[Service]) -> None:
    """Raise :class:`WorkloadError` for the first arrival that no engine could serve as it is written."""
    names = {service.name for service in services}
    previous_us = 0
    for index, arrival in enumerate(arrivals):
        where = f"request {index} at {arrival.at_us} us"
        if arrival.service not in names:
            raise WorkloadError(f"{where}: no service {arrival.service!r}; there are {', '.join(sorted(names))}")
        if arrival.at_us < previous_us:
            raise WorkloadError(f"{where}: comes before the request in front of it ({previous_us} us)")
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
            raise WorkloadError(
                f"{where}: {arrival.prompt_tokens} prompt and {arrival.output_tokens} output tokens; each has to be 1 "
                "or more"
            )
        previous_us = arrival.at_us
