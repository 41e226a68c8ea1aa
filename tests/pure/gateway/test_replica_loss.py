"""An engine replica that dies: what had not begun starts again elsewhere, what had begun ends in a clear error."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from deployments.protocol import ReplicaAddress
from tests.fakes.house import ENGINE, chat, run_house
from tests.fakes.surroundings import until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_has_not_begun_starts_again(stream: bool) -> None:
    """Nothing sent yet: the client gets its whole response from another replica and sees nothing of the loss."""
    async with run_house(replicas=2) as house:
        calls = [house.call(chat(stream=stream, max_tokens=20)) for _ in range(4)]
        if stream:
            for replica in house.pool.replicas.values():
                replica.engine.hold_us = 100_000
        await until(lambda: all(len(r.engine.running) == 2 for r in house.pool.replicas.values()))
        await asyncio.sleep(0.03)
        await house.pool.replicas["r0"].kill()
        await asyncio.wait([call.task for call in calls])
        assert [call.status for call in calls] == [200] * 4
        assert all("w19" in call.text and '"error"' not in call.text for call in calls)
        assert len(house.pool.replicas["r1"].engine.submitted) == 4


async def test_a_stream_that_has_begun_ends_in_an_error_event() -> None:
    """Case S2: no silent end and no finish_reason, but an error event; held tokens still go out before it."""
    engine = replace(ENGINE, engine_args={"step_us": 10_000, "hold_us": 100_000})
    async with run_house(engine=engine) as house:
        call = house.call(chat(stream=True, max_tokens=500))
        await until(lambda: len(call.messages) > 5)
        made = next(iter(house.pool.replicas["r0"].engine.running.values())).made
        await house.pool.replicas["r0"].kill()
        await asyncio.wait([call.task])
        events = [line[6:] for line in call.text.split("\n") if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "replica_lost"
        last = json.loads(events[-2])["choices"][0]["delta"]["content"]
        assert int(last.strip()[1:]) >= made - 2 > 8
        assert "[DONE]" not in call.text
        assert '"finish_reason": "' not in call.text
        assert call.messages[-1]["more_body"] is False
        await house.settle()
        assert (await house.admission.slo())["triage"]["outcomes"]["failed"] == 1


async def test_a_dead_replica_gets_no_grants() -> None:
    """After a loss nothing is granted to the dead replica, and it is forgotten when it stays silent."""
    async with run_house(replicas=2) as house:
        await asyncio.gather(*(house.http.post("/v1/chat/completions", json=chat()) for _ in range(4)))
        await house.pool.replicas["r0"].kill()
        await house.settle()
        load = await house.load()
        assert load["replicas"]["r0"]["eligible"] is False
        answers = await asyncio.gather(*(house.http.post("/v1/chat/completions", json=chat()) for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        await asyncio.sleep(6)
        assert set((await house.load())["replicas"]) == {"r1"}


async def test_a_hung_replica_is_given_up() -> None:
    """A replica that neither breaks its streams nor sends heartbeats is taken for lost: its requests go elsewhere."""
    engine = replace(ENGINE, engine_args={"step_us": 10_000})
    async with run_house(replicas=1, engine=engine) as house:
        call = house.call(chat(stream=True, fake={"stall_after": 0}, max_tokens=3))
        await house.settle()
        heartbeats = house.pool.replicas["r0"].endpoint._heartbeats
        assert heartbeats is not None
        await house.add_replica("r1")
        heartbeats.cancel()
        await until(lambda: len(house.pool.replicas["r1"].engine.submitted) == 1, 20)
        call.disconnect()


async def test_the_last_replica_dies() -> None:
    """With no replica left a queued request waits for a new one and is served by it."""
    async with run_house() as house:
        call = house.call(chat(max_tokens=50))
        await house.settle()
        await house.pool.replicas["r0"].kill()
        await asyncio.sleep(1)
        assert call.status is None
        await house.add_replica("r9")
        await asyncio.wait([call.task])
        assert call.status == 200


async def test_a_request_that_kills_every_replica_is_given_up() -> None:
    """A request may be lost a few times only; then its client is told, and the other replicas live."""
    async with run_house(replicas=5) as house:
        call = house.call(chat(stream=True, fake={"stall_after": 0}))
        killed = 0
        while not call.task.done():
            await asyncio.sleep(0.05)
            for replica in house.pool.replicas.values():
                if replica.engine.running and not replica.dead.is_set():
                    await replica.kill()
                    killed += 1
        assert killed == 3
        assert call.status == 503


async def test_wrong_addresses_are_refused() -> None:
    """A grant for a former life of a replica is not run by the new one: the request is granted again."""
    async with run_house() as house:
        replica = house.pool.replicas["r0"]
        stale = ReplicaAddress("r0", "former life")
        known = house.admission._book._replicas["r0"]
        known.status = replace(known.status, incarnation=stale.incarnation)
        answer = await house.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 200
        assert len(replica.engine.submitted) == 1


async def test_a_stream_that_broke_unnoticed() -> None:
    """A request submitted on a stream that the engine has closed is granted again, not failed."""
    async with run_house() as house:
        await house.http.post("/v1/chat/completions", json=chat())
        house.pool.replicas["r0"].engine._gateways.clear()
        call = house.call(chat())
        await asyncio.sleep(0.05)
        await house.add_replica("r1")
        await asyncio.wait([call.task])
        assert call.status == 200
