"""What one engine step computes, as far as its duration depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StepShape:
    """A step with ``decodes`` decodes whose KV contexts sum to ``context_tokens``, and prompt chunks.

    ``chunks`` are (tokens, tokens of the same prompt computed before). ``sampled`` counts the rows that give a token:
    decodes and prompts finished in this step. ``finetune_tokens`` are rows of fine-tuning samples.
    """

    decodes: int
    context_tokens: int
    chunks: tuple[tuple[int, int], ...] = ()
    sampled: int = 0
    finetune_tokens: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of all chunks."""
        return sum(tokens for tokens, _ in self.chunks)

    @property
    def tokens(self) -> int:
        """All rows of the step."""
        return self.decodes + self.prefill_tokens + self.finetune_tokens

    @property
    def pairs(self) -> int:
        """Query-key pairs of the chunks, halves dropped, as :func:`scheduling.latency_model.pairs_of` counts them."""
        return sum(tokens * prefix + tokens * tokens // 2 for tokens, prefix in self.chunks)


StepTime = Callable[[StepShape], tuple[int, bool]]
"""Gives the duration of a step in microseconds, at least 1, and whether it runs as a captured graph."""
