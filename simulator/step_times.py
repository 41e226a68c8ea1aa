"""How long a step takes on some hardware: the sum of what its parts were measured to take.

    step = host + dense(rows) + communication(rows) + head(sampled rows) + decode attention + prefill attention
           + LoRA(rows) less what overlaps with the base + fine-tuning rows

Attention is affine: a price per decode and per token of its context, and per chunk, prompt token, query-key pair and
token of prefix that a chunk reads. A step that is captured as a CUDA graph runs padded to the next captured size and
without the launch cost of an eager one. Base-LoRA overlap (HALO section 6.6) hides a share of the LoRA time in steps of
at most ``overlap_rows_max`` rows; larger ones, prefill, gain nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from simulator.curve import Curve
from simulator.step_shape import StepShape, StepTime

_ROWS_KEPT = 16_384


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The prices of a model on some hardware, in microseconds.

    ``lora`` has a curve over rows per layer group (qkv, o, gate_up, down). ``graph_sizes`` are the captured batch sizes
    of decode-only steps, empty for an engine without graphs; an eager step costs ``eager_us`` more. ``host_us`` and
    ``host_per_request_us`` pass between steps; an engine that plans ahead hides them behind the step before.
    """

    dense: Curve
    communication: Curve | None = None
    head: Curve | None = None
    per_decode_us: float = 0.0
    per_context_token_us: float = 0.0
    per_prefill_token_us: float = 0.0
    per_pair_us: float = 0.0
    per_prefix_token_us: float = 0.0
    per_chunk_us: float = 0.0
    lora: Mapping[str, Curve] = field(default_factory=dict)
    overlap_share: float = 0.0
    overlap_rows_max: int = 0
    host_us: float = 0.0
    host_per_request_us: float = 0.0
    host_overlapped: bool = False
    graph_sizes: tuple[int, ...] = ()
    eager_us: float = 0.0
    per_finetune_token_us: float = 0.0
    noise_pct: float = 0.0

    def without_lora(self) -> StepCosts:
        """The base model alone."""
        return replace(self, lora={}, overlap_share=0.0)

    def base_us(self, rows: int, sampled: int) -> float:
        """Everything that depends on the number of rows alone, LoRA left out."""
        total = self.dense(rows)
        if self.communication is not None:
            total += self.communication(rows)
        if self.head is not None and sampled:
            total += self.head(sampled)
        return total

    def lora_us(self, rows: int, *, overlap: bool) -> float:
        """LoRA time that is added to the base."""
        total = sum(curve(rows) for curve in self.lora.values())
        if overlap and rows <= self.overlap_rows_max:
            total *= 1.0 - self.overlap_share
        return total


class StepTimes:
    """A :data:`StepTime` from :class:`StepCosts`. The same ``seed`` gives the same noise.

    Noise multiplies each step's time; it is roughly normal with ``noise_pct`` standard deviation, never below a
    quarter of the time, and made of sums of uniform numbers so that it is the same on every machine.
    """

    def __init__(self, costs: StepCosts, *, overlap: bool = False, seed: int = 0) -> None:
        self.costs = costs
        self.overlap = overlap
        self._random = Random(seed).random  # noqa: S311  # noise, not a secret
        self._dense: dict[int, float] = {}
        self._head: dict[int, float] = {}

    def __call__(self, shape: StepShape) -> tuple[int, bool]:
        """Duration in microseconds, and whether the step ran as a graph."""
        time_us, graph = self.exact_us(shape)
        noise_pct = self.costs.noise_pct
        if noise_pct:
            random = self._random
            # The sum of four uniforms has standard deviation 1 / sqrt(3).
            spread = (random() + random() + random() + random() - 2.0) * 1.7320508
            time_us *= max(0.25, 1.0 + spread * noise_pct / 100.0)
        return max(1, round(time_us)), graph

    def exact_us(self, shape: StepShape) -> tuple[float, bool]:
        """Duration without noise, and whether the step runs as a graph."""
        costs = self.costs
        rows, time_us, graph = shape.decodes, 0.0, False
        if shape.chunks or shape.finetune_tokens:
            prefill = shape.prefill_tokens
            rows += prefill + shape.finetune_tokens
            time_us += (
                costs.per_prefill_token_us * prefill
                + costs.per_pair_us * shape.pairs
                + costs.per_prefix_token_us * sum(prefix for _, prefix in shape.chunks)
                + costs.per_chunk_us * len(shape.chunks)
                + costs.per_finetune_token_us * shape.finetune_tokens
                + costs.eager_us
            )
        elif costs.graph_sizes and rows <= costs.graph_sizes[-1]:
            graph = True
            rows = costs.graph_sizes[bisect_left(costs.graph_sizes, rows)]
        else:
            time_us += costs.eager_us
        time_us += costs.per_decode_us * shape.decodes + costs.per_context_token_us * shape.context_tokens
        time_us += self._rows_us(rows)
        if costs.head is not None and shape.sampled:
            time_us += self._head_us(shape.sampled)
        host_us = costs.host_us + costs.host_per_request_us * (shape.decodes + len(shape.chunks))
        return (max(time_us, host_us) if costs.host_overlapped else time_us + host_us), graph

    def _rows_us(self, rows: int) -> float:
        found = self._dense.get(rows)
        if found is None:
            found = self.costs.base_us(rows, 0) + self.costs.lora_us(rows, overlap=self.overlap)
            if len(self._dense) < _ROWS_KEPT:
                self._dense[rows] = found
        return found

    def _head_us(self, sampled: int) -> float:
        found = self._head.get(sampled)
        if found is None and self.costs.head is not None:
            found = self._head[sampled] = self.costs.head(sampled)
        return found or 0.0


def constant_time(duration_us: int) -> StepTime:
    """Every step takes ``duration_us``."""
    return lambda _: (duration_us, False)
