"""Deliveries on their way to one gateway: everything of an engine step leaves as one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from deployments.protocol import Delivery


class OutboxFullError(Exception):
    """The gateway has stopped to take deliveries."""


class Outbox:
    """Collects deliveries until the gateway's stream takes them, all at once.

    The tasks of all requests wake in the same turn of the event loop when an engine step ends; the reader wakes in the
    turn after it, so one list holds the whole step. At most ``limit`` deliveries wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: list[Delivery] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, delivery: Delivery) -> None:
        """Add a delivery; raises :class:`OutboxFullError` when nobody takes them any more."""
        if self._closed or len(self._pending) >= self._limit:
            raise OutboxFullError
        self._pending.append(delivery)
        self._ready.set()

    def close(self) -> None:
        """End the stream; what was not taken is dropped."""
        self._closed = True
        self._ready.set()

    async def batches(self, keepalive_s: float) -> AsyncIterator[list[Delivery]]:
        """Yield what has gathered, as soon as there is something; an empty list every ``keepalive_s`` without any."""
        while not self._closed:
            try:
                async with asyncio.timeout(keepalive_s):
                    await self._ready.wait()
            except TimeoutError:
                yield []
                continue
            self._ready.clear()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
