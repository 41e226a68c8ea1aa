"""How many requests may hold a place at once (HALO section 5.4).

A request whose TBT target is k times the strictest one joins every k-th step, so it uses 1/k of a place in the batch:
with a strictest target of 50 ms, a request with 100 ms uses 0.5. The sum over all admitted requests stays at or below
the batch size B that meets the strictest target.

The paper gives no arithmetic; this one is exact. All sums are integers over the least common multiple of the targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import lcm
from operator import attrgetter

from scheduling.policy import View

_tbt = attrgetter("tbt_us")


class StrictestTbt:
    """The strictest TBT target: as configured, or without that the strictest of any request seen so far."""

    __slots__ = ("_fixed", "us")

    def __init__(self, configured_us: int | None) -> None:
        self._fixed = configured_us is not None
        self.us = configured_us or 0

    def see(self, view: View) -> int:
        """Look at the requests of ``view`` and return the target in microseconds; 0 while none was seen."""
        if not self._fixed:
            for states in (view.running, view.waiting):
                strictest_us = min(map(_tbt, states), default=self.us)
                if not self.us or strictest_us < self.us:
                    self.us = strictest_us
        return self.us


class CapacityMeter:
    """Counts capacity units of admitted requests: sum of ``tbt_min_us / tbt_us``, at most ``batch``."""

    __slots__ = ("_batch", "_common_us", "_tbt_min_us", "_used")

    def __init__(self, batch: int, tbt_min_us: int, admitted_tbt_us: Iterable[int] = ()) -> None:
        counts = Counter(admitted_tbt_us)
        self._batch = batch
        self._tbt_min_us = tbt_min_us
        self._common_us = lcm(*counts)
        self._used = sum(count * tbt_min_us * (self._common_us // tbt_us) for tbt_us, count in counts.items())

    @property
    def used(self) -> Fraction:
        """Units in use, as an exact fraction of places."""
        return Fraction(self._used, self._common_us)

    def fits(self, tbt_us: int) -> bool:
        """Whether a request with this target can be admitted."""
        used = self._used * tbt_us + self._tbt_min_us * self._common_us
        return used <= self._batch * self._common_us * tbt_us

    def add(self, tbt_us: int) -> None:
        """Count a request as admitted, whether it fits or not."""
        if self._common_us % tbt_us:
            common_us = lcm(self._common_us, tbt_us)
            self._used *= common_us // self._common_us
            self._common_us = common_us
        self._used += self._tbt_min_us * (self._common_us // tbt_us)
