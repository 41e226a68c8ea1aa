"""How fast the cluster finishes requests, from what was seen lately."""

from __future__ import annotations

from collections import deque


class DrainRate:
    """How many requests a second the cluster has been finishing, from the times of the last ``window`` releases."""

    def __init__(self, window: int = 64) -> None:
        self._times_us: deque[int] = deque(maxlen=window)

    def count(self, now_us: int) -> None:
        """A request gave its replica back."""
        self._times_us.append(now_us)

    def per_second(self, now_us: int) -> float | None:
        """Releases a second, falling while none comes; None before there is anything to go by."""
        if len(self._times_us) < 4:
            return None
        span_us = now_us - self._times_us[0]
        return len(self._times_us) * 1e6 / span_us if span_us > 0 else None
