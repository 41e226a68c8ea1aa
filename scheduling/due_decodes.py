"""Which decodes a step must run, and how long it may take, from deadlines and predicted times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil
from operator import attrgetter

from scheduling.halo_paper import Keyed
from scheduling.request import RequestState

STEP_MAX_US = 250_000
LATE_MAX_US = 1_000_000

_context = attrgetter("computed_tokens")

DecodeTime = Callable[[int, int], float]


def longest_prefix(states: Sequence[RequestState], fits: Callable[[int, int], bool], most: int) -> int:
    """Return how many of ``states``, at most ``most``, still fit; ``fits`` takes their number and summed context."""
    contexts = [0, *accumulate(map(_context, states[:most]))]
    low, high = 0, len(contexts) - 1
    if fits(high, contexts[high]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle, contexts[middle]):
            low = middle
        else:
            high = middle - 1
    return low


class DueDecodes:
    """The decodes of a step, from ``keyed``, as :func:`scheduling.halo_paper.by_deadline` sorts them.

    ``limit_us`` is the step limit T*: until the earliest deadline of those that can still be met, less the margin, and
    at most ``step_max_us``. ``without_slot`` are decodes whose adapters have no slot in this step; they shorten it
    so that the next one is in time for them. ``urgent`` must run in this step and ``rest`` may, both by deadline.
    ``time_us`` gives the time of a decode-only step from the number of decodes and their summed context.
    """

    def __init__(
        self,
        keyed: Sequence[Keyed],
        now_us: int,
        time_us: DecodeTime,
        margin_us: int,
        tbt_min_us: int,
        *,
        step_max_us: int = STEP_MAX_US,
        without_slot: Sequence[Keyed] = (),
    ) -> None:
        self._now_us = now_us
        self._time_us = time_us
        self._keyed = keyed
        self._ordered = [entry[3] for entry in keyed]
        one_us = ceil(time_us(1, self._ordered[0].computed_tokens if keyed else 0))
        self._lost = self._due_before(now_us + one_us)
        slack_us = self._keyed[self._lost][0] - now_us if self._lost < len(keyed) else step_max_us + margin_us
        self.limit_us = max(min(slack_us - margin_us, step_max_us), one_us)
        if without_slot:
            self._leave_time_for(without_slot, one_us, margin_us)
        self.urgent, self.rest = self._choose(tbt_min_us)

    def _leave_time_for(self, without_slot: Sequence[Keyed], one_us: int, margin_us: int) -> None:
        """End in time for the next step to serve decodes whose adapters have no slot in this one, if that can be."""
        next_us = ceil(self._time_of([entry[3] for entry in without_slot]))
        savable = bisect_left(without_slot, (self._now_us + one_us + next_us,))
        if savable < len(without_slot):
            slack_us = without_slot[savable][0] - self._now_us - next_us - margin_us
            self.limit_us = max(min(self.limit_us, slack_us), one_us)

    def _due_before(self, instant_us: int) -> int:
        """Number of decodes with a deadline before ``instant_us``."""
        return bisect_left(self._keyed, (instant_us,))

    def _time_of(self, states: Sequence[RequestState]) -> float:
        return self._time_us(len(states), sum(map(_context, states)))

    def _choose(self, tbt_min_us: int) -> tuple[list[RequestState], list[RequestState]]:
        """Urgent with look-ahead: due before the step that follows this one could have run them."""
        ends_us = self._now_us + self.limit_us
        soon = self._ordered[: self._due_before(ends_us + tbt_min_us)]
        next_step_us = max(ceil(self._time_of(soon)) if soon else 0, tbt_min_us)
        count = self._due_before(ends_us + next_step_us)
        urgent, rest = self._ordered[:count], self._ordered[count:]
        if not urgent or self._time_of(urgent) <= self.limit_us:
            return urgent, rest
        chosen = self._triage(urgent)
        left_out = set(urgent).difference(chosen)
        return chosen, [state for state in urgent if state in left_out] + rest

    def _triage(self, urgent: list[RequestState]) -> list[RequestState]:
        """Choose among more urgent decodes than ``limit_us`` has time for.

        Decodes that are late anyway are left out first, until they are :data:`LATE_MAX_US` late. If the others still
        do not fit, either all run now or those due first run now and the rest in the next step.
        """
        overdue = self._due_before(self._now_us - LATE_MAX_US)
        must, lost, savable = urgent[:overdue], urgent[overdue : self._lost], urgent[self._lost :]
        core = must + savable
        core_us = self._time_of(core)
        if core_us <= self.limit_us:
            return must + self._as_many(core, lost) + savable
        first = must + self._as_many(must, savable)
        if len(first) in {0, len(core)}:
            return core
        second = core[len(first) :]
        first_us = self._time_of(first)
        late_if_all = self._late(savable, core_us)
        late_if_split = self._late(second, first_us + self._time_of(second))
        return first if late_if_split < late_if_all else core

    def _as_many(self, base: list[RequestState], more: list[RequestState]) -> list[RequestState]:
        """The first of ``more`` that fit beside ``base``."""
        count, context = len(base), sum(map(_context, base))
        fits = longest_prefix(more, lambda n, k: self._time_us(count + n, context + k) <= self.limit_us, len(more))
        return more[:fits]

    def _late(self, states: list[RequestState], takes_us: float) -> int:
        return sum(state.deadline_us < self._now_us + takes_us for state in states)
