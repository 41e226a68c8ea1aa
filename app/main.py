"""``app.main:build_app``: the import path in cluster.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.serve import Application

from app.config import parse_args
from deployments.builders import Deployments, build


def build_app(args: dict[str, Any]) -> Application:
    """The Serve application for the ``args`` of cluster.yaml. Raises one error that lists every fault in them."""
    # Ray starts its workers in the directory in which `serve run` was started; relative paths begin there.
    config = parse_args(args, Path.cwd())
    return build(
        Deployments(
            gateway=config.gateway_settings(),
            admission=config.admission_settings(),
            engine=config.engine_settings(),
            gateways=config.gateways,
            replicas=config.replicas,
            gpus=cuda_cluster(),
        )
    )


def cuda_cluster() -> bool:
    """Whether the Ray cluster has GPUs for the engine replicas."""
    import ray  # noqa: PLC0415

    return bool(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else False
