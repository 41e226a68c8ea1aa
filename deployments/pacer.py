"""Holds deliveries for as long as the engine asked (``hold_us``) and hands them on in order.

One pacer per gateway. A delivery without hold, on a response that has nothing held, passes straight through.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Protocol

from deployments.clock import Clock, monotonic_us
from deployments.protocol import Delivery


class Sink(Protocol):
    """Where released deliveries go: one response. ``due_us`` is the pacer's: when its last held delivery leaves."""

    due_us: int
    held: int

    def put(self, delivery: Delivery) -> None:
        """Take a released delivery. Never raises."""
        ...


class HoldQueue:
    """The pacer without a clock: what is held, when it is due.

    Nothing leaves before it is due, and the deliveries of one sink leave in the order in which they came, whatever
    their holds.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sink, Delivery]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, sink: Sink, delivery: Delivery, now_us: int) -> None:
        """Hold a delivery that arrived now, or hand it straight on."""
        due_us = now_us + max(0, delivery.hold_us)
        if sink.held:
            due_us = max(due_us, sink.due_us)
        elif due_us <= now_us:
            sink.put(delivery)
            return
        sink.due_us = due_us
        sink.held += 1
        self._sequence += 1
        heapq.heappush(self._heap, (due_us, self._sequence, sink, delivery))

    def release(self, now_us: int) -> None:
        """Hand on everything that is due."""
        while self._heap and self._heap[0][0] <= now_us:
            _, _, sink, delivery = heapq.heappop(self._heap)
            sink.held -= 1
            sink.put(delivery)

    def next_due_us(self) -> int | None:
        """When the next delivery is due; None when nothing is held."""
        return self._heap[0][0] if self._heap else None


class Pacer:
    """Runs a ``HoldQueue`` on the event loop.

    It wakes when the next delivery is due, but at most once every ``tick_us``: what is due in between leaves together,
    up to a tick late and never early. So the cost is bounded however many streams there are.
    """

    def __init__(self, tick_us: int, clock: Clock = monotonic_us) -> None:
        self._queue = HoldQueue()
        self._tick_us = tick_us
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._fired_us = 0

    @property
    def held(self) -> int:
        """How many deliveries are held now."""
        return len(self._queue)

    def offer(self, sink: Sink, delivery: Delivery) -> None:
        """Take a delivery that just arrived. Call it on the event loop."""
        self._queue.offer(sink, delivery, self._clock())
        self._arm()

    def close(self) -> None:
        """Stop the timer. What is held stays held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        due_us = self._queue.next_due_us()
        if due_us is None:
            return
        wake_us = max(due_us, self._fired_us + self._tick_us)
        if self._timer is not None:
            if self._timer_us <= wake_us:
                return
            self._timer.cancel()
        self._timer_us = wake_us
        delay_s = max(0, wake_us - self._clock()) / 1e6
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._fired_us = self._clock()
        self._queue.release(self._fired_us)
        self._arm()
