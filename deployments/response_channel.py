"""The way of one response from its replica's stream to its HTTP connection: bounded, one writer, one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from deployments.protocol import Delivery


class ReplicaLostError(Exception):
    """The replica that served the response is gone."""


class SlowClientError(Exception):
    """The client reads more slowly than it may fall behind."""


class ResponseChannel:
    """Released deliveries that the connection has not taken yet. Also the pacer's sink.

    ``max_bytes`` bounds what waits here: a client that does not read is cut instead of filling the gateway's memory.
    ``on_overflow`` is called when that happens, ``on_last`` when the engine's last delivery has arrived, which may be
    long before it is released.
    """

    def __init__(self, max_bytes: int, on_overflow: Callable[[], None], on_last: Callable[[], None]) -> None:
        self.due_us = 0
        self.held = 0
        self.on_last = on_last
        self._on_overflow = on_overflow
        self._max_bytes = max_bytes
        self._released: deque[Delivery] = deque()
        self._bytes = 0
        self._begun = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        """Take a released delivery."""
        if isinstance(self._error, SlowClientError):
            return
        self._bytes += len(delivery.data)
        if self._bytes > self._max_bytes and self._released:
            self._error = SlowClientError(f"more than {self._max_bytes} bytes wait for the client")
            self._released.clear()
            self._on_overflow()
        else:
            self._released.append(delivery)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the channel: nothing more will be offered to the pacer for it."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self, timeout_s: float) -> list[Delivery]:
        """Everything released so far, at least one delivery. Raises what ended the channel, or TimeoutError.

        A response that has begun gets what is still held for it before the error. One that has not begun gets the
        error at once, so that it can start again elsewhere.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                if self._error is not None and (not self._begun or not (self._released or self.held)):
                    raise self._error
                if self._released:
                    return self._take_released()
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None

    def _take_released(self) -> list[Delivery]:
        self._begun = True
        taken = list(self._released)
        self._released.clear()
        self._bytes = 0
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
