"""Step costs, profiles, the bound, the search, the comparison and the capacity plan."""

import json
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from app.cli import app
from scheduling.request import ReleasePolicy
from simulator.bound import Hull, _chained_steps, due_by, upper_bound_rps
from simulator.capacity_plan import plan_capacity
from simulator.comparison import Question, compare
from simulator.curve import Curve, lower_hull
from simulator.hardware_profile import (
    KINDS,
    HardwareProfile,
    ProfileError,
    dump_costs,
    load_profile,
    parse_profile,
    profile_names,
)
from simulator.hardware_profile import SHIPPED as PROFILES
from simulator.lengths import Quantiles
from simulator.scenario import Scenario, load_scenario
from simulator.search import Load, Runs, highest_rate, kept
from simulator.step_shape import StepShape
from simulator.step_times import StepCosts, StepTimes
from simulator.system import Deployment, System, simulate
from simulator.workload import WorkloadError

run = CliRunner()
SHORT = Load(40.0, 5.0)


def slow_hardware() -> HardwareProfile:
    """A profile on which a step takes 20 ms and 0.6 ms a token, so that a few requests are a load."""
    profile = load_profile("llama3-8b-a100-80g")
    lora = {"qkv": Curve([(0, 0), (100, 10_000)])}
    costs = StepCosts(Curve([(0, 20_000), (100, 70_000)]), lora=lora, overlap_share=0.5, overlap_rows_max=512)
    return replace(profile, batch=64, limits=replace(profile.limits, step_tokens=512), costs=costs)


def brief_requests() -> Scenario:
    """The hospital's services with looser targets, and short prompts and answers."""
    scenario = load_scenario("hospital")
    lengths = Quantiles((20, 60), (4, 12))
    services = [replace(s, tbt_us=s.tbt_us * 3) for s in scenario.services]
    return replace(
        scenario,
        loads=tuple(replace(x, lengths=lengths, service=s) for x, s in zip(scenario.loads, services, strict=True)),
    )


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles(name):
    """Every shipped profile loads, says where its numbers come from, and its costs survive writing and reading."""
    profile = load_profile(name)
    assert profile.sources
    assert {s.kind for s in profile.sources} <= set(KINDS)
    assert all(s.licence for s in profile.sources if s.kind == "measured")
    data = json.loads((PROFILES / f"{name}.json").read_text())
    assert dump_costs(parse_profile({**data, "costs": dump_costs(profile.costs)}).costs) == dump_costs(profile.costs)


def test_the_anchors():
    """Llama3-8B on an A100 decodes with LoRA in the paper's 47 and 57 ms at batch 384 and 512, short context."""
    times = StepTimes(load_profile("llama3-8b-a100-80g").costs)
    for batch, ms in ((384, 47), (512, 57)):
        assert times.exact_us(StepShape(batch, batch * 128, (), batch))[0] / 1000 == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format", "other", "this release reads halo-profile-1"),
        ("batch", 0, "batch has to be a whole number of 1"),
        ("costs", {"dense": [[1, -5]]}, "costs.dense has to be a number"),
        ("costs", {"dense": [[2, 5], [1, 6]]}, "rising counts"),
        ("costs", {"dense": [[1, 5]], "noise": 2}, "unknown costs noise"),
        ("costs", {"dense": [[1, 5]], "host_us": "1"}, "costs.host_us has to be a number"),
        ("costs", {}, "the key 'dense' is missing"),
        ("sources", [], "sources is empty"),
        ("engine", None, "wrong form"),
    ],
)
def test_wrong_profiles(key, value, reason):
    """A wrong profile is refused with the key and the reason."""
    data = json.loads((PROFILES / "llama3-8b-a100-80g.json").read_text())
    with pytest.raises(ProfileError, match=reason):
        parse_profile({**data, key: value}, "p.json")


def test_profiles_that_are_not_there(tmp_path):
    """Names are listed; NaN is not a number in JSON."""
    with pytest.raises(ProfileError, match="there are llama3-8b-a100-40g"):
        load_profile("llama")
    path = tmp_path / "p.json"
    path.write_text('{"batch": NaN}')
    with pytest.raises(ProfileError, match=r"p\.json: not JSON: NaN"):
        load_profile(path)


def test_graph_eager_overlap_and_host():
    """A captured step is padded to its size, an eager one pays its launch, overlap hides LoRA in small steps only."""
    costs = StepCosts(
        dense=Curve([(0, 0), (100, 1000)]),
        lora={"qkv": Curve([(0, 0), (100, 500)])},
        overlap_share=0.4,
        overlap_rows_max=64,
        graph_sizes=(8, 16),
        eager_us=70,
        host_us=30,
    )
    plain, overlap = StepTimes(costs), StepTimes(costs, overlap=True)
    assert plain(StepShape(9, 0)) == (16 * 15 + 30, True)
    assert plain(StepShape(20, 0)) == (20 * 15 + 70 + 30, False)
    assert overlap(StepShape(16, 0)) == (16 * 13 + 30, True)
    assert overlap(StepShape(0, 0, ((64, 0),))) == (64 * 13 + 70 + 30, False)
    assert overlap(StepShape(0, 0, ((65, 0),))) == (65 * 15 + 70 + 30, False)
    hidden = StepTimes(replace(costs, host_overlapped=True, host_us=500))
    assert hidden(StepShape(16, 0)) == (500, True)


def test_noise_is_seeded_and_fair():
    """Noise has the stated size, no bias, and the same seed gives the same."""
    costs = StepCosts(dense=Curve([(1, 10_000)]), noise_pct=5)
    drawn = [StepTimes(costs, seed=1)(StepShape(1, 0))[0] for _ in range(2)]
    assert drawn[0] == drawn[1]
    times = StepTimes(costs, seed=2)
    many = np.array([times(StepShape(1, 0))[0] for _ in range(4000)])
    assert many.mean() == pytest.approx(10_000, rel=0.005)
    assert many.std() / many.mean() == pytest.approx(0.05, rel=0.06)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=2, max_size=12, unique_by=lambda p: p[0]))
def test_hulls_are_below_and_convex(points):
    """The hull touches no point from above and its slopes rise."""
    points.sort()
    hull = Hull(points)
    assert all(hull(x) <= y + 1e-6 for x, y in points)
    corners = lower_hull(points)
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairwise(corners)]
    assert slopes == sorted(slopes)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 15), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(0, 2),
)
def test_steps_that_cannot_be_avoided(windows, missed):
    """Against every choice: whichever requests are missed, some chain of the others needs at least that many steps."""
    starts = np.array([s for s, _, _ in windows], dtype=float)
    ends = np.array([s + n for s, n, _ in windows], dtype=float)
    weights = np.array([w for _, _, w in windows], dtype=float)
    found = _chained_steps(starts, ends, weights, missed)

    def best(indices) -> float:
        heaviest = 0.0
        for size in range(len(indices) + 1):
            for chain in combinations(sorted(indices, key=lambda i: ends[i]), size):
                if all(ends[a] <= starts[b] for a, b in pairwise(chain)):
                    heaviest = max(heaviest, sum(weights[i] for i in chain))
        return heaviest

    everyone = range(len(windows))
    worst = min(
        best([i for i in everyone if i not in gone])
        for size in range(min(missed, len(windows)) + 1)
        for gone in combinations(everyone, size)
    )
    assert found <= worst
    if not missed:
        assert found == worst


def test_nothing_beats_the_bound():
    """No policy keeps its promises at the bound, and the better ones come within a third of it."""
    profile, scenario = load_profile("llama3-8b-a100-80g"), load_scenario("hospital")
    bound = upper_bound_rps(scenario, profile.costs, lambda r: SHORT.arrivals_us(r, 1), seconds=SHORT.seconds, seed=1)
    for label in ("fcfs", "halo"):
        runs = Runs(System(label), Deployment(profile), scenario, SHORT)
        assert kept(runs.at(bound, 1), "promises") < 0.99
    assert kept(runs.at(bound * 0.6, 1), "promises") >= 0.99


def test_demand_by_hand():
    """One request of 100 prompt and 11 output tokens, TTFT 1 s and TBT 50 ms, by 1.2 s: five tokens are due."""
    scenario = load_scenario("hospital")
    (arrival,) = scenario.compose([0], 3)
    arrival = replace(arrival, service="analysis-assistant", prompt_tokens=100, output_tokens=11)
    demand = due_by([arrival], scenario, 1_200_000, 1.0)
    assert (demand.rows, demand.decodes, demand.steps, demand.pairs) == (104, 4, 5, 5000)
    assert demand.context_tokens == 100 + 101 + 102 + 103
    assert due_by([arrival], scenario, 999_999, 1.0).rows == 0


def test_bisection():
    """The search finds the edge from either side and says 0 when there is none."""
    assert highest_rate(lambda r: r <= 7.3, 4, 16, 0.001) == pytest.approx(7.3, rel=0.002)
    assert highest_rate(lambda r: r <= 0.7, 4, 16, 0.001) == pytest.approx(0.7, rel=0.002)
    assert highest_rate(lambda _: False, 4, 16) == 0


def test_comparison():
    """The answer names every policy with its highest rate, its share of the bound, and what was assumed."""
    question = Question(
        brief_requests(),
        Deployment(slow_hardware()),
        (System("fcfs"), System("halo+overlap")),
        rates=(4.0,),
        load=SHORT,
        tolerance=0.1,
    )
    answer = compare(question)
    assert answer["simulated"] is True
    fcfs, halo = answer["policies"]["fcfs"], answer["policies"]["halo+overlap"]
    assert 0 < fcfs["max_rps"] < halo["max_rps"] < halo["bound_rps"]
    assert 0 < fcfs["of_bound"] < halo["of_bound"] < 1
    assert halo["rates"]["4"][0]["total"]["ttft_met"] == 1.0
    assert any("MedicalData" in line for line in answer["assumed"])


def test_more_load_needs_more_replicas():
    """The plan's replicas keep the promises, one fewer does not, and what breaks first is named."""
    scenario = brief_requests()
    plan = plan_capacity(scenario, Deployment(slow_hardware()), System("halo-paper"), 40, seeds=(1,), load=SHORT)
    assert plan.replicas == 2
    assert plan.tried == {1: 0.0, 2: 1.0}
    assert plan.max_rps >= 40
    assert {row.promise for row in plan.tightened} == {"TTFT", "TBT"}
    assert all(row.change_pct <= 0 for row in plan.tightened)
    assert plan.breaks_first is not None
    assert plan.breaks_first.service in {s.name for s in scenario.services}
    assert plan.breaks_first.rate > plan.max_rps


def test_services_keep_their_own_release():
    """With keep_release, as in a plan, tokens leave as each service says, not as the policy is used to."""
    scenario = brief_requests().released(ReleasePolicy.SLO)
    arrivals = scenario.compose(SHORT.arrivals_us(2, 1), 1)
    kept_own = simulate(System("fcfs"), Deployment(slow_hardware(), keep_release=True), scenario, arrivals)
    assert all(t.first_us == t.arrival.at_us + t.service.ttft_us for t in kept_own.tracks if t.ttft_met)
    usual = simulate(System("fcfs"), Deployment(slow_hardware()), scenario, arrivals)
    assert all(t.first_us == t.ready_us for t in usual.tracks)


def test_a_promise_no_number_of_gpus_keeps():
    """When a single step is longer than the TBT, the plan says so instead of asking for ever more GPUs."""
    profile, scenario = load_profile("llama3-8b-a100-80g"), load_scenario("hospital")
    loads = tuple(replace(x, service=replace(x.service, tbt_us=5_000)) for x in scenario.loads)
    with pytest.raises(WorkloadError, match="longer than promised on this hardware"):
        plan_capacity(replace(scenario, loads=loads), Deployment(profile), System("fcfs"), 0.2, seeds=(1,), load=SHORT)


def test_labels_of_systems():
    """A label names policy, overlap and release; another one is refused with what there is."""
    for label, expected in {
        "fcfs": ("fcfs", False, ReleasePolicy.OFF),
        "halo-paper+overlap": ("halo-paper", True, ReleasePolicy.SLO),
        "halo": ("halo", False, ReleasePolicy.BOUNDED),
        "halo+overlap@slo": ("halo", True, ReleasePolicy.SLO),
    }.items():
        system = System(label)
        assert (system.policy, system.overlap, system.release) == expected
    for wrong in ("hallo", "halo@soon", "halo@", "+overlap"):
        with pytest.raises(WorkloadError, match="there are fcfs"):
            System(wrong)


def test_simulate_command(tmp_path):
    """`halo simulate --json` prints policies with max_rps and of_bound; --plot draws."""
    arguments = ["simulate", "--policy", "fcfs", "--seconds", "30", "--rate", "3", "--rate", "5", "--json"]
    result = run.invoke(app, [*arguments, "--no-max", "--plot", str(tmp_path / "p.png")])
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["policies"]["fcfs"]["rates"]) == {"3", "5"}
    assert (tmp_path / "p.png").stat().st_size > 1000
    result = run.invoke(app, ["simulate", "--policy", "nonsense"])
    assert result.exit_code == 1
    assert "no policy 'nonsense'" in result.output


def test_plan_command(tmp_path):
    """`halo plan` reads the shipped cluster.yaml; missing and wrong loads are refused with what to do."""
    result = run.invoke(
        app, ["plan", "cluster.yaml", "--rps", "6", "--seeds", "1", "--no-tighten", "--seconds", "30", "--json"]
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["replicas"] == 1
    assert plan["services"]["pre-assessment"] == 1.5
    for arguments, reason in (
        ([], "say how much load to expect"),
        (["--rate", "nobody=3"], "has to be SERVICE=REQUESTS_PER_SECOND"),
        (["--rps", "nan"], "the rate has to be above 0"),
        (["--rps", "2", "--profile", "x"], "no profile 'x'"),
    ):
        result = run.invoke(app, ["plan", "cluster.yaml", *arguments])
        assert result.exit_code == 1, arguments
        assert reason in result.output
