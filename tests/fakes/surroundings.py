"""What surrounds a gateway, without Ray: engine endpoints in this process, metrics that are only recorded, keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from deployments.admission import Admission
from deployments.engine_endpoint import EngineEndpoint
from deployments.protocol import (
    Delivery,
    Outcome,
    Prepared,
    Refusal,
    ReplicaAddress,
    ReplicaUnavailableError,
    Submission,
)
from deployments.settings import EngineSettings
from tests.fakes.engine import FakeEngine


class FakeReplica:
    """A fake engine behind the real endpoint, which can die."""

    def __init__(self, replica_id: str, settings: EngineSettings, admission: Admission) -> None:
        self.engine = FakeEngine(settings, replica_id)
        self.endpoint = EngineEndpoint(self.engine, replica_id, admission)
        self.dead = asyncio.Event()

    @property
    def address(self) -> ReplicaAddress:
        return ReplicaAddress(self.engine.replica_id, self.engine.incarnation)

    async def kill(self) -> None:
        """Vanish as a killed process does: no more heartbeats, streams broken, nothing said to admission."""
        heartbeats = self.endpoint._heartbeats
        assert heartbeats is not None
        heartbeats.cancel()
        self.dead.set()
        await asyncio.sleep(0)

    def check(self) -> None:
        if self.dead.is_set():
            raise ReplicaUnavailableError(f"replica {self.engine.replica_id} died")


class FakePool:
    """``EnginePool`` over replicas in this process. ``hidden`` replicas are not routable."""

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.hidden: set[str] = set()
        self.open_streams: Counter[str] = Counter()

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        living = [replica for replica in self.replicas.values() if not replica.dead.is_set()]
        if not living:
            raise ReplicaUnavailableError("no replica")
        return await living[0].endpoint.prepare(submission)

    async def submit(self, address: ReplicaAddress, submission: Submission) -> None:
        endpoint = self._endpoint(address)
        await endpoint.submit(submission, replica_id=address.replica_id, incarnation=address.incarnation)

    async def abort(self, address: ReplicaAddress, request_ids: list[str]) -> None:
        endpoint = self._endpoint(address)
        await endpoint.abort(request_ids, replica_id=address.replica_id, incarnation=address.incarnation)

    async def deliveries(self, address: ReplicaAddress, gateway_id: str) -> AsyncGenerator[list[Delivery], None]:
        replica = self.replicas[address.replica_id]
        endpoint = self._endpoint(address)
        stream = endpoint.deliveries(gateway_id, replica_id=address.replica_id, incarnation=address.incarnation)
        died = asyncio.create_task(replica.dead.wait())
        batch: asyncio.Task[list[Delivery] | None] | None = None
        self.open_streams[address.replica_id] += 1
        try:
            while True:
                batch = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait((died, batch), return_when=asyncio.FIRST_COMPLETED)
                replica.check()
                made = batch.result()
                if made is None:
                    return
                yield made
        finally:
            self.open_streams[address.replica_id] -= 1
            died.cancel()
            if batch is not None and not batch.done():
                batch.cancel()
                await asyncio.gather(batch, return_exceptions=True)
            await stream.aclose()

    def routable(self) -> frozenset[str] | None:
        return frozenset(self.replicas) - self.hidden

    def _endpoint(self, address: ReplicaAddress) -> EngineEndpoint:
        """The addressed endpoint; like Serve's router, another one when the address is not routable."""
        if address.replica_id in self.replicas and address.replica_id not in self.hidden:
            replica = self.replicas[address.replica_id]
        else:
            replica = next(replica for name, replica in self.replicas.items() if name not in self.hidden)
        replica.check()
        return replica.endpoint


@dataclass(slots=True)
class RecordedMetrics:
    """``GatewayMetrics`` that remembers what it was told."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    sheds: list[str] = field(default_factory=list)
    held_now: int = 0

    def refused(self, service: str) -> None:
        self.refusals.append(service)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def first_token(self, service: str, ttft_us: int) -> None:
        self.first_tokens.append(ttft_us)

    def gap(self, service: str, gap_us: int, count: int) -> None:
        self.gaps.extend([gap_us] * count)

    def queued(self, service: str, queued_us: int) -> None:
        self.waits.append(queued_us)

    def shed(self, service: str, reason: str) -> None:
        self.sheds.append(reason)

    def held(self, deliveries: int) -> None:
        self.held_now = deliveries


@dataclass(frozen=True, slots=True)
class FakeHolder:
    """A key that may use some services."""

    services: frozenset[str]
    name: str = "key"
    rate_per_s: float | None = None

    def may_use(self, service: str) -> bool:
        return service in self.services


@dataclass(frozen=True, slots=True)
class FakeKeys:
    """``Keys`` from a dictionary of Authorization headers."""

    holders: dict[str, FakeHolder]

    def authenticate(self, header: str | None) -> FakeHolder | None:
        return None if header is None else self.holders.get(header)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until a condition holds; TimeoutError when it does not."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)
