"""How durations are written in cluster.yaml: a number and a unit, ``500ms``, ``0.5s`` or ``2min``.

A bare number is refused. Elsewhere ``500`` has been read as milliseconds by one program and as seconds by the next,
and a promise that is wrong by a factor of a thousand looks plausible for a long time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal

UNITS_US = {"ms": 1_000, "s": 1_000_000, "min": 60_000_000}

_DURATION = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?) ?(?P<unit>ms|s|min)")
_NUMBER_WITH_LETTERS = re.compile(r"(?P<number>[0-9.]+) ?(?P<unit>[A-Za-zµμ]+)")


def parse_duration(value: object) -> int:
    """Return ``value`` in whole microseconds. Raises ValueError, which says how to write what was probably meant."""
    if isinstance(value, bool) or value is None or not isinstance(value, str | int | float):
        raise ValueError("is not a duration; write a number and a unit, like 500ms, 0.5s or 2min")
    if not isinstance(value, str):
        raise ValueError(_bare_number(float(value)))
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(_unreadable(value.strip()))
    duration_us = int(Decimal(match["number"]) * UNITS_US[match["unit"]])
    if duration_us <= 0:
        raise ValueError("must be longer than zero")
    return duration_us


def format_duration(duration_us: int) -> str:
    """The shortest exact way to write a duration; :func:`parse_duration` reads it back to the same value."""
    for unit in ("min", "s"):
        if duration_us % UNITS_US[unit] == 0:
            return f"{duration_us // UNITS_US[unit]}{unit}"
    return f"{Decimal(duration_us) / 1000:f}ms"


def between(lowest: str, highest: str) -> Callable[[int], int]:
    """A check that a duration lies within two others, both included."""
    lowest_us, highest_us = parse_duration(lowest), parse_duration(highest)

    def check(duration_us: int) -> int:
        if not lowest_us <= duration_us <= highest_us:
            raise ValueError(f"is {format_duration(duration_us)}; it must be between {lowest} and {highest}")
        return duration_us

    return check


def _bare_number(number: float) -> str:
    if not math.isfinite(number):
        return "is not a duration; write a number and a unit, like 500ms or 0.5s"
    if number <= 0:
        return "must be longer than zero, with a unit, like 500ms or 0.5s"
    return f"has no unit; write {number:.12g}ms if milliseconds are meant, {number:.12g}s if seconds"


def _unreadable(text: str) -> str:
    try:
        return _bare_number(float(text))
    except ValueError:
        pass
    match = _NUMBER_WITH_LETTERS.fullmatch(text)
    if match is None:
        return "is not a duration; write a number and a unit, like 500ms, 0.5s or 2min"
    if match["unit"] == "m":
        number = match["number"]
        return f"could mean minutes or milliseconds; write {number}min or {number}ms"
    return f"has the unit {match['unit']!r}; the units are {', '.join(UNITS_US)}"
