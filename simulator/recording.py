"""What a serving engine did, written down so that it can be replayed here and compared.

A recording is a JSON-lines file. The first line is a header; ``request`` lines come in order of arrival and ``step``
lines in order of start, mixed or not. Times are microseconds from the recording's start on the engine's monotonic
clock::

    {"kind": "header", "format": "halo-recording-1", "policy": "halo", "options": {...}, "limits": {...}}
    {"kind": "request", "at_us": 0, "service": "a", "ttft_us": 0, "tbt_us": 0, "adapter": 1, "release": "bounded",
     "hold_max_us": 250000, "prompt_tokens": 9, "ready_us": [70100, 81000], "released_us": [70100, 82000]}
    {"kind": "step", "start_us": 0, "duration_us": 0, "decodes": 3, "context_tokens": 90, "chunks": [[64, 0]],
     "graph": false}

A request's output length is the number of its ``ready_us``. The engine side writes; this module reads, and turns a
recording into arrivals, services, limits and step times, so that scheduling and step time can be judged apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduling.policy import Limits, StepRecord
from scheduling.request import ReleasePolicy
from simulator.step_shape import StepShape
from simulator.workload import Arrival, Service, WorkloadError

FORMAT = "halo-recording-1"


class RecordingError(WorkloadError):
    """A recording that cannot be used; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request, and when each of its tokens was computed and released."""

    arrival: Arrival
    service: Service
    ready_us: tuple[int, ...]
    released_us: tuple[int, ...]

    @property
    def ttft_us(self) -> int:
        """Arrival to release of the first token."""
        return self.released_us[0] - self.arrival.at_us


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that ran, host work included in its duration."""

    start_us: int
    duration_us: int
    shape: StepShape
    graph: bool

    def as_record(self) -> StepRecord:
        """What a policy's ``observe`` would have been told, tokens per service left out."""
        prefixes = tuple(prefix for _, prefix in self.shape.chunks)
        return StepRecord(
            duration_us=self.duration_us,
            decode_tokens=self.shape.decodes,
            prefill_tokens=self.shape.prefill_tokens,
            prefill_chunks=tuple(tokens for tokens, _ in self.shape.chunks),
            context_tokens=self.shape.context_tokens,
            chunk_prefix_tokens=sum(prefixes),
            chunk_prefixes=prefixes,
            graph=self.graph,
            finetune_tokens=self.shape.finetune_tokens,
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything in a file."""

    policy: str
    options: Mapping[str, Any]
    limits: Limits
    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...]

    @property
    def services(self) -> tuple[Service, ...]:
        """The services of all requests, by name."""
        return tuple(sorted({r.service.name: r.service for r in self.requests}.values(), key=lambda s: s.name))

    @property
    def arrivals(self) -> list[Arrival]:
        """What to replay."""
        return [request.arrival for request in self.requests]


class ReplayedSteps:
    """A step time that gives the recorded durations one after the other, and then those of ``after``.

    Replaying arrivals with it isolates scheduling: as long as the simulated engine makes the recorded steps, their
    shapes agree, and :attr:`differing` counts those that do not.
    """

    def __init__(self, steps: Sequence[RecordedStep], after_us: int) -> None:
        self._steps = iter(steps)
        self._after_us = after_us
        self.replayed = 0
        self.differing = 0

    def __call__(self, shape: StepShape) -> tuple[int, bool]:
        """The next recorded duration."""
        step = next(self._steps, None)
        if step is None:
            return self._after_us, False
        self.replayed += 1
        same = (step.shape.decodes, step.shape.chunks) == (shape.decodes, shape.chunks)
        self.differing += not same
        return step.duration_us, step.graph


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises :class:`RecordingError`."""
    lines = _lines(path)
    where, header = next(lines, (str(path), {}))
    if header.get("format") != FORMAT:
        raise RecordingError(f"{where}: format is {header.get('format')!r}, this release reads {FORMAT}")
    requests: list[RecordedRequest] = []
    steps: list[RecordedStep] = []
    for where, data in lines:
        try:
            if data["kind"] == "request":
                requests.append(_request(data, where))
            elif data["kind"] == "step":
                steps.append(_step(data, where))
            else:
                raise RecordingError(f"{where}: kind is {data['kind']!r}, not request or step")
        except KeyError as error:
            raise RecordingError(f"{where}: the key {error.args[0]!r} is missing") from None
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, RecordingError) else RecordingError(f"{where}: {error}") from None
        _check_order(requests, steps, where)
    if not requests:
        raise RecordingError(f"{path}: no requests")
    try:
        limits = Limits(**{key: int(value) for key, value in header["limits"].items()})
        return Recording(str(header["policy"]), dict(header["options"]), limits, tuple(requests), tuple(steps))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"{path} line 1: the header is incomplete: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            data = json.loads(line, parse_constant=_no_constant)
        except ValueError as error:
            raise RecordingError(f"{where}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise RecordingError(f"{where}: not an object")
        yield where, data


def _request(data: Mapping[str, Any], where: str) -> RecordedRequest:
    ready, released = tuple(map(int, data["ready_us"])), tuple(map(int, data["released_us"]))
    at_us = int(data["at_us"])
    if not ready or len(ready) != len(released):
        raise RecordingError(f"{where}: {len(ready)} ready and {len(released)} released tokens; both need 1 or more")
    if list(ready) != sorted(ready) or ready[0] < at_us or any(b < a for a, b in zip(ready, released, strict=True)):
        raise RecordingError(f"{where}: a token is released before it is ready, or ready before the one before it")
    prompt = int(data["prompt_tokens"])
    if at_us < 0 or prompt < 1:
        raise RecordingError(f"{where}: at_us {at_us} has to be 0 or more and prompt_tokens {prompt} 1 or more")
    service = Service(
        str(data["service"]),
        int(data["ttft_us"]),
        int(data["tbt_us"]),
        int(data["adapter"]),
        ReleasePolicy(data["release"]),
        int(data["hold_max_us"]),
    )
    return RecordedRequest(Arrival(at_us, service.name, prompt, len(ready)), service, ready, released)


def _step(data: Mapping[str, Any], where: str) -> RecordedStep:
    chunks = tuple((int(tokens), int(prefix)) for tokens, prefix in data["chunks"])
    shape = StepShape(int(data["decodes"]), int(data["context_tokens"]), chunks, 0, int(data.get("finetune_tokens", 0)))
    step = RecordedStep(int(data["start_us"]), int(data["duration_us"]), shape, bool(data["graph"]))
    if step.duration_us <= 0 or shape.tokens <= 0:
        raise RecordingError(f"{where}: a step of {step.duration_us} us with {shape.tokens} tokens")
    return step


def _check_order(requests: Sequence[RecordedRequest], steps: Sequence[RecordedStep], where: str) -> None:
    late = len(requests) > 1 and requests[-1].arrival.at_us < requests[-2].arrival.at_us
    if late or (len(steps) > 1 and steps[-1].start_us < steps[-2].start_us):
        raise RecordingError(f"{where}: comes before the line in front of it; sort requests by arrival, steps by start")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")
