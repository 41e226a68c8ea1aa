"""An upper quantile of the newest values of a stream."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from math import ceil


class SlidingQuantile:
    """The ``quantile`` of the newest ``window`` values; one insertion and one removal per value."""

    def __init__(self, quantile: float, window: int) -> None:
        self._quantile = quantile
        self._window = window
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._newest)

    def push(self, value: float) -> None:
        """Add a value; the oldest one leaves when the window is full."""
        if len(self._newest) == self._window:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(value)
        insort(self._ordered, value)

    def extend(self, values: Iterable[float]) -> None:
        """Add values, oldest first."""
        for value in values:
            self.push(value)

    def value(self) -> float | None:
        """The smallest value with at least the share ``quantile`` of n + 1 at or below it, as in conformal prediction.

        With too few values for that, the largest; None without any.
        """
        count = len(self._ordered)
        if not count:
            return None
        return self._ordered[min(count, ceil(self._quantile * (count + 1))) - 1]

    def newest(self) -> list[float]:
        """The values in the window, oldest first."""
        return list(self._newest)
