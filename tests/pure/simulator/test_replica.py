"""The simulated engine: KV blocks, preemption, prefix cache, release, agreement with the tests' other host."""

import os
import random
import subprocess
import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.policy import Limits, PrefillChunk, StepPlan
from scheduling.registry import POLICIES, make_policy
from scheduling.release import release_time_us
from scheduling.request import ReleasePolicy, RequestState
from simulator.cluster import Cluster
from simulator.kv_cache import KvCache
from simulator.replica import Replica, SimulationError, Step
from simulator.token_release import next_tokens
from simulator.track import Track
from simulator.workload import Arrival, Service, WorkloadError
from tests.fakes.step_host import StepHost, request

SERVICES = (Service("a", 400_000, 50_000, 1), Service("b", 900_000, 200_000, 2, ReleasePolicy.OFF))


def affine(shape):
    return 10_000 + 100 * shape.tokens, False


def options(name: str, batch: int) -> dict:
    return {"batch": batch}


@st.composite
def workloads(draw):
    count = draw(st.integers(1, 25))
    at = sorted(draw(st.lists(st.integers(0, 1_500_000), min_size=count, max_size=count)))
    return [
        Arrival(
            time,
            draw(st.sampled_from("ab")),
            draw(st.integers(1, 200)),
            draw(st.integers(1, 40)),
            draw(st.sampled_from(["", "x", "y"])),
            draw(st.integers(0, 200)),
        )
        for time in at
    ]


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from(sorted(POLICIES)), st.integers(16, 60), st.booleans())
def test_everything_finishes_and_no_block_is_lost(arrivals, policy, blocks, prefix_caching):
    """Whatever is preempted or shared, every request gets all its tokens, KV stays in bounds and ends empty."""
    limits = Limits(step_tokens=256, running=8, adapters=0, kv_blocks=blocks, kv_block_tokens=16)
    used: list[int] = []
    replica = Replica(
        make_policy(policy, **options(policy, 64)),
        limits,
        affine,
        prefix_caching=prefix_caching,
        on_step=lambda _: used.append(replica.kv.used),
    )
    result = Cluster(SERVICES, [replica]).run(arrivals)
    assert len(result.tracks) + len(result.refused) == len(arrivals)
    assert all(track.done for track in result.tracks)
    assert all(0 <= n <= blocks for n in used)
    assert replica.kv.peak <= blocks
    assert replica.kv.used == 0
    assert not replica.running
    assert not replica.waiting
    assert sum(len(g) for g in result.gaps.values()) == sum(t.outputs - 1 for t in result.tracks)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_steps_as_the_other_host(policy):
    """Without preemption this host and the tests' StepHost, written apart, run exactly the same steps."""
    limits = Limits(step_tokens=512, running=32, adapters=2, kv_blocks=5_000, kv_block_tokens=16)
    rng = random.Random(7)
    arrivals = sorted(
        (
            Arrival(rng.randrange(4_000_000), rng.choice("ab"), rng.randint(1, 300), rng.randint(1, 60))
            for _ in range(80)
        ),
        key=lambda a: a.at_us,
    )
    steps: list[Step] = []
    replica = Replica(make_policy(policy, batch=48), limits, affine, on_step=steps.append)
    Cluster(SERVICES, [replica]).run(arrivals)
    other = StepHost(make_policy(policy, batch=48), limits, lambda work: 10_000 + 100 * work.tokens)
    promises = {service.name: service for service in SERVICES}
    for index, a in enumerate(arrivals):
        s = promises[a.service]
        other.submit(
            request(
                f"r{index:07d}",
                a.at_us,
                a.prompt_tokens,
                a.output_tokens,
                s.ttft_us,
                s.tbt_us,
                service=s.name,
                adapter=s.adapter,
                release=s.release,
            )
        )
    other.run()
    assert [(s.start_us, s.end_us, set(s.plan.decode), s.plan.prefill) for s in steps] == [
        (s.start_us, s.end_us, set(s.plan.decode), s.plan.prefill) for s in other.steps
    ]


@given(
    st.sampled_from(list(ReleasePolicy)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_tokens_are_released_as_in_serving(release, previous_us, now_us, tbt_us, hold_us):
    """The release time worked out in line is the one that serving uses."""
    track = Track("r", Arrival(0, "s", 5, 9), Service("s", 100, tbt_us, 0, release, hold_us))
    state = track.state
    state.generated_tokens, state.last_release_us = 3, previous_us
    expected = release_time_us(state, now_us, hold_us)
    next_tokens([track], now_us)
    assert state.last_release_us == expected
    assert track.gaps[0] == expected - previous_us


class Scripted:
    """A policy that returns given plans."""

    name = "scripted"

    def __init__(self, *plans: StepPlan) -> None:
        self.plans = list(plans)

    def plan(self, view):
        return self.plans.pop(0) if self.plans else StepPlan()

    def observe(self, record):
        pass

    def forget(self, request_id):
        pass


def placed(request_id: str, prompt: int, generated: int, last_release_us: int = 0) -> Track:
    track = Track(request_id, Arrival(0, "a", prompt, 50), SERVICES[0])
    track.state.generated_tokens = generated
    track.state.computed_tokens = prompt + generated - 1
    track.state.last_release_us = last_release_us
    return track


def test_who_is_preempted():
    """A decode without a block takes those of the request with the latest deadline that sits the step out."""
    limits = Limits(step_tokens=64, running=8, adapters=0, kv_blocks=3, kv_block_tokens=16)
    replica = Replica(Scripted(StepPlan(decode=("r1",))), limits, affine)
    tracks = [placed("r1", 16, 1, 5), placed("r2", 10, 2, 9), placed("r3", 10, 2, 7)]
    for track in tracks:
        replica.place(track)
    assert replica.start(0) == 10_100
    replica.finish()
    assert [s.request_id for s in replica.running] == ["r1", "r3"]
    (gone,) = replica.waiting
    assert (gone.request_id, gone.computed_tokens, gone.prompt_tokens, gone.kv_blocks) == ("r2", 0, 12, 0)
    assert replica.counts.preemptions == 1


def test_a_step_that_preempts_admits_nobody():
    """As in vLLM, waiting requests are not looked at when a running one was preempted."""
    limits = Limits(step_tokens=64, running=8, adapters=0, kv_blocks=3, kv_block_tokens=16)
    plan = StepPlan(decode=("r1",), prefill=(PrefillChunk("new", 4),))
    replica = Replica(Scripted(plan), limits, affine)
    for track in (placed("r1", 16, 1, 5), placed("r2", 10, 2, 9), placed("r3", 10, 2, 7)):
        replica.place(track)
    replica.submit(Track("new", Arrival(0, "a", 4, 2), SERVICES[0]))
    replica.start(0)
    replica.finish()
    assert {s.request_id for s in replica.waiting} == {"new", "r2"}


def test_a_policy_that_plans_nothing_is_named():
    """An empty plan with work to do is a fault of the policy, not an endless loop."""
    replica = Replica(Scripted(), Limits(64, 8, 0, 3, 16), affine)
    replica.submit(Track("new", Arrival(0, "a", 4, 2), SERVICES[0]))
    with pytest.raises(SimulationError, match="scripted plans nothing"):
        replica.start(0)


def test_prefix_cache_saves_what_was_computed_before():
    """The second request of a conversation computes only what the first did not, and never nothing."""
    limits = Limits(step_tokens=512, running=8, adapters=0, kv_blocks=100, kv_block_tokens=16)
    chunks = []
    replica = Replica(
        make_policy("fcfs", batch=512),
        limits,
        affine,
        prefix_caching=True,
        on_step=lambda step: chunks.extend(step.shape.chunks),
    )
    arrivals = [Arrival(i * 1_000_000, "a", 64, 2, "chat", 64) for i in range(2)]
    Cluster(SERVICES, [replica]).run(arrivals)
    assert chunks == [(64, 0), (16, 48)]
    assert replica.kv.hit_tokens == 48


def test_prefix_cache_belongs_to_an_adapter():
    """Two services never share KV, since their adapters computed it."""
    limits = Limits(step_tokens=512, running=8, adapters=0, kv_blocks=100, kv_block_tokens=16)
    replica = Replica(make_policy("fcfs", batch=512), limits, affine, prefix_caching=True)
    Cluster(SERVICES, [replica]).run([Arrival(i * 10**6, s, 64, 2, "chat", 64) for i, s in enumerate("ab")])
    assert replica.kv.hit_tokens == 0


def test_cached_blocks_are_evicted_least_recently_used_first():
    """Cached beginnings give way when memory is wanted, the oldest first; those in use stay."""
    kv = KvCache(10, 16, prefix_caching=True)
    for key in ("old", "new"):
        kv.take(4)
        shared = kv.publish(key, 0, 64, 64)
        kv.drop(key, shared, 4)
    assert (kv.used, kv.free) == (0, 10)
    kv.take(4)
    assert kv.reuse("new", 65, 64) == 4
    assert kv.used == 8
    assert kv.reuse("old", 65, 64) == 2


def test_same_seed_same_bytes():
    """Two runs give identical gaps and times."""
    rng = random.Random(1)
    arrivals = [Arrival(i * 20_000, rng.choice("ab"), rng.randint(1, 300), rng.randint(1, 60)) for i in range(60)]

    def once() -> tuple[bytes, list[int]]:
        replica = Replica(make_policy("halo", batch=64), Limits(512, 32, 0, 500, 16), affine)
        result = Cluster(SERVICES, [replica]).run(arrivals)
        return result.gaps["a"].tobytes(), [t.ended_us for t in result.tracks]

    assert once() == once()


_DIGEST = """
import hashlib
from simulator.hardware_profile import load_profile
from simulator.scenario import load_scenario
from simulator.search import Load
from simulator.system import Deployment, System, simulate
scenario = load_scenario("hospital")
arrivals = scenario.compose(Load(20.0, 0.0).arrivals_us(12, 1), 1)
result = simulate(System("halo"), Deployment(load_profile("llama3-8b-a100-80g")), scenario, arrivals, seed=1)
print(hashlib.sha256(b"".join(gaps.tobytes() for gaps in result.gaps.values())).hexdigest())
"""


def test_same_bytes_on_other_processors():
    """With OpenBLAS kernels of two processor families, whose sums differ in their last bits, the bytes are the same."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "OPENBLAS_CORETYPE": kernels, "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for kernels in ("Haswell", "Nehalem")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@pytest.mark.parametrize(
    ("arrival", "reason"),
    [
        (Arrival(5, "nobody", 1, 1), "no service 'nobody'"),
        (Arrival(5, "a", 0, 1), "0 prompt"),
        (Arrival(5, "a", 1, 0), "0 output"),
        (Arrival(-5, "a", 1, 1), "before the request"),
    ],
)
def test_arrivals_that_nobody_could_serve_are_refused(arrival, reason):
    """The index and the reason are named."""
    replica = Replica(make_policy("fcfs", batch=64), Limits(512, 32, 0, 500, 16), affine)
    with pytest.raises(WorkloadError, match=f"request 0.*{reason}"):
        Cluster(SERVICES, [replica]).run([arrival])


def test_requests_larger_than_memory_are_refused_not_stuck():
    """What never fits is counted and the rest goes on."""
    replica = Replica(make_policy("fcfs", batch=64), Limits(512, 32, 0, 4, 16), affine)
    result = Cluster(SERVICES, [replica]).run([Arrival(0, "a", 100, 5), Arrival(1, "a", 10, 5)])
    assert [a.prompt_tokens for a in result.refused] == [100]
    assert result.tracks[0].done


def test_finetuning_rows_ride_along():
    """Fine-tuning rows lengthen steps, are counted, and reach the policy's records."""
    seen = []

    class Watching(Scripted):
        def observe(self, record):
            seen.append(record.finetune_tokens)

    replica = Replica(Watching(StepPlan(decode=("r1",))), Limits(64, 8, 0, 9, 16), affine, finetune=lambda v, p: 32)
    replica.place(placed("r1", 16, 1))
    assert replica.start(0) == 10_000 + 100 * 33
    replica.finish()
    assert seen == [32]
    assert replica.counts.finetune_tokens == 32


def test_answers_in_one_piece_have_one_deadline():
    """A request that does not stream gives no gaps and is late only if its last token is."""
    track = Track("r", Arrival(0, "a", 5, 3, streaming=False), SERVICES[0])
    track.gaps = array("q")
    state: RequestState = track.state
    state.generated_tokens = 1
    assert next_tokens([track], 300_000) == []
    assert next_tokens([track], 499_000) == [track]
    assert (len(track.gaps), track.late_tokens) == (0, 0)
