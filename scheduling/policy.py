"""The interface between a host (vLLM, the simulator, a test) and a scheduling policy.

The host shows the policy a :class:`View` before each engine step and carries out the :class:`StepPlan` it gets
back. After the step it reports a :class:`StepRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduling.request import RequestState


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can do in one step, fixed at start-up.

    ``step_tokens`` bounds all tokens of a step (vLLM ``max_num_batched_tokens``); ``running`` bounds the requests that
    hold KV cache (``max_num_seqs``); ``adapters`` bounds the distinct LoRA adapters among the requests scheduled in one
    step (``max_loras``, 0 without LoRA); ``kv_blocks`` is the size of the KV cache in blocks of ``kv_block_tokens``.
    """

    step_tokens: int
    running: int
    adapters: int
    kv_blocks: int
    kv_block_tokens: int


@dataclass(slots=True)
class View:
    """The engine's state when a step is planned.

    ``running`` holds every request with KV cache: decodes and unfinished prefills, in the host's order.
    ``waiting`` holds the queue ordered by :attr:`RequestState.edf_key`; a policy that wants another order keeps its
    own.
    """

    now_us: int
    running: Sequence[RequestState]
    waiting: Sequence[RequestState]
    kv_blocks_free: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """``tokens`` prompt tokens of one request, computed in this step."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step computes.

    ``decode`` lists the running requests that generate one token, most urgent first; a running decode that is not
    listed sits the step out and keeps its KV cache. ``prefill`` lists chunks in the order in which they take the
    room: each chunk finishes its prompt, except the last, which may be cut short. Waiting requests named in
    ``prefill`` are admitted. A plan is empty only when there is nothing to run.
    """

    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a finished step did and how long it took.

    ``decode_tokens`` and ``prefill_tokens`` are totals; ``context_tokens`` is the KV context of the decodes, summed;
    ``chunk_prefix_tokens`` the tokens of the chunks' own prompts that were computed before, summed, and
    ``chunk_prefixes`` the same per chunk; a host that leaves it empty is taken to mean that the first chunk has the
    whole prefix. ``finetune_tokens`` are tokens of fine-tuning samples in the step. ``service_tokens`` maps a
    service to the tokens generated for it, first tokens included; ``first_tokens`` maps a service to (first tokens
    produced in this step, how many of them released after their deadline). ``graph`` tells whether the step ran as a
    captured CUDA graph.
    """

    duration_us: int
    decode_tokens: int
    prefill_tokens: int
    prefill_chunks: tuple[int, ...] = ()
    context_tokens: int = 0
    chunk_prefix_tokens: int = 0
    service_tokens: Mapping[str, int] = field(default_factory=dict)
    first_tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    graph: bool = False
    chunk_prefixes: tuple[int, ...] = ()
    finetune_tokens: int = 0


class Policy(Protocol):
    """Decides what an engine step computes.

    Implementations are deterministic: the same sequence of calls gives the same plans. They read no clock and draw no
    random numbers.
    """

    name: str

    def plan(self, view: View) -> StepPlan:
        """Return the plan for the step about to start. Never raises for any view a host can build."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop anything kept about a request that finished or was aborted. Unknown ids are ignored."""
        ...
