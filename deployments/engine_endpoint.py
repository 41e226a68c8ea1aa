"""An engine replica as Serve runs it: builds the engine, answers gateways, reports to admission."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextvars import Context

from deployments.protocol import (
    AdmissionPort,
    Delivery,
    EnginePort,
    NoStreamError,
    Prepared,
    Refusal,
    ReplicaAddress,
    ReplicaStatus,
    ReplicaUnavailableError,
    Submission,
    WrongReplicaError,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 5.0


class EngineEndpoint:
    """Speaks for one engine. Calls meant for another replica, or for a former life of this one, are refused."""

    def __init__(self, engine: EnginePort, replica_id: str, admission: AdmissionPort) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._admission = admission
        self._address: ReplicaAddress | None = None
        self._heartbeats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and register with admission."""
        await self._engine.start()
        status = await self.status()
        self._address = ReplicaAddress(status.replica_id, status.incarnation)
        self._heartbeats = asyncio.get_running_loop().create_task(
            self._beat_for_ever(), name="heartbeats", context=Context()
        )

    async def stop(self) -> None:
        """Leave admission, then stop the engine."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        if self._address is not None:
            try:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    await self._admission.withdraw(self._address)
            except (ReplicaUnavailableError, TimeoutError):
                logger.info("admission was not told that replica %s stops", self._replica_id)
        await self._engine.stop()

    async def check_health(self) -> None:
        """The engine's own judgement. A loop that no longer sends heartbeats is ill as well."""
        if self._heartbeats is not None and self._heartbeats.done():
            raise RuntimeError("the heartbeat task of this replica ended")
        await self._engine.check_health()

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """See ``EnginePort.prepare``."""
        return await self._engine.prepare(submission)

    async def submit(self, submission: Submission, *, replica_id: str, incarnation: str) -> None:
        """See ``EnginePort.submit``. Raises WrongReplicaError."""
        self._check(replica_id, incarnation)
        try:
            await self._engine.submit(submission)
        except LookupError as error:
            if type(error) is not LookupError:
                raise
            raise NoStreamError(str(error)) from error

    async def abort(self, request_ids: list[str], *, replica_id: str, incarnation: str) -> None:
        """See ``EnginePort.abort``. Raises WrongReplicaError."""
        self._check(replica_id, incarnation)
        await self._engine.abort(request_ids)

    async def deliveries(
        self, gateway_id: str, *, replica_id: str, incarnation: str
    ) -> AsyncGenerator[list[Delivery], None]:
        """See ``EnginePort.deliveries``. The first list is empty: the gateway is registered.

        Raises WrongReplicaError.
        """
        self._check(replica_id, incarnation)
        stream = self._engine.deliveries(gateway_id)
        first = asyncio.ensure_future(anext(stream, None))
        try:
            await asyncio.sleep(0)
            yield []
            batch = await first
            while batch is not None:
                yield batch
                batch = await anext(stream, None)
        finally:
            first.cancel()
            if isinstance(stream, AsyncGenerator):
                with contextlib.suppress(RuntimeError):
                    await stream.aclose()

    async def status(self) -> ReplicaStatus:
        """See ``EnginePort.status``."""
        return await self._engine.status()

    def _check(self, replica_id: str, incarnation: str) -> None:
        if self._address != ReplicaAddress(replica_id, incarnation):
            raise WrongReplicaError(f"replica {replica_id} is not here; this is {self._replica_id}")

    async def _beat_for_ever(self) -> None:
        while True:
            try:
                await self._beat()
            except (ReplicaUnavailableError, TimeoutError) as error:
                logger.warning("the heartbeat did not reach admission: %s", error or type(error).__name__)
            except Exception:
                logger.exception("the heartbeat failed")
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _beat(self) -> None:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            status = await self.status()
            self._address = ReplicaAddress(status.replica_id, status.incarnation)
            aborts = await self._admission.heartbeat(status)
        if aborts:
            await self._engine.abort(aborts)
