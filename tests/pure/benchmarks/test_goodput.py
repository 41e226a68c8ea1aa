"""How the highest rate is searched and what counts as kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attainment import Observation, Targets
from benchmarks.goodput import Search, judged, parse


@given(st.integers(-20, 20))
def test_the_search_finds_the_last_step_that_holds(last: int) -> None:
    """Wherever it is, in about twice the logarithm of its distance, and no step twice."""
    asked: list[int] = []

    def holds(step: int) -> bool:
        asked.append(step)
        return step <= last

    assert Search(holds).run(lowest=-70, highest=70) == (last, True)
    assert len(asked) == len(set(asked)) <= 12


def test_without_time_the_search_says_that_it_is_not_done() -> None:
    """It always has one probe, and never claims a bracket that it did not see."""
    assert Search(lambda step: True, lambda: True).run() == (0, False)
    assert Search(lambda step: False, lambda: True).run() == (None, False)


def test_rates_out_of_bounds_end_the_search() -> None:
    """A server that keeps everything, or nothing, does not keep the search going."""
    low, bracketed = Search(lambda step: True).run(highest=10)
    assert low is not None
    assert not bracketed
    assert Search(lambda step: False).run(lowest=-10) == (None, False)


def test_a_rate_holds_when_99_of_100_requests_met_both_targets() -> None:
    """One late gap in a hundred requests is allowed, two are not, and a failed request counts as missed."""
    targets = {"a": Targets(1_000_000, 100_000)}

    def seen(gap_us: int, error: str = "") -> Observation:
        return Observation("a", 0, tokens=[(500_000, 1), (500_000 + gap_us, 1)], error=error)

    good, late, failed = seen(90_000), seen(150_000), seen(90_000, "reset")
    assert judged(1.0, [good] * 99 + [late], targets, 0).holds
    assert not judged(1.0, [good] * 98 + [late] * 2, targets, 0).holds
    assert not judged(1.0, [good] * 98 + [late, failed], targets, 0).holds
    assert judged(1.0, [good], targets, 0).p99_ttft_ms == {"a": 500.0}
    assert judged(1.0, [late], targets, 60_000).holds


@pytest.mark.parametrize("arguments", [["--seeds", "1,1"], ["--seeds", "x"], ["--seconds", "0"], ["--policies", ""]])
def test_senseless_options_are_refused(arguments: list[str]) -> None:
    """Before a server is started for nothing."""
    with pytest.raises(SystemExit):
        parse(arguments)
