"""The engine's load, taken from the statistics vLLM reports after every step."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase


class EngineLoad:
    """Running and waiting requests, KV cache use (0 to 1) and the number of steps so far."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.steps = 0
        self.preemptions = 0

    def factory(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """What ``AsyncLLM(stat_loggers=[...])`` calls to get a logger that writes into this object."""
        return _LoadLogger(vllm_config, engine_index, self)

    def as_dict(self) -> dict[str, Any]:
        """All readings by name."""
        return dict(vars(self))


class _LoadLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not typed for us
    def __init__(self, vllm_config: VllmConfig, engine_index: int, load: EngineLoad) -> None:
        self._load = load

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        load = self._load
        load.steps += 1
        if scheduler_stats is not None:
            load.running = scheduler_stats.num_running_reqs
            load.waiting = scheduler_stats.num_waiting_reqs
            load.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            load.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to announce: the replica logs its own start."""
