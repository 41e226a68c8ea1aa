"""The one place that turns the plain classes into Serve deployments and binds them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.admission import Admission
from deployments.auth import load_keys
from deployments.engine_endpoint import EngineEndpoint
from deployments.gateway import Gateway
from deployments.http_app import build_http_app
from deployments.metrics import RayMetrics
from deployments.serve_ports import ServeAdmission, ServeEnginePool
from deployments.settings import AdmissionSettings, EngineSettings, GatewaySettings

GATEWAY, ADMISSION, ENGINE = "gateway", "admission", "engine"

ENGINE_CLASS = "deployments.engine:EngineReplica"
"""Built inside the replica, so that neither the driver nor Serve's controller imports vLLM."""

MANY_REQUESTS = 16_384
"""Serve's own limit of concurrent calls must never bind: admission limits the engines, its queue the rest."""

QUIET = {"enable_access_log": False}
"""No line per call: the gateway's access log has one per request already."""

DRAIN_MARGIN_S = 30.0
CPU_FOR_CONTROL = 0.01
"""Serve schedules by declared CPUs. Ours share the machine with the engine, which is sized by its own settings."""


@dataclass(frozen=True, slots=True)
class Deployments:
    """How many of each, and on what. ``engine_class`` is the ``module:class`` of an ``EnginePort``."""

    gateway: GatewaySettings
    admission: AdmissionSettings
    engine: EngineSettings
    gateways: int = 1
    replicas: int = 1
    gpus: bool = False
    engine_class: str = ENGINE_CLASS


class GatewayDeployment:
    """A gateway with its ports behind Serve handles."""

    def __init__(self, settings: GatewaySettings, admission: DeploymentHandle, engines: DeploymentHandle) -> None:
        keys_file = settings.auth.keys_file
        self._gateway = Gateway(
            settings,
            ServeEnginePool(engines),
            ServeAdmission(admission),
            RayMetrics([*settings.services, settings.base_promise]),
            keys=None if keys_file is None else load_keys(keys_file),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._gateway)


class EngineDeployment(EngineEndpoint):
    """An engine endpoint that builds its engine and knows its Serve replica id."""

    async def __init__(  # type: ignore[misc]
        self, engine_class: str, settings: EngineSettings, admission: DeploymentHandle
    ) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        engine = load_class(engine_class)(settings, replica_id)
        super().__init__(engine, replica_id, ServeAdmission(admission))
        await self.start()

    async def __del__(self) -> None:
        """Serve's way to say that the replica stops."""
        await self.stop()


def load_class(path: str) -> Any:
    """The class at ``module:class``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build(deployments: Deployments) -> Application:
    """The Serve application: gateway in front of admission and engines."""
    services = [*deployments.gateway.services, deployments.gateway.base_promise]
    admission = serve.deployment(Admission, name=ADMISSION, **admission_options()).bind(deployments.admission, services)
    engine = serve.deployment(EngineDeployment, name=ENGINE, **engine_options(deployments)).bind(
        deployments.engine_class, deployments.engine, admission
    )
    gateway = serve.deployment(serve.ingress()(GatewayDeployment), name=GATEWAY, **gateway_options(deployments))
    return gateway.bind(deployments.gateway, admission, engine)


def admission_options() -> dict[str, Any]:
    """One replica, never scaled: it is the one place that knows all loads.

    It does not drain: a queued request asks again, and the next admission learns from the gateways what is granted.
    """
    return {
        "num_replicas": 1,
        "max_ongoing_requests": MANY_REQUESTS,
        "graceful_shutdown_timeout_s": 1.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5.0,
        "logging_config": QUIET,
        "ray_actor_options": {"num_cpus": CPU_FOR_CONTROL},
    }


def gateway_options(deployments: Deployments) -> dict[str, Any]:
    """A gateway drains until its longest stream has ended."""
    return {
        "num_replicas": deployments.gateways,
        "max_ongoing_requests": MANY_REQUESTS,
        "graceful_shutdown_timeout_s": deployments.gateway.stream_timeout_us / 1e6 + DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "ray_actor_options": {"num_cpus": CPU_FOR_CONTROL},
    }


def engine_options(deployments: Deployments) -> dict[str, Any]:
    """Replicas are health-checked for progress and drain until their longest stream has ended."""
    return {
        "num_replicas": deployments.replicas,
        "max_ongoing_requests": MANY_REQUESTS,
        "graceful_shutdown_timeout_s": deployments.gateway.stream_timeout_us / 1e6 + DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "request_router_config": RequestRouterConfig(request_router_class="deployments.replica_router.ReplicaRouter"),
        "logging_config": QUIET,
        "ray_actor_options": engine_actor_options(deployments),
    }


def engine_actor_options(deployments: Deployments) -> dict[str, Any]:
    """vLLM's workers are children of the replica, so with GPUs the replica itself holds its whole TP group."""
    options: dict[str, Any] = {"num_cpus": CPU_FOR_CONTROL}
    if deployments.gpus:
        options["num_gpus"] = deployments.engine.tensor_parallel_size
    return options
