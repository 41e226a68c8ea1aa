"""The engine replicas that admission knows, and the grants that are out on them. No clock: callers pass ``now_us``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deployments.protocol import HeldRequest, ReplicaAddress, ReplicaStatus

logger = logging.getLogger(__name__)

SUSPEND_US = 1_000_000
"""After a gateway lost a replica, how long its heartbeats are not believed: they may have been sent before it died."""

FORGET_US = 600_000_000
"""How long gateways are told that a replica is silent."""


@dataclass(slots=True)
class Replica:
    """``used`` counts the slots granted; ``suspended_until_us`` is when a heartbeat makes it eligible again.

    ``aborts`` are request ids for its next heartbeat: their client has gone.
    """

    status: ReplicaStatus
    seen_us: int
    used: int = 0
    suspended_until_us: int | None = None
    aborts: list[str] = field(default_factory=list)

    @property
    def address(self) -> ReplicaAddress:
        """This life of this replica."""
        return ReplicaAddress(self.status.replica_id, self.status.incarnation)


@dataclass(frozen=True, slots=True)
class HeldGrant:
    """A grant that is out. ``slots`` is what it takes of its replica."""

    gateway_id: str
    address: ReplicaAddress
    slots: int
    granted_us: int


class ReplicaBook:
    """Replicas by id and grants by request id. ``inflight_per_replica`` overrides what replicas say they take."""

    def __init__(self, inflight_per_replica: int | None) -> None:
        self._inflight_per_replica = inflight_per_replica
        self._replicas: dict[str, Replica] = {}
        self._held: dict[str, HeldGrant] = {}
        self._unroutable: dict[str, frozenset[str]] = {}
        self._silent: dict[ReplicaAddress, int] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    @property
    def eligible_count(self) -> int:
        """How many replicas may get grants now."""
        return sum(map(self._eligible, self._replicas.values()))

    @property
    def silent(self) -> tuple[ReplicaAddress, ...]:
        """Replicas that were removed because they fell silent."""
        return tuple(self._silent)

    def held_by(self, gateway_id: str) -> Iterator[tuple[str, HeldGrant]]:
        """The grants of one gateway, safe to drop while iterating."""
        return ((name, held) for name, held in list(self._held.items()) if held.gateway_id == gateway_id)

    def heard(self, status: ReplicaStatus, now_us: int) -> list[str]:
        """A heartbeat: register or refresh a replica. Returns the ids that it must abort."""
        replica = self._replicas.get(status.replica_id)
        if replica is None or replica.status.incarnation != status.incarnation:
            if replica is not None:
                self._remove(status.replica_id, "was restarted")
            logger.info("replica %s registered, %d requests at a time", status.replica_id, status.max_requests)
            replica = self._replicas[status.replica_id] = Replica(status, now_us)
            replica.used = sum(held.slots for held in self._held.values() if held.address == replica.address)
        replica.status = status
        replica.seen_us = now_us
        self._silent.pop(replica.address, None)
        if replica.suspended_until_us is not None and now_us >= replica.suspended_until_us:
            replica.suspended_until_us = None
        aborts, replica.aborts = replica.aborts, []
        return aborts

    def withdraw(self, address: ReplicaAddress) -> None:
        """A replica stops."""
        if self._at(address) is not None:
            self._remove(address.replica_id, "stopped")

    def suspend(self, address: ReplicaAddress, now_us: int) -> None:
        """No grants for a replica until a heartbeat that was sent after its loss."""
        replica = self._at(address)
        if replica is not None:
            logger.warning("replica %s lost by a gateway; no grants until its next heartbeat", address.replica_id)
            replica.suspended_until_us = now_us + SUSPEND_US

    def set_unroutable(self, gateway_id: str, replica_ids: frozenset[str]) -> None:
        """Replicas that a gateway cannot reach get no grants. The empty set lifts that."""
        if replica_ids:
            self._unroutable[gateway_id] = replica_ids
        else:
            self._unroutable.pop(gateway_id, None)

    def expire(self, heard_before_us: int, now_us: int) -> None:
        """Remove the replicas that were last heard before ``heard_before_us``."""
        for replica_id, replica in list(self._replicas.items()):
            if replica.seen_us < heard_before_us:
                self._silent[replica.address] = now_us
                self._remove(replica_id, "is silent; removed")
        for address, since_us in list(self._silent.items()):
            if now_us - since_us > FORGET_US:
                del self._silent[address]

    def least_loaded(self, slots: int) -> Replica | None:
        """The eligible replica with the lowest share of its slots in use that can take ``slots`` more.

        A request for more slots than a replica has gets a replica of its own.
        """
        fitting = (
            replica
            for replica in self._replicas.values()
            if self._eligible(replica) and replica.used + self._taken(slots, replica) <= self._capacity(replica)
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

    def grant(self, request_id: str, gateway_id: str, replica: Replica, slots: int, now_us: int) -> None:
        """Take ``slots`` of a replica for a request."""
        taken = self._taken(slots, replica)
        replica.used += taken
        self._held[request_id] = HeldGrant(gateway_id, replica.address, taken, now_us)

    def adopt(self, gateway_id: str, held: HeldRequest, now_us: int) -> None:
        """Learn of a grant made before admission was restarted. The replica may be unknown as yet."""
        replica = self._at(held.address)
        slots = max(1, held.choices)
        if replica is not None:
            self.grant(held.request_id, gateway_id, replica, slots, now_us)
        else:
            self._held[held.request_id] = HeldGrant(gateway_id, held.address, slots, now_us)

    def drop(self, request_id: str) -> HeldGrant | None:
        """Give a grant's slots back; None when there is no such grant."""
        held = self._held.pop(request_id, None)
        if held is not None:
            replica = self._at(held.address)
            if replica is not None:
                replica.used -= held.slots
        return held

    def abort_at(self, address: ReplicaAddress, request_id: str) -> None:
        """Name a request in the replica's next heartbeat."""
        replica = self._at(address)
        if replica is not None:
            replica.aborts.append(request_id)

    def as_dict(self) -> dict[str, Any]:
        """Replicas and grants for the operator."""
        return {
            "held": len(self._held),
            "replicas": {
                name: {"used": replica.used, "eligible": self._eligible(replica), "kv_usage": replica.status.kv_usage}
                for name, replica in self._replicas.items()
            },
        }

    def _at(self, address: ReplicaAddress) -> Replica | None:
        replica = self._replicas.get(address.replica_id)
        return replica if replica is not None and replica.address == address else None

    def _capacity(self, replica: Replica) -> int:
        return self._inflight_per_replica or max(1, replica.status.max_requests)

    def _taken(self, slots: int, replica: Replica) -> int:
        return min(slots, self._capacity(replica))

    def _eligible(self, replica: Replica) -> bool:
        replica_id = replica.status.replica_id
        routable = all(replica_id not in unroutable for unroutable in self._unroutable.values())
        return replica.suspended_until_us is None and routable

    def _remove(self, replica_id: str, why: str) -> None:
        logger.warning("replica %s %s", replica_id, why)
        del self._replicas[replica_id]
