"""A real vLLM engine in this process, whose scheduler can be exchanged between runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from scheduling.request import ReleasePolicy
from vllm_plugin.promise import PROFILING_KEY, PROMISE_KEY, RequestPromise, detach_hold
from vllm_plugin.scheduler import monotonic_us

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("intelligent-triage", "pre-assessment", "analysis-assistant", "record-generation")
MAX_LORAS = 4


@dataclass(frozen=True)
class Ask:
    """One request: prompt, service ("" for the base model), output length, targets in milliseconds."""

    prompt: str | Sequence[int]
    service: str = ""
    tokens: int = 16
    ttft_ms: int = 60_000
    tbt_ms: int = 60_000
    release: ReleasePolicy = ReleasePolicy.OFF
    ignore_eos: bool = True
    seed: int | None = None
    profiling: int = 0


@dataclass
class Run:
    """What the engine did: token ids and holds per request, and the requests scheduled in each step."""

    tokens: list[list[int]] = field(default_factory=list)
    holds_us: list[list[int]] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


class Bench:
    """A vLLM engine; in float32 token ids do not depend on how requests are batched."""

    def __init__(self, model: Path, dtype: str = "float32") -> None:
        from vllm import LLM  # noqa: PLC0415
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            enable_lora=True,
            max_loras=MAX_LORAS,
            max_cpu_loras=4,
            max_lora_rank=32,
            enforce_eager=True,
            scheduler_cls="vllm_plugin.scheduler.HaloScheduler",
            additional_config={"halo": {"policy": "fcfs", "options": {"batch": 256}}},
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.adapters = {
            name: LoRARequest(name, index, str(ROOT / "adapters" / name)) for index, name in enumerate(SERVICES, 1)
        }
        self._serial = count()

    def close(self) -> None:
        """End the engine's processes."""
        self.engine.engine_core.shutdown()

    @property
    def scheduler(self) -> Any:
        """The scheduler in force."""
        return self.core.scheduler

    def use(
        self, cls: type, policy: str = "", *, blocks: int | None = None, trace_dir: Path | None = None, **options: int
    ) -> Any:
        """Put a new scheduler into the idle engine: ``cls`` with ``policy``, and at most ``blocks`` KV blocks."""
        old = self.core.scheduler
        assert not old.has_unfinished_requests()
        config = old.vllm_config
        halo = {"policy": policy, "options": options, "tbt_min_us": options.get("tbt_min_us"), "trace_dir": trace_dir}
        config.additional_config = {"halo": halo} if policy else {}
        kv_cache_config = self._kv_cache_config = getattr(self, "_kv_cache_config", old.kv_cache_config)
        if blocks is not None:
            kv_cache_config = replace(kv_cache_config, num_blocks=blocks)
        new = cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            block_size=old.block_size,
            hash_block_size=old.hash_block_size,
            log_stats=old.log_stats,
        )
        new.finished_req_ids |= old.finished_req_ids
        self.core.scheduler = new
        return new

    def add(self, ask: Ask) -> tuple[str, str]:
        """Queue a request; return its name at the engine's front and the id under which the scheduler knows it."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        promise = RequestPromise(
            ask.service, monotonic_us(), ask.ttft_ms * 1000, ask.tbt_ms * 1000, ask.release, 250_000, streaming=True
        )
        params = SamplingParams(
            max_tokens=ask.tokens,
            temperature=0.0 if ask.seed is None else 1.0,
            seed=ask.seed,
            ignore_eos=ask.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
            extra_args={PROFILING_KEY: ask.profiling} if ask.profiling else {PROMISE_KEY: promise.to_wire()},
        )
        before = set(self.scheduler.requests)
        name = f"r{next(self._serial):04d}"
        prompt = ask.prompt if isinstance(ask.prompt, str) else {"prompt_token_ids": list(ask.prompt)}
        self.engine.add_request(name, prompt, params, lora_request=self.adapters.get(ask.service))
        return name, next(iter(set(self.scheduler.requests) - before))

    def run(self, asks: Sequence[Ask], *, arrive_at_step: Sequence[int] | None = None, limit: int = 3000) -> Run:
        """Run requests to their end; request i is added before step ``arrive_at_step[i]``."""
        run = Run([[] for _ in asks], [[] for _ in asks], [], [""] * len(asks))
        external: dict[str, int] = {}
        pending = sorted(range(len(asks)), key=lambda i: arrive_at_step[i] if arrive_at_step else 0)
        scheduler = self.scheduler
        schedule = scheduler.schedule

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            run.steps.append(dict(output.num_scheduled_tokens))
            return output

        scheduler.schedule = recorded
        try:
            for step in range(limit):
                while pending and (arrive_at_step[pending[0]] if arrive_at_step else 0) <= step:
                    index = pending.pop(0)
                    name, run.ids[index] = self.add(asks[index])
                    external[name] = index
                if not pending and not self.engine.has_unfinished_requests():
                    return run
                for output in self.engine.step():
                    index = external[output.request_id]
                    run.tokens[index] += output.outputs[0].token_ids
                    hold_us = detach_hold(output.kv_transfer_params)[1]
                    if hold_us is not None:
                        run.holds_us[index].append(hold_us)
        finally:
            scheduler.schedule = schedule
        raise AssertionError(f"requests not finished after {limit} steps")
