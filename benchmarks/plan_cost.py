"""How long a policy takes to plan one step: 512 running, 2,000 waiting, requests coming and going between plans.

``python -m benchmarks.plan_cost --json`` prints the cost per policy and, on the last line, ``{"p99_us": x, ...}``, the
worst p99 over all policies and situations. No engine is started. ``Policy.plan`` alone is timed: it waits for nothing,
so its cost is the CPU time of its thread, which other processes on the machine do not change; the wall-clock p99 stands
beside it and includes their turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import insort
from dataclasses import dataclass, replace

from scheduling.policy import Limits, Policy, StepPlan, StepRecord, View
from scheduling.registry import POLICIES, make_policy
from scheduling.request import RequestState

RUNNING, WAITING = 512, 2_000
PROMISES_US = ((1_000_000, 50_000), (1_000_000, 50_000), (2_000_000, 100_000), (2_000_000, 200_000))
LIMITS = Limits(step_tokens=2_048, running=RUNNING + 8, adapters=8, kv_blocks=200_000, kv_block_tokens=16)


@dataclass(frozen=True)
class Situation:
    """What makes a plan costly.

    ``batch`` is the policy's; with 1,024 the decodes leave room for prompts. ``free_places`` requests could be admitted
    in each step; ``adapters`` are the adapter slots, for four services.
    """

    name: str
    batch: int = 1_024
    free_places: int = 8
    adapters: int = 8
    kv_blocks: int = LIMITS.kv_blocks


SITUATIONS = (
    Situation("decodes fill batch", batch=384),
    Situation("no place free", free_places=0),
    Situation("admitting"),
    Situation("few adapter slots", adapters=2),
    Situation("little KV memory", kv_blocks=34_000),
)


class Load:
    """Requests that run, finish and are replaced, so that each plan starts from a changed view."""

    def __init__(self, situation: Situation, seed: int) -> None:
        self.limits = replace(
            LIMITS,
            running=RUNNING + situation.free_places,
            adapters=situation.adapters,
            kv_blocks=situation.kv_blocks,
        )
        self.now_us = 10_000_000
        self._random = random.Random(seed)  # noqa: S311  a workload, not a secret
        self._made = 0
        self.waiting: list[RequestState] = []
        self.running = [self._decoding(self._request()) for _ in range(RUNNING)]
        while len(self.waiting) < WAITING:
            self._arrive()

    def _request(self) -> RequestState:
        self._made += 1
        kind = self._random.randrange(4)
        ttft_us, tbt_us = PROMISES_US[kind]
        return RequestState(
            request_id=f"request-{self._made:08}",
            service=f"service-{kind}",
            arrival_us=self.now_us - self._random.randrange(3_000_000),
            ttft_us=ttft_us,
            tbt_us=tbt_us,
            prompt_tokens=self._random.randrange(50, 2_000),
            max_tokens=500,
            adapter=kind + 1,
        )

    def _decoding(self, state: RequestState) -> RequestState:
        state.generated_tokens = self._random.randrange(1, 200)
        state.computed_tokens = state.prompt_tokens + state.generated_tokens - 1
        state.last_release_us = self.now_us + self._random.randrange(-50_000, 300_000)
        state.kv_blocks = -(-state.computed_tokens // 16)
        return state

    def _arrive(self) -> None:
        insort(self.waiting, self._request(), key=lambda state: state.edf_key)

    def view(self) -> View:
        """The view of the next step."""
        free = self.limits.kv_blocks - sum(state.kv_blocks for state in self.running)
        return View(self.now_us, list(self.running), list(self.waiting), max(0, free), self.limits)

    def carry_out(self, plan: StepPlan) -> StepRecord:
        """Move on by a step; the running set keeps its size, some requests leave, others come."""
        decodes = set(plan.decode)
        context = sum(state.computed_tokens for state in self.running if state.request_id in decodes)
        duration_us = step_time_us(len(decodes), context, sum(chunk.tokens for chunk in plan.prefill))
        self.now_us += duration_us
        for state in self.running:
            if state.request_id in decodes:
                self._grow(state, 1)
                state.generated_tokens += 1
                state.last_release_us = max(self.now_us, state.last_release_us + state.tbt_us)
        chunks = {chunk.request_id: chunk.tokens for chunk in plan.prefill}
        admitted = [state for state in self.waiting if state.request_id in chunks]
        for state in admitted:
            self.waiting.remove(state)
            self.running.append(state)
        for state in self.running:
            if state.request_id in chunks:
                self._grow(state, chunks[state.request_id])
                if not state.prefill_left:
                    state.generated_tokens, state.last_release_us = 1, self.now_us
        for _ in range(3):
            self._arrive()
        for _ in range(max(3, len(self.running) - RUNNING)):
            self.running.pop(self._random.randrange(len(self.running)))
        while len(self.running) < RUNNING:
            self.running.append(self._decoding(self._request()))
        del self.waiting[WAITING:]
        return StepRecord(
            duration_us,
            len(decodes),
            sum(chunks.values()),
            tuple(chunks.values()),
            context,
            0,
            {"service-0": len(decodes)},
        )

    def _grow(self, state: RequestState, tokens: int) -> None:
        state.computed_tokens += tokens
        state.kv_blocks = -(-state.computed_tokens // 16)


def step_time_us(decodes: int, context: int, prompt_tokens: int) -> int:
    """Microseconds of a step on a rough fast GPU: 15 ms, 0.02 ms a decode, 0.05 ms a prompt token, and KV reads."""
    return 15_000 + 20 * decodes + context // 100 + 50 * prompt_tokens


def warm_up(policy: Policy) -> None:
    """Show a policy steps of many shapes, so that one with a step-time model plans with it."""
    for decodes in (0, 1, 8, 64, 256, 512):
        for context in (100, 1_000, 4_000):
            for chunk in (0, 16, 64, 256, 1_024, 2_048):
                duration_us = step_time_us(decodes, decodes * context, chunk)
                chunks = (chunk,) if chunk else ()
                for _ in range(4):
                    policy.observe(StepRecord(duration_us, decodes, chunk, chunks, decodes * context))


def measure(policy: Policy, situation: Situation, plans: int, seed: int) -> tuple[list[float], list[float]]:
    """Return the microseconds each of ``plans`` plans took: CPU time and wall-clock time."""
    load = Load(situation, seed)
    cpu_us, wall_us = [], []
    warm_up(policy)
    for index in range(plans + 20):
        view = load.view()
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        plan = policy.plan(view)
        cpu, wall = time.thread_time_ns() - begin_cpu, time.perf_counter_ns() - begin
        if index >= 20:
            cpu_us.append(cpu / 1_000)
            wall_us.append(wall / 1_000)
        policy.observe(load.carry_out(plan))
    return cpu_us, wall_us


def quantile(values: list[float], q: float) -> float:
    """The smallest value at or above a share ``q`` of ``values``."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def main() -> None:
    """Measure all policies and print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    parser.add_argument("--plans", type=int, default=500, help="plans per policy and situation")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated policy names")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    detail: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.policies.split(","):
        for situation in SITUATIONS:
            options = {"batch": situation.batch} if "batch" in POLICIES[name].options else {}
            cpu_us, wall_us = measure(make_policy(name, **options), situation, args.plans, args.seed)
            row = {
                "p50_us": round(quantile(cpu_us, 0.5), 1),
                "p99_us": round(quantile(cpu_us, 0.99), 1),
                "p99_wall_us": round(quantile(wall_us, 0.99), 1),
            }
            detail.setdefault(name, {})[situation.name] = row
            cells = "   ".join(f"{key.removesuffix('_us'):8} {value:8.1f} us" for key, value in row.items())
            print(f"{name:12} {situation.name:20} {cells}", flush=True)
    worst = max(row["p99_us"] for rows in detail.values() for row in rows.values())
    if args.json:
        print(json.dumps({"p99_us": worst, "policies": detail}))
    else:
        print(f"worst p99 {worst:.1f} us")


if __name__ == "__main__":
    main()
