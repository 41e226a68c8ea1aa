"""Replicas behind the admission queue, on a clock that is only a number.

What :class:`deployments.admission.Admission` does with requests happens here with the same queue object: earliest
deadline first over all services, the head is never passed over, a grant goes to the replica with the fewest requests,
and a replica takes at most ``inflight`` of them. A request of a service that sheds leaves the queue when its deadline
has passed; others wait ``queue_timeout_us`` at most. Not modelled: refusals predicted from the drain rate, and the
milliseconds of gateway and network.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduling.admission_queue import AdmissionQueue, QueuedRequest
from simulator.replica import Replica
from simulator.track import Track
from simulator.workload import Arrival, Service, WorkloadError, check_arrivals

_NEVER = 2**62


@dataclass(slots=True)
class RunResult:
    """What became of the requests of a run, in order of arrival.

    ``gaps`` holds the gaps between released tokens per service, of requests that arrived at ``measured_from_us`` or
    later. ``ended_us`` is when the last step ended; ``refused`` requests are larger than the whole KV cache.
    """

    services: tuple[Service, ...]
    tracks: list[Track]
    gaps: dict[str, array[int]]
    measured_from_us: int
    ended_us: int = 0
    refused: list[Arrival] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)


class Cluster:
    """Runs arrivals through ``replicas``, each of which takes at most ``inflight`` requests at a time."""

    def __init__(
        self,
        services: Sequence[Service],
        replicas: Sequence[Replica],
        *,
        inflight: int | None = None,
        queue_timeout_us: int = _NEVER,
    ) -> None:
        if not replicas:
            raise WorkloadError("a cluster needs a replica")
        self._services = {service.name: service for service in services}
        self._replicas = list(replicas)
        self._inflight = inflight or replicas[0].limits.running
        self._queue_timeout_us = queue_timeout_us
        self._queue = AdmissionQueue()
        self._queued: dict[str, Track] = {}
        self._held = [0] * len(replicas)
        self._ends: list[tuple[int, int]] = []
        self._timeouts: list[tuple[int, str]] = []

    def run(self, arrivals: Sequence[Arrival], *, measured_from_us: int = 0) -> RunResult:
        """Run until every request is done. Raises WorkloadError for arrivals that cannot be served as written."""
        check_arrivals(arrivals, tuple(self._services.values()))
        gaps = {name: array("q") for name in self._services}
        result = RunResult(tuple(self._services.values()), [], gaps, measured_from_us, replicas=self._replicas)
        index, ignored, count = 0, array("q"), len(arrivals)
        while True:
            arrives_us = arrivals[index].at_us if index < count else _NEVER
            ends_us = self._ends[0][0] if self._ends else _NEVER
            leaves_us = self._timeouts[0][0] if self._timeouts else _NEVER
            now_us = min(arrives_us, ends_us, leaves_us)
            if now_us == _NEVER:
                break
            if arrives_us == now_us:
                arrival = arrivals[index]
                measured = arrival.at_us >= measured_from_us
                self._arrive(index, arrival, gaps[arrival.service] if measured else ignored, result)
                index += 1
            elif leaves_us == now_us:
                self._time_out(now_us)
                continue
            else:
                self._end_step(now_us)
                result.ended_us = now_us
            self._dispatch(now_us, arrivals[index].at_us if index < count else _NEVER)
        return result

    def _arrive(self, index: int, arrival: Arrival, gaps: array[int], result: RunResult) -> None:
        limits = self._replicas[0].limits
        if arrival.prompt_tokens + arrival.output_tokens > limits.kv_blocks * limits.kv_block_tokens:
            result.refused.append(arrival)
            return
        service = self._services[arrival.service]
        track = Track(f"r{index:07d}", arrival, service)
        track.gaps = gaps
        result.tracks.append(track)
        request_id, deadline_us = track.state.request_id, arrival.at_us + service.ttft_us
        self._queue.push(QueuedRequest(request_id, arrival.at_us, deadline_us))
        self._queued[request_id] = track
        patience_us = min(self._queue_timeout_us, service.ttft_us if service.shed else _NEVER)
        if patience_us < _NEVER:
            heappush(self._timeouts, (arrival.at_us + patience_us, request_id))

    def _time_out(self, now_us: int) -> None:
        _, request_id = heappop(self._timeouts)
        track = self._queued.pop(request_id, None)
        if track is not None:
            self._queue.remove(request_id)
            track.shed, track.ended_us = True, now_us

    def _end_step(self, now_us: int) -> None:
        _, index = heappop(self._ends)
        for track in self._replicas[index].finish():
            self._held[track.replica] -= 1

    def _dispatch(self, now_us: int, next_arrival_us: int) -> None:
        """Grant replicas to the head of the queue, then let idle replicas begin a step."""
        held = self._held
        while self._queued:
            index = min(range(len(held)), key=held.__getitem__)
            if held[index] >= self._inflight:
                break
            track = self._queued.pop(self._queue.pop().request_id)
            held[index] += 1
            track.replica, track.admitted_us = index, now_us
            self._replicas[index].submit(track)
        if next_arrival_us == now_us or (self._ends and self._ends[0][0] == now_us):
            return  # Whatever else happens at this instant comes first.
        for index, replica in enumerate(self._replicas):
            if not replica.stepping:
                ends_us = replica.start(now_us)
                if ends_us is not None:
                    heappush(self._ends, (ends_us, index))
