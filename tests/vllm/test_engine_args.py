"""The engine arguments that a replica is built with, without building one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from app.config import ConfigErrors, parse_args
from app.machine_checks import is_cpu_build
from deployments.engine_args import EngineConfigError, build_engine_args, set_engine_environment
from deployments.settings import EngineSettings, ServiceSettings
from tests.fakes.checkpoints import write_adapter, write_model


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    """An engine with one service."""
    model = write_model(tmp_path / "model")
    service = ServiceSettings("triage", write_adapter(tmp_path / "adapter"), 1, 1)
    return EngineSettings(str(model), "base", (service,), ServiceSettings("base", None, 1, 1))


def test_the_context_memory_may_be_a_fraction(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's variable for CPUs holds whole GiB and is ignored on GPUs; the argument is neither."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    half = replace(settings, kv_cache_gb=0.5)
    set_engine_environment(half)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert build_engine_args(half).kv_cache_memory_bytes == 512 * 1024**2
    assert build_engine_args(settings).kv_cache_memory_bytes is None


def test_what_the_check_accepts_the_engine_takes(settings: EngineSettings) -> None:
    """`enforce_eager: true` is what a CPU engine runs with anyway; false is refused by both."""
    if not current_platform.is_cpu():
        pytest.skip("a GPU engine may compile")
    assert build_engine_args(replace(settings, engine_args={"enforce_eager": True})).enforce_eager is True
    with pytest.raises(EngineConfigError, match="enforce_eager: is set by HALO Serve itself"):
        build_engine_args(replace(settings, engine_args={"enforce_eager": False}))


def test_the_platform_is_found_without_importing_vllm() -> None:
    """The check decides as vLLM does."""
    assert is_cpu_build() == current_platform.is_cpu()


def test_every_argument_of_ours_is_refused_by_the_check(settings: EngineSettings, tmp_path: Path) -> None:
    """What the engine would refuse is found before one is started."""
    from vllm.engine import arg_utils  # noqa: PLC0415

    ours: dict[str, Any] = {}

    class Recorder:
        __dataclass_fields__ = arg_utils.AsyncEngineArgs.__dataclass_fields__

        def __init__(self, **given: Any) -> None:
            ours.update(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arg_utils, "AsyncEngineArgs", Recorder)
        build_engine_args(replace(settings, kv_cache_gb=1.0, max_model_len=64))
    args = {
        "model": "model",
        "base": {"name": "base", "ttft": "2s", "tbt": "200ms"},
        "services": [{"name": "triage", "adapter": "adapter", "ttft": "1s", "tbt": "50ms"}],
        "scheduler": {"policy": "fcfs", "options": {"batch": 8}},
        "engine_args": dict.fromkeys(ours, "x"),
    }
    with pytest.raises(ConfigErrors) as caught:
        parse_args(args, tmp_path)
    assert {problem.path for problem in caught.value.problems} == {("engine_args", name) for name in ours}
