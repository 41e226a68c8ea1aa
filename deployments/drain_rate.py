"""How fast the cluster finishes requests while it is full."""

from __future__ import annotations

from collections import deque


class DrainRate:
    """Releases a second over the last ``window`` releases, on a clock that runs only while requests have to wait.

    Idle time says nothing about how fast a full cluster drains: counted in, an hour without requests would make the
    next short queue look hopeless. A stall while requests wait does count, and lowers the rate.
    """

    def __init__(self, window: int = 64) -> None:
        self._times_us: deque[int] = deque(maxlen=window)
        self._full = False
        self._full_us = 0
        self._seen_us = 0

    def note(self, full: bool, now_us: int) -> None:
        """Whether a further request would have to wait from now on."""
        self._advance(now_us)
        if full and not self._full and not self._times_us:
            self._times_us.append(self._full_us)
        self._full = full

    def count(self, now_us: int) -> None:
        """A request gave its replica back."""
        self._advance(now_us)
        if self._full:
            self._times_us.append(self._full_us)

    def per_second(self, now_us: int) -> float | None:
        """Releases a second while full; None before there is anything to go by."""
        self._advance(now_us)
        if len(self._times_us) < 4:
            return None
        span_us = self._full_us - self._times_us[0]
        return (len(self._times_us) - 1) * 1e6 / span_us if span_us > 0 else None

    def _advance(self, now_us: int) -> None:
        if self._full:
            self._full_us += now_us - self._seen_us
        self._seen_us = now_us
