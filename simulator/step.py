"""A simulated engine step: what ran in it, and the record of it that the policy gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from scheduling.policy import StepPlan, StepRecord
from simulator.step_shape import StepShape
from simulator.track import Track

_state = attrgetter("state")
_context = attrgetter("computed_tokens")


@dataclass(slots=True)
class Step:
    """A step in progress or finished. Times are microseconds on the simulated clock."""

    start_us: int
    end_us: int
    plan: StepPlan
    shape: StepShape
    graph: bool
    decodes: list[Track] = field(repr=False)
    prompts: list[tuple[Track, int]] = field(repr=False)


@dataclass(slots=True)
class StepCounts:
    """Sums over all steps of a replica."""

    steps: int = 0
    busy_us: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    finetune_tokens: int = 0
    preemptions: int = 0


def shape_of(decodes: list[Track], prompts: list[tuple[Track, int]], extra: int) -> StepShape:
    """What a step computes; ``extra`` are rows of fine-tuning samples."""
    context = sum(map(_context, map(_state, decodes)))
    if not prompts:
        return StepShape(len(decodes), context, (), len(decodes), extra)
    chunks = tuple((tokens, track.state.computed_tokens) for track, tokens in prompts)
    finished = sum(t.state.computed_tokens + tokens >= t.state.prompt_tokens for t, tokens in prompts)
    return StepShape(len(decodes), context, chunks, len(decodes) + finished, extra)


def record_of(step: Step, served: Mapping[str, int], first: Mapping[str, tuple[int, int]]) -> StepRecord:
    """What the policy is told: tokens ``served`` per service, and first tokens with how many of them were late."""
    shape = step.shape
    prefixes = tuple(prefix for _, prefix in shape.chunks)
    return StepRecord(
        duration_us=step.end_us - step.start_us,
        decode_tokens=shape.decodes,
        prefill_tokens=shape.prefill_tokens,
        prefill_chunks=tuple(tokens for tokens, _ in shape.chunks),
        context_tokens=shape.context_tokens,
        chunk_prefix_tokens=sum(prefixes),
        service_tokens=served,
        first_tokens=first,
        graph=step.graph,
        chunk_prefixes=prefixes,
        finetune_tokens=shape.finetune_tokens,
    )
