"""A piecewise linear function of a whole number, from measured points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


class Curve:
    """Microseconds over a count, linear between ``points`` and beyond the last one; through the first one before it.

    ``points`` are (count, microseconds) with rising counts. Raises ValueError, naming ``name``, if they are not.
    """

    def __init__(self, points: Sequence[tuple[float, float]], name: str = "curve") -> None:
        counts = [float(count) for count, _ in points]
        if not points or any(b <= a for a, b in pairwise(counts)):
            raise ValueError(f"{name}: needs points with rising counts, got {counts[:8]}")
        values = [float(value) for _, value in points]
        if any(not 0 <= value < float("inf") for value in values):
            raise ValueError(f"{name}: has a time below 0 or none at all")
        self.points = tuple(zip(counts, values, strict=True))
        self._counts = counts
        self._values = values
        self._slopes = [(values[i + 1] - values[i]) / (counts[i + 1] - counts[i]) for i in range(len(counts) - 1)] or [
            0.0
        ]

    def __call__(self, count: float) -> float:
        """The value at ``count``."""
        if count <= self._counts[0]:
            return self._values[0]
        piece = min(bisect_right(self._counts, count), len(self._slopes)) - 1
        return self._values[piece] + self._slopes[piece] * (count - self._counts[piece])

    def scaled(self, factor: float) -> Curve:
        """This curve times ``factor``."""
        return Curve([(count, value * factor) for count, value in self.points])

    def plus(self, other: Curve) -> Curve:
        """The sum of two curves."""
        counts = sorted({count for count, _ in self.points} | {count for count, _ in other.points})
        return Curve([(count, self(count) + other(count)) for count in counts])


def lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the largest convex function at or below ``points``, which are sorted by count."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
