"""Every way to run a pair, measured once: hours on a GPU (paper, Equation 1), the yardstick on an analytic one."""

from __future__ import annotations

from collections.abc import Iterable

from partition.analytic_device import AnalyticPair
from partition.configs import Candidate, Layer, Measure, SmGeometry, Solo, Unsplit
from partition.readings import Readings
from partition.search_result import SearchResult, Verdict, not_measured, result_of


def exhaustive(geometry: SmGeometry, measure: Measure) -> SearchResult:
    """The fastest reading among all splits, sequential and plain dual stream."""
    candidates: tuple[Candidate, ...] = (*Unsplit, *geometry.splits)
    readings = Readings(measure, len(candidates))
    for candidate in candidates:
        readings.add(candidate)
    best = readings.best(candidates)
    if best is None or readings.of(Unsplit.SEQUENTIAL) is None:
        return not_measured(readings)
    return result_of(readings, best[0], Verdict.CLEAR)


def optimum_us(pair: AnalyticPair, unsplit: Iterable[Unsplit] = tuple(Unsplit)) -> float:
    """The time of the best of ``unsplit`` and all splits, without noise: what `exhaustive` finds, sooner.

    A split never takes less than its longer half alone, so splits are tried in that order until none can win.
    """
    best_us = min(pair.time_us(candidate) for candidate in unsplit)
    solo_us = {Solo(layer, sms): pair.time_us(Solo(layer, sms)) for layer in Layer for sms in pair.geometry.sizes}
    bounds = sorted(
        (max(solo_us[Solo(Layer.BASE, split.base_sms)], solo_us[Solo(Layer.LORA, split.lora_sms)]), split)
        for split in pair.geometry.splits
    )
    for bound_us, split in bounds:
        if bound_us >= best_us:
            break
        best_us = min(best_us, pair.time_us(split))
    return best_us
