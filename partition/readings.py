"""Measurements of one pair: repeated, averaged, counted, and skipped with a reason where they fail."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from partition.configs import Config, Measure, MeasurementError, Solo

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the readings of one configuration say: the mean and its standard error, in microseconds."""

    time_us: float
    error_us: float
    readings: int


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement in the order they were made; ``time_us`` is that reading alone."""

    config: Config
    time_us: float


class Readings:
    """Measures through ``measure`` and remembers everything; a configuration that failed is not tried again.

    ``pair_limit`` bounds the measurements of pairs: beyond it `add` refuses, whatever noise would ask for.
    """

    def __init__(self, measure: Measure, pair_limit: int) -> None:
        self._measure, self._pair_limit = measure, pair_limit
        self._times: dict[Config, list[float]] = {}
        self._spreads: dict[Config, float] = {}
        self.skipped: dict[Config, str] = {}
        self.path: list[Step] = []
        self.solo_count = self.pair_count = 0

    def add(self, config: Config) -> bool:
        """Measure ``config`` once more; False when it failed, failed before, or the limit is reached."""
        if config in self.skipped:
            return False
        if isinstance(config, Solo):
            self.solo_count += 1
        elif self.pair_count >= self._pair_limit:
            return False
        else:
            self.pair_count += 1
        try:
            reading = self._measure(config)
        except MeasurementError as error:
            self._skip(config, str(error))
            return False
        if not (math.isfinite(reading.time_us) and reading.time_us > 0):
            self._skip(config, f"the device reported {reading.time_us} us")
            return False
        if not (math.isfinite(reading.spread) and reading.spread >= 0):
            self._skip(config, f"the device stated a spread of {reading.spread}")
            return False
        self._times.setdefault(config, []).append(reading.time_us)
        self._spreads[config] = max(reading.spread, self._spreads.get(config, 0.0))
        self.path.append(Step(config, reading.time_us))
        return True

    def _skip(self, config: Config, reason: str) -> None:
        """A configuration that failed once is not trusted: its earlier readings go as well."""
        self.skipped[config] = reason
        self._times.pop(config, None)

    def of(self, config: Config) -> Estimate | None:
        """What is known of ``config``, or None."""
        times = self._times.get(config)
        if not times:
            return None
        mean = math.fsum(times) / len(times)
        error = self._spreads[config] * mean / math.sqrt(len(times))
        return Estimate(mean, max(error, self._scatter_us(times, mean)), len(times))

    @staticmethod
    def _scatter_us(times: list[float], mean: float) -> float:
        """The standard error by the readings' own scatter: a device may understate its spread (from three on)."""
        if len(times) < 3:
            return 0.0
        variance = math.fsum((time - mean) ** 2 for time in times) / (len(times) - 1)
        return math.sqrt(variance / len(times))

    def time_us(self, config: Config) -> float | None:
        """The mean time of ``config``, measured now if it was not yet; None when that failed."""
        if config not in self._times and not self.add(config):
            return None
        known = self.of(config)
        return known.time_us if known is not None else None

    def best(self, configs: Iterable[ConfigT]) -> tuple[ConfigT, Estimate] | None:
        """The fastest of ``configs`` that were measured."""
        known = [(config, estimate) for config in configs if (estimate := self.of(config)) is not None]
        return min(known, key=lambda entry: entry[1].time_us) if known else None
