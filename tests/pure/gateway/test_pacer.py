"""The pacer: never early, at most a tick late, in order, and not in the way when nothing is held."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.pacer import HoldQueue, Pacer
from deployments.protocol import Delivery
from tests.fakes.virtual_time import virtual_us

TICK_US = 2_000


class RecordingSink:
    """Remembers what was released, and when."""

    def __init__(self, clock=lambda: 0) -> None:
        self.due_us = 0
        self.held = 0
        self.clock = clock
        self.got: list[tuple[int, str]] = []

    def put(self, delivery: Delivery) -> None:
        self.got.append((self.clock(), delivery.data))


offers = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(-5, 100)), max_size=60)


@given(offers)
def test_never_early_and_in_order(offered: list[tuple[int, int, int]]) -> None:
    """Each delivery leaves at its due time or when those before it have left, per sink in the order of arrival."""
    now = 0
    queue = HoldQueue()
    sinks = [RecordingSink(lambda: now) for _ in range(4)]
    expected: list[list[tuple[int, str]]] = [[] for _ in sinks]
    for place, (wait, sink, hold) in enumerate(offered):
        for _ in range(wait):
            now += 1
            queue.release(now)
        queue.offer(sinks[sink], Delivery("r", str(place), hold_us=hold), now)
        before = expected[sink][-1][0] if expected[sink] else 0
        expected[sink].append((max(now + max(0, hold), before), str(place)))
    while len(queue):
        now += 1
        queue.release(now)
    assert [sink.got for sink in sinks] == expected
    assert all(sink.held == 0 for sink in sinks)
    assert queue.next_due_us() is None


@pytest.mark.anyio
async def test_without_hold_nothing_waits() -> None:
    """Without hold a delivery is released within the call, and no timer is started."""
    pacer, sink = Pacer(TICK_US, virtual_us), RecordingSink(virtual_us)
    pacer.offer(sink, Delivery("r", "a"))
    assert sink.got == [(virtual_us(), "a")]
    assert pacer.held == 0
    assert pacer._timer is None


@pytest.mark.anyio
async def test_64_streams_within_a_tick() -> None:
    """64 streams with random holds: no token early, every token within a tick of its time."""
    generator = random.Random(1)
    pacer = Pacer(TICK_US, virtual_us)
    sinks = [RecordingSink(virtual_us) for _ in range(64)]
    due: list[list[int]] = [[] for _ in sinks]
    for _ in range(50):
        for sink, times in zip(sinks, due, strict=True):
            hold_us = generator.choice([0, 500, 30_000, generator.randrange(250_000)])
            times.append(max(virtual_us() + hold_us, times[-1] if times else 0))
            pacer.offer(sink, Delivery("r", "", hold_us=hold_us))
        await asyncio.sleep(generator.random() / 20)
    await asyncio.sleep(1)
    late = [
        at - wanted
        for sink, times in zip(sinks, due, strict=True)
        for (at, _), wanted in zip(sink.got, times, strict=True)
    ]
    assert min(late) >= 0
    assert max(late) <= TICK_US + 10
    pacer.close()


@pytest.mark.anyio
async def test_one_timer_a_tick() -> None:
    """Deliveries that are due in the same tick leave on one timer."""
    pacer = Pacer(TICK_US, virtual_us)
    sink = RecordingSink(virtual_us)
    fires = 0
    fire = pacer._fire

    def counted() -> None:
        nonlocal fires
        fires += 1
        fire()

    pacer._fire = counted  # type: ignore[method-assign]
    for place in range(1_000):
        pacer.offer(RecordingSink(virtual_us) if place else sink, Delivery("r", "", hold_us=10_000 + place))
    await asyncio.sleep(0.1)
    assert len(sink.got) == 1
    assert pacer.held == 0
    assert fires <= 3
