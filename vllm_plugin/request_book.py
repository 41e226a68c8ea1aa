"""The scheduler's records: one :class:`Track` per request, and the queue in deadline order."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from scheduling.release import release_time_us
from scheduling.request import RequestState
from vllm_plugin.promise import RequestPromise


@dataclass(slots=True)
class Track:
    """A request's state for the policy, and what was really released so far.

    With async scheduling a step is planned while the previous one runs. ``state`` then already counts the tokens in
    flight, as if they were released when ready; ``released_tokens`` and ``released_us`` hold what is known.
    ``profiling`` marks requests of the profiling pass.
    """

    state: RequestState
    promise: RequestPromise
    released_tokens: int = 0
    released_us: int = 0
    profiling: bool = False

    def release(self, tokens: int, ready_us: int) -> int:
        """Book ``tokens`` new tokens, ready at ``ready_us``, and return when the last of them goes out."""
        state = self.state
        state.generated_tokens, state.last_release_us = self.released_tokens, self.released_us
        for _ in range(tokens):
            state.last_release_us = release_time_us(state, ready_us, self.promise.hold_max_us)
            state.generated_tokens += 1
        self.released_tokens, self.released_us = state.generated_tokens, state.last_release_us
        return state.last_release_us

    def project(self, in_flight: int, ready_us: int) -> None:
        """Let ``state`` count ``in_flight`` tokens that are being computed as released at ``ready_us`` or later."""
        state = self.state
        state.generated_tokens, state.last_release_us = self.released_tokens, self.released_us
        for _ in range(in_flight):
            state.last_release_us = release_time_us(state, ready_us, self.promise.hold_max_us)
            state.generated_tokens += 1


class RequestBook:
    """All tracked requests, and the waiting ones ordered by :attr:`RequestState.edf_key`."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.waiting: list[RequestState] = []
        self._keys: list[tuple[int, int, str]] = []
        self._key_of: dict[str, tuple[int, int, str]] = {}

    def add(self, track: Track) -> None:
        """Start to track a request. It is in no queue yet."""
        self.tracks[track.state.request_id] = track

    def enqueue(self, state: RequestState) -> None:
        """Put a request into the waiting queue; its deadline must not change while it waits."""
        key = state.edf_key
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self.waiting.insert(index, state)
        self._key_of[state.request_id] = key

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request is in the waiting queue."""
        return request_id in self._key_of

    def dequeue(self, request_id: str) -> None:
        """Take a request out of the waiting queue; unknown ids are ignored."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return
        index = bisect_left(self._keys, key)
        del self._keys[index]
        del self.waiting[index]

    def drop(self, request_id: str) -> Track | None:
        """Forget a request and return what was known of it."""
        self.dequeue(request_id)
        return self.tracks.pop(request_id, None)
