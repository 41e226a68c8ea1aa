"""The default search: rank the pairs of knees of the two solo curves, measure a handful, repeat what noise hides.

The paper's search (`partition.five_stage`) climbs in steps of one granule and stops on the plateaus that waves make.
Only sizes at which a curve falls are worth having, and which two of them to join is predicted well enough by the two
curves; so few pairs have to be measured. Sequential and plain dual stream are always among the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from partition.configs import Candidate, Layer, Measure, SmGeometry, Split, Unsplit
from partition.curves import measure_curve
from partition.readings import Estimate, Readings
from partition.search_result import SearchResult, Verdict, not_measured, result_of


@dataclass(frozen=True, slots=True)
class RankedPairsOptions:
    """How the search spends its measurements.

    ``knee_gain``: what a size must gain over every smaller one to be a knee. ``overlap_cost``: the share of the shorter
    half that a pair is predicted to take beyond the longer one. ``splits_max``: different splits measured.
    ``indifferent``: a difference not worth telling apart. ``confidence``: standard errors between the best and every
    other candidate, after that allowance, before the search is content. ``pair_limit``: runs of a pair in all.
    """

    knee_gain: float = 0.003
    overlap_cost: float = 0.3
    splits_max: int = 6
    indifferent: float = 0.006
    confidence: float = 1.6
    pair_limit: int = 24


DEFAULTS = RankedPairsOptions()


def ranked_pairs(geometry: SmGeometry, measure: Measure, options: RankedPairsOptions = DEFAULTS) -> SearchResult:
    """The fastest way to run one pair on a GPU of ``geometry``, found with few runs of it."""
    readings = Readings(measure, options.pair_limit)
    predicted = _predictions(readings, geometry, options)
    if not readings.add(Unsplit.SEQUENTIAL):
        return not_measured(readings)
    readings.add(Unsplit.DUAL_STREAM)
    measured = list(_measure_splits(readings, predicted, geometry, options))
    candidates = [candidate for candidate in (*Unsplit, *measured) if readings.of(candidate) is not None]
    return _settle(readings, candidates, options)


def _predictions(readings: Readings, geometry: SmGeometry, options: RankedPairsOptions) -> dict[Split, float]:
    """The predicted time of every pair of knees that fits, fastest first; microseconds without fork and join."""
    base = measure_curve(readings, Layer.BASE, geometry).smoothed()
    lora = measure_curve(readings, Layer.LORA, geometry).smoothed()
    predicted = {}
    for base_sms in base.knees(options.knee_gain):
        for lora_sms in lora.knees(options.knee_gain):
            split = Split(base_sms, lora_sms)
            if geometry.fits(split):
                shorter_us, longer_us = sorted((base.at(base_sms), lora.at(lora_sms)))
                predicted[split] = longer_us + options.overlap_cost * shorter_us
    return dict(sorted(predicted.items(), key=lambda entry: (entry[1], entry[0])))


def _measure_splits(
    readings: Readings, predicted: dict[Split, float], geometry: SmGeometry, options: RankedPairsOptions
) -> Iterator[Split]:
    """Measure splits in their predicted order until the next is predicted to lose.

    Measured splits correct the prediction: what they took over what was predicted. A neighbour of a measured split
    tells nothing new and is skipped.
    """
    apart = max(geometry.sms // 50, 1)
    done: list[Split] = []
    ratios: list[float] = []
    best = readings.best(Unsplit)
    assert best is not None, "sequential was measured"
    best_us = best[1].time_us
    for split, predicted_us in predicted.items():
        if len(ratios) == options.splits_max:
            return
        if any(_near(split, other, apart) for other in done):
            continue
        # One split may have been measured too slow by chance: alone it must not end the search.
        scale = median(ratios) if len(ratios) > 1 else min([1.0, *ratios])
        if predicted_us * scale >= best_us:
            return
        time_us = readings.time_us(split)
        if time_us is None:  # failed: its neighbours may work, and it must not use up the search
            continue
        done.append(split)
        ratios.append(time_us / predicted_us)
        best_us = min(best_us, time_us)
        yield split


def _near(split: Split, other: Split, apart: int) -> bool:
    return abs(split.base_sms - other.base_sms) <= apart and abs(split.lora_sms - other.lora_sms) <= apart


def _settle(readings: Readings, candidates: Sequence[Candidate], options: RankedPairsOptions) -> SearchResult:
    """Repeat the best and its rivals until the noise can no longer hide a better one, or say that it does."""
    while True:
        left = [candidate for candidate in candidates if candidate not in readings.skipped]
        found = readings.best(left)
        if found is None or Unsplit.SEQUENTIAL not in left:
            return not_measured(readings)
        choice, estimate = found
        rivals = sorted(
            (distance, str(rival), rival)
            for rival in left
            if rival != choice and (distance := _distance(readings.of(rival), estimate, options)) < options.confidence
        )
        if not rivals:
            return result_of(readings, choice, Verdict.CLEAR)
        rival = rivals[0][2]
        other = readings.of(rival)
        assert other is not None
        repeated = rival if other.error_us >= estimate.error_us else choice
        if not readings.add(repeated) and repeated not in readings.skipped:
            # The limit is reached. What may not win against sequential is not used.
            unsafe = any(rival is Unsplit.SEQUENTIAL for _, _, rival in rivals)
            return result_of(readings, Unsplit.SEQUENTIAL if unsafe else choice, Verdict.NOISY)


def _distance(rival: Estimate | None, best: Estimate, options: RankedPairsOptions) -> float:
    """How many standard errors ``rival`` lies above ``best``, a difference not worth having granted to it."""
    assert rival is not None
    ahead_us = rival.time_us - best.time_us + options.indifferent * best.time_us
    error_us = (rival.error_us**2 + best.error_us**2) ** 0.5
    return ahead_us / error_us if error_us else float("inf")
