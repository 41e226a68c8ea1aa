"""One reading of durations: a number and a unit."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.durations import between, format_duration, parse_duration

BOTH = "has no unit; write {0}ms if milliseconds are meant, {0}s if seconds"
NONSENSE = "is not a duration; write a number and a unit, like 500ms"


@pytest.mark.parametrize(
    ("written", "duration_us"),
    [
        ("500ms", 500_000),
        ("0.5s", 500_000),
        ("2s", 2_000_000),
        ("2 s", 2_000_000),
        ("5min", 300_000_000),
        ("0.001ms", 1),
        (" 50ms ", 50_000),
    ],
)
def test_readable(written: str, duration_us: int) -> None:
    """A number with ms, s or min is exact in microseconds."""
    assert parse_duration(written) == duration_us


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (500, BOTH.format(500)),
        (0.5, BOTH.format("0.5")),
        ("500", BOTH.format(500)),
        ("1e3", BOTH.format(1000)),
        (1e3, BOTH.format(1000)),
        (0, "must be longer than zero, with a unit, like 500ms or 0.5s"),
        (-1, "must be longer than zero, with a unit, like 500ms or 0.5s"),
        ("0ms", "must be longer than zero"),
        ("0.0001ms", "must be longer than zero"),
        (math.nan, NONSENSE + " or 0.5s"),
        (math.inf, NONSENSE + " or 0.5s"),
        ("nan", NONSENSE + " or 0.5s"),
        ("5m", "could mean minutes or milliseconds; write 5min or 5ms"),
        ("5 hours", "has the unit 'hours'; the units are ms, s, min"),
        ("5us", "has the unit 'us'; the units are ms, s, min"),
        ("-5ms", NONSENSE + ", 0.5s or 2min"),
        ("1e3ms", NONSENSE + ", 0.5s or 2min"),
        ("1,5s", NONSENSE + ", 0.5s or 2min"),
        ("\u0665s", NONSENSE + ", 0.5s or 2min"),
        ("", NONSENSE + ", 0.5s or 2min"),
        (None, NONSENSE + ", 0.5s or 2min"),
        (True, NONSENSE + ", 0.5s or 2min"),
        (["2s"], NONSENSE + ", 0.5s or 2min"),
    ],
)
def test_refused(written: object, message: str) -> None:
    """What has no unit, or two readings, is refused, and the message shows how to write it."""
    with pytest.raises(ValueError, match=r".+") as caught:
        parse_duration(written)
    assert str(caught.value) == message


@given(st.integers(min_value=1, max_value=10**12))
def test_round_trip(duration_us: int) -> None:
    """Every duration is written so that it is read back to the microsecond."""
    assert parse_duration(format_duration(duration_us)) == duration_us


@given(st.decimals(min_value=Decimal("0.001"), max_value=10**6, places=3))
def test_units_agree(seconds: Decimal) -> None:
    """The same duration in seconds and in milliseconds is the same number."""
    assert parse_duration(f"{seconds:f}s") == parse_duration(f"{seconds * 1000:f}ms")


def test_bounds() -> None:
    """Bounds are part of what is allowed, and the message names them as they were written."""
    check = between("1ms", "1min")
    assert [check(1_000), check(60_000_000)] == [1_000, 60_000_000]
    with pytest.raises(ValueError, match="is 2min; it must be between 1ms and 1min"):
        check(120_000_000)
