"""Schedules worked out by hand: a step of n tokens takes 10 + 0.1 n ms, times below in milliseconds."""

import pytest

from scheduling.policy import Limits
from scheduling.registry import make_policy
from scheduling.request import ReleasePolicy
from simulator.cluster import Cluster
from simulator.replica import Replica, Step
from simulator.workload import Arrival, Service

ROOMY = Limits(step_tokens=8192, running=256, adapters=0, kv_blocks=10_000, kv_block_tokens=16)


def affine(shape):
    return 10_000 + 100 * shape.tokens, False


def run(policy: str, batch: int, requests, release=ReleasePolicy.OFF):
    """Run (arrival, prompt, output, ttft, tbt) in milliseconds; return tracks by order and the steps."""
    steps: list[Step] = []
    services = [
        Service(f"s{i}", ttft * 1000, tbt * 1000, release=release) for i, (_, _, _, ttft, tbt) in enumerate(requests)
    ]
    arrivals = [Arrival(at * 1000, f"s{i}", prompt, out) for i, (at, prompt, out, _, _) in enumerate(requests)]
    replica = Replica(make_policy(policy, batch=batch), ROOMY, affine, on_step=steps.append)
    result = Cluster(services, [replica]).run(arrivals)
    return result, steps


def test_pacing():
    """One request, TTFT 100, TBT 50: ready at 20, 30.1, 40.2, 50.3; released at 100, 150, 200, 250."""
    result, steps = run("fcfs", 1000, [(0, 100, 4, 100, 50)], ReleasePolicy.SLO)
    (track,) = result.tracks
    assert [step.end_us for step in steps] == [20_000, 30_100, 40_200, 50_300]
    assert (track.ready_us, track.first_us, track.ended_us) == (20_000, 100_000, 250_000)
    assert list(result.gaps["s0"]) == [50_000] * 3


@pytest.mark.parametrize(("release", "late"), [(ReleasePolicy.OFF, 1), (ReleasePolicy.SLO, 0)])
def test_the_bank_of_held_tokens(release, late):
    """A's gap while X's 800 prompt tokens run from 35.2 to 125.3 breaks TBT only when tokens were sent as generated."""
    result, steps = run("fcfs", 1000, [(0, 50, 6, 100, 50), (30, 800, 2, 500, 200)], release)
    assert [(s.start_us, s.end_us) for s in steps if s.shape.tokens > 700] == [(35_200, 125_300)]
    first, second = result.tracks
    assert (first.late_gaps, second.late_gaps) == (late, 0)
    assert first.met is not bool(late)


def test_halo_paper_lets_everybody_yield_to_a_prompt():
    """B = 4, three decodes with slack: a prompt of 6 gets chunks of 4 and 2, ready at 51.7; fcfs needs until 93.3."""
    requests = [(0, 1, 9, 20, 100), (0, 1, 9, 20, 100), (0, 1, 9, 60, 50), (25, 6, 2, 60, 50)]
    result, steps = run("halo-paper", 4, requests)
    assert result.tracks[3].ready_us == 51_700
    assert [(s.start_us, s.shape.decodes, s.shape.prefill_tokens) for s in steps[3:5]] == [
        (30_900, 0, 4),
        (41_300, 2, 2),
    ]
    late, _ = run("fcfs", 4, requests)
    assert late.tracks[3].ready_us == 93_300
    assert not late.tracks[3].ttft_met


def test_a_full_replica_keeps_the_admission_queue_in_order_of_deadlines():
    """With one place, a later request with an earlier deadline is granted before an earlier one that waits."""
    services = [Service("slow", 900_000, 100_000), Service("fast", 200_000, 100_000)]
    arrivals = [Arrival(0, "slow", 10, 3), Arrival(1_000, "slow", 10, 3), Arrival(2_000, "fast", 10, 3)]
    replica = Replica(make_policy("fcfs", batch=100), ROOMY, affine)
    result = Cluster(services, [replica], inflight=1).run(arrivals)
    assert [t.admitted_us for t in result.tracks] == [0, 62_400, 31_200]


def test_a_service_that_sheds_leaves_the_queue_at_its_deadline():
    """A request whose deadline passes in the queue is shed; one of a service that queues is served late."""
    services = [
        Service("a", 100_000, 1_000_000),
        Service("b", 20_000, 100_000, shed=True),
        Service("c", 20_000, 100_000),
    ]
    arrivals = [Arrival(0, "a", 10, 9), Arrival(1, "b", 10, 1), Arrival(2, "c", 10, 1)]
    result = Cluster(services, [Replica(make_policy("fcfs", batch=100), ROOMY, affine)], inflight=1).run(arrivals)
    _, shed, queued = result.tracks
    assert (shed.shed, shed.ended_us, shed.first_us) == (True, 20_001, 0)
    assert queued.done
    assert not queued.ttft_met
