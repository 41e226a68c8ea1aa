"""Classes and functions that are named in strings, which no linter follows, exist."""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def resolve(name: str) -> object:
    """``package.module:object`` or ``package.module.object``."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    "name", [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["vllm.general_plugins"].values()]
)
def test_entry_points(name: str) -> None:
    """The console script and vLLM's plug-in hook."""
    assert callable(resolve(name))


def test_the_installed_project_offers_the_plug_in() -> None:
    """vLLM finds plug-ins through installed metadata only, so an uninstalled tree would serve without ours."""
    assert [point.value for point in entry_points(group="vllm.general_plugins", name="halo_serve")] == [
        "vllm_plugin:register"
    ]


def test_serves_import_path() -> None:
    """What cluster.yaml calls and what the configuration check insists on."""
    config = importlib.import_module("app.config")
    assert callable(resolve(config.IMPORT_PATH))
    assert config.IMPORT_PATH in Path("cluster.yaml").read_text(encoding="utf-8")


def test_classes_in_the_deployments() -> None:
    """The engine class and the request router, as Serve will load them."""
    builders = importlib.import_module("deployments.builders")
    assert resolve(builders.ENGINE_CLASS)
    router = builders.RequestRouterConfig(request_router_class="deployments.replica_router.ReplicaRouter")
    assert router.get_request_router_class() is resolve("deployments.replica_router.ReplicaRouter")


def test_the_scheduler_class() -> None:
    """It subclasses AsyncScheduler: vLLM turns asynchronous scheduling off for anything else."""
    engine_args = importlib.import_module("deployments.engine_args")
    async_scheduler = resolve("vllm.v1.core.sched.async_scheduler.AsyncScheduler")
    scheduler = resolve(engine_args.SCHEDULER_CLASS)
    assert isinstance(scheduler, type)
    assert isinstance(async_scheduler, type)
    assert issubclass(scheduler, async_scheduler)
