"""How long a step takes (DeltaServe section 3.3, Eq. I and II; calibration and refits: section 3.4).

DeltaServe prices a step that carries prompt tokens with ``a * sum((n_i + B_d)^2) + b * (T_in + B_d) + g * T_ft
+ e * K + c`` (Eq. I) and a decode-only step with ``b' * B_d + e' * K + c'`` (Eq. II), one set of coefficients per
execution mode (CUDA graph or eager). This module fits the same terms, none negative, with these changes:

- Attention of a chunk counts the pairs it really computes, ``n_i * (prefix_i + n_i / 2)``, and the prefix it reads: in
  chunked prefill a chunk attends to all of its prompt that came before, which Eq. I does not know.
- ``T_in`` and ``B_d`` have prices of their own, and the price of ``T_in`` (in decode-only steps, of ``B_d``) is
  piecewise linear with non-negative slopes that change little from one piece to the next: time is not linear in the
  chunk on CPUs, and in decode batches on GPUs it follows tile sizes.
- Errors are relative: a fit by absolute error serves the longest steps only.

Old steps fade without being lost (:mod:`scheduling.step_fit`): steps of one shape, a cell, are averaged over about 32
of them, and cells fade with the steps since they were last seen. A level common to all cells follows a machine that
becomes slower or faster as a whole. The cost of a step and the memory held do not grow with time.
Deadlines are checked against an upper quantile: the prediction times a quantile of the newest ratios of observed to
predicted time. A model that has not seen enough steps of a kind predicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from scheduling.policy import StepRecord
from scheduling.step_fit import StepFit

_DECODE_KNOTS = (0, 8, 16, 32, 64, 128, 256)
_CHUNK_KNOTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)


def pairs_of(tokens: int, prefix: int) -> int:
    """Query-key pairs of a chunk of ``tokens`` behind ``prefix`` computed ones, halves dropped."""
    return tokens * prefix + tokens * tokens // 2


class StepTimeModel:
    """Predicts step times, learns from every step. Times are microseconds.

    ``quantile`` is the share of steps that :meth:`bound_us` is to cover.
    """

    def __init__(self, *, quantile: float = 0.99) -> None:
        self.quantile = quantile
        self._decode = {graph: StepFit(1, _DECODE_KNOTS, quantile) for graph in (False, True)}
        self._mixed = {graph: StepFit(5, _CHUNK_KNOTS, quantile) for graph in (False, True)}
        self._decode_graph = False
        self._mixed_graph = False

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step."""
        if record.duration_us <= 0:
            return
        if record.prefill_tokens or record.finetune_tokens:
            prefixes = record.chunk_prefixes or (record.chunk_prefix_tokens,)
            pairs = sum(
                pairs_of(tokens, prefixes[i] if i < len(prefixes) else 0)
                for i, tokens in enumerate(record.prefill_chunks or (record.prefill_tokens,))
            )
            linear = (
                record.decode_tokens,
                record.context_tokens,
                pairs,
                record.chunk_prefix_tokens,
                record.finetune_tokens,
            )
            self._mixed_graph = record.graph
            self._mixed[record.graph].observe(linear, record.prefill_tokens, record.duration_us)
        elif record.decode_tokens:
            self._decode_graph = record.graph
            self._decode[record.graph].observe((record.context_tokens,), record.decode_tokens, record.duration_us)

    @property
    def warm(self) -> bool:
        """Whether steps that carry prompt tokens can be predicted in the mode seen last.

        Decode-only steps then can be bounded too, as steps with no prompt token, until enough of them were seen: under
        lasting load there may be none.
        """
        return self._mixed[self._mixed_graph].warm

    @property
    def mixed_ratio(self) -> float:
        """Upper quantile over mean of steps that carry prompt tokens, in the mode seen last."""
        return self._mixed[self._mixed_graph].ratio

    @property
    def largest_chunk(self) -> int:
        """Most prompt tokens seen in one step; far beyond it predictions are guesses."""
        return self._mixed[self._mixed_graph].largest

    def predict_us(
        self,
        decodes: int,
        context_tokens: int,
        chunks: Iterable[tuple[int, int]] = (),
        *,
        finetune_tokens: int = 0,
        graph: bool | None = None,
    ) -> int | None:
        """Return the expected time of a step, or None while the model is cold for its kind and mode.

        ``chunks`` are (tokens, prefix) pairs; ``graph`` None means the mode in which such steps ran last.
        """
        found = self._price(decodes, context_tokens, tuple(chunks), finetune_tokens, graph)
        return None if found is None else ceil(found[0])

    def bound_us(
        self,
        decodes: int,
        context_tokens: int,
        chunks: Iterable[tuple[int, int]] = (),
        *,
        finetune_tokens: int = 0,
        graph: bool | None = None,
    ) -> int | None:
        """Return the time a step stays within with the model's quantile; None as in :meth:`predict_us`."""
        found = self._price(decodes, context_tokens, tuple(chunks), finetune_tokens, graph)
        return None if found is None else ceil(found[0] * found[1].ratio)

    def _price(
        self, decodes: int, context: int, chunks: Sequence[tuple[int, int]], finetune: int, graph: bool | None
    ) -> tuple[float, StepFit] | None:
        if not chunks and not finetune:
            fit = self._decode[self._decode_graph if graph is None else graph]
            if fit.warm:
                return fit.central((context,), decodes), fit
        fit = self._mixed[self._mixed_graph if graph is None else graph]
        if not fit.warm:
            return None
        pairs = sum(pairs_of(tokens, prefix) for tokens, prefix in chunks)
        linear = (decodes, context, pairs, sum(prefix for _, prefix in chunks), finetune)
        return fit.central(linear, sum(tokens for tokens, _ in chunks)), fit

    def decode_bound_us(self, decodes: int, context_tokens: int) -> float:
        """:meth:`bound_us` of a decode-only step of a warm model, for inner loops."""
        fit = self._decode[self._decode_graph]
        if not fit.warm:
            return self.mixed_bound_us(decodes, context_tokens, 0, 0, 0)
        return (fit.constant + fit.piecewise(decodes) + fit.prices[0] * context_tokens) * fit.upper

    def decode_mean_us(self, decodes: int, context_tokens: int) -> float:
        """:meth:`predict_us` of a decode-only step of a warm model, for inner loops."""
        fit = self._decode[self._decode_graph]
        return self.decode_bound_us(decodes, context_tokens) / (fit.ratio if fit.warm else self.mixed_ratio)

    def mixed_bound_us(self, decodes: int, context_tokens: int, tokens: int, pairs: int, prefix: int) -> float:
        """:meth:`bound_us` of a step with prompt ``tokens`` in all, of a warm model, for inner loops."""
        fit = self._mixed[self._mixed_graph]
        decode_price, context_price, pair_price, prefix_price, _ = fit.prices
        return (
            fit.constant
            + fit.piecewise(tokens)
            + decode_price * decodes
            + context_price * context_tokens
            + pair_price * pairs
            + prefix_price * prefix
        ) * fit.upper

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as JSON values, to be kept per model and hardware."""
        return {
            "version": 1,
            "decode": {str(graph): fit.snapshot() for graph, fit in self._decode.items()},
            "mixed": {str(graph): fit.snapshot() for graph, fit in self._mixed.items()},
            "graph": [self._decode_graph, self._mixed_graph],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Start from a snapshot. Raises ValueError if it is not one; then nothing has changed."""
        fresh = StepTimeModel(quantile=self.quantile)
        try:
            if snapshot["version"] != 1:
                raise ValueError(f"step-time snapshot of version {snapshot['version']!r}; this release reads version 1")
            for graph in (False, True):
                fresh._decode[graph].restore(snapshot["decode"][str(graph)])
                fresh._mixed[graph].restore(snapshot["mixed"][str(graph)])
            fresh._decode_graph, fresh._mixed_graph = map(bool, snapshot["graph"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a step-time snapshot: {type(error).__name__}: {error}") from error
        self._decode, self._mixed = fresh._decode, fresh._mixed
        self._decode_graph, self._mixed_graph = fresh._decode_graph, fresh._mixed_graph
