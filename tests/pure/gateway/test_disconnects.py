"""A client that goes, at whatever stage, frees its place in the queue, on the replica and at the gateway (case C4)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest

from deployments.protocol import Delivery, ReplicaUnavailableError
from deployments.replica_book import ReplicaBook
from deployments.settings import AdmissionSettings
from tests.fakes.house import ENGINE, GATEWAY, House, RawCall, chat, run_house
from tests.fakes.surroundings import until

pytestmark = pytest.mark.anyio

Leave = Callable[[RawCall], None]


def close(call: RawCall) -> None:
    call.disconnect()


def cancel(call: RawCall) -> None:
    call.task.cancel()


async def quiet(house: House) -> None:
    """Nothing is queued, held or running anywhere."""
    async with asyncio.timeout(3):
        while True:
            load = await house.load()
            engines = [replica.engine for replica in house.pool.replicas.values()]
            if load["queued"] == load["held"] == sum(len(e.running) + len(e.waiting) for e in engines) == 0:
                assert all(replica["used"] == 0 for replica in load["replicas"].values())
                return
            await asyncio.sleep(0.01)


both_ways = pytest.mark.parametrize("leave", [close, cancel])
streamed_or_not = pytest.mark.parametrize("stream", [True, False])


@both_ways
@streamed_or_not
async def test_while_preparing(leave: Leave, stream: bool) -> None:
    """Gone while the request is validated: nothing is asked of admission."""
    async with run_house() as house:
        await house.add_replica("r0", prepare_us=500_000)
        call = house.call(chat(stream=stream))
        await house.settle()
        leave(call)
        await asyncio.wait([call.task])
        await quiet(house)
        assert not house.metrics.outcomes
        assert call.messages == []


@both_ways
@streamed_or_not
async def test_while_queued(leave: Leave, stream: bool) -> None:
    """Gone while queued: the place in the queue is given up, the engine never sees the request."""
    async with run_house() as house:
        running = [house.call(chat(stream=True, max_tokens=400)) for _ in range(2)]
        await house.settle()
        queued = [house.call(chat(stream=stream)) for _ in range(20)]
        await until_queued(house, 20)
        for call in queued:
            leave(call)
        await asyncio.wait([call.task for call in queued])
        await until_queued(house, 0)
        assert len(house.pool.replicas["r0"].engine.submitted) == 2
        for call in running:
            leave(call)
        await quiet(house)
        account = (await house.admission.slo())["triage"]
        assert account["outcomes"]["cancelled"] == 22
        assert account["requests"]["ttft"]["attainment"] is None


async def until_queued(house: House, count: int) -> None:
    await until(lambda: len(house.admission._queue) == count, 3)


@both_ways
@streamed_or_not
async def test_while_prefilling(leave: Leave, stream: bool) -> None:
    """Gone before the first token: the engine drops the request."""
    engine = replace(ENGINE, engine_args={"step_us": 400_000})
    async with run_house(engine=engine) as house:
        call = house.call(chat(stream=stream))
        await until(lambda: bool(house.pool.replicas["r0"].engine.submitted))
        leave(call)
        await quiet(house)
        assert house.pool.replicas["r0"].engine.aborted


@both_ways
async def test_while_decoding(leave: Leave) -> None:
    """Gone in the middle of a stream: the engine drops it, and the account says cancelled, with its TTFT measured."""
    async with run_house() as house:
        call = house.call(chat(stream=True, max_tokens=5_000))
        await until(lambda: len(call.messages) > 5)
        leave(call)
        await quiet(house)
        account = (await house.admission.slo())["triage"]
        assert account["outcomes"] == {"completed": 0, "cancelled": 1, "failed": 0, "shed": 0}
        assert sum(account["ttft"]["counts"]) == 1
        assert account["requests"]["tbt"]["attainment"] is None


@both_ways
async def test_while_tokens_are_held(leave: Leave) -> None:
    """Gone while the pacer holds its tokens, after the engine has finished."""
    engine = replace(ENGINE, engine_args={"step_us": 10_000, "hold_us": 2_000_000})
    async with run_house(engine=engine) as house:
        call = house.call(chat(stream=True, max_tokens=3))
        await until(lambda: house.pool.replicas["r0"].engine.steps >= 3)
        leave(call)
        await quiet(house)
        assert call.messages == []


async def test_a_client_that_does_not_read_is_cut() -> None:
    """Case C3: what waits for a client is bounded; beyond it the request ends and the engine is freed."""
    settings = replace(GATEWAY, max_unsent_bytes=20_000)
    async with run_house(gateway_settings=settings) as house:
        call = house.call(chat(stream=True, max_tokens=20_000))
        other = house.call(chat(stream=True, max_tokens=300))
        await until(lambda: len(call.messages) > 3)
        call.reading.clear()
        await until(call.task.done)
        assert len(house.pool.replicas["r0"].engine.aborted) == 1
        await asyncio.wait([other.task])
        assert other.text.endswith("data: [DONE]\n\n")
        await quiet(house)


async def test_a_client_that_never_reads_the_end_is_cut() -> None:
    """A stalled client does not keep its connection, nor anything else, beyond the longest stream."""
    settings = replace(GATEWAY, stream_timeout_us=5_000_000)
    async with run_house(gateway_settings=settings) as house:
        call = house.call(chat(stream=True, max_tokens=20))
        await until(lambda: len(call.messages) > 3)
        call.reading.clear()
        await until(call.task.done)
        await quiet(house)


async def test_a_slot_is_free_when_the_engine_is_done() -> None:
    """Tokens that are held for long do not keep their replica's slot: the next request is granted meanwhile."""
    engine = replace(ENGINE, engine_args={"step_us": 10_000, "hold_us": 5_000_000}, max_num_seqs=1)
    async with run_house(engine=engine) as house:
        first = house.call(chat(stream=True))
        await house.settle()
        second = house.call(chat(stream=True))
        await until(lambda: len(house.pool.replicas["r0"].engine.submitted) == 2, 1)
        assert first.status is None
        await house.gateway.report()
        assert (await house.load())["replicas"]["r0"]["used"] == 1
        await asyncio.wait([first.task, second.task])
        assert (await house.admission.slo())["triage"]["outcomes"]["completed"] == 2


async def test_a_gateway_that_vanishes_is_forgotten() -> None:
    """What a silent gateway held or queued is released, and the replica told to stop its requests."""
    async with run_house() as house:
        for _ in range(2):
            house.call(chat(stream=True, max_tokens=5_000))
        await house.settle()
        house.call(chat(stream=True))
        await until_queued(house, 1)
        reports = house.gateway._reports
        assert reports is not None
        reports.cancel()
        await asyncio.sleep(7)
        await quiet(house)
        assert len(house.pool.replicas["r0"].engine.aborted) == 2


async def test_lost_release_is_made_up_for() -> None:
    """A release that never reaches admission is found by the gateway's report: no slot leaks."""
    async with run_house() as house:
        real = house.admission.release

        async def lost(*_: object) -> None:
            raise TimeoutError

        house.admission.release = lost  # type: ignore[method-assign]
        await house.http.post("/v1/chat/completions", json=chat())
        await house.settle()
        assert (await house.load())["held"] == 1
        house.admission.release = real  # type: ignore[method-assign]
        await asyncio.sleep(8)
        await quiet(house)


async def test_lost_abort_is_made_up_for() -> None:
    """An abort that cannot reach a draining replica arrives with the replica's next heartbeat."""
    async with run_house() as house:
        call = house.call(chat(stream=True, max_tokens=5_000))
        await until(lambda: len(call.messages) > 3)
        await house.add_replica("r1")
        house.pool.hidden.add("r0")
        call.disconnect()
        await asyncio.wait([call.task])
        await asyncio.sleep(1.5)
        await quiet(house)
        assert len(house.pool.replicas["r0"].engine.aborted) == 1


async def test_admission_restart_learns_what_is_held() -> None:
    """A new admission learns from the gateways what is in flight and does not overfill the replicas."""
    async with run_house(admission_settings=AdmissionSettings(heartbeat_timeout_us=4_000_000)) as house:
        calls = [house.call(chat(stream=True, max_tokens=500)) for _ in range(2)]
        await house.settle()
        assert (await house.load())["held"] == 2
        house.admission._book = ReplicaBook(None)
        await asyncio.sleep(2.5)
        load = await house.load()
        assert load["held"] == 2
        assert load["replicas"]["r0"]["used"] == 2
        await asyncio.wait([call.task for call in calls])
        await quiet(house)


async def test_queued_requests_outlive_admission() -> None:
    """While admission is being restarted a queued request asks again and is served in the end."""
    async with run_house() as house:
        real, failures = house.admission.acquire, 0

        async def lost(*_: object) -> object:
            nonlocal failures
            failures += 1
            raise ReplicaUnavailableError("admission died")

        house.admission.acquire = lost  # type: ignore[method-assign, assignment]
        call = house.call(chat())
        await asyncio.sleep(3)
        house.admission.acquire = real  # type: ignore[method-assign]
        await asyncio.wait([call.task])
        assert call.status == 200
        assert 5 < failures < 20


async def test_owned_work_leaves_the_request_context() -> None:
    """Streams, releases and aborts run outside the request's context: Serve cancels what runs in it."""
    marker: ContextVar[str | None] = ContextVar("marker", default=None)
    seen: dict[str, str | None] = {}
    async with run_house() as house:
        pool, admission = house.pool, house.admission
        real_abort, real_release, real_deliveries = pool.abort, admission.release, pool.deliveries

        async def abort(*arguments: Any) -> None:
            seen["abort"] = marker.get()
            await real_abort(*arguments)

        async def release(*arguments: Any) -> None:
            seen["release"] = marker.get()
            await real_release(*arguments)

        async def deliveries(*arguments: Any) -> AsyncGenerator[list[Delivery], None]:
            seen["deliveries"] = marker.get()
            async with contextlib.aclosing(real_deliveries(*arguments)) as batches:
                async for batch in batches:
                    yield batch

        pool.abort, admission.release, pool.deliveries = abort, release, deliveries  # type: ignore[method-assign]
        marker.set("a request")
        call = house.call(chat(stream=True, max_tokens=500))
        await until(lambda: len(call.messages) > 3)
        call.disconnect()
        await quiet(house)
        await house.settle()
    assert seen == {"abort": None, "release": None, "deliveries": None}
