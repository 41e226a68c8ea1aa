"""One long-lived stream per engine replica, over which all of its deliveries reach this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context

from deployments.pacer import Pacer
from deployments.protocol import Delivery, EnginePool, ReplicaAddress, ReplicaUnavailableError
from deployments.response_channel import ReplicaLostError, ResponseChannel

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
"""How long a replica may take to answer that its stream is open."""

LostCallback = Callable[[ReplicaAddress], Awaitable[None]]


class _Stream:
    """The stream of one life of one replica, and the responses that arrive on it."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.channels: dict[str, ResponseChannel] = {}
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None


class ReplicaStreams:
    """Opens a replica's stream when the first request is bound to it and hands its deliveries to the pacer.

    When a stream breaks, every response bound to it fails with ``ReplicaLostError`` and ``on_lost`` is called.
    """

    def __init__(self, engines: EnginePool, gateway_id: str, pacer: Pacer, on_lost: LostCallback) -> None:
        self._engines = engines
        self._gateway_id = gateway_id
        self._pacer = pacer
        self._on_lost = on_lost
        self._streams: dict[ReplicaAddress, _Stream] = {}

    async def bind(self, address: ReplicaAddress, request_id: str, channel: ResponseChannel) -> None:
        """From now on the request's deliveries go to ``channel``. Raises ReplicaUnavailableError."""
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = _Stream(address)
            # The stream outlives the request that opens it, so it must not run in that request's context: Serve
            # would cancel it together with the request.
            stream.task = asyncio.get_running_loop().create_task(
                self._pump(stream), name=f"deliveries of {address.replica_id}", context=Context()
            )
        stream.channels[request_id] = channel
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.shield(stream.opened)
        except BaseException as error:
            stream.channels.pop(request_id, None)
            if isinstance(error, TimeoutError):
                self.lose(address)
                raise ReplicaUnavailableError(f"replica {address.replica_id} did not open its stream") from None
            raise

    def unbind(self, address: ReplicaAddress, request_id: str) -> None:
        """Deliveries that still come for the request are dropped."""
        stream = self._streams.get(address)
        if stream is not None:
            stream.channels.pop(request_id, None)

    def close_idle(self, keep: Callable[[ReplicaAddress], bool]) -> None:
        """Close the streams without responses that ``keep`` does not want: an open stream keeps a replica draining."""
        for stream in list(self._streams.values()):
            if not stream.channels and stream.opened.done() and not keep(stream.address):
                self._close(stream)

    def lose(self, address: ReplicaAddress) -> None:
        """Give up on a replica that no longer answers."""
        stream = self._streams.get(address)
        if stream is not None:
            self._fail(stream, "it no longer answers")
            self._close(stream)

    async def stop(self) -> None:
        """Close every stream."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for stream in list(self._streams.values()):
            self._close(stream)
        await asyncio.gather(*tasks, return_exceptions=True)

    def addresses(self) -> list[ReplicaAddress]:
        """The replicas whose streams are open."""
        return list(self._streams)

    async def _pump(self, stream: _Stream) -> None:
        reason = "its stream ended"
        try:
            async with contextlib.aclosing(self._engines.deliveries(stream.address, self._gateway_id)) as batches:
                async for batch in batches:
                    if not stream.opened.done():
                        stream.opened.set_result(None)
                    for delivery in batch:
                        self._hand_on(stream, delivery)
        except ReplicaUnavailableError as error:
            reason = str(error) or type(error).__name__
        except asyncio.CancelledError:
            self._forget(stream)
            raise
        except Exception:
            logger.exception("the stream of replica %s broke", stream.address.replica_id)
        self._fail(stream, reason)
        await self._on_lost(stream.address)

    def _hand_on(self, stream: _Stream, delivery: Delivery) -> None:
        channel = stream.channels.get(delivery.request_id)
        if channel is None:
            return
        if delivery.last:
            del stream.channels[delivery.request_id]
        self._pacer.offer(channel, delivery)
        if delivery.last:
            channel.on_last()

    def _fail(self, stream: _Stream, reason: str) -> None:
        self._forget(stream)
        logger.warning("replica %s lost: %s; %d responses", stream.address.replica_id, reason, len(stream.channels))
        error = ReplicaLostError(f"replica {stream.address.replica_id} was lost: {reason}")
        self._never_opens(stream, str(error))
        for channel in stream.channels.values():
            channel.fail(error)
        stream.channels.clear()

    def _forget(self, stream: _Stream) -> None:
        if self._streams.get(stream.address) is stream:
            del self._streams[stream.address]

    def _never_opens(self, stream: _Stream, reason: str) -> None:
        if not stream.opened.done():
            stream.opened.set_exception(ReplicaUnavailableError(reason))
            stream.opened.exception()  # seen, even when nobody waits for it any more

    def _close(self, stream: _Stream) -> None:
        self._forget(stream)
        self._never_opens(stream, "the stream was closed")
        if stream.task is not None:
            stream.task.cancel()
