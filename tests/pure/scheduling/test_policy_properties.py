"""What must hold of every policy, whatever the requests and the engine's limits."""

import random
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduling.capacity import CapacityMeter
from scheduling.policy import Limits, StepPlan, View
from scheduling.registry import POLICIES, make_policy
from scheduling.request import ReleasePolicy, RequestState
from tests.fakes.step_host import StepHost, Work, check_plan, decoding, profile, request

SERVICES = (
    ("a", 1, 200_000, 50_000),
    ("b", 2, 400_000, 100_000),
    ("c", 3, 100_000, 75_000),
    ("base", 0, 900_000, 200_000),
)
NAMES = (*POLICIES, "halo, warm")
PROFILED = Limits(step_tokens=64, running=24, adapters=0, kv_blocks=1_000, kv_block_tokens=8)


def policy_named(name: str, batch: int):
    name, _, warm = name.partition(", ")
    options = POLICIES[name].options
    given_options = {"batch": batch, "tbt_min_us": 50_000}
    policy = make_policy(name, **{key: value for key, value in given_options.items() if key in options})
    if warm:
        profile(policy, step_time, PROFILED, longest_context=100)
    return policy


def step_time(work: Work) -> int:
    return 10_000 + 700 * work.tokens + sum(work.decode_contexts) // 10


@st.composite
def requests(draw, most=24, span_us=2_000_000) -> list[RequestState]:
    made = []
    for index in range(draw(st.integers(1, most))):
        service, adapter, ttft_us, tbt_us = draw(st.sampled_from(SERVICES))
        made.append(
            request(
                f"r{index:02}",
                draw(st.integers(0, span_us)),
                draw(st.integers(1, 90)),
                draw(st.integers(1, 12)),
                ttft_us,
                tbt_us,
                service=service,
                adapter=adapter,
                release=draw(st.sampled_from(ReleasePolicy)),
                streaming=draw(st.sampled_from((True, True, True, False))),
            )
        )
    return made


limits = st.builds(
    Limits,
    step_tokens=st.integers(1, 64),
    running=st.integers(1, 24),
    adapters=st.integers(0, 3),
    kv_blocks=st.integers(13, 60),
    kv_block_tokens=st.just(8),
)


@st.composite
def views(draw) -> View:
    """A view any host could build: some requests decode, some are half way through their prompt, some wait."""
    now_us = 3_000_000
    running, waiting = [], []
    for state in draw(requests()):
        match draw(st.sampled_from("dpw")):
            case "d":
                decoding(state, draw(st.integers(1, state.max_tokens)), now_us + draw(st.integers(-400_000, 400_000)))
                running.append(state)
            case "p" if state.prompt_tokens > 1:
                state.computed_tokens = draw(st.integers(1, state.prompt_tokens - 1))
                running.append(state)
            case _:
                waiting.append(state)
    bounds = draw(limits)
    used = 0
    for state in running:
        state.kv_blocks = -(-state.computed_tokens // bounds.kv_block_tokens)
        used += state.kv_blocks
    bounds = Limits(
        bounds.step_tokens, max(bounds.running, len(running)), bounds.adapters, max(bounds.kv_blocks, used), 8
    )
    waiting.sort(key=lambda state: state.edf_key)
    return View(now_us, tuple(running), tuple(waiting), bounds.kv_blocks - used, bounds)


@pytest.mark.parametrize("name", NAMES)
@given(view=views(), batch=st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_plans_are_valid_and_never_empty(name, view, batch):
    """A plan names known requests once, cuts only its last chunk, keeps the budget, and is not empty for nothing."""
    plan = policy_named(name, batch).plan(view)
    check_plan(plan, view)
    tokens = len(plan.decode) + sum(chunk.tokens for chunk in plan.prefill)
    if name in {"fcfs", "vtc-t", "vtc-r", "halo-paper"}:
        assert tokens <= batch
    if view.running or any(-(-(s.prompt_tokens + 1) // 8) <= view.kv_blocks_free for s in view.waiting):
        assert tokens > 0


@pytest.mark.parametrize("name", NAMES)
@given(view=views(), batch=st.integers(1, 40), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_running_does_not_matter(name, view, batch, shuffle: random.Random):
    """The plan depends on the requests, not on the order in which the host keeps them."""
    shuffled = list(view.running)
    shuffle.shuffle(shuffled)
    other = View(view.now_us, tuple(shuffled), view.waiting, view.kv_blocks_free, view.limits)
    assert policy_named(name, batch).plan(view) == policy_named(name, batch).plan(other)


@pytest.mark.parametrize("name", NAMES)
@given(states=requests(), bounds=limits, batch=st.integers(2, 40))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_everything_finishes_and_nothing_is_early(name, states, bounds, batch):
    """When arrivals stop, every request finishes, even with few KV blocks and fewer adapter slots than adapters; no
    token is released before it is ready, before its predecessor or, under `slo`, before its target."""
    host = StepHost(policy_named(name, batch), bounds, step_time)
    host.submit(*states)
    work = sum(state.prompt_tokens + state.max_tokens for state in states)
    host.run(max_steps=30 * work + 1_000)
    for life in host.lives.values():
        assert life.done
        assert all(out >= ready for out, ready in zip(life.released_us, life.ready_us, strict=True))
        assert life.released_us == sorted(life.released_us)
        state = life.state
        if state.release is ReleasePolicy.SLO and state.streaming:
            assert life.released_us[0] >= state.arrival_us + state.ttft_us
            gaps = [b - a for a, b in zip(life.released_us, life.released_us[1:], strict=False)]
            assert all(gap >= state.tbt_us for gap in gaps)


@pytest.mark.parametrize("name", NAMES)
@given(states=requests(most=16), bounds=limits)
@settings(max_examples=10, deadline=None)
def test_same_calls_same_plans(name, states, bounds):
    """A policy is deterministic: the same requests give the same steps."""

    def run() -> list[StepPlan]:
        host = StepHost(policy_named(name, 16), bounds, step_time)
        host.submit(*(_fresh(state) for state in states))
        host.run()
        return [step.plan for step in host.steps]

    assert run() == run()


def _fresh(s: RequestState) -> RequestState:
    return request(
        s.request_id,
        s.arrival_us,
        s.prompt_tokens,
        s.max_tokens,
        s.ttft_us,
        s.tbt_us,
        service=s.service,
        adapter=s.adapter,
        release=s.release,
        streaming=s.streaming,
    )


@given(
    batch=st.integers(1, 64),
    admitted=st.lists(st.integers(50_000, 400_000), max_size=40),
    asked=st.lists(st.integers(50_000, 400_000), max_size=40),
)
def test_capacity_is_exact(batch, admitted, asked):
    """`fits` says yes exactly when the sum of strictest TBT / own TBT stays within the batch."""
    meter = CapacityMeter(batch, 50_000, admitted)
    used = sum((Fraction(50_000, tbt_us) for tbt_us in admitted), Fraction())
    for tbt_us in asked:
        assert meter.used == used
        assert meter.fits(tbt_us) == (used + Fraction(50_000, tbt_us) <= batch)
        if meter.fits(tbt_us):
            meter.add(tbt_us)
            used += Fraction(50_000, tbt_us)
    assert meter.used == used


@given(view=views(), batch=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_halo_paper_admits_within_capacity(view, batch):
    """`halo-paper` admits nobody beyond a capacity of B units, except into an idle engine."""
    plan = policy_named("halo-paper", batch).plan(view)
    waiting = {state.request_id: state for state in view.waiting}
    admitted = [waiting[chunk.request_id] for chunk in plan.prefill if chunk.request_id in waiting]
    meter = CapacityMeter(batch, 50_000, [state.tbt_us for state in (*view.running, *admitted)])
    assert not admitted or meter.used <= batch


@given(
    ttft_us=st.integers(1_000_000, 3_000_000),
    tbt_us=st.integers(50_000, 200_000),
    waits=st.lists(st.integers(1_000, 90_000), max_size=8),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1_000, 45_000)), max_size=30),
)
def test_slack_is_the_papers_recurrence(ttft_us, tbt_us, waits, steps):
    """Slack in closed form equals Eq. 2-3: TTFT - N * T_mix while it waits, then + (TBT - T) for a step that decodes
    and - T for one that does not, as long as no token is late."""
    state = request("r", 7_000, 10, 1_000, ttft_us, tbt_us, release=ReleasePolicy.SLO)
    now_us, slack_us = 7_000, ttft_us
    for step_us in waits:
        now_us += step_us
        slack_us -= step_us
        assert state.slack_us(now_us) == slack_us
    host_release = state.arrival_us + ttft_us
    decoding(state, 1, host_release)
    slack_us += tbt_us
    for decodes, step_us in steps:
        if slack_us < step_us:
            break
        now_us += step_us
        slack_us -= step_us
        if decodes:
            decoding(state, state.generated_tokens + 1, state.last_release_us + tbt_us)
            slack_us += tbt_us
        assert state.slack_us(now_us) == slack_us


@pytest.mark.parametrize("name", NAMES)
def test_one_adapter_slot_is_shared(name):
    """With one adapter slot, a service is not shut out by another whose requests keep coming."""
    bounds = Limits(step_tokens=64, running=16, adapters=1, kv_blocks=10_000, kv_block_tokens=16)
    host = StepHost(policy_named(name, 16), bounds, lambda _: 20_000)
    for index in range(150):
        host.submit(request(f"a{index:03}", 60_000 * index, 8, 40, 200_000, 50_000, service="a", adapter=1))
    host.submit(request("b", 1_000_000, 8, 10, 400_000, 100_000, service="b", adapter=2))
    host.run(until_us=8_000_000)
    assert host.lives["b"].done


@pytest.mark.parametrize("name", NAMES)
def test_early_and_late_requests_both_finish_under_lasting_overload(name):
    """Arrivals above what the engine can do do not starve the requests that came first."""
    bounds = Limits(step_tokens=64, running=12, adapters=0, kv_blocks=300, kv_block_tokens=16)
    host = StepHost(policy_named(name, 12), bounds, step_time)
    for index in range(400):
        service, adapter, ttft_us, tbt_us = SERVICES[index % 4]
        host.submit(request(f"r{index:03}", 20_000 * index, 40, 10, ttft_us, tbt_us, service=service, adapter=adapter))
    host.run(until_us=20_000_000)
    assert all(host.lives[f"r{index:03}"].done for index in range(20))
