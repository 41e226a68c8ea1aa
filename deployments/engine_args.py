"""vLLM's engine arguments for one replica, from our settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deployments.settings import EngineSettings

SCHEDULER_CLASS = "vllm_plugin.scheduler.HaloScheduler"


class EngineConfigError(ValueError):
    """The engine cannot be built from these settings; the message names the setting and what to do."""


def set_engine_environment(settings: EngineSettings) -> None:
    """Set what vLLM reads from the environment. Must run before vllm is imported; values already set are kept."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if settings.kv_cache_gb is not None:
        # It would win over the engine argument, and holds whole GiB only.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if not settings.allow_hub:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def build_engine_args(settings: EngineSettings) -> Any:
    """``AsyncEngineArgs`` that run ``settings`` under HaloScheduler.

    Raises :class:`EngineConfigError` when the model directory is missing or an entry of ``engine_args`` is unknown or
    one of ours.
    """
    # Imported late, after the environment is set.
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not settings.allow_hub and not Path(settings.model).is_dir():
        raise EngineConfigError(
            f"model: {settings.model} is not a directory. Prepare it first, or set allow_hub: true for a hub name."
        )
    adapters = [service for service in settings.services if service.adapter is not None]
    args: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": [settings.base_name],
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "scheduler_cls": SCHEDULER_CLASS,
        "additional_config": {
            "halo": {
                "policy": settings.policy,
                "options": dict(settings.policy_options),
                "tbt_min_us": min(promise.tbt_us for promise in (*settings.services, settings.base_promise)),
                "trace_dir": str(settings.trace_dir) if settings.trace_dir else None,
            }
        },
        "worker_extension_cls": "vllm_plugin.worker_extension.HaloWorkerExtension",
        "enable_log_requests": False,
    }
    if adapters:
        args |= {
            "enable_lora": True,
            "max_lora_rank": settings.max_lora_rank,
            "max_loras": settings.max_loras,
            "max_cpu_loras": max(settings.max_loras, len(adapters)),
        }
    if settings.kv_cache_gb is not None:
        args["kv_cache_memory_bytes"] = int(settings.kv_cache_gb * 1024**3)
    if current_platform.is_cpu():
        # vLLM 0.32 compiles the model on CPU only without LoRA, and then answers wrongly in bfloat16 on some
        # processors (docs/adr/0006-eager-on-cpu.md).
        args["enforce_eager"] = True
    known = set(AsyncEngineArgs.__dataclass_fields__)
    for name, value in settings.engine_args.items():
        if name not in known:
            raise EngineConfigError(f"engine_args.{name}: vLLM has no such argument")
        if name in args and args[name] != value:
            raise EngineConfigError(f"engine_args.{name}: is set by HALO Serve itself; use its own key")
        args[name] = value
    return AsyncEngineArgs(**args)
