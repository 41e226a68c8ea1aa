"""The two solo curves of a pair: time against SMs, smoothed, and their knees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partition.configs import Layer, SmGeometry, Solo
from partition.readings import Readings


@dataclass(frozen=True, slots=True)
class Curve:
    """Time of one half alone for the partition sizes that could be measured, ascending in ``sms``."""

    sms: tuple[int, ...]
    times_us: tuple[float, ...]

    def at(self, sms: int) -> float:
        """The time on ``sms`` SMs, which must be one of the curve's."""
        return self.times_us[self.sms.index(sms)]

    def smoothed(self) -> Curve:
        """The curve without what noise adds: more SMs never take longer (isotonic regression, in logarithms).

        A plateau of a curve is where waves stay the same, so averaging it away is what is wanted.
        """
        return Curve(self.sms, tuple(math.exp(value) for value in _falling([math.log(t) for t in self.times_us])))

    def knees(self, gain: float) -> tuple[int, ...]:
        """Sizes that beat every smaller one by more than ``gain`` (a share), the smallest size included."""
        found: list[int] = []
        best_us = math.inf
        for sms, time_us in zip(self.sms, self.times_us, strict=True):
            if time_us < best_us * (1 - gain):
                found.append(sms)
                best_us = time_us
        return tuple(found)


def measure_curve(readings: Readings, layer: Layer, geometry: SmGeometry) -> Curve:
    """Measure ``layer`` alone on every size; sizes that fail are left out."""
    points = [(sms, readings.time_us(Solo(layer, sms))) for sms in geometry.sizes]
    known = [(sms, time_us) for sms, time_us in points if time_us is not None]
    return Curve(tuple(sms for sms, _ in known), tuple(time_us for _, time_us in known))


def _falling(values: Sequence[float]) -> list[float]:
    """The non-increasing sequence closest to ``values`` in squares: pool adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] < total / count:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
