"""Before an engine starts: run the partition job and tell the engine's workers where the table is."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from deployments.partition_cache import default_cache
from deployments.partition_device import CUDA_DEVICE
from deployments.partition_job import run_partition_job
from deployments.settings import EngineSettings

logger = logging.getLogger(__name__)

# Read by vllm_plugin.lora_overlap and by vLLM in the workers, which inherit the environment.
TABLE_VARIABLE = "HALO_PARTITION_TABLE"
DUAL_STREAM_VARIABLE = "VLLM_LORA_ENABLE_DUAL_STREAM"


def prepare_lora_overlap(
    settings: EngineSettings, *, device: Sequence[str] = CUDA_DEVICE, cache: Path | None = None
) -> str:
    """Set the environment in which workers run base and LoRA side by side, or leave it; says which and why.

    Blocks while it searches, ten minutes at most. Must run before vLLM is imported. Never raises.
    """
    for variable in (TABLE_VARIABLE, DUAL_STREAM_VARIABLE):
        os.environ.pop(variable, None)
    if not settings.lora_overlap:
        return "off: lora_overlap is false in cluster.yaml"
    report = run_partition_job(settings, device=device, cache=cache or default_cache())
    if not report.useful:
        state = f"off: {report.reason if report.table is None else 'sequential wins everywhere'}"
        logger.warning("LoRA overlap %s; base and LoRA run one after the other", state)
        return state
    os.environ[TABLE_VARIABLE] = str(report.path)
    os.environ[DUAL_STREAM_VARIABLE] = "1"
    logger.info("LoRA overlap on: %s (%s)", report.path, report.reason)
    return f"on: {report.reason}"
