"""One client request through the gateway: prepare, acquire, submit, stream, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.background import BackgroundTasks
from deployments.clock import Clock
from deployments.gateway_ports import GatewayMetrics
from deployments.openai_errors import ApiError
from deployments.protocol import (
    AdmissionPort,
    Delivery,
    End,
    Endpoint,
    EnginePool,
    Grant,
    HeldRequest,
    Outcome,
    Prepared,
    Promise,
    Refusal,
    ReplicaAddress,
    ReplicaUnavailableError,
    Shed,
    Submission,
    Ticket,
)
from deployments.release_tracker import ReleaseTracker
from deployments.replica_streams import ReplicaStreams
from deployments.response_channel import ReplicaLostError, ResponseChannel, SlowClientError
from deployments.settings import GatewaySettings

logger = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 30.0
SUBMIT_TIMEOUT_S = 30.0
CONTROL_TIMEOUT_S = 10.0
ADMISSION_RETRY_S = 0.25
ADMISSION_RETRIES = 100
CUT_AFTER_TIMEOUT_S = 5.0
GIVE_BACK_EARLY_US = 50_000
MAX_ATTEMPTS = 3
"""How many replicas one request may see. One that takes every engine down with it must not tour the cluster."""


@dataclass(frozen=True, slots=True)
class Call:
    """An authenticated request for a known service. ``arrival_us`` is on this process' clock."""

    request_id: str
    endpoint: Endpoint
    service: str
    promise: Promise
    body: Mapping[str, Any]
    arrival_us: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the response, ready to send. The first one sets status and content type."""

    data: str
    status: int
    streamed: bool


@dataclass(frozen=True, slots=True)
class Ports:
    """What an exchange needs of its gateway."""

    gateway_id: str
    settings: GatewaySettings
    engines: EnginePool
    admission: AdmissionPort
    streams: ReplicaStreams
    metrics: GatewayMetrics
    background: BackgroundTasks
    clock: Clock
    register: Callable[[Exchange], None]
    unregister: Callable[[Exchange], None]


@dataclass(slots=True, eq=False)
class Exchange:
    """Runs one call. Close ``pieces`` early and everything that was started for the call is stopped.

    ``cut`` is set when the connection must be closed although its client has not taken what was sent: it reads too
    slowly, or the response has outlived its time.
    """

    ports: Ports
    call: Call
    _prepared: Prepared | None = None
    _tracker: ReleaseTracker | None = None
    _channel: ResponseChannel | None = None
    _address: ReplicaAddress | None = None
    _asked: bool = False
    _shed: bool = False
    _attempts: int = 0
    _deadline_us: int = 0
    _begun: bool = False
    _finished: bool = False
    _given_back: bool = False
    _cut_timer: asyncio.TimerHandle | None = None
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    _end: End = End.FAILED
    _submission: Submission = field(init=False)

    def __post_init__(self) -> None:
        call = self.call
        self._submission = Submission(
            call.request_id,
            self.ports.gateway_id,
            call.endpoint,
            call.service,
            call.body,
            aimed(call.promise, self.ports.settings.delivery_margin_us),
        )

    @property
    def held(self) -> HeldRequest | None:
        """The grant this exchange holds now."""
        if self._address is None or self._prepared is None or self._given_back:
            return None
        return HeldRequest(self.call.request_id, self._address, self._prepared.choices)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The response. Raises ApiError; after the first piece only for what must end in an SSE error event."""
        self.ports.register(self)
        try:
            self._prepared = await self._prepare()
            self._tracker = self._start_tracker(self._prepared)
            while not self._finished:
                deliveries = await self._next(self._prepared)
                self._begun = True
                yield self._piece(deliveries, self._tracker)
        except (asyncio.CancelledError, GeneratorExit):
            self._end = End.CANCELLED
            raise
        finally:
            self._finish()
            self.ports.unregister(self)

    async def _prepare(self) -> Prepared:
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                answer = await self.ports.engines.prepare(self._aged())
        except (ReplicaUnavailableError, TimeoutError):
            raise _unavailable("No engine replica answers.", "no_replica") from None
        if isinstance(answer, Refusal):
            self.ports.metrics.refused(self.call.service)
            raise ApiError.from_refusal(answer)
        return answer

    def _start_tracker(self, prepared: Prepared) -> ReleaseTracker:
        service, metrics = self.call.service, self.ports.metrics
        return ReleaseTracker(
            service,
            self.call.promise,
            prepared.stream,
            prepared.choices,
            on_first=lambda ttft_us: metrics.first_token(service, ttft_us),
            on_gap=lambda gap_us, count: metrics.gap(service, gap_us, count),
        )

    async def _next(self, prepared: Prepared) -> list[Delivery]:
        """What the client gets next. Starts the request on a replica first, again on another when one is lost."""
        while True:
            try:
                if self._channel is None:
                    self._channel = await self._start(prepared)
                left_us = self._deadline_us - self.ports.clock()
                return await self._channel.take(max(0.0, left_us / 1e6))
            except (ReplicaLostError, ReplicaUnavailableError) as error:
                self._leave_replica()
                if self._begun:
                    raise ApiError(
                        502, "The engine replica was lost; send the request again.", code="replica_lost"
                    ) from error
                if self._attempts >= MAX_ATTEMPTS:
                    raise _unavailable("The request was lost on every replica it was given.", "replica_lost") from error
                logger.info("request %s starts again: %s", self.call.request_id, error)
            except TimeoutError:
                seconds = self.ports.settings.stream_timeout_us / 1e6
                raise ApiError(504, f"The response took longer than {seconds:g} s.", code="timeout") from None
            except SlowClientError as error:
                self._end = End.CANCELLED
                raise ApiError(408, f"The client reads too slowly: {error}.", code="slow_client") from None

    async def _start(self, prepared: Prepared) -> ResponseChannel:
        grant = await self._acquire(prepared)
        self._attempts += 1
        self._address = ReplicaAddress(grant.replica_id, grant.incarnation)
        self._deadline_us = self.ports.clock() + self.ports.settings.stream_timeout_us
        self.ports.metrics.queued(self.call.service, grant.queued_us)
        self._arm_cut()
        channel = ResponseChannel(self.ports.settings.max_unsent_bytes, self.cut.set, self._engine_done)
        await self.ports.streams.bind(self._address, self.call.request_id, channel)
        try:
            async with asyncio.timeout(SUBMIT_TIMEOUT_S):
                await self.ports.engines.submit(self._address, self._aged())
        except TimeoutError:
            raise ReplicaUnavailableError(f"replica {grant.replica_id} did not take the request") from None
        except ReplicaUnavailableError:
            self._background(self.ports.admission.report_lost(self._address), "report a lost replica")
            raise
        return channel

    async def _acquire(self, prepared: Prepared) -> Grant:
        self._asked = True
        try:
            async with asyncio.timeout(self.ports.settings.stream_timeout_us / 1e6):
                answer = await self._ask_admission(prepared)
        except (ReplicaUnavailableError, TimeoutError):
            raise _unavailable("Admission does not answer.", "no_admission") from None
        if isinstance(answer, Grant):
            return answer
        self.ports.metrics.shed(self.call.service, answer.reason)
        self._shed = True
        self._end = End.SHED
        raise _shed_error(answer)

    async def _ask_admission(self, prepared: Prepared) -> Grant | Shed:
        """Wait in the queue. While admission is being restarted, ask again: a queued request does not get lost."""
        for _ in range(ADMISSION_RETRIES):
            try:
                return await self.ports.admission.acquire(self._ticket(prepared))
            except ReplicaUnavailableError as error:
                logger.warning("admission was lost while request %s waited: %s", self.call.request_id, error)
                await asyncio.sleep(ADMISSION_RETRY_S)
        return await self.ports.admission.acquire(self._ticket(prepared))

    def _ticket(self, prepared: Prepared) -> Ticket:
        call = self.call
        return Ticket(
            call.request_id,
            self.ports.gateway_id,
            call.service,
            call.promise,
            prepared.prompt_tokens,
            prepared.max_tokens,
            prepared.choices,
            self._age_us(),
        )

    def _piece(self, deliveries: list[Delivery], tracker: ReleaseTracker) -> Piece:
        age_us = self._age_us()
        for delivery in deliveries:
            tracker.released(age_us, delivery.tokens, delivery.index)
            if delivery.last:
                self._finished = True
                self._end = _end_of(delivery.status)
        first = deliveries[0]
        streamed = tracker.streamed and first.status < 400
        return Piece("".join(delivery.data for delivery in deliveries), first.status, streamed)

    def _arm_cut(self) -> None:
        """Close the connection when even the error about the time-out cannot be sent."""
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        delay_s = self.ports.settings.stream_timeout_us / 1e6 + CUT_AFTER_TIMEOUT_S
        self._cut_timer = asyncio.get_running_loop().call_later(delay_s, self.cut.set)

    def _engine_done(self) -> None:
        """The engine is done with the request. Its slot is given back at once when the last token is held for long."""
        if self._channel is not None and self._channel.due_us - self.ports.clock() > GIVE_BACK_EARLY_US:
            self._given_back = True
            self._background(self.ports.admission.release(self.call.request_id, None), "give back")

    def _leave_replica(self) -> None:
        if self._address is not None:
            self.ports.streams.unbind(self._address, self.call.request_id)
        self._channel = None
        self._address = None

    def _finish(self) -> None:
        """Give everything back. Only starts tasks: this also runs in a request that is being cancelled."""
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        call, address = self.call, self._address
        outcome = self._tracker.outcome(self._end) if self._tracker else Outcome(call.service, self._end)
        if address is not None:
            self.ports.streams.unbind(address, call.request_id)
            if not self._finished and not self._given_back:
                self._background(self.ports.engines.abort(address, [call.request_id]), "abort")
        if self._asked and not self._shed:
            self._background(self.ports.admission.release(call.request_id, outcome), "release")
        if self._prepared is not None:
            self.ports.metrics.ended(outcome)
        self._address = None

    def _background(self, work: Any, what: str) -> None:
        self.ports.background.start(_bounded(work, what, self.call.request_id), f"{what} {self.call.request_id}")

    def _age_us(self) -> int:
        return self.ports.clock() - self.call.arrival_us

    def _aged(self) -> Submission:
        return replace(self._submission, age_us=self._age_us())


async def _bounded(work: Any, what: str, request_id: str) -> None:
    """Await a control call with a time-out. Admission makes up for lost ones: reports and heartbeats reconcile."""
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            await work
    except (ReplicaUnavailableError, TimeoutError) as error:
        logger.warning("%s of request %s did not arrive: %s", what, request_id, error or type(error).__name__)


def aimed(promise: Promise, margin_us: int) -> Promise:
    """What an engine aims at to keep ``promise``: a little earlier, as releases are late by the pacer's jitter.

    An engine that paces tokens a full TBT apart would break every other gap by a millisecond or two.
    """
    return replace(
        promise,
        ttft_us=promise.ttft_us - min(margin_us, promise.ttft_us // 10),
        tbt_us=promise.tbt_us - min(margin_us, promise.tbt_us // 10),
    )


def _end_of(status: int) -> End:
    """An engine's 4xx is the client's doing, so it is not a broken promise."""
    if status < 400:
        return End.COMPLETED
    return End.FAILED if status >= 500 else End.CANCELLED


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"retry-after": "5"})


def _shed_error(shed: Shed) -> ApiError:
    headers = {"retry-after": str(shed.retry_after_s), "x-halo-shed-reason": shed.reason}
    status = 503 if shed.reason == "queue_timeout" else 429
    message = f"The server is overloaded ({shed.reason}); try again in {shed.retry_after_s} s."
    return ApiError(status, message, code="overloaded", headers=headers)
