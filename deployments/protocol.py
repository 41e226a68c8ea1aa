"""Messages between gateway, admission and engine replicas, and the ports they stand behind.

Between processes travel ages and durations, never clock readings: the clocks of two nodes need not agree.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
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


class ReplicaUnavailableError(Exception):
    """A replica died, is not reachable, or gave no answer in time."""


class WrongReplicaError(ReplicaUnavailableError):
    """A call meant for one life of a replica reached another one. The addressed one is gone or not yet routable."""


class NoStreamError(ReplicaUnavailableError):
    """A request came from a gateway whose delivery stream is not open: it broke, and the gateway does not know yet."""


class EnginePort(Protocol):
    """An engine replica as its endpoint sees it. Implemented by ``EngineReplica`` and ``tests/fakes``.

    ``EngineEndpoint`` puts it behind a Serve replica: it builds the engine, awaits ``start``, registers it with
    admission once a second, and awaits ``stop`` when Serve takes the replica down.
    """

    async def start(self) -> None:
        """Load the model. Returns when the engine can take requests; raises when it never will."""
        ...

    async def stop(self) -> None:
        """Release everything the engine holds. Safe to call twice."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine makes no progress and must be replaced. Load alone never does."""
        ...

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Validate a request completely, without queueing it."""
        ...

    async def submit(self, submission: Submission) -> None:
        """Start a granted request. Its deliveries, errors included, arrive on the gateway's stream.

        Raises NoStreamError when that stream is not open.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Stop requests whose client has gone and free their KV cache. Unknown ids are ignored."""
        ...

    def deliveries(self, gateway_id: str) -> AsyncIterator[list[Delivery]]:
        """All deliveries for one gateway, one list per engine step, for as long as the replica lives.

        The gateway is registered before the first suspension, so that nothing submitted after the stream was asked
        for its first list is lost. Opening the stream again closes the former one and aborts the requests that were
        bound to it; so does closing it.
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


class End(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, reported with its release.

    ``ttft_us`` is the released time to first token, None when no token was released or the response was not
    streamed. ``tokens`` counts released tokens, ``gaps`` the gaps between them (for each choice apart), ``late_gaps``
    those above the TBT target, ``late_tokens`` the tokens released after their deadline
    arrival + TTFT + i * TBT. ``gap_counts`` is the histogram of the gaps over ``slo_ledger.edges_us(tbt)``, overflow
    last. A response that is not streamed has one deadline, its last token's, and no gaps: ``late_tokens`` is 0 or 1.
    """

    service: str
    end: End
    streamed: bool = True
    ttft_us: int | None = None
    ttft_met: bool = False
    tokens: int = 0
    gaps: int = 0
    late_gaps: int = 0
    late_tokens: int = 0
    max_gap_us: int = 0
    gap_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """One life of one engine replica. A restarted process has another ``incarnation``."""

    replica_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A grant that a gateway holds."""

    request_id: str
    address: ReplicaAddress
    choices: int


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What a gateway tells admission about itself, once a second: every grant it holds, and whom it cannot reach.

    Admission releases what the gateway no longer holds and, after its own restart, learns what was granted.
    """

    gateway_id: str
    held: tuple[HeldRequest, ...] = ()
    unroutable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What admission answers to a gateway's report.

    ``replicas`` counts those that get grants. ``silent`` names replicas that stopped sending heartbeats: what they
    still owe will not come.
    """

    replicas: int
    queued: int
    gateways: int = 1
    silent: tuple[ReplicaAddress, ...] = ()


class EnginePool(Protocol):
    """All engine replicas as a gateway sees them. Implemented by ``ServeEnginePool`` and ``tests/fakes``.

    Every method raises ``ReplicaUnavailableError`` when the replica died or cannot be reached.
    """

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Validate a request on any replica."""
        ...

    async def submit(self, address: ReplicaAddress, submission: Submission) -> None:
        """Start a granted request on the replica it was granted."""
        ...

    async def abort(self, address: ReplicaAddress, request_ids: list[str]) -> None:
        """Stop requests on one replica."""
        ...

    def deliveries(self, address: ReplicaAddress, gateway_id: str) -> AsyncGenerator[list[Delivery], None]:
        """One replica's deliveries. The first list comes at once, empty: the stream is open."""
        ...

    def routable(self) -> frozenset[str] | None:
        """The ids of the replicas that calls can reach now; None while that is not known."""
        ...


class AdmissionPort(Protocol):
    """Admission as gateways and engine endpoints see it: ``Admission`` itself, or ``ServeAdmission`` over a handle."""

    async def acquire(self, ticket: Ticket) -> Grant | Shed:
        """Wait in the EDF queue for a replica. Asking again for a request id gives its former grant back.

        A request that is shed is accounted for here and needs no release.
        """
        ...

    async def release(self, request_id: str, outcome: Outcome | None) -> None:
        """Give a grant back, or leave the queue, and account for the request. May be repeated.

        Without an outcome only the grant is given back: the engine has finished, the client has not got everything.
        """
        ...

    async def heartbeat(self, status: ReplicaStatus) -> list[str]:
        """Register or refresh a replica. Returns request ids it must abort: their client has gone."""
        ...

    async def withdraw(self, address: ReplicaAddress) -> None:
        """A replica stops cleanly: grant it nothing more."""
        ...

    async def report_lost(self, address: ReplicaAddress) -> None:
        """A gateway's stream from a replica broke: grant it nothing until it is heard of again."""
        ...

    async def sync(self, report: GatewayReport) -> ClusterState:
        """A gateway's report, once a second."""
        ...

    async def slo(self) -> dict[str, Any]:
        """The SLO table of all services (see ``slo_ledger``)."""
        ...
