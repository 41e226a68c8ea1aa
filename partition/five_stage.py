"""The search of the HALO paper, section 4.2.2, as it is written: five stages of feedback.

Kept beside `partition.ranked_pairs` to compare with. Like the paper it looks at splits alone and does not know plain
dual stream; only where its best split does not beat sequential, which it measures once, sequential is the result.
"""

from __future__ import annotations

from collections.abc import Callable

from partition.configs import Layer, Measure, SmGeometry, Split, Unsplit
from partition.curves import Curve, measure_curve
from partition.readings import Readings
from partition.search_result import SearchResult, Verdict, not_measured, result_of

DROP_ALLOWED = 0.10
"""Stage 2: the base layer's performance may drop by less than this from its optimum."""

PAIR_LIMIT = 1000


def five_stage(geometry: SmGeometry, measure: Measure) -> SearchResult:
    """The paper's search. One measurement per configuration; improvements are taken as they are read."""
    readings = Readings(measure, PAIR_LIMIT)
    base = measure_curve(readings, Layer.BASE, geometry)  # stage 1
    lora = measure_curve(readings, Layer.LORA, geometry)
    if not readings.add(Unsplit.SEQUENTIAL):
        return not_measured(readings)
    start = _start(base, lora, geometry)
    if start is None or readings.time_us(start) is None:
        return result_of(readings, Unsplit.SEQUENTIAL, Verdict.CLEAR)
    step = geometry.granularity

    def climb(split: Split, change: Callable[[Split, int], Split]) -> Split:
        return _climb(readings, geometry, split, change, step)

    split = climb(start, lambda now, by: Split(now.base_sms, now.lora_sms + by))  # stage 4
    split = climb(split, lambda now, by: Split(now.base_sms + by, now.lora_sms))  # stage 5
    best = readings.best((split, Unsplit.SEQUENTIAL))
    assert best is not None
    return result_of(readings, Unsplit.SEQUENTIAL if best[0] is Unsplit.SEQUENTIAL else split, Verdict.CLEAR)


def _start(base: Curve, lora: Curve, geometry: SmGeometry) -> Split | None:
    """Stages 2 and 3: the base layer at its last spike, and the smallest LoRA share that keeps up with it.

    Where no share that is left keeps up, the largest; None where nothing is left.
    """
    if not base.times_us:
        return None
    slowest_us = min(base.times_us) / (1 - DROP_ALLOWED)
    base_sms = next(sms for sms, time_us in zip(base.sms, base.times_us, strict=True) if time_us <= slowest_us)
    left = [sms for sms in lora.sms if geometry.fits(Split(base_sms, sms))]
    if not left:
        return None
    return Split(base_sms, next((sms for sms in left if lora.at(sms) <= base.at(base_sms)), left[-1]))


def _climb(
    readings: Readings, geometry: SmGeometry, start: Split, change: Callable[[Split, int], Split], step: int
) -> Split:
    """Grow one share while the pair gets faster; when it never did, shrink it while the pair gets faster."""
    grown = _follow(readings, geometry, start, change, step)
    return grown if grown != start else _follow(readings, geometry, start, change, -step)


def _follow(
    readings: Readings, geometry: SmGeometry, split: Split, change: Callable[[Split, int], Split], by: int
) -> Split:
    time_us = readings.time_us(split)
    while time_us is not None:
        following = change(split, by)
        if min(following.base_sms, following.lora_sms) < geometry.sizes[0] or not geometry.fits(following):
            break
        following_us = readings.time_us(following)
        if following_us is None or following_us >= time_us:
            break
        split, time_us = following, following_us
    return split
