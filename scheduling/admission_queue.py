"""The queue in which requests wait for a replica: earliest deadline first over all services.

A deadline is arrival + TTFT (HALO section 5.2, EDF). A late request keeps its deadline and therefore only becomes more
urgent, so nothing starves while capacity is left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A waiting request. ``slots`` is how many of a replica's places it takes: its number of choices."""

    request_id: str
    arrival_us: int
    deadline_us: int
    slots: int = 1

    @property
    def edf_key(self) -> tuple[int, int, str]:
        """Earliest deadline first; ties go to the earlier arrival, then to the id, so that order is total."""
        return (self.deadline_us, self.arrival_us, self.request_id)


class AdmissionQueue:
    """Requests in EDF order, with removal by id and the number of requests ahead of a deadline.

    A sorted list: places are found by bisection, and shifting the list costs about a microsecond at the queue's bound
    of some thousand entries.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, str]] = []
        self._requests: dict[str, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Requests, most urgent first."""
        return (self._requests[key[2]] for key in self._keys)

    def push(self, request: QueuedRequest) -> None:
        """Add a request. Raises ValueError when its id already waits."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} already waits for admission")
        self._requests[request.request_id] = request
        insort(self._keys, request.edf_key)

    def head(self) -> QueuedRequest | None:
        """The most urgent request, or None."""
        return self._requests[self._keys[0][2]] if self._keys else None

    def pop(self) -> QueuedRequest:
        """Take the most urgent request. Raises IndexError when nothing waits."""
        return self._requests.pop(self._keys.pop(0)[2])

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Take one request out, wherever it stands; None when it does not wait."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            del self._keys[bisect_left(self._keys, request.edf_key)]
        return request

    def ahead_of(self, deadline_us: int) -> int:
        """How many waiting requests have a deadline at or before ``deadline_us``."""
        return bisect_left(self._keys, (deadline_us + 1,))
