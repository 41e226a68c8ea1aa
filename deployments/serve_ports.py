"""Engines and admission behind Serve deployment handles. Ray's errors become ``ReplicaUnavailableError`` here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import routable
from deployments.protocol import (
    ClusterState,
    Delivery,
    GatewayReport,
    Grant,
    Outcome,
    Prepared,
    Refusal,
    ReplicaAddress,
    ReplicaStatus,
    ReplicaUnavailableError,
    Shed,
    Submission,
    Ticket,
)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Ray's and Serve's transport errors as ours. An error that the remote code raised is raised as it is."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ReplicaUnavailableError):
            raise type(cause)(str(cause)) from None
        raise
    except (RayActorError, RayError, RayServeException) as error:
        raise ReplicaUnavailableError(type(error).__name__) from error


class ServeEnginePool:
    """``EnginePool`` over the handle of the ``engine`` deployment, which routes by ``replica_router``."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """See ``EnginePool``."""
        with _translated():
            answer: Prepared | Refusal = await self._handle.prepare.remote(submission)
            return answer

    async def submit(self, address: ReplicaAddress, submission: Submission) -> None:
        """See ``EnginePool``."""
        with _translated():
            await self._handle.submit.remote(submission, **_to(address))

    async def abort(self, address: ReplicaAddress, request_ids: list[str]) -> None:
        """See ``EnginePool``."""
        with _translated():
            await self._handle.abort.remote(request_ids, **_to(address))

    async def deliveries(self, address: ReplicaAddress, gateway_id: str) -> AsyncGenerator[list[Delivery], None]:
        """See ``EnginePool``."""
        response = self._streaming.deliveries.remote(gateway_id, **_to(address))
        try:
            with _translated():
                async for batch in response:
                    yield batch
        finally:
            response.cancel()

    def routable(self) -> frozenset[str] | None:
        """See ``EnginePool``."""
        return routable.replicas(self._handle.deployment_name)


class ServeAdmission:
    """``AdmissionPort`` over the handle of the ``admission`` deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def acquire(self, ticket: Ticket) -> Grant | Shed:
        """See ``AdmissionPort``."""
        answer: Grant | Shed = await self._call("acquire", ticket)
        return answer

    async def release(self, request_id: str, outcome: Outcome | None) -> None:
        """See ``AdmissionPort``."""
        await self._call("release", request_id, outcome)

    async def heartbeat(self, status: ReplicaStatus) -> list[str]:
        """See ``AdmissionPort``."""
        aborts: list[str] = await self._call("heartbeat", status)
        return aborts

    async def withdraw(self, address: ReplicaAddress) -> None:
        """See ``AdmissionPort``."""
        await self._call("withdraw", address)

    async def report_lost(self, address: ReplicaAddress) -> None:
        """See ``AdmissionPort``."""
        await self._call("report_lost", address)

    async def sync(self, report: GatewayReport) -> ClusterState:
        """See ``AdmissionPort``."""
        state: ClusterState = await self._call("sync", report)
        return state

    async def slo(self) -> dict[str, Any]:
        """See ``AdmissionPort``."""
        table: dict[str, Any] = await self._call("slo")
        return table

    async def _call(self, method: str, *arguments: Any) -> Any:
        with _translated():
            return await getattr(self._handle, method).remote(*arguments)


def _to(address: ReplicaAddress) -> dict[str, str]:
    return {"replica_id": address.replica_id, "incarnation": address.incarnation}
