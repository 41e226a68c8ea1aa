"""The account of kept and broken promises, by hand-checked numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocol import End, Outcome, Promise
from deployments.release_tracker import ReleaseTracker
from deployments.settings import ServiceSettings
from deployments.slo_ledger import Histogram, SloLedger, edges_us, judge, render_text
from scheduling.request import ReleasePolicy

PROMISE = Promise(ttft_us=1_000, tbt_us=100, release=ReleasePolicy.OFF, hold_max_us=0)
SERVICE = ServiceSettings("s", None, PROMISE.ttft_us, PROMISE.tbt_us)


def track(times: list[tuple[int, int]], *, streamed: bool = True, choices: int = 1) -> ReleaseTracker:
    tracker = ReleaseTracker("s", PROMISE, streamed, choices)
    for age_us, tokens in times:
        tracker.released(age_us, tokens)
    return tracker


def test_the_target_is_an_edge() -> None:
    """A time at the target is in the bucket that ends there, one microsecond more is in the next: met and missed."""
    histogram = Histogram(edges_us(1_000))
    place = histogram.edges_us.index(1_000)
    histogram.observe(1_000)
    assert histogram.counts[place] == 1
    histogram.observe(1_001)
    assert histogram.counts[place + 1] == 1
    histogram.observe(10**9)
    assert histogram.counts[-1] == 1


def test_both_forms_by_hand() -> None:
    """Tokens at 900, 990, 1150, 1250: the gap of 160 is late; deadlines 1000, 1100, 1200, 1300 are all kept."""
    outcome = track([(900, 1), (990, 1), (1_150, 1), (1_250, 1)]).outcome(End.COMPLETED)
    assert (outcome.ttft_us, outcome.ttft_met) == (900, True)
    assert (outcome.gaps, outcome.late_gaps, outcome.max_gap_us) == (3, 1, 160)
    assert outcome.late_tokens == 0
    assert judge(outcome) == [("ttft", True), ("tbt", False), ("deadlines", True)]


def test_late_first_token() -> None:
    """First token at 1050 with gaps of 100: TTFT missed, every gap kept, every deadline missed by 50."""
    outcome = track([(1_050 + 100 * i, 1) for i in range(5)]).outcome(End.COMPLETED)
    assert judge(outcome) == [("ttft", False), ("tbt", True), ("deadlines", False)]
    assert outcome.late_tokens == 5


def test_tokens_in_one_piece() -> None:
    """Case M3: tokens that leave together count each: completion_tokens - 1 gaps, zero between them."""
    outcome = track([(900, 1), (1_250, 4), (1_300, 3)]).outcome(End.COMPLETED)
    assert (outcome.tokens, outcome.gaps, outcome.late_gaps) == (8, 7, 1)
    assert sum(outcome.gap_counts) == 7
    # Deadlines of tokens 1..4 are 1100..1400: at 1250 tokens 1 and 2 are late, 3 and 4 are not; 1300 keeps 5..7.
    assert outcome.late_tokens == 2


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5)), min_size=1, max_size=30))
def test_deadline_form_agrees_with_its_definition(steps: list[tuple[int, int]]) -> None:
    """late_tokens counts exactly the i with release(i) > arrival + TTFT + i * TBT."""
    age, times = 500, []
    for wait, tokens in steps:
        age += wait
        times.append((age, tokens))
    released = [at for at, tokens in times for _ in range(tokens)]
    late = sum(at > PROMISE.ttft_us + i * PROMISE.tbt_us for i, at in enumerate(released))
    gaps = [later - earlier for earlier, later in pairwise(released)]
    outcome = track(times).outcome(End.COMPLETED)
    assert outcome.late_tokens == late
    assert outcome.late_gaps == sum(gap > PROMISE.tbt_us for gap in gaps)
    assert outcome.gaps == len(gaps)


@pytest.mark.parametrize(("age_us", "met"), [(1_900, True), (1_901, False)])
def test_whole_response_has_one_deadline(age_us: int, met: bool) -> None:
    """A response of 10 tokens that is not streamed is due at TTFT + 9 TBT; it has no TTFT and no gaps."""
    outcome = track([(age_us, 10)], streamed=False).outcome(End.COMPLETED)
    assert judge(outcome) == [("whole", met)]
    assert (outcome.ttft_us, outcome.gaps, outcome.gap_counts) == (None, 0, ())
    assert judge(track([(age_us, 20)], streamed=False, choices=2).outcome(End.COMPLETED)) == [("whole", met)]


def test_choices_have_their_own_gaps() -> None:
    """Two choices that alternate every 60 have gaps of 120 each, not of 60."""
    tracker = ReleaseTracker("s", PROMISE, True, 2)
    for step in range(6):
        tracker.released(500 + 60 * step, 1, step % 2)
    outcome = tracker.outcome(End.COMPLETED)
    assert (outcome.tokens, outcome.gaps, outcome.late_gaps) == (6, 4, 4)


def test_aborts_do_not_move_the_attainment() -> None:
    """Case M2: five cancelled before and five after the first token: +10 cancelled, +5 TTFT, shares unchanged."""
    ledger = SloLedger([SERVICE])
    ledger.record(track([(900, 1), (990, 1)]).outcome(End.COMPLETED))
    before = ledger.table()["s"]
    for _ in range(5):
        ledger.record(track([]).outcome(End.CANCELLED))
        ledger.record(track([(5_000, 1), (9_000, 1)]).outcome(End.CANCELLED))
    after = ledger.table()["s"]
    assert after["outcomes"]["cancelled"] == 10
    assert sum(after["ttft"]["counts"]) - sum(before["ttft"]["counts"]) == 5
    assert after["requests"] == before["requests"]
    assert after["tokens"]["gaps"] == before["tokens"]["gaps"]
    assert after["tokens"]["deadlines"] == before["tokens"]["deadlines"]


def test_failures_count_as_missed() -> None:
    """A failed request broke what it had not kept: without tokens both targets, with tokens its TBT."""
    assert judge(track([]).outcome(End.FAILED)) == [("ttft", False), ("tbt", False), ("deadlines", False)]
    assert judge(track([(900, 1)]).outcome(End.FAILED)) == [("ttft", True), ("tbt", False), ("deadlines", False)]
    assert judge(Outcome("s", End.SHED)) == []


def test_idle_is_not_a_breach() -> None:
    """Case M3: without requests the shares are null, and the text table shows a dash, never 0 % or NaN."""
    table = SloLedger([SERVICE]).table()
    assert all(kind["attainment"] is None for kind in table["s"]["requests"].values())
    assert "nan" not in render_text(table).lower()
    assert render_text(table).splitlines()[1].count("-") == 4


def test_unknown_service_is_ignored() -> None:
    """An outcome of a service that was configured away does no harm."""
    ledger = SloLedger([SERVICE])
    ledger.record(replace(Outcome("s", End.COMPLETED), service="gone"))
    assert list(ledger.table()) == ["s"]


def test_quantiles_are_upper_edges() -> None:
    """A quantile is the upper edge of its bucket; none in the overflow or without samples."""
    histogram = Histogram(edges_us(1_000))
    assert histogram.quantile_us(0.99) is None
    for value in (100, 240, 260, 990):
        histogram.observe(value)
    assert histogram.quantile_us(0.5) == 250
    assert histogram.quantile_us(1.0) == 1_000
    histogram.observe(10**9)
    assert histogram.quantile_us(1.0) is None
