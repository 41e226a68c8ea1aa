"""Holds requests back while every replica is full, in EDF order, and grants replicas one request at a time.

A plain class on one event loop: builders.py makes it the Serve deployment ``admission``, of which there is exactly one.
Nothing here awaits anything but a waiting request's own future, so every operation is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deployments.clock import Clock, monotonic_us
from deployments.drain_rate import DrainRate
from deployments.protocol import (
    ClusterState,
    End,
    GatewayReport,
    Grant,
    Outcome,
    ReplicaAddress,
    ReplicaStatus,
    Shed,
    Ticket,
)
from deployments.replica_book import ReplicaBook
from deployments.settings import AdmissionSettings, Overload, ServiceSettings
from deployments.slo_ledger import SloLedger
from scheduling.admission_queue import AdmissionQueue, QueuedRequest

logger = logging.getLogger(__name__)

REMEMBERED_RELEASES = 16_384
"""Ids of released requests kept, so that a release which overtakes its acquire, or comes twice, does no harm."""

RECONCILE_AFTER_US = 5_000_000
"""A grant that its gateway does not report is released only when it is older than this: the report may be older."""


@dataclass(slots=True)
class _Waiting:
    ticket: Ticket
    future: asyncio.Future[Grant | Shed]
    queued_us: int


class Admission:
    """EDF queue over all services, loads of all replicas, and the cluster's SLO account. See ``AdmissionPort``."""

    def __init__(
        self, settings: AdmissionSettings, services: Iterable[ServiceSettings], clock: Clock = monotonic_us
    ) -> None:
        self._settings = settings
        self._clock = clock
        services = tuple(services)
        self._services = {service.name: service for service in services}
        self._ledger = SloLedger(services)
        self._queue = AdmissionQueue()
        self._waiting: dict[str, _Waiting] = {}
        self._book = ReplicaBook(settings.inflight_per_replica)
        self._gateways: dict[str, int] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._drain = DrainRate()

    async def acquire(self, ticket: Ticket) -> Grant | Shed:
        """Wait for a replica. See ``AdmissionPort.acquire``."""
        now_us = self._clock()
        request_id = ticket.request_id
        self._gateways.setdefault(ticket.gateway_id, now_us)
        if request_id in self._released:
            return Shed("cancelled", 1)
        if request_id in self._waiting:
            raise ValueError(f"request {request_id} already waits for admission")
        self._book.drop(request_id)
        deadline_us = now_us - ticket.age_us + ticket.promise.ttft_us
        reason = self._refuse_now(ticket, now_us, deadline_us)
        if reason is not None:
            return self._shed(ticket, reason)
        future: asyncio.Future[Grant | Shed] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(ticket, future, now_us)
        self._queue.push(QueuedRequest(request_id, now_us - ticket.age_us, deadline_us, max(1, ticket.choices)))
        self._dispatch()
        try:
            return await asyncio.wait_for(future, self._patience_us(ticket, now_us, deadline_us) / 1e6)
        except TimeoutError:
            return self._shed(ticket, "deadline_passed" if self._sheds(ticket) else "queue_timeout")
        except asyncio.CancelledError:
            self._book.drop(request_id)
            raise
        finally:
            self._queue.remove(request_id)
            self._waiting.pop(request_id, None)

    async def release(self, request_id: str, outcome: Outcome | None) -> None:
        """Free the request's slots and account for it. See ``AdmissionPort.release``."""
        if request_id in self._released:
            return
        if outcome is not None:
            self._remember(request_id)
            self._ledger.record(outcome)
        self._leave_queue(request_id, "cancelled")
        held = self._book.drop(request_id)
        if held is not None:
            self._drain.count(self._clock())
            if outcome is not None and outcome.end is not End.COMPLETED:
                self._book.abort_at(held.address, request_id)
        self._dispatch()

    async def heartbeat(self, status: ReplicaStatus) -> list[str]:
        """Register or refresh a replica. See ``AdmissionPort.heartbeat``."""
        now_us = self._clock()
        aborts = self._book.heard(status, now_us)
        self._expire(now_us)
        self._dispatch()
        return aborts

    async def withdraw(self, address: ReplicaAddress) -> None:
        """A replica stops cleanly. See ``AdmissionPort.withdraw``."""
        self._book.withdraw(address)

    async def report_lost(self, address: ReplicaAddress) -> None:
        """Suspend a replica until it is heard of again. See ``AdmissionPort.report_lost``."""
        self._book.suspend(address, self._clock())

    async def sync(self, report: GatewayReport) -> ClusterState:
        """Reconcile what a gateway holds with what it was granted. See ``AdmissionPort.sync``."""
        now_us = self._clock()
        self._gateways[report.gateway_id] = now_us
        self._book.set_unroutable(report.gateway_id, frozenset(report.unroutable))
        reported = {held.request_id: held for held in report.held}
        for request_id, held in self._book.held_by(report.gateway_id):
            if request_id not in reported and now_us - held.granted_us > RECONCILE_AFTER_US:
                logger.warning("grant %s is no longer held by its gateway; released", request_id)
                self._book.drop(request_id)
        for request_id, held_request in reported.items():
            known = request_id in self._book or request_id in self._released or request_id in self._waiting
            if not known:
                self._book.adopt(report.gateway_id, held_request, now_us)
        self._expire(now_us)
        self._dispatch()
        return ClusterState(self._book.eligible_count, len(self._queue), len(self._gateways), self._book.silent)

    async def slo(self) -> dict[str, Any]:
        """The SLO table of all services, by name."""
        return self._ledger.table()

    async def load(self) -> dict[str, Any]:
        """Queue, grants and replicas now, for the operator."""
        return {"queued": len(self._queue), "gateways": sorted(self._gateways), **self._book.as_dict()}

    def _dispatch(self) -> None:
        """Grant replicas to the head of the queue for as long as one fits. The head is never passed over."""
        now_us = self._clock()
        while (head := self._queue.head()) is not None:
            replica = self._book.least_loaded(head.slots)
            if replica is None:
                break
            self._queue.pop()
            waiting = self._waiting[head.request_id]
            if waiting.future.done():
                continue
            self._book.grant(head.request_id, waiting.ticket.gateway_id, replica, head.slots, now_us)
            address = replica.address
            waiting.future.set_result(Grant(address.replica_id, address.incarnation, now_us - waiting.queued_us))
        self._drain.note(self._book.least_loaded(1) is None, now_us)

    def _sheds(self, ticket: Ticket) -> bool:
        service = self._services.get(ticket.service)
        return service is not None and service.overload is Overload.SHED

    def _refuse_now(self, ticket: Ticket, now_us: int, deadline_us: int) -> str | None:
        if len(self._queue) >= self._settings.queue_requests:
            return "queue_full"
        if not self._sheds(ticket):
            return None
        if deadline_us <= now_us:
            return "deadline_passed"
        wait_us = self._expected_wait_us(max(1, ticket.choices), now_us, deadline_us)
        return "deadline_unreachable" if wait_us is not None and now_us + wait_us > deadline_us else None

    def _expected_wait_us(self, slots: int, now_us: int, deadline_us: int) -> int | None:
        """How long a request with this deadline would wait, from the observed drain rate; None when it is unknown."""
        ahead = self._queue.ahead_of(deadline_us)
        if ahead == 0 and self._book.least_loaded(slots) is not None:
            return 0
        rate = self._drain.per_second(now_us)
        return None if rate is None else int((ahead + 1) / rate * 1e6)

    def _patience_us(self, ticket: Ticket, now_us: int, deadline_us: int) -> int:
        timeout_us = self._settings.queue_timeout_us
        return min(timeout_us, deadline_us - now_us) if self._sheds(ticket) else timeout_us

    def _shed(self, ticket: Ticket, reason: str) -> Shed:
        self._ledger.record(Outcome(ticket.service, End.SHED))
        rate = self._drain.per_second(self._clock())
        retry_s = 5 if rate is None else math.ceil((len(self._queue) + 1) / rate)
        return Shed(reason, min(max(retry_s, 1), 60))

    def _leave_queue(self, request_id: str, reason: str) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.future.done():
            self._queue.remove(request_id)
            waiting.future.set_result(Shed(reason, 1))

    def _remember(self, request_id: str) -> None:
        self._released[request_id] = None
        while len(self._released) > REMEMBERED_RELEASES:
            self._released.popitem(last=False)

    def _expire(self, now_us: int) -> None:
        """Forget replicas and gateways that fell silent, and give back what those gateways held or queued."""
        oldest_us = now_us - self._settings.heartbeat_timeout_us
        self._book.expire(oldest_us, now_us)
        for gateway_id in [name for name, seen_us in self._gateways.items() if seen_us < oldest_us]:
            self._forget_gateway(gateway_id)

    def _forget_gateway(self, gateway_id: str) -> None:
        logger.warning("gateway %s is silent; its requests are released", gateway_id)
        del self._gateways[gateway_id]
        self._book.set_unroutable(gateway_id, frozenset())
        for request_id, held in self._book.held_by(gateway_id):
            self._book.drop(request_id)
            self._book.abort_at(held.address, request_id)
        for request_id, waiting in list(self._waiting.items()):
            if waiting.ticket.gateway_id == gateway_id:
                self._leave_queue(request_id, "gateway_lost")
