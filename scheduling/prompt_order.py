"""In which order prompts are computed when some can no longer make their TTFT: the savable before the lost.

Plain EDF collapses under overload: the request that is latest goes first, so that every request is late. Here

1. requests whose stream was interrupted by preemption come first,
2. then requests that can still make it, earliest deadline first: now + the time the rest of the prompt takes alone is
   at most arrival + TTFT,
3. then the lost, earliest deadline first, those that already hold KV blocks before those that wait.

The lost would starve as long as the others keep the engine busy. So for every :data:`LOST_SHARE` prompt tokens that
others get while lost requests are there, the lost are owed one; when the debt pays for a chunk of theirs, the lost
request with the earliest deadline goes before the savable ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

from scheduling.request import RequestState

LOST_SHARE = 8
LOST_CHUNK = 64
LOOK_AHEAD = 128

_deadline = attrgetter("deadline_us")
_edf = attrgetter("edf_key")


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
        now_us: int,
        alone_us: Callable[[RequestState], float],
        passed_over: set[int],
    ) -> Iterator[RequestState]:
        """Yield prompts in order.

        ``started`` are unfinished prompts of running requests, ``waiting`` is sorted by deadline, ``alone_us`` gives
        the time the rest of a prompt takes with the engine to itself. Waiting requests with an adapter in
        ``passed_over``, which may grow during the walk, are left out.
        """
        overdue = bisect_left(waiting, now_us, key=_deadline)
        self._waiting_open = True
        resumed = sorted((s for s in chain(started, islice(waiting, overdue)) if s.generated_tokens), key=_edf)
        fresh = sorted((s for s in started if not s.generated_tokens), key=_edf)
        savable = [s for s in fresh if now_us + alone_us(s) <= s.deadline_us]
        lost_started = [s for s in fresh if now_us + alone_us(s) > s.deadline_us]
        overdue_waiting = self._open(islice(waiting, overdue), passed_over)
        lost = chain(lost_started, (s for s in overdue_waiting if not s.generated_tokens))
        self._lost = set()
        self._has_lost = bool(lost_started) or overdue > len(resumed)
        yield from resumed
        owed = next(lost, None) if self._debt > 0 else None
        if owed is not None and self._debt >= min(LOST_CHUNK, owed.prefill_left):
            self._lost.add(owed.request_id)
            yield owed
            owed = None
        late: list[RequestState] = []
        in_time = islice(self._open(islice(waiting, overdue, None), passed_over), LOOK_AHEAD)
        for state in merge(savable, in_time, key=_edf):
            if state.generated_tokens or now_us + alone_us(state) <= state.deadline_us:
                yield state
            else:
                late.append(state)
        self._has_lost = self._has_lost or bool(late)
        for state in chain((owed,) if owed is not None else (), lost, late):
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
