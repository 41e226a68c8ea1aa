"""Holds requests back while every replica is full, in EDF order, and grants replicas one request at a time.

A plain class on one event loop: builders.py makes it the Serve deployment ``admission``, of which there is exactly one.
Nothing here awaits anything but a waiting request's own future, so every operation is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deployments.clock import Clock, monotonic_us
from deployments.protocol import (
    ClusterState,
    End,
    GatewayReport,
    Grant,
    HeldRequest,
    Outcome,
    ReplicaAddress,
    ReplicaStatus,
    Shed,
    Ticket,
)
from deployments.settings import AdmissionSettings, Overload, ServiceSettings
from deployments.slo_ledger import SloLedger
from scheduling.admission_queue import AdmissionQueue, QueuedRequest

logger = logging.getLogger(__name__)

REMEMBERED_RELEASES = 16_384
"""Ids of released requests kept, so that a release which overtakes its acquire, or comes twice, does no harm."""

RECONCILE_AFTER_US = 5_000_000
"""A grant that its gateway does not report is released only when it is older than this: the report may be older."""

SUSPEND_US = 1_000_000
"""After a gateway lost a replica, how long its heartbeats are not believed: they may have been sent before it died."""

FORGET_US = 600_000_000
"""How long gateways are told that a replica is silent."""


@dataclass(slots=True)
class _Replica:
    """``used`` counts the slots granted; ``suspended_until_us`` is when a heartbeat makes it eligible again."""

    status: ReplicaStatus
    seen_us: int
    used: int = 0
    suspended_until_us: int | None = None
    aborts: list[str] = field(default_factory=list)

    @property
    def address(self) -> ReplicaAddress:
        return ReplicaAddress(self.status.replica_id, self.status.incarnation)


@dataclass(slots=True)
class _Held:
    gateway_id: str
    address: ReplicaAddress
    slots: int
    granted_us: int


@dataclass(slots=True)
class _Waiting:
    ticket: Ticket
    future: asyncio.Future[Grant | Shed]
    queued_us: int


class DrainRate:
    """How many requests a second the cluster has been finishing lately, from the times of the last releases."""

    def __init__(self, window: int = 64) -> None:
        self._times_us: deque[int] = deque(maxlen=window)

    def count(self, now_us: int) -> None:
        """A request gave its replica back."""
        self._times_us.append(now_us)

    def per_second(self, now_us: int) -> float | None:
        """Releases a second, falling while none comes; None before there is anything to go by."""
        if len(self._times_us) < 4:
            return None
        span_us = now_us - self._times_us[0]
        return len(self._times_us) * 1e6 / span_us if span_us > 0 else None


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
        self._held: dict[str, _Held] = {}
        self._replicas: dict[str, _Replica] = {}
        self._gateways: dict[str, int] = {}
        self._unroutable: dict[str, frozenset[str]] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._drain = DrainRate()
        self._silent: dict[ReplicaAddress, int] = {}

    async def acquire(self, ticket: Ticket) -> Grant | Shed:
        """Wait for a replica. See ``AdmissionPort.acquire``."""
        now_us = self._clock()
        request_id = ticket.request_id
        self._gateways.setdefault(ticket.gateway_id, now_us)
        if request_id in self._released:
            return Shed("cancelled", 1)
        if request_id in self._waiting:
            raise ValueError(f"request {request_id} already waits for admission")
        self._drop_grant(request_id)
        deadline_us = now_us - ticket.age_us + ticket.promise.ttft_us
        shed = self._refuse_now(ticket, now_us, deadline_us)
        if shed is not None:
            return self._shed(ticket, shed)
        future: asyncio.Future[Grant | Shed] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _Waiting(ticket, future, now_us)
        self._queue.push(QueuedRequest(request_id, now_us - ticket.age_us, deadline_us, max(1, ticket.choices)))
        self._dispatch()
        try:
            return await asyncio.wait_for(future, self._patience_us(ticket, now_us, deadline_us) / 1e6)
        except TimeoutError:
            reason = "deadline_passed" if self._sheds(ticket) else "queue_timeout"
            return self._shed(ticket, reason)
        except asyncio.CancelledError:
            self._drop_grant(request_id)
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
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_result(Shed("cancelled", 1))
            self._queue.remove(request_id)
        held = self._drop_grant(request_id)
        if held is not None:
            self._drain.count(self._clock())
            if outcome is not None and outcome.end is not End.COMPLETED:
                self._abort_on_replica(request_id, held)
        self._dispatch()

    async def heartbeat(self, status: ReplicaStatus) -> list[str]:
        """Register or refresh a replica. See ``AdmissionPort.heartbeat``."""
        now_us = self._clock()
        replica = self._replicas.get(status.replica_id)
        if replica is None or replica.status.incarnation != status.incarnation:
            if replica is not None:
                self._remove_replica(status.replica_id, "was restarted")
            logger.info("replica %s registered, %d requests at a time", status.replica_id, status.max_requests)
            replica = _Replica(status, now_us)
            replica.used = sum(held.slots for held in self._held.values() if held.address == replica.address)
            self._replicas[status.replica_id] = replica
        replica.status = status
        replica.seen_us = now_us
        self._silent.pop(replica.address, None)
        if replica.suspended_until_us is not None and now_us >= replica.suspended_until_us:
            replica.suspended_until_us = None
        aborts, replica.aborts = replica.aborts, []
        self._expire(now_us)
        self._dispatch()
        return aborts

    async def withdraw(self, address: ReplicaAddress) -> None:
        """A replica stops cleanly. See ``AdmissionPort.withdraw``."""
        replica = self._replicas.get(address.replica_id)
        if replica is not None and replica.address == address:
            self._remove_replica(address.replica_id, "stopped")

    async def report_lost(self, address: ReplicaAddress) -> None:
        """Suspend a replica until it is heard of again. See ``AdmissionPort.report_lost``."""
        replica = self._replicas.get(address.replica_id)
        if replica is not None and replica.address == address:
            logger.warning("replica %s lost by a gateway; no grants until its next heartbeat", address.replica_id)
            replica.suspended_until_us = self._clock() + SUSPEND_US

    async def sync(self, report: GatewayReport) -> ClusterState:
        """Reconcile what a gateway holds with what it was granted. See ``AdmissionPort.sync``."""
        now_us = self._clock()
        self._gateways[report.gateway_id] = now_us
        self._unroutable[report.gateway_id] = frozenset(report.unroutable)
        reported = {held.request_id: held for held in report.held}
        for request_id, held in list(self._held.items()):
            stale = now_us - held.granted_us > RECONCILE_AFTER_US
            if held.gateway_id == report.gateway_id and request_id not in reported and stale:
                logger.warning("grant %s is no longer held by its gateway; released", request_id)
                self._drop_grant(request_id)
        for held_request in reported.values():
            self._adopt(report.gateway_id, held_request, now_us)
        self._expire(now_us)
        self._dispatch()
        eligible = sum(map(self._eligible, self._replicas.values()))
        return ClusterState(eligible, len(self._queue), len(self._gateways), tuple(self._silent))

    async def slo(self) -> dict[str, Any]:
        """The SLO table of all services, by name."""
        return self._ledger.table()

    async def load(self) -> dict[str, Any]:
        """Queue and replicas now, for the operator."""
        return {
            "queued": len(self._queue),
            "held": len(self._held),
            "gateways": sorted(self._gateways),
            "replicas": {
                name: {"used": replica.used, "eligible": self._eligible(replica), "kv_usage": replica.status.kv_usage}
                for name, replica in self._replicas.items()
            },
        }

    def _dispatch(self) -> None:
        while (head := self._queue.head()) is not None:
            replica = self._least_loaded(head.slots)
            if replica is None:
                return
            self._queue.pop()
            waiting = self._waiting[head.request_id]
            if waiting.future.done():
                continue
            now_us = self._clock()
            slots = min(head.slots, self._capacity(replica))
            self._held[head.request_id] = _Held(waiting.ticket.gateway_id, replica.address, slots, now_us)
            replica.used += slots
            status = replica.status
            waiting.future.set_result(Grant(status.replica_id, status.incarnation, now_us - waiting.queued_us))

    def _least_loaded(self, slots: int) -> _Replica | None:
        """The eligible replica with the lowest share of its slots in use that can take ``slots`` more.

        The head of the queue is never passed over, so a request for many choices waits for enough free slots; one for
        more than a replica has gets a replica of its own.
        """
        fitting = (
            replica
            for replica in self._replicas.values()
            if self._eligible(replica) and replica.used + min(slots, self._capacity(replica)) <= self._capacity(replica)
        )
        return min(
            fitting,
            key=lambda replica: (
                replica.used / self._capacity(replica),
                replica.status.kv_usage,
                replica.status.replica_id,
            ),
            default=None,
        )

    def _capacity(self, replica: _Replica) -> int:
        return self._settings.inflight_per_replica or max(1, replica.status.max_requests)

    def _eligible(self, replica: _Replica) -> bool:
        replica_id = replica.status.replica_id
        routable = all(replica_id not in unroutable for unroutable in self._unroutable.values())
        return replica.suspended_until_us is None and routable

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
        if ahead == 0 and self._least_loaded(slots) is not None:
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

    def _drop_grant(self, request_id: str) -> _Held | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            replica = self._replicas.get(held.address.replica_id)
            if replica is not None and replica.address == held.address:
                replica.used -= held.slots
        return held

    def _adopt(self, gateway_id: str, held: HeldRequest, now_us: int) -> None:
        """Learn of a grant made before admission was restarted."""
        if held.request_id in self._held or held.request_id in self._released or held.request_id in self._waiting:
            return
        slots = max(1, held.choices)
        replica = self._replicas.get(held.address.replica_id)
        if replica is not None and replica.address == held.address:
            slots = min(slots, self._capacity(replica))
            replica.used += slots
        self._held[held.request_id] = _Held(gateway_id, held.address, slots, now_us)

    def _abort_on_replica(self, request_id: str, held: _Held) -> None:
        replica = self._replicas.get(held.address.replica_id)
        if replica is not None and replica.address == held.address:
            replica.aborts.append(request_id)

    def _remember(self, request_id: str) -> None:
        self._released[request_id] = None
        while len(self._released) > REMEMBERED_RELEASES:
            self._released.popitem(last=False)

    def _remove_replica(self, replica_id: str, why: str) -> None:
        logger.warning("replica %s %s", replica_id, why)
        del self._replicas[replica_id]

    def _expire(self, now_us: int) -> None:
        """Forget replicas and gateways that fell silent, and give back what those gateways held or queued."""
        oldest_us = now_us - self._settings.heartbeat_timeout_us
        for replica_id in [name for name, replica in self._replicas.items() if replica.seen_us < oldest_us]:
            self._silent[self._replicas[replica_id].address] = now_us
            self._remove_replica(replica_id, "is silent; removed")
        self._silent = {
            address: since_us for address, since_us in self._silent.items() if now_us - since_us < FORGET_US
        }
        for gateway_id in [name for name, seen_us in self._gateways.items() if seen_us < oldest_us]:
            self._forget_gateway(gateway_id)

    def _forget_gateway(self, gateway_id: str) -> None:
        logger.warning("gateway %s is silent; its requests are released", gateway_id)
        del self._gateways[gateway_id]
        self._unroutable.pop(gateway_id, None)
        for request_id in [name for name, held in self._held.items() if held.gateway_id == gateway_id]:
            held = self._drop_grant(request_id)
            assert held is not None
            self._abort_on_replica(request_id, held)
        for request_id, waiting in list(self._waiting.items()):
            if waiting.ticket.gateway_id == gateway_id and not waiting.future.done():
                self._queue.remove(request_id)
                waiting.future.set_result(Shed("gateway_lost", 1))
