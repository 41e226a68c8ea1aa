"""Messages between gateway, admission and engine replicas, and the ports they stand behind.

Between processes travel ages and durations, never clock readings: the clocks of two nodes need not agree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from scheduling.request import ReleasePolicy


class Endpoint(StrEnum):
    """The OpenAI routes that generate tokens."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Promise:
    """The targets of one request: its service's, in integer microseconds."""

    ttft_us: int
    tbt_us: int
    release: ReleasePolicy
    hold_max_us: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One client request on its way to an engine replica.

    ``body`` is the request's JSON object as the client sent it. ``age_us`` is how long ago the request arrived at the
    gateway, measured when this message is sent.
    """

    request_id: str
    gateway_id: str
    endpoint: Endpoint
    service: str
    body: Mapping[str, Any]
    promise: Promise
    age_us: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request found valid, and its size: what admission needs to know before it grants a replica."""

    prompt_tokens: int
    max_tokens: int
    choices: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A client's mistake, found before anything was queued: HTTP status and OpenAI error envelope."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A piece of a response.

    For a streamed response ``data`` is one or more complete SSE events; for another it is the JSON body, in one piece.
    ``tokens`` of choice ``index`` are in it, 0 for events that carry none (role, usage, [DONE]). The gateway sends it
    ``hold_us`` after receipt. ``last`` ends the response. ``status`` is the HTTP status of a response that has not
    begun; an error before the first token arrives as a non-streamed body with a status of 400 or more.
    """

    request_id: str
    data: str
    hold_us: int = 0
    tokens: int = 0
    index: int = 0
    last: bool = False
    status: int = 200


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica tells admission about itself, once a second and when it starts.

    ``incarnation`` changes when the process does. ``steps`` counts engine steps, so that a stalled engine shows.
    """

    replica_id: str
    incarnation: str
    max_requests: int
    running: int
    waiting: int
    kv_usage: float
    steps: int


class EnginePort(Protocol):
    """An engine replica as gateways and admission see it. Implemented by ``EngineReplica`` and ``tests/fakes``."""

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Validate a request completely, without queueing it."""
        ...

    async def submit(self, submission: Submission) -> None:
        """Start a granted request. Its deliveries, errors included, arrive on the gateway's stream."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Stop requests whose client has gone and free their KV cache. Unknown ids are ignored."""
        ...

    def deliveries(self, gateway_id: str) -> AsyncIterator[list[Delivery]]:
        """All deliveries for one gateway, one list per engine step, for as long as the replica lives.

        Opening the stream again closes the former one and aborts the requests that were bound to it.
        """
        ...

    async def status(self) -> ReplicaStatus:
        """The replica's load now."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that asks admission for a replica. ``age_us`` is its age when the message is sent."""

    request_id: str
    gateway_id: str
    service: str
    promise: Promise
    prompt_tokens: int
    max_tokens: int
    choices: int
    age_us: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to submit to one replica."""

    replica_id: str
    incarnation: str
    queued_us: int


@dataclass(frozen=True, slots=True)
class Shed:
    """Admission turns a request away. ``reason`` goes into a response header; retry after ``retry_after_s``."""

    reason: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a granted request ended, reported with its release.

    ``ttft_us`` is the released time to first token, None when no token was released. ``gaps`` counts the gaps
    between released tokens, ``late_gaps`` those above the TBT target, ``late_tokens`` the tokens released after their
    deadline arrival + TTFT + i * TBT. ``end`` is one of ``completed``, ``cancelled``, ``failed``.
    """

    service: str
    end: str
    ttft_us: int | None = None
    ttft_met: bool = False
    tokens: int = 0
    gaps: int = 0
    late_gaps: int = 0
    late_tokens: int = 0
    max_gap_us: int = 0
