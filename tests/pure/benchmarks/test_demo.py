"""What the demo sends and how it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attainment import Targets
from benchmarks.demo import Load, main, overlay, parse, policy_names, workload
from benchmarks.driver import drive
from benchmarks.workload import PlannedRequest, WorkloadError

SERVICES = ["intelligent-triage", "pre-assessment", "analysis-assistant", "record-generation"]


def test_every_policy_gets_the_same_requests() -> None:
    """One seed is one workload; all services are in it, short and long prompts both."""
    requests = workload(SERVICES, rate=4, seconds=60, seed=5)
    assert requests == workload(SERVICES, rate=4, seconds=60, seed=5)
    assert requests != workload(SERVICES, rate=4, seconds=60, seed=6)
    assert {request.service for request in requests} == set(SERVICES)
    lengths = [len(request.messages[-1]["content"].split()) for request in requests]
    assert min(lengths) < 100
    assert max(lengths) > 250
    assert 0.1 < sum(length > 200 for length in lengths) / len(lengths) < 0.5


def test_a_policy_may_carry_a_budget() -> None:
    """``fcfs@64`` runs with 64 tokens a step; without a number the file's own budget stays."""
    assert overlay("fcfs@64")["max_num_batched_tokens"] == 64
    assert overlay("fcfs@64")["admission"]["inflight_per_replica"] > 100
    assert overlay("fcfs@64")["scheduler"] == {"policy": "fcfs"}
    assert "max_num_batched_tokens" not in overlay("halo-paper")


@pytest.mark.parametrize("text", ["", ",", "fcfs,fcfs", "fcfs@", "fcfs@0", "fcfs@x", "a b", "FCFS;rm"])
def test_senseless_policy_lists_are_refused(text: str) -> None:
    """Before a server is started for nothing."""
    with pytest.raises(SystemExit):
        parse(["--policies", text])
    assert policy_names("fcfs, fcfs@64 ,halo-paper") == ["fcfs", "fcfs@64", "halo-paper"]


def test_a_bad_configuration_ends_the_demo_with_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 and the reason, no traceback."""
    assert main(["--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_requests_to_a_service_without_targets_are_refused_before_sending() -> None:
    """They could not be judged."""
    request = PlannedRequest(0, "unknown", ({"role": "user", "content": "?"},), 1)
    with pytest.raises(WorkloadError, match="unknown"):
        drive(None, [request], {"a": Targets(1, 1)})  # type: ignore[arg-type]


def test_without_a_rate_the_first_warm_up_decides_for_all_policies() -> None:
    """The rate that keeps 16 under way; a slower second server is sent the same requests. A given rate stays."""
    load = Load(SERVICES, None, seconds=30, seed=3)
    first = load.requests(burst_s=5.0)
    assert load.rate == 3.2
    assert load.requests(burst_s=20.0) == first
    fixed = Load(SERVICES, 2.0, seconds=30, seed=3)
    fixed.requests(burst_s=0.5)
    assert fixed.rate == 2.0


def test_the_warm_up_sends_its_requests_at_once_and_none_of_the_load() -> None:
    """Sixteen streams together; prompts of the load itself would be found in the prefix cache."""
    load = Load(SERVICES, 2.0, seconds=30, seed=3)
    warm_up = load.burst()
    assert len(warm_up) == 16
    assert {request.at_us for request in warm_up} == {0}
    assert sorted(request.service for request in load.first_of_each()) == sorted(SERVICES)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_rates_and_lengths_have_to_be_above_zero(value: str) -> None:
    """Before a server is started for nothing."""
    with pytest.raises(SystemExit):
        parse(["--rate", value])
    with pytest.raises(SystemExit):
        parse(["--seconds", value])
