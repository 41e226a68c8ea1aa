"""What a search found, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from partition.configs import Candidate, Config, Measure, SmGeometry, Unsplit
from partition.readings import Readings, Step


class Verdict(StrEnum):
    """How far the choice can be trusted."""

    CLEAR = "clear"
    """It is the fastest that was measured, or within what is worth having of it, beyond the noise."""
    NOISY = "noisy"
    """The noise is too large to tell within the measurements allowed. The safe choice was taken."""
    UNMEASURED = "unmeasured"
    """Running one after the other could not be measured, so nothing can be said to beat it."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """``choice`` for one pair and its mean ``time_us``; ``sequential_us`` and ``dual_stream_us`` to compare with.

    Times are None where nothing was measured. ``path`` holds every measurement in order, ``skipped`` every
    configuration that could not be measured and why. ``pair_measurements`` counts all runs of a pair, repetitions,
    sequential and dual stream included; ``solo_measurements`` the points of the two curves.
    """

    choice: Candidate
    verdict: Verdict
    time_us: float | None
    sequential_us: float | None
    dual_stream_us: float | None
    pair_measurements: int
    solo_measurements: int
    path: tuple[Step, ...]
    skipped: tuple[tuple[Config, str], ...]


Search = Callable[[SmGeometry, Measure], SearchResult]


def result_of(readings: Readings, choice: Candidate, verdict: Verdict) -> SearchResult:
    """The result of a search that took ``choice``."""

    def known_us(candidate: Candidate) -> float | None:
        estimate = readings.of(candidate)
        return None if estimate is None else estimate.time_us

    return SearchResult(
        choice=choice,
        verdict=verdict,
        time_us=known_us(choice),
        sequential_us=known_us(Unsplit.SEQUENTIAL),
        dual_stream_us=known_us(Unsplit.DUAL_STREAM),
        pair_measurements=readings.pair_count,
        solo_measurements=readings.solo_count,
        path=tuple(readings.path),
        skipped=tuple(readings.skipped.items()),
    )


def not_measured(readings: Readings) -> SearchResult:
    """The result where sequential could not be measured: it is used all the same, being what vLLM does."""
    return result_of(readings, Unsplit.SEQUENTIAL, Verdict.UNMEASURED)
