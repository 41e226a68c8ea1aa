"""In which order prompts are computed when not all can make their TTFT: the savable before the lost.

Plain EDF collapses under overload: the request that is latest goes first, so that every request is late. Here

1. requests whose stream was interrupted by preemption come first,
2. then the savable, earliest deadline first,
3. then the lost, earliest deadline first: those that are overdue, then those given up.

Who is savable is decided anew in each step over the :data:`LOOK_AHEAD` earliest deadlines: prompts are lined up by
deadline at the rate at which the engine computes them now, and whenever one would finish late, the longest so far is
given up. This rule (Moore 1968) makes the fewest late. The paper only says EDF (HALO section 5.4).

The lost would starve as long as the others keep the engine busy. So for every :data:`LOST_SHARE` prompt tokens that
others get while lost requests are there, the lost are owed one; when the debt pays for a chunk of theirs, the first of
the lost goes before the savable ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import chain, islice
from operator import attrgetter

from scheduling.request import RequestState

LOST_SHARE = 8
LOST_CHUNK = 64
LOOK_AHEAD = 128

_deadline = attrgetter("deadline_us")
_edf = attrgetter("edf_key")


def fewest_late(
    prompts: Iterable[RequestState], now_us: int, token_us: float
) -> tuple[list[RequestState], list[RequestState]]:
    """Split ``prompts``, sorted by deadline, into (savable, given up), both sorted by deadline.

    Interrupted streams are never given up.
    """
    kept: list[RequestState] = []
    longest: list[tuple[int, int]] = []
    dropped: set[int] = set()
    finished_us = float(now_us)
    for state in prompts:
        left = state.prompt_tokens - state.computed_tokens
        if not state.generated_tokens:
            heappush(longest, (-left, len(kept)))
        kept.append(state)
        finished_us += left * token_us
        if finished_us > state.deadline_us and longest:
            negative, index = heappop(longest)
            finished_us += negative * token_us
            dropped.add(index)
    if not dropped:
        return kept, []
    return [s for i, s in enumerate(kept) if i not in dropped], [s for i, s in enumerate(kept) if i in dropped]


class PromptOrder:
    """Orders prompts, step after step, and keeps account of what the lost are owed."""

    def __init__(self) -> None:
        self._debt = 0.0
        self._lost: set[str] = set()
        self._has_lost = False
        self._waiting_open = True

    def walk(
        self,
        started: list[RequestState],
        waiting: Sequence[RequestState],
        *,
        now_us: int,
        token_us: float,
        step_us: int,
        passed_over: set[int],
    ) -> Iterator[RequestState]:
        """Yield prompts in order.

        ``started`` are unfinished prompts of running requests, ``waiting`` is sorted by deadline, ``token_us`` is the
        time the engine takes per prompt token at present, ``step_us`` that of a step: a prompt is finished when its
        last step is, half a step after its last token on average. Waiting requests with an adapter in ``passed_over``,
        which may grow during the walk, are left out.
        """
        overdue = bisect_left(waiting, now_us, key=_deadline)
        self._waiting_open = True
        resumed = sorted((s for s in chain(started, islice(waiting, overdue)) if s.generated_tokens), key=_edf)
        fresh = sorted((s for s in started if not s.generated_tokens), key=_edf)
        started_overdue = bisect_left(fresh, now_us, key=_deadline)
        coming = merge(
            fresh[started_overdue:],
            islice(self._open(islice(waiting, overdue, None), passed_over), LOOK_AHEAD),
            key=_edf,
        )
        savable, given_up = fewest_late(coming, now_us + step_us // 2, token_us)
        overdue_waiting = self._open(islice(waiting, overdue), passed_over)
        lost = chain(fresh[:started_overdue], (s for s in overdue_waiting if not s.generated_tokens), given_up)
        self._lost = set()
        self._has_lost = bool(started_overdue or given_up) or overdue > len(resumed)
        yield from resumed
        owed = next(lost, None) if self._debt > 0 else None
        if owed is not None and self._debt >= min(LOST_CHUNK, owed.prefill_left):
            self._lost.add(owed.request_id)
            yield owed
            owed = None
        yield from savable
        for state in chain((owed,) if owed is not None else (), lost):
            self._lost.add(state.request_id)
            yield state

    def _open(self, waiting: Iterator[RequestState], passed_over: set[int]) -> Iterator[RequestState]:
        """Those of ``waiting`` with an adapter that may run, until :meth:`close_waiting`."""
        for state in waiting:
            if not self._waiting_open:
                return
            if state.adapter not in passed_over:
                yield state

    def close_waiting(self) -> None:
        """Yield no further waiting requests in this walk: there is no place for any."""
        self._waiting_open = False

    def account(self, request_id: str, tokens: int) -> None:
        """Hear that a prompt of the last walk got ``tokens``."""
        if request_id in self._lost:
            self._debt = max(0.0, self._debt - tokens)
        elif self._has_lost:
            self._debt += tokens / LOST_SHARE

    def settle(self) -> None:
        """End the step: without lost requests nothing is owed."""
        if not self._has_lost:
            self._debt = 0.0
