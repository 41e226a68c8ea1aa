"""Recordings of an engine: read strictly, replayed step by step, turned into a profile."""

import json
import random

import pytest

from scheduling.policy import Limits
from scheduling.registry import make_policy
from scheduling.request import ReleasePolicy
from simulator.cluster import Cluster
from simulator.curve import Curve
from simulator.profile_fit import fit_costs
from simulator.recording import RecordedStep, RecordingError, ReplayedSteps, load_recording
from simulator.replica import Replica, Step
from simulator.step_shape import StepShape
from simulator.step_times import StepCosts, StepTimes
from simulator.workload import Arrival, Service, WorkloadError

LIMITS = {"step_tokens": 256, "running": 16, "adapters": 0, "kv_blocks": 500, "kv_block_tokens": 16}
SERVICE = Service("a", 400_000, 100_000, release=ReleasePolicy.OFF)
HEADER = {"kind": "header", "format": "halo-recording-1", "policy": "fcfs", "options": {"batch": 64}, "limits": LIMITS}


def recorded(tmp_path, seed=3):
    """A recording as the engine side writes it, of an engine that is a simulation with noise."""
    rng = random.Random(seed)
    arrivals = [Arrival(i * 40_000, "a", rng.randint(1, 90), rng.randint(1, 20)) for i in range(60)]
    steps: list[Step] = []
    costs = StepCosts(Curve([(0, 5_000), (300, 60_000)]), noise_pct=5)
    ready: dict[str, list[int]] = {}

    def watch(step: Step) -> None:
        steps.append(step)
        finished = [t for t, n in step.prompts if t.state.generated_tokens == 1]
        for track in [*step.decodes, *finished]:
            ready.setdefault(track.state.request_id, []).append(step.end_us)

    replica = Replica(make_policy("fcfs", batch=64), Limits(**LIMITS), StepTimes(costs, seed=9), on_step=watch)
    result = Cluster([SERVICE], [replica]).run(arrivals)
    lines = [HEADER]
    for track in result.tracks:
        times = ready[track.state.request_id]
        lines.append(
            {"kind": "request", "at_us": track.arrival.at_us, "service": "a", "ttft_us": 400_000, "tbt_us": 100_000}
            | {"adapter": 0, "release": "off", "hold_max_us": 0, "prompt_tokens": track.arrival.prompt_tokens}
            | {"ready_us": times, "released_us": times}
        )
    lines += [
        {"kind": "step", "start_us": s.start_us, "duration_us": s.end_us - s.start_us, "decodes": s.shape.decodes}
        | {"context_tokens": s.shape.context_tokens, "chunks": s.shape.chunks, "graph": s.graph}
        for s in steps
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path, result


def test_replay_gives_the_recorded_times(tmp_path):
    """With the recorded step times the same policy makes the same steps, and every token comes when it came."""
    path, result = recorded(tmp_path)
    recording = load_recording(path)
    times = ReplayedSteps(recording.steps, 1)
    replica = Replica(make_policy(recording.policy, **recording.options), recording.limits, times)
    again = Cluster(recording.services, [replica]).run(recording.arrivals)
    assert (times.replayed, times.differing) == (len(recording.steps), 0)
    assert [t.first_us for t in again.tracks] == [t.first_us for t in result.tracks]
    assert [r.released_us[-1] for r in recording.requests] == [t.ended_us for t in again.tracks]
    other = ReplayedSteps(recording.steps, 1)
    replica = Replica(make_policy("fcfs", batch=16), recording.limits, other)
    Cluster(recording.services, [replica]).run(recording.arrivals)
    assert other.differing > 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"halo-recording-1"', '"other"', "line 1: format is 'other'"),
        ('"prompt_tokens"', '"prompt"', "line 2: the key 'prompt_tokens' is missing"),
        ('"release": "off"', '"release": "never"', "line 2: 'never' is not a valid ReleasePolicy"),
        ('"ready_us": [', '"ready_us": [1, ', "line 2: "),
        ('"at_us": 0,', '"at_us": NaN,', "line 2: not JSON: NaN"),
        ('"kind": "step"', '"kind": "stop"', "kind is 'stop'"),
        ('"step_tokens"', '"tokens"', "line 1: the header is incomplete"),
    ],
)
def test_wrong_recordings(tmp_path, old, new, reason):
    """File, line and reason are named."""
    path, _ = recorded(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RecordingError, match=f"r.jsonl.*{reason}"):
        load_recording(path)


def test_costs_from_measured_steps():
    """Costs fitted to steps of a machine that is known come back, and the errors on unseen steps say how well."""
    truth = StepTimes(
        StepCosts(
            Curve([(0, 0), (64, 3_000), (128, 10_000), (2048, 170_000)]),
            per_decode_us=40,
            per_context_token_us=0.2,
            per_pair_us=0.01,
            host_us=4_000,
            noise_pct=2,
        ),
        seed=4,
    )
    rng = random.Random(5)
    steps = []
    for _ in range(900):
        decodes = rng.choice([0, 1, 4, 16, 48, 100])
        chunks = (
            ((rng.choice([8, 32, 100, 256, 700]), rng.choice([0, 300])),) if rng.random() < 0.6 or not decodes else ()
        )
        shape = StepShape(decodes, decodes * rng.randint(10, 900), chunks, decodes)
        steps.append(RecordedStep(0, truth(shape)[0], shape, False))
    costs, errors = fit_costs(steps)
    assert abs(errors.signed_mean) < 0.01
    assert errors.median < 0.03
    assert errors.p95 < 0.08
    assert costs.noise_pct == pytest.approx(2, abs=1)
    shape = StepShape(64, 64 * 500, ((200, 0),), 64)
    assert StepTimes(costs).exact_us(shape)[0] == pytest.approx(truth.exact_us(shape)[0], rel=0.03)
    with pytest.raises(WorkloadError, match="at least 50"):
        fit_costs(steps[:10])
