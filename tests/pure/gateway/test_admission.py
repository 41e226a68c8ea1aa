"""Admission: EDF over all services, never more than the replicas take, nothing leaked, shed with a reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission import RECONCILE_AFTER_US, Admission
from deployments.drain_rate import DrainRate
from deployments.protocol import (
    End,
    GatewayReport,
    Grant,
    HeldRequest,
    Outcome,
    Promise,
    ReplicaAddress,
    ReplicaStatus,
    Shed,
    Ticket,
)
from deployments.settings import AdmissionSettings, Overload, ServiceSettings
from scheduling.request import ReleasePolicy
from tests.fakes.virtual_time import VirtualTimeLoop, virtual_us

QUEUEING = ServiceSettings("queueing", None, 1_000_000, 50_000)
SHEDDING = ServiceSettings("shedding", None, 1_000_000, 50_000, overload=Overload.SHED)


def admission(**changes: object) -> Admission:
    return Admission(AdmissionSettings(**changes), [QUEUEING, SHEDDING], virtual_us)  # type: ignore[arg-type]


def ticket(
    name: str,
    service: str = "queueing",
    *,
    ttft_us: int = 1_000_000,
    choices: int = 1,
    age_us: int = 0,
    gateway: str = "g",
) -> Ticket:
    promise = Promise(ttft_us, 50_000, ReleasePolicy.BOUNDED, 0)
    return Ticket(name, gateway, service, promise, 10, 10, choices, age_us)


def status(name: str = "r0", *, limit: int = 2, incarnation: str = "i") -> ReplicaStatus:
    return ReplicaStatus(name, incarnation, limit, 0, 0, 0.0, 0)


def done(end: End = End.COMPLETED) -> Outcome:
    return Outcome("queueing", end)


async def used(subject: Admission) -> dict[str, int]:
    return {name: replica["used"] for name, replica in (await subject.load())["replicas"].items()}


pytestmark = pytest.mark.anyio


async def test_least_loaded_first() -> None:
    """Grants go to the replica with the lowest share of its slots in use."""
    subject = admission()
    await subject.heartbeat(status("small", limit=2))
    await subject.heartbeat(status("large", limit=6))
    for number in range(8):
        assert isinstance(await subject.acquire(ticket(str(number))), Grant)
        shares = {name: count / {"small": 2, "large": 6}[name] for name, count in (await used(subject)).items()}
        assert abs(shares["small"] - shares["large"]) <= 1 / 2
    assert await used(subject) == {"small": 2, "large": 6}


async def test_equal_loads_go_by_kv_cache() -> None:
    """Among replicas with the same share in use, the one with the emptier KV cache is taken."""
    subject = admission()
    await subject.heartbeat(replace(status("a"), kv_usage=0.9))
    await subject.heartbeat(replace(status("b"), kv_usage=0.1))
    grant = await subject.acquire(ticket("x"))
    assert isinstance(grant, Grant)
    assert grant.replica_id == "b"


async def test_the_setting_bounds_a_replica() -> None:
    """inflight_per_replica overrides what the replica could take."""
    subject = admission(inflight_per_replica=1)
    await subject.heartbeat(status(limit=8))
    await subject.acquire(ticket("a"))
    waiting = asyncio.create_task(subject.acquire(ticket("b")))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await subject.release("a", done())
    grant = await waiting
    assert isinstance(grant, Grant)
    assert 100_000 <= grant.queued_us <= 101_000


async def test_earliest_deadline_first_across_services() -> None:
    """Grants follow arrival + TTFT on admission's clock, from the ages of the tickets, over all services."""
    subject = admission(inflight_per_replica=1)
    await subject.heartbeat(status())
    await subject.acquire(ticket("running"))
    order: list[str] = []

    async def wait(request: Ticket) -> None:
        await subject.acquire(request)
        order.append(request.request_id)

    waiting = [
        asyncio.create_task(wait(request))
        for request in (
            ticket("third", ttft_us=900_000),
            ticket("second", ttft_us=900_000, age_us=200_000),
            ticket("first", ttft_us=300_000),
            ticket("last", ttft_us=5_000_000),
        )
    ]
    await asyncio.sleep(0.01)
    await subject.release("running", done())
    for _ in waiting:
        await asyncio.sleep(0.01)
        await subject.release(order[-1], done())
    assert order == ["first", "second", "third", "last"]


async def test_choices_take_slots() -> None:
    """n choices take n slots; more than a replica has take a whole one; the head of the queue is not passed over."""
    subject = admission()
    await subject.heartbeat(status(limit=3))
    await subject.acquire(ticket("one"))
    wide = asyncio.create_task(subject.acquire(ticket("wide", choices=9, ttft_us=100)))
    await asyncio.sleep(0.01)
    narrow = asyncio.create_task(subject.acquire(ticket("narrow")))
    await asyncio.sleep(0.01)
    assert not wide.done()
    assert not narrow.done()
    await subject.release("one", done())
    assert isinstance(await wide, Grant)
    assert await used(subject) == {"r0": 3}
    await subject.release("wide", done())
    assert isinstance(await narrow, Grant)


async def test_release_may_overtake_or_repeat() -> None:
    """A release that comes before its acquire, or twice, neither leaks a slot nor frees another's."""
    subject = admission()
    await subject.heartbeat(status())
    await subject.release("early", done(End.CANCELLED))
    assert isinstance(await subject.acquire(ticket("early")), Shed)
    await subject.acquire(ticket("a"))
    await subject.acquire(ticket("b"))
    await subject.release("a", done())
    await subject.release("a", done())
    assert await used(subject) == {"r0": 1}
    assert (await subject.slo())["queueing"]["outcomes"]["completed"] == 1


async def test_acquire_again_returns_the_former_grant() -> None:
    """A request that lost its replica asks again under its id: its old slot is given back."""
    subject = admission()
    await subject.heartbeat(status("r0"))
    first = await subject.acquire(ticket("a"))
    await subject.report_lost(ReplicaAddress("r0", "i"))
    await subject.heartbeat(status("r1"))
    second = await subject.acquire(ticket("a"))
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert (first.replica_id, second.replica_id) == ("r0", "r1")
    assert await used(subject) == {"r0": 0, "r1": 1}


async def test_cancelled_acquire_leaves_nothing() -> None:
    """An acquire that is cancelled leaves the queue; one cancelled with its grant under way gives it back."""
    subject = admission(inflight_per_replica=1)
    await subject.heartbeat(status())
    await subject.acquire(ticket("a"))
    waiting = asyncio.create_task(subject.acquire(ticket("b")))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await subject.load())["queued"] == 0
    racing = asyncio.create_task(subject.acquire(ticket("c")))
    await asyncio.sleep(0.01)
    await subject.release("a", done())
    racing.cancel()
    result = (await asyncio.gather(racing, return_exceptions=True))[0]
    # Python 3.11's wait_for may hand the grant out although it was cancelled; then the caller holds and releases it.
    assert (await subject.load())["held"] == (1 if isinstance(result, Grant) else 0)


async def test_lost_replica_needs_a_later_heartbeat() -> None:
    """After a loss, heartbeats that may have been under way do not bring the replica back; a later one does."""
    subject = admission()
    await subject.heartbeat(status())
    await subject.report_lost(ReplicaAddress("r0", "i"))
    await subject.heartbeat(status())
    waiting = asyncio.create_task(subject.acquire(ticket("a")))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await asyncio.sleep(0.6)
    await subject.heartbeat(status())
    assert isinstance(await waiting, Grant)


async def test_stale_loss_report_is_ignored() -> None:
    """A report about a former life does not suspend the present one."""
    subject = admission()
    await subject.heartbeat(status(incarnation="new"))
    await subject.report_lost(ReplicaAddress("r0", "old"))
    grant = await subject.acquire(ticket("a"))
    assert grant == Grant("r0", "new", 0)


async def test_new_life_starts_empty() -> None:
    """A replica under a new incarnation has all its slots, whatever was held on the old one."""
    subject = admission()
    await subject.heartbeat(status(incarnation="old"))
    await subject.acquire(ticket("a"))
    await subject.heartbeat(status(incarnation="new"))
    assert await used(subject) == {"r0": 0}
    await subject.release("a", done(End.FAILED))
    assert await used(subject) == {"r0": 0}
    assert await subject.heartbeat(status(incarnation="new")) == []


async def test_silent_replica_is_removed() -> None:
    """A replica that is silent for the time-out is removed, and gateways are told."""
    subject = admission(heartbeat_timeout_us=3_000_000)
    await subject.heartbeat(status("r0"))
    await asyncio.sleep(4)
    state = await subject.sync(GatewayReport("g"))
    assert state.replicas == 0
    assert state.silent == (ReplicaAddress("r0", "i"),)
    await subject.heartbeat(status("r0"))
    assert (await subject.sync(GatewayReport("g"))).silent == ()


async def test_aborts_ride_on_heartbeats() -> None:
    """A request released without having completed is named to its replica once."""
    subject = admission()
    await subject.heartbeat(status())
    await subject.acquire(ticket("a"))
    await subject.acquire(ticket("b"))
    await subject.release("a", done(End.CANCELLED))
    await subject.release("b", done())
    assert await subject.heartbeat(status()) == ["a"]
    assert await subject.heartbeat(status()) == []


async def test_reports_reconcile() -> None:
    """An old grant that its gateway does not report is released; a young one and another gateway's are not."""
    subject = admission(heartbeat_timeout_us=60_000_000)
    await subject.heartbeat(status(limit=8))
    await subject.acquire(ticket("old"))
    await subject.acquire(ticket("other", gateway="h"))
    await asyncio.sleep(RECONCILE_AFTER_US / 1e6 + 0.1)
    await subject.acquire(ticket("young"))
    await subject.sync(GatewayReport("g"))
    assert await used(subject) == {"r0": 2}
    held = HeldRequest("unknown", ReplicaAddress("r0", "i"), 3)
    await subject.sync(GatewayReport("g", (held,)))
    assert await used(subject) == {"r0": 5}
    await subject.release("unknown", done())
    assert await used(subject) == {"r0": 2}


async def test_unroutable_replicas_get_no_grants() -> None:
    """While one gateway cannot reach a replica, nothing is granted there."""
    subject = admission()
    await subject.heartbeat(status("r0"))
    await subject.heartbeat(status("r1"))
    await subject.sync(GatewayReport("g", unroutable=("r0",)))
    grants = [await subject.acquire(ticket(name)) for name in ("a", "b")]
    assert {grant.replica_id for grant in grants if isinstance(grant, Grant)} == {"r1"}
    await subject.sync(GatewayReport("g"))
    assert isinstance(await subject.acquire(ticket("c")), Grant)


async def test_shedding_service_is_not_kept_past_its_deadline() -> None:
    """overload shed: turned away when the deadline passes in the queue; overload queue: kept until the time-out."""
    subject = admission(inflight_per_replica=1, queue_timeout_us=30_000_000)
    await subject.heartbeat(status())
    await subject.acquire(ticket("running"))
    shed = asyncio.create_task(subject.acquire(ticket("a", "shedding", ttft_us=500_000)))
    kept = asyncio.create_task(subject.acquire(ticket("b", ttft_us=500_000)))
    start_us = virtual_us()
    answer = await shed
    assert isinstance(answer, Shed)
    assert answer.reason == "deadline_passed"
    assert virtual_us() - start_us == pytest.approx(500_000, abs=1_000)
    assert not kept.done()
    timed_out = await kept
    assert isinstance(timed_out, Shed)
    assert timed_out.reason == "queue_timeout"
    assert await subject.acquire(ticket("c", "shedding", age_us=2_000_000)) == replace(answer, retry_after_s=5)


async def test_shed_from_the_observed_rate() -> None:
    """overload shed: turned away at once when the queue ahead, at the observed rate, outlasts the deadline."""
    subject = admission(inflight_per_replica=1)
    await subject.heartbeat(status())
    for number in range(8):
        await subject.acquire(ticket(f"past{number}"))
        await asyncio.sleep(0.5)
        await subject.release(f"past{number}", done())
    await subject.acquire(ticket("running"))
    ahead = [asyncio.create_task(subject.acquire(ticket(f"q{number}", ttft_us=900_000))) for number in range(4)]
    await asyncio.sleep(0.01)
    answer = await subject.acquire(ticket("late", "shedding", ttft_us=1_000_000))
    assert isinstance(answer, Shed)
    assert answer.reason == "deadline_unreachable"
    assert answer.retry_after_s == 3
    sooner = asyncio.create_task(subject.acquire(ticket("soon", "shedding", ttft_us=800_000)))
    await asyncio.sleep(0.01)
    assert not sooner.done()
    for task in (*ahead, sooner):
        task.cancel()
    await asyncio.gather(*ahead, sooner, return_exceptions=True)


async def test_idle_time_is_not_slowness() -> None:
    """After an hour without requests a short queue is not hopeless: the observed rate is that of the full cluster."""
    subject = admission(inflight_per_replica=1, heartbeat_timeout_us=10**12)
    await subject.heartbeat(status())
    for number in range(8):
        await subject.acquire(ticket(f"past{number}"))
        await asyncio.sleep(0.1)
        await subject.release(f"past{number}", done())
    await asyncio.sleep(3600)
    await subject.acquire(ticket("running"))
    waiting = asyncio.create_task(subject.acquire(ticket("a", "shedding", ttft_us=500_000)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await subject.release("running", done())
    assert isinstance(await waiting, Grant)


def test_drain_rate_by_hand() -> None:
    """Ten releases, one a second while full, is one a second; idle time changes nothing, a stall while full does."""
    rate = DrainRate()
    assert rate.per_second(0) is None
    rate.note(True, 0)
    for second in range(1, 11):
        rate.count(second * 1_000_000)
    rate.note(False, 10_000_000)
    assert rate.per_second(10_000_000) == pytest.approx(1.0)
    rate.count(500_000_000)
    assert rate.per_second(999_000_000) == pytest.approx(1.0)
    rate.note(True, 1_000_000_000)
    assert rate.per_second(1_010_000_000) == pytest.approx(0.5)


actions = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "cancel", "beat", "lose", "restart", "sync", "wait"]),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=150, deadline=None)
def test_never_overfull_and_never_leaking(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens in whatever order: no replica beyond its slots, and at the end everything is free again."""

    async def run() -> None:
        subject = admission(inflight_per_replica=3, queue_timeout_us=5_000_000)
        tasks: dict[str, asyncio.Task[Grant | Shed]] = {}
        lives = {"r0": 0, "r1": 0}
        adopts = any(action == "sync" for action, *_ in steps)
        serial = 0
        for action, number, choices in steps:
            name = f"r{number % 2}"
            pick = list(tasks)[number % len(tasks)] if tasks else None
            if action == "acquire":
                serial += 1
                request = ticket(f"q{serial}", ["queueing", "shedding"][number % 2], choices=choices)
                tasks[request.request_id] = asyncio.create_task(subject.acquire(request))
            elif action == "release" and pick:
                await subject.release(pick, done())
            elif action == "cancel" and pick:
                tasks[pick].cancel()
            elif action == "restart":
                lives[name] += 1
            elif action == "lose":
                await subject.report_lost(ReplicaAddress(name, str(lives[name])))
            elif action == "sync":
                await subject.sync(GatewayReport("g", (HeldRequest(f"q{number}", ReplicaAddress(name, "0"), choices),)))
            elif action == "wait":
                await asyncio.sleep(number / 3)
            if action in ("beat", "restart"):
                await subject.heartbeat(status(name, incarnation=str(lives[name])))
            await asyncio.sleep(0)
            counts = (await used(subject)).values()
            assert all(count >= 0 for count in counts)
            # Adopted grants were made by a former admission, so only without them is the bound ours to keep.
            assert adopts or all(count <= 3 for count in counts)
        for request_id, task in tasks.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await subject.release(request_id, done(End.CANCELLED))
        for number in range(8):
            await subject.release(f"q{number}", done(End.CANCELLED))
        load = await subject.load()
        assert (load["queued"], load["held"]) == (0, 0)
        assert all(replica["used"] == 0 for replica in load["replicas"].values())

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
