"""One real engine per session, started when a test first asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
)

from app.default_model import prepare_default_model
from tests.vllm.engine_bench import Bench
from vllm_plugin.scheduler import HaloScheduler

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's directory, prepared if need be."""
    return prepare_default_model(ROOT / ".cache" / "models")


@pytest.fixture(scope="session")
def bench(default_model: Path) -> Iterator[Bench]:
    """The engine; started once."""
    bench = Bench(default_model)
    yield bench
    bench.close()


@pytest.fixture
def halo(bench: Bench) -> Bench:
    """The engine with a fresh ``halo-paper`` scheduler."""
    bench.use(HaloScheduler, "halo-paper", batch=64)
    return bench
