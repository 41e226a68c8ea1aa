"""One set of step-time coefficients: what was seen, the fit, and how far steps stray from it.

See :mod:`scheduling.latency_model` for what is priced and why.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduling.nnls import solve_nnls
from scheduling.sliding_quantile import SlidingQuantile

CELLS = 512
CELL_STEPS = 32
FADE_STEPS = 4_000
WARM_STEPS = 24
WARM_CELLS = 3
RATIOS = 512
RATIO_CAP = 3.0
REFIT_STEPS = 16
LEVEL_GAIN = 1 / 64


def pieces(x: int, knots: Sequence[int]) -> list[float]:
    """Split ``x`` into the lengths it covers between ``knots``; the last piece has no end."""
    ends = (*knots[1:], None)
    return [max(0.0, (x if end is None else min(x, end)) - start) for start, end in zip(knots, ends, strict=True)]


def _fine(x: int) -> int:
    """Two buckets per power of two."""
    length = x.bit_length()
    return x if length < 2 else 2 * length + (x >> (length - 2) & 1)


def _coarse(x: int) -> int:
    """One bucket per power of four."""
    return (x.bit_length() + 1) // 2


class StepFit:
    """One coefficient set: the cells seen, the coefficients, and the ratios of observed to predicted time.

    ``level`` is how slow the machine is at present against the cells, ``ratio`` the quantile of observed to predicted
    time, ``upper`` their product: a price times ``upper`` is an upper bound in microseconds.
    Rows of features are: constant, linear features (``linear`` of them), pieces of the one piecewise feature.
    """

    def __init__(self, linear: int, knots: Sequence[int], quantile: float) -> None:
        self._linear = linear
        self._knots = tuple(knots)
        size = 1 + linear + len(knots)
        self._features = np.zeros((CELLS, size))
        self._time = np.zeros(CELLS)
        self._count = np.zeros(CELLS)
        self._seen = np.zeros(CELLS)
        self._cells: dict[tuple[int, ...], int] = {}
        self._quantile = quantile
        self._ratios = SlidingQuantile(quantile, RATIOS)
        self._spread = 0.1
        self._to_refit = 0
        self.steps = 0
        self.largest = 0
        self.level = 1.0
        self.ratio = 1.0
        self.upper = 1.0
        self.constant = 0.0
        self.prices: tuple[float, ...] = (0.0,) * linear
        self._slopes: tuple[float, ...] = (0.0,) * len(knots)
        self._bases: tuple[float, ...] = (0.0,) * len(knots)
        self.warm = False

    def piecewise(self, x: int) -> float:
        """Price of ``x`` units of the piecewise feature, in microseconds."""
        piece = bisect_right(self._knots, x) - 1
        return self._bases[piece] + self._slopes[piece] * (x - self._knots[piece])

    def central(self, linear: Sequence[int], x: int) -> float:
        """Predicted time in microseconds."""
        linear_us = sum(price * n for price, n in zip(self.prices, linear, strict=True))
        return self.level * (self.constant + self.piecewise(x) + linear_us)

    def observe(self, linear: Sequence[int], x: int, duration_us: int) -> None:
        """Add a step; refit after every few."""
        seen_us = float(duration_us)
        if self.warm:
            predicted_us = max(1.0, self.central(linear, x))
            ratio = min(RATIO_CAP, seen_us / predicted_us)
            self._ratios.push(ratio)
            self._spread += (abs(ratio - 1.0) - self._spread) / 16
            reach = max(0.1, 4 * self._spread)
            clipped = min(max(ratio, 1 - reach), 1 + reach)
            seen_us = clipped * predicted_us
            self.level *= 1 + LEVEL_GAIN * (clipped - 1)
            self.upper = self.level * self.ratio
        self._add(linear, x, seen_us / self.level)
        self.steps += 1
        self.largest = max(self.largest, x)
        self._to_refit -= 1
        if self._to_refit <= 0:
            self._refit()

    def _add(self, linear: Sequence[int], x: int, seen_us: float) -> None:
        row = np.array((1.0, *linear, *pieces(x, self._knots)))
        key = (*map(_coarse, linear), _fine(x))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._free_cell()
            self._cells[key] = cell
            self._features[cell], self._time[cell], self._count[cell] = row, seen_us, 0.0
        self._count[cell] = min(CELL_STEPS, self._count[cell] + 1)
        gain = 1.0 / self._count[cell]
        self._features[cell] += gain * (row - self._features[cell])
        self._time[cell] += gain * (seen_us - self._time[cell])
        self._seen[cell] = self.steps

    def _free_cell(self) -> int:
        if len(self._cells) < CELLS:
            return len(self._cells)
        oldest = min(self._cells, key=lambda key: self._seen[self._cells[key]])
        return self._cells.pop(oldest)

    def _refit(self) -> None:
        count = len(self._cells)
        self._to_refit = REFIT_STEPS if self.steps >= 4 * REFIT_STEPS else 4
        if self.steps < WARM_STEPS or count < WARM_CELLS:
            return
        time = np.maximum(self._time[:count], 1.0)
        age = self.steps - self._seen[:count]
        weight = np.sqrt(self._count[:count] * np.maximum(0.02, np.exp2(-age / FADE_STEPS)))
        rows = np.vstack((self._features[:count] * (weight / time)[:, None], self._smoothing(float(np.median(time)))))
        target = np.concatenate((weight, np.zeros(len(self._knots) - 1)))
        solution = solve_nnls(rows.T @ rows, rows.T @ target)
        self.constant = float(solution[0])
        self.prices = tuple(map(float, solution[1 : 1 + self._linear]))
        self._slopes = tuple(map(float, solution[1 + self._linear :]))
        widths = np.diff(self._knots)
        self._bases = (0.0, *map(float, np.cumsum(np.asarray(self._slopes[:-1]) * widths)))
        self.warm = True
        self._update_ratio()

    def _smoothing(self, time_us: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Rows that ask neighbouring slopes to agree, as strongly as a small part of one observation."""
        size = len(self._knots)
        rows = np.zeros((size - 1, 1 + self._linear + size))
        for piece, width in enumerate(np.diff(self._knots)):
            rows[piece, 1 + self._linear + piece] = 0.3 * width / time_us
            rows[piece, 2 + self._linear + piece] = -0.3 * width / time_us
        return rows

    def _update_ratio(self) -> None:
        """Few ratios say little about a tail, so below a hundred the margin is at least a tenth."""
        ratio = self._ratios.value()
        floor = 1.0 if len(self._ratios) >= 100 else 1.1
        self.ratio = max(floor, ratio if ratio is not None else floor)
        self.upper = self.level * self.ratio

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as plain JSON values."""
        cells = [
            {
                "key": list(key),
                "features": self._features[cell].tolist(),
                "time_us": float(self._time[cell]),
                "count": float(self._count[cell]),
                "age": float(self.steps - self._seen[cell]),
            }
            for key, cell in self._cells.items()
        ]
        return {
            "knots": list(self._knots),
            "largest": self.largest,
            "level": self.level,
            "cells": cells,
            "ratios": self._ratios.newest(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what :meth:`snapshot` gave; raises ValueError if it is of another form."""
        cells = snapshot["cells"]
        if tuple(snapshot["knots"]) != self._knots or any(len(c["features"]) != self._features.shape[1] for c in cells):
            raise ValueError("the step-time snapshot has other features; delete it and let the engine profile again")
        self.steps = sum(int(cell["count"]) for cell in cells)
        self.largest = int(snapshot["largest"])
        self.level = float(snapshot["level"])
        self._cells = {tuple(cell["key"]): index for index, cell in enumerate(cells[:CELLS])}
        for index, cell in enumerate(cells[:CELLS]):
            self._features[index] = cell["features"]
            self._time[index], self._count[index] = cell["time_us"], cell["count"]
            self._seen[index] = self.steps - cell["age"]
        self._ratios = SlidingQuantile(self._quantile, RATIOS)
        self._ratios.extend(snapshot["ratios"])
        self._refit()
