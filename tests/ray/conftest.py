"""One local Serve instance per session, on ports of its own, with the fake engine behind the real builders."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")

import ray
from ray import serve

from deployments.builders import Deployments, build
from deployments.settings import AdmissionSettings, EngineSettings, GatewaySettings, Overload, ServiceSettings
from scheduling.request import ReleasePolicy

ROOT = Path(__file__).parents[2]
SERVICES = ("triage", "assessment", "analysis", "records")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The address of the running application and of Ray's metrics."""

    url: str
    metrics_url: str


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deployments(**changes: object) -> Deployments:
    """Four services on two fake replicas behind two gateways."""
    services = (
        *(
            ServiceSettings(name, None, 400_000 * (1 + place), 60_000 * (1 + place), ReleasePolicy.BOUNDED)
            for place, name in enumerate(SERVICES)
        ),
        ServiceSettings("shedding", None, 400_000, 60_000, overload=Overload.SHED),
    )
    base = ServiceSettings("base", None, 2_000_000, 500_000)
    values: dict[str, object] = {
        "gateway": GatewaySettings(services, "base", base, stream_timeout_us=60_000_000),
        "admission": AdmissionSettings(heartbeat_timeout_us=4_000_000),
        "engine": EngineSettings(
            "none", "base", services, base, max_model_len=100, engine_args={"step_us": 10_000, "hold_us": 20_000}
        ),
        "gateways": 2,
        "replicas": 2,
        "engine_class": "tests.fakes.engine:FakeEngine",
    }
    return Deployments(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def deployments_of() -> Callable[..., Deployments]:
    """Makes variants of what is deployed."""
    return deployments


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The application, started once, shut down at the end."""
    port, metrics_port = free_port(), free_port()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 1024 * 1024,
        _metrics_export_port=metrics_port,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(deployments()), name="halo", route_prefix="/", external_scaler_enabled=True)
    url = f"http://127.0.0.1:{port}"
    wait_ready(url)
    try:
        yield Cluster(url, f"http://127.0.0.1:{metrics_port}/metrics")
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_ready(url: str, timeout_s: float = 60) -> None:
    """Until the application can serve."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} did not become ready in {timeout_s} s")
