"""A recorded run of a policy: every view, plan and record as JSON values, and its replay.

A policy is a function of its calls, so the same calls give the same plans, bit by bit. The host writes one entry per
call; :func:`replay` makes the calls again and names the first plan that differs. Entries hold lengths and times, never
a prompt or an answer.

Entries are lists that begin with a letter:

- ``["h", header]`` once: ``policy``, ``options``, ``limits``. The policy is new then; what it learned before its first
  view, in a profiling pass, follows as records.
- ``["r", number, request]`` before a request is first seen: what does not change about it.
- ``["v", now_us, kv_blocks_free, running, waiting]``: requests as (number and what changes, see :data:`CHANGING`).
- ``["p", decode numbers, [number, tokens] per chunk]``: the plan for the view before.
- ``["o", record]``: a finished step. ``["f", number]``: a request is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scheduling.policy import Limits, PrefillChunk, StepPlan, StepRecord, View
from scheduling.registry import make_policy
from scheduling.request import ReleasePolicy, RequestState

VERSION = 1
FIXED = ("request_id", "service", "arrival_us", "ttft_us", "tbt_us", "max_tokens", "adapter", "release", "streaming")
CHANGING = ("prompt_tokens", "computed_tokens", "generated_tokens", "last_release_us", "kv_blocks")

Entry = list[Any]


class TraceError(ValueError):
    """A trace that cannot be read; the message names the entry."""


class TraceEncoder:
    """Turns a policy's calls into entries. It numbers requests in the order in which they are first seen."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._count = 0

    def header(self, policy: str, options: Mapping[str, Any], limits: Limits) -> Entry:
        """The first entry."""
        return ["h", {"version": VERSION, "policy": policy, "options": dict(options), "limits": asdict(limits)}]

    def view(self, view: View) -> list[Entry]:
        """The entries of a view, new requests first."""
        entries: list[Entry] = []
        running = [self._state(state, entries) for state in view.running]
        waiting = [self._state(state, entries) for state in view.waiting]
        entries.append(["v", view.now_us, view.kv_blocks_free, running, waiting])
        return entries

    def plan(self, plan: StepPlan) -> Entry:
        """The entry of a plan for the newest view."""
        numbers = self._numbers
        return [
            "p",
            [numbers[request_id] for request_id in plan.decode],
            [[numbers[chunk.request_id], chunk.tokens] for chunk in plan.prefill],
        ]

    def record(self, record: StepRecord) -> Entry:
        """The entry of a finished step."""
        return ["o", asdict(record)]

    def forget(self, request_id: str) -> list[Entry]:
        """The entry of a request that is gone; none if no view had it."""
        number = self._numbers.pop(request_id, None)
        return [] if number is None else [["f", number]]

    def _state(self, state: RequestState, entries: list[Entry]) -> list[Any]:
        number = self._numbers.get(state.request_id)
        if number is None:
            number = self._numbers[state.request_id] = self._count
            self._count += 1
            entries.append(["r", number, {name: getattr(state, name) for name in FIXED}])
        return [number, *(getattr(state, name) for name in CHANGING)]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A plan that differs from the recorded one. ``entry`` is the position of the recorded plan in the trace."""

    entry: int
    recorded: StepPlan
    replayed: StepPlan


@dataclass(slots=True)
class Replay:
    """What a replay found: how many plans there were, and those that differ (the first few)."""

    plans: int
    mismatches: list[Mismatch]


class _Reader:
    """The state of a trace while its entries are read in order."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        if header["version"] != VERSION:
            raise TraceError(f"the trace has version {header['version']!r}; this release reads version {VERSION}")
        self.limits = Limits(**header["limits"])
        self.policy = make_policy(header["policy"], **header["options"])
        self.states: dict[int, RequestState] = {}

    def add(self, number: int, fixed: Mapping[str, Any]) -> None:
        values = {**fixed, "release": ReleasePolicy(fixed["release"])}
        self.states[number] = RequestState(prompt_tokens=0, **values)

    def view(self, now_us: int, kv_blocks_free: int, running: Sequence[Any], waiting: Sequence[Any]) -> View:
        return View(now_us, self._states(running), self._states(waiting), kv_blocks_free, self.limits)

    def plan(self, decode: Sequence[int], chunks: Sequence[Sequence[int]]) -> StepPlan:
        return StepPlan(
            tuple(self.states[number].request_id for number in decode),
            tuple(PrefillChunk(self.states[number].request_id, tokens) for number, tokens in chunks),
        )

    def _states(self, rows: Sequence[Sequence[int]]) -> list[RequestState]:
        states = []
        for number, *values in rows:
            state = self.states[number]
            for name, value in zip(CHANGING, values, strict=True):
                setattr(state, name, value)
            states.append(state)
        return states


def record_of(values: Mapping[str, Any]) -> StepRecord:
    """A step record from its JSON values."""
    return StepRecord(
        **{
            **values,
            "prefill_chunks": tuple(values["prefill_chunks"]),
            "chunk_prefixes": tuple(values["chunk_prefixes"]),
            "first_tokens": {service: tuple(counts) for service, counts in values["first_tokens"].items()},
        }
    )


def replay(entries: Iterable[Entry], *, keep: int = 10) -> Replay:
    """Make the recorded calls again with a fresh policy. Raises :class:`TraceError` for what is not a trace."""
    numbered = enumerate(entries)
    result = Replay(0, [])
    position = 0
    try:
        position, (kind, header) = next(numbered)
        if kind != "h":
            raise TraceError("the first entry is not a header")
        for position, recorded, replayed in _plans(_Reader(header), numbered):
            result.plans += 1
            if recorded != replayed and len(result.mismatches) < keep:
                result.mismatches.append(Mismatch(position, recorded, replayed))
    except StopIteration:
        raise TraceError("the trace is empty") from None
    except TraceError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TraceError(f"not a trace, near entry {position}: {type(error).__name__}: {error}") from error
    return result


def _plans(reader: _Reader, numbered: Iterator[tuple[int, Entry]]) -> Iterator[tuple[int, StepPlan, StepPlan]]:
    """The recorded and the replayed plan of every view, with the position of the recorded one."""
    replayed: StepPlan | None = None
    for position, (kind, *values) in numbered:
        if kind == "r":
            reader.add(*values)
        elif kind == "v":
            replayed = reader.policy.plan(reader.view(*values))
        elif kind == "p" and replayed is not None:
            yield position, reader.plan(*values), replayed
            replayed = None
        elif kind == "o":
            reader.policy.observe(record_of(*values))
        elif kind == "f":
            reader.policy.forget(reader.states.pop(values[0]).request_id)
        else:
            raise TraceError(f"entry {position} begins with {kind!r}")
