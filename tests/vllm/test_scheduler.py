"""HaloScheduler inside a real vLLM engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.replay import entries
from scheduling.profiling import prompt_lengths
from scheduling.request import ReleasePolicy
from scheduling.trace import replay
from tests.vllm.engine_bench import SERVICES, Ask, Bench
from vllm_plugin.scheduler import HaloScheduler

POLICIES = ("fcfs", "vtc-t", "vtc-r", "qoserve", "halo-paper", "halo")
PATIENT = "The patient is 54 years old and reports chest pain since this morning. "


def mixed(tokens: int = 12) -> list[Ask]:
    """Three requests per service and three for the base model, prompts of very different lengths."""
    return [
        Ask(PATIENT * repeats + f"Case {index}.", service, tokens, tbt_ms=40 if "a" in service[:1] else 400)
        for index, (service, repeats) in enumerate((s, r) for s in ("", *SERVICES) for r in (1, 6, 14))
    ]


def assert_empty(scheduler: HaloScheduler) -> None:
    """Nothing is kept of requests that are gone, neither by vLLM nor by us."""
    assert not scheduler.requests
    assert not scheduler._book.tracks
    assert not scheduler._book.waiting
    assert not scheduler._blocked
    assert scheduler.kv_cache_manager.usage == 0


@pytest.fixture(scope="module")
def stock_tokens(bench: Bench) -> list[list[int]]:
    """Greedy token ids of the mixed requests under vLLM's own scheduler."""
    bench.use(Scheduler)
    return bench.run(mixed()).tokens


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_as_stock(bench: Bench, stock_tokens: list[list[int]], policy: str) -> None:
    """Every policy changes when tokens are computed, never which tokens: ids equal those of vLLM's own scheduler."""
    scheduler = bench.use(HaloScheduler, policy, batch=48)
    asks = mixed()
    run = bench.run(asks, arrive_at_step=[2 * i for i in range(len(asks))])
    assert run.tokens == stock_tokens
    assert scheduler._plan_failures == 0
    assert_empty(scheduler)


@pytest.mark.timeout(300)
def test_base_request_beside_lora_requests(bench: Bench) -> None:
    """A base-model request gets the same tokens in a batch full of LoRA requests as it gets alone."""
    ask = Ask(PATIENT + "What should be done first?", tokens=16)
    bench.use(HaloScheduler, "fcfs", batch=256)
    alone = bench.run([ask]).tokens[0]
    bench.use(HaloScheduler, "fcfs", batch=256)
    beside = bench.run([Ask(PATIENT, service, 16) for service in SERVICES] + [ask]).tokens[-1]
    assert beside == alone


@pytest.mark.timeout(300)
def test_relaxed_decodes_yield_to_a_prompt(halo: Bench) -> None:
    """While a prompt waits, decodes with slack sit steps out and keep their KV cache; strict ones are never skipped."""
    relaxed = [Ask(PATIENT, SERVICES[0], 24, tbt_ms=600_000) for _ in range(4)]
    strict = [Ask(PATIENT, SERVICES[2], 24, tbt_ms=1) for _ in range(2)]
    late = Ask(PATIENT * 20, SERVICES[3], 2)
    run = halo.run([*relaxed, *strict, late], arrive_at_step=[0] * 6 + [8])
    computing = [step for step in run.steps if step.get(run.ids[6], 0) > 1]
    assert len(computing) >= 3
    # The last chunk leaves room, which the decodes with the least slack may take.
    assert all(request not in step for step in computing[:-1] for request in run.ids[:4])
    assert all(request in step for step in computing for request in run.ids[4:6])
    assert all(len(tokens) == 24 for tokens in run.tokens[:6])
    assert_empty(halo.scheduler)


@pytest.mark.timeout(300)
def test_step_is_bounded_by_the_batch(halo: Bench) -> None:
    """No step computes more tokens than the policy's batch, whatever the prompts."""
    run = halo.run([Ask(PATIENT * 12, service, 4) for service in SERVICES])
    assert max(sum(step.values()) for step in run.steps) == 64


@pytest.mark.timeout(300)
def test_preemption_keeps_tokens_and_deadlines(bench: Bench) -> None:
    """With a KV cache too small for all, requests are preempted, finish with the same tokens, and leave nothing."""
    asks = [Ask(PATIENT * 3 + f"Case {i}.", SERVICES[i % 4], 100) for i in range(5)]
    bench.use(HaloScheduler, "fcfs", batch=256)
    expected = bench.run(asks).tokens
    blocks = 1 + max(5, -(-sum(70 + 100 for _ in asks) // bench.scheduler.block_size) * 2 // 3)
    scheduler = bench.use(HaloScheduler, "fcfs", blocks=blocks, batch=256)
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **kwargs: (
        preempted.append(request.request_id),
        preempt(request, *args, **kwargs),
    )[1]
    assert bench.run(asks).tokens == expected
    assert preempted
    assert_empty(scheduler)


@pytest.mark.timeout(300)
def test_more_services_than_adapter_slots(bench: Bench) -> None:
    """With two adapter slots for four services every service is served, none waits for the others to end."""
    scheduler = bench.use(HaloScheduler, "halo-paper", batch=64)
    slots = scheduler.lora_config.max_loras
    scheduler.lora_config.max_loras = 2
    try:
        scheduler = bench.use(HaloScheduler, "halo-paper", batch=64)
        run = bench.run([Ask(PATIENT, service, 40) for service in SERVICES for _ in range(2)])
    finally:
        scheduler.lora_config.max_loras = slots
    assert all(len(tokens) == 40 for tokens in run.tokens)
    first_step = {request: next(i for i, step in enumerate(run.steps) if request in step) for request in run.ids}
    last_step = {request: max(i for i, step in enumerate(run.steps) if request in step) for request in run.ids}
    assert max(first_step.values()) < min(last_step.values())
    assert_empty(scheduler)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_steps", [0, 1, 3, 12])
def test_abort_at_every_stage(halo: Bench, after_steps: int) -> None:
    """A request aborted while queued, prefilling or decoding frees its KV cache at once and is forgotten."""
    scheduler = halo.scheduler
    asks = [Ask(PATIENT * 8, service, 30) for service in SERVICES]
    names, ids = zip(*(halo.add(ask) for ask in asks), strict=True)
    for _ in range(after_steps):
        halo.engine.step()
    halo.engine.abort_request(list(names[:2]))
    assert set(scheduler._book.tracks) == set(ids[2:])
    halo.engine.abort_request(list(names[2:]))
    assert_empty(scheduler)
    assert len(halo.run([asks[0]]).tokens[0]) == 30


@pytest.mark.timeout(300)
def test_holds_follow_the_release_policy(halo: Bench) -> None:
    """``off`` holds nothing; ``slo`` holds the first token to its TTFT; ``bounded`` sends it at once, then holds."""
    asks = [Ask(PATIENT, SERVICES[0], 8, 2000, 500, release) for release in ReleasePolicy]
    run = halo.run(asks)
    holds = dict(zip(ReleasePolicy, run.holds_us, strict=True))
    assert holds[ReleasePolicy.OFF] == [0] * 8
    assert holds[ReleasePolicy.BOUNDED][0] == 0
    assert all(0 < hold <= 250_000 for hold in holds[ReleasePolicy.BOUNDED][1:])
    assert 1_000_000 < holds[ReleasePolicy.SLO][0] <= 2_000_000
    assert sorted(holds[ReleasePolicy.SLO]) == holds[ReleasePolicy.SLO]


@pytest.mark.timeout(300)
def test_a_failing_policy_costs_deadlines_not_the_engine(halo: Bench) -> None:
    """When a policy raises, the stock scheduler takes the step and every request still finishes."""
    scheduler = halo.scheduler

    class Broken:
        name = "broken"

        def plan(self, view: object) -> None:
            raise ZeroDivisionError

        def observe(self, record: object) -> None:
            raise ZeroDivisionError

        def forget(self, request_id: str) -> None:
            """Nothing is kept."""

    scheduler.halo_policy = Broken()
    run = halo.run([Ask(PATIENT, service, 6) for service in SERVICES])
    assert all(len(tokens) == 6 for tokens in run.tokens)
    assert scheduler._plan_failures > 0
    assert_empty(scheduler)


@pytest.mark.timeout(300)
def test_seeded_requests_survive_chunked_prompts(bench: Bench) -> None:
    """A seeded request gets the same tokens whether its prompt is computed in one piece or in many."""
    asks = [Ask(PATIENT * 8, service, 12, seed=7) for service in ("", SERVICES[0])]
    bench.use(HaloScheduler, "fcfs", batch=256)
    whole = bench.run(asks[:1]).tokens + bench.run(asks[1:]).tokens
    bench.use(HaloScheduler, "fcfs", batch=24)
    assert bench.run(asks).tokens == whole


@pytest.mark.timeout(300)
def test_a_recorded_trace_replays_exactly(bench: Bench, tmp_path: Path) -> None:
    """What the engine's scheduler saw and decided, preemptions and aborts included, is decided again from the file."""
    scheduler = bench.use(HaloScheduler, "halo", blocks=24, trace_dir=tmp_path, batch=48)
    asks = mixed(24)
    bench.run(asks, arrive_at_step=[3 * i for i in range(len(asks))])
    scheduler._trace.close()
    (path,) = tmp_path.iterdir()
    result = replay(entries(path))
    assert result.plans > 40
    assert result.mismatches == []
    assert PATIENT[:20] not in path.read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_the_profiling_pass_warms_the_policy(bench: Bench) -> None:
    """It runs on the engine as it is, ends with its requests, leaves nothing behind, and real requests come after."""
    scheduler = bench.use(HaloScheduler, "halo", tbt_min_us=400_000)
    lengths = prompt_lengths(scheduler._limits, 1024)
    draw = random.Random(3)
    run = bench.run(
        [
            Ask([draw.randrange(40_000) for _ in range(n)], ("", *SERVICES)[i % 5], 60, profiling=len(lengths))
            for i, n in enumerate(lengths)
        ]
    )
    assert scheduler._profiled["steps"] > 40
    assert scheduler._profiled["batch"] == scheduler.halo_policy._cold.batch
    assert scheduler.halo_policy.model.warm
    chunked = {sum(step.values()) for step in run.steps if max(step.values(), default=0) > 1}
    assert max(chunked) > 200
    assert_empty(scheduler)
    assert len(bench.run([Ask(PATIENT, SERVICES[0], 4)]).tokens[0]) == 4
