"""An engine in this process, stepped by hand, to time single steps.

For measurements only (benchmarks, calibration): serving uses ``AsyncLLM``. The environment must be set before vLLM is
imported: ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps engine core, worker and model runner in this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16
STEPS_MAX = 2_000


class SteppedEngine:
    """A vLLM engine for ``model`` that steps only when asked to; ``adapters`` are directories of LoRA adapters."""

    def __init__(
        self, model: Path, adapters: Sequence[Path], *, chunk_tokens: int, sequences: int, eager: bool
    ) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError(
                "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported: steps are timed in-process"
            )
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - reads the environment when imported
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        lora: dict[str, Any] = (
            {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 32, "max_cpu_loras": len(adapters)}
            if adapters
            else {}
        )
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="bfloat16",
                seed=0,
                max_model_len=2048,
                max_num_seqs=sequences,
                max_num_batched_tokens=chunk_tokens,
                enable_prefix_caching=False,
                enforce_eager=eager,
                disable_log_stats=True,
                **lora,
            )
        )
        self._requests = [LoRARequest(f"adapter-{n}", n, str(path)) for n, path in enumerate(adapters, start=1)]
        self._count = 0

    def _add(self, adapter: int | None, prompt_tokens: int, max_tokens: int) -> str:
        from vllm import SamplingParams  # noqa: PLC0415

        self._count += 1
        request_id = f"r{self._count}"
        # Any tokens do; different ones, so that no two requests are alike.
        prompt = [100 + (self._count * 7919 + position * 31) % 40_000 for position in range(prompt_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        lora = None if adapter is None or not self._requests else self._requests[adapter % len(self._requests)]
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling, lora_request=lora)
        return request_id

    def _step_us(self) -> float:
        start = time.perf_counter_ns()
        self._engine.step()
        return (time.perf_counter_ns() - start) / 1000

    def _drain(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))
        for _ in range(STEPS_MAX):
            if not self._engine.has_unfinished_requests():
                return
            self._engine.step()
        raise RuntimeError(f"requests still unfinished after {STEPS_MAX} steps")

    def decode_us(self, adapters: Sequence[int | None], steps: int, warm_up: int = 3) -> list[float]:
        """Times of ``steps`` decode-only steps in microseconds, one sequence per entry of ``adapters`` (None: base)."""
        # Prefills share steps; after one step per sequence all of them decode for sure.
        room = len(adapters) + warm_up + steps + 8
        request_ids = [self._add(adapter, PROMPT_TOKENS, room) for adapter in adapters]
        for _ in range(len(adapters) + warm_up):
            self._engine.step()
        times_us = [self._step_us() for _ in range(steps)]
        self._drain(request_ids)
        return times_us

    def prefill_us(self, adapter: int | None, tokens: int, steps: int) -> list[float]:
        """Times of ``steps`` steps in microseconds, each the whole prefill of one prompt of ``tokens``."""
        times_us = []
        for _ in range(steps):
            request_id = self._add(adapter, tokens, 1)
            times_us.append(self._step_us())
            self._drain([request_id])
        return times_us
