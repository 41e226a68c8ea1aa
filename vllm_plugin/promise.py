"""How a request's promise travels through vLLM to the scheduler, and how the scheduler's answer travels back.

vLLM hands ``SamplingParams.extra_args`` through to ``Request.sampling_params`` unread, and
``EngineCoreOutput.kv_transfer_params`` back to ``RequestOutput`` unread when no KV connector is configured. Both are
plain dicts; this module owns the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduling.request import ReleasePolicy

PROMISE_KEY = "halo_promise"
HOLD_KEY = "halo_hold_us"
PROFILING_KEY = "halo_profiling"
PROFILED_KEY = "halo_profiled"

# Direct users of the engine (vLLM's own tools, profiling) make no promise. An hour keeps them behind all who do.
UNPROMISED_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class RequestPromise:
    """The targets of one request and its arrival.

    ``arrival_us`` is on the host's CLOCK_MONOTONIC: AsyncLLM and its EngineCore child always share a host
    (docs/adr/0005).
    """

    service: str
    arrival_us: int
    ttft_us: int
    tbt_us: int
    release: ReleasePolicy
    hold_max_us: int
    streaming: bool

    def to_wire(self) -> dict[str, Any]:
        """A dict of msgpack types for ``SamplingParams.extra_args``."""
        return {
            "service": self.service,
            "arrival_us": self.arrival_us,
            "ttft_us": self.ttft_us,
            "tbt_us": self.tbt_us,
            "release": str(self.release),
            "hold_max_us": self.hold_max_us,
            "streaming": self.streaming,
        }

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, now_us: int) -> RequestPromise:
        """The promise in ``extra_args``; without one, a promise nobody will find tight, made at ``now_us``."""
        wire = (extra_args or {}).get(PROMISE_KEY)
        if wire is None:
            return cls("", now_us, UNPROMISED_US, UNPROMISED_US, ReleasePolicy.OFF, 0, True)
        return cls(
            service=wire["service"],
            arrival_us=wire["arrival_us"],
            ttft_us=wire["ttft_us"],
            tbt_us=wire["tbt_us"],
            release=ReleasePolicy(wire["release"]),
            hold_max_us=wire["hold_max_us"],
            streaming=wire["streaming"],
        )


def profiling_requests(extra_args: Mapping[str, Any] | None) -> int:
    """How many requests the profiling pass has of which this request is one; 0 for any other request."""
    return int((extra_args or {}).get(PROFILING_KEY, 0))


def attach_hold(kv_transfer_params: dict[str, Any] | None, hold_us: int) -> dict[str, Any]:
    """``kv_transfer_params`` with the hold of an output's tokens added."""
    return {**(kv_transfer_params or {}), HOLD_KEY: hold_us}


def detach_hold(kv_transfer_params: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int | None]:
    """Split what :func:`attach_hold` joined. The hold is None when HaloScheduler did not stamp the output."""
    if not kv_transfer_params or HOLD_KEY not in kv_transfer_params:
        return kv_transfer_params, None
    rest = {key: value for key, value in kv_transfer_params.items() if key != HOLD_KEY}
    return rest or None, int(kv_transfer_params[HOLD_KEY])
