"""A waiting queue kept in a policy's own order, updated by what changed since the last step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from scheduling.request import RequestState

_Entry = tuple[int, str, RequestState]


class ArrivalQueues:
    """Waiting requests by arrival, ties by id, in one queue per group.

    ``group`` names the queue of a request; it and the arrival must not change while the request waits. Requests are
    told apart by identity, so finding the changes costs two set differences and sorting costs one insertion per change.
    """

    def __init__(self, group: Callable[[RequestState], str]) -> None:
        self._group = group
        self._known: set[RequestState] = set()
        self._queues: dict[str, list[_Entry]] = {}

    def sync(self, waiting: Sequence[RequestState]) -> None:
        """Make the queues hold exactly ``waiting``."""
        current = set(waiting)
        if current == self._known:
            return
        for state in self._known - current:
            group = self._group(state)
            queue = self._queues[group]
            del queue[bisect_left(queue, (state.arrival_us, state.request_id))]
            if not queue:
                del self._queues[group]
        for state in current - self._known:
            insort(self._queues.setdefault(self._group(state), []), (state.arrival_us, state.request_id, state))
        self._known = current

    def groups(self) -> list[str]:
        """Names of the queues that are not empty, sorted."""
        return sorted(self._queues)

    def walk(self, group: str) -> Iterator[RequestState]:
        """The requests of one queue, earliest arrival first."""
        return (entry[2] for entry in self._queues.get(group, ()))
