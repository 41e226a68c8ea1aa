"""The judgement of requests against promises, on timelines small enough to check by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attainment import Observation, Targets, quantile_ms, report, summarise

MS = 1000
STRICT = Targets(ttft_us=100 * MS, tbt_us=50 * MS)


def seen(*times_ms: float, planned_ms: int = 0, error: str = "", service: str = "s") -> Observation:
    """A request whose tokens came one by one at ``times_ms``."""
    tokens = [(round(at * MS), 1) for at in times_ms]
    return Observation(service, planned_ms * MS, planned_ms * MS, 200, tokens, ended_us=1, error=error)


def test_everything_exactly_on_time_is_met() -> None:
    """A target is the latest time that still counts."""
    verdict = seen(1100, 1150, 1200, planned_ms=1000).judge(STRICT)
    assert (verdict.ttft_met, verdict.tbt_met, verdict.deadlines_met) == (True, True, True)
    assert verdict.ttft_us == 100 * MS
    assert list(verdict.gaps_us) == [50 * MS, 50 * MS]


@pytest.mark.parametrize(
    ("times_ms", "met"),
    [
        ((100.001, 120), (False, True, True)),  # first token late; the next is due at 150
        ((10, 60.001), (True, False, True)),  # a late gap, yet before its deadline of 150
        ((100, 150, 200.001), (True, False, False)),  # late by both measures
        ((100, 150, 199, 249.5), (True, False, True)),  # the gap of 50.5 counts even after an early token
        ((101,), (False, True, False)),  # one token: no gap to miss, its deadline is TTFT
    ],
)
def test_gap_form_and_deadline_form(times_ms: tuple[float, ...], met: tuple[bool, bool, bool]) -> None:
    """Both are reported because they differ."""
    verdict = seen(*times_ms).judge(STRICT)
    expected_deadlines = all(at <= 100 + 50 * i for i, at in enumerate(times_ms))
    assert (verdict.ttft_met, verdict.tbt_met) == met[:2]
    assert verdict.deadlines_met is expected_deadlines


def test_a_message_with_several_tokens_has_gaps_of_zero() -> None:
    """Three tokens in one message are three tokens: two gaps of 0 and one deadline each."""
    observation = Observation("s", 0, 0, 200, [(10 * MS, 1), (60 * MS, 3)])
    assert list(observation.judge(STRICT).gaps_us) == [50 * MS, 0, 0]


def test_a_failed_request_met_nothing() -> None:
    """Also when all that came before the failure was on time; what was measured still counts as measured."""
    failed = seen(10, 20, error="StreamError").judge(STRICT)
    assert (failed.complete, failed.ttft_met, failed.tbt_met, failed.deadlines_met) == (False, False, False, False)
    assert failed.ttft_us == 10 * MS
    silent = seen().judge(STRICT)
    assert (silent.complete, silent.ttft_met, silent.ttft_us) == (False, False, None)


def test_tolerance_widens_gaps_but_not_the_first_token() -> None:
    """It is for jitter between tokens; TTFT stands as promised."""
    verdict = seen(100.001, 155).judge(STRICT, tolerance_us=5 * MS)
    assert (verdict.ttft_met, verdict.tbt_met, verdict.deadlines_met) == (False, True, False)
    assert seen(100, 154.9).judge(STRICT, tolerance_us=5 * MS).deadlines_met


def test_report_of_two_services() -> None:
    """Counts, shares, quantiles and goodput of a run of ten seconds, worked out by hand."""
    observations = [
        seen(50, 90, 130, service="a"),  # gaps 40, 40: all met
        seen(150, 190, service="a"),  # TTFT missed
        seen(50, 110, service="a"),  # gap 60 missed, TTFT met
        seen(20, error="cut", service="a"),
        seen(5000, planned_ms=4800, service="b"),
    ]
    reports = report(observations, {"a": STRICT, "b": Targets(200 * MS, 50 * MS)}, seconds=10)
    a = reports["a"]
    assert (a.requests, a.failed, a.tokens) == (4, 1, 3 + 2 + 2 + 1)
    assert (a.ttft_met, a.tbt_met, a.both_met) == (2 / 4, 2 / 4, 1 / 4)
    assert a.gaps_met == 3 / 4
    assert a.deadlines_met == 2 / 4
    assert (a.ttft_p50_ms, a.ttft_p99_ms) == (50, 150)
    assert (a.tbt_p50_ms, a.tbt_p99_ms, a.tbt_max_ms) == (40, 60, 60)
    assert a.goodput_rps == 0.1
    b = reports["b"]
    assert (b.ttft_met, b.tbt_met, b.gaps_met, b.tbt_p99_ms) == (1, 1, None, None)
    assert reports["all"].requests == 5
    assert reports["all"].goodput_rps == 0.2


def test_nothing_is_not_zero() -> None:
    """A service without requests has no attainment rather than 0 or 1."""
    empty = summarise([], seconds=1)
    assert {name for name, value in dataclasses.asdict(empty).items() if value is not None} == {
        "requests", "failed", "tokens", "goodput_rps",
    }  # fmt: skip


@given(st.lists(st.integers(0, 10**9), min_size=1), st.sampled_from([0.5, 0.99, 1.0]))
def test_quantile_is_the_smallest_value_with_that_share_below(values: list[int], q: float) -> None:
    """Nearest rank: an observed value, enough at or below it, too few below it."""
    quantile = quantile_ms(values, q)
    assert quantile is not None
    assert any(value / 1000 == quantile for value in values)
    assert sum(value / 1000 <= quantile for value in values) >= q * len(values) - 1e-9
    assert sum(value / 1000 < quantile for value in values) < q * len(values)
