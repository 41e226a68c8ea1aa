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

Old steps fade without being lost: the steps of one shape (a cell) are averaged over about :data:`CELL_STEPS` of them,
and cells fade with the steps since they were last seen. A level common to all cells follows a machine that becomes
slower or faster as a whole. The cost of a step and the memory held do not grow with time.
Deadlines are checked against an upper quantile: the prediction times a quantile of the newest ratios of observed to
predicted time. A model that has not seen enough steps of a kind predicts nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

from scheduling.nnls import solve_nnls
from scheduling.policy import StepRecord
from scheduling.sliding_quantile import SlidingQuantile

CELLS = 512
CELL_STEPS = 32
FADE_STEPS = 4_000
WARM_STEPS = 24
WARM_CELLS = 3
RATIOS = 512
RATIO_CAP = 3.0
REFIT_STEPS = 16
LEVEL_GAIN = 1 / 64

_DECODE_KNOTS = (0, 8, 16, 32, 64, 128, 256)
_CHUNK_KNOTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048)


def pairs_of(tokens: int, prefix: int) -> int:
    """Query-key pairs of a chunk of ``tokens`` behind ``prefix`` computed ones, halves dropped."""
    return tokens * prefix + tokens * tokens // 2


def pieces(x: int, knots: Sequence[int]) -> list[float]:
    """Split ``x`` into the lengths it covers between ``knots``; the last piece has no end."""
    ends = (*knots[1:], None)
    return [max(0.0, (x if end is None else min(x, end)) - start) for start, end in zip(knots, ends, strict=True)]


def _fine(x: int) -> int:
    """Two buckets per power of two."""
    length = x.bit_length()
    return x if length < 2 else 2 * length + (x >> (length - 2) & 1)


def _coarse(x: int) -> int:
    """One bucket per power of four."""
    return (x.bit_length() + 1) // 2


class _Fit:
    """One coefficient set: the cells seen, the coefficients, and the ratios of observed to predicted time.

    ``level`` is how slow the machine is at present against the cells, ``ratio`` the quantile of observed to predicted
    time, ``upper`` their product: a price times ``upper`` is an upper bound in microseconds.
    Rows of features are: constant, linear features (``linear`` of them), pieces of the one piecewise feature.
    """

    def __init__(self, linear: int, knots: Sequence[int], quantile: float) -> None:
        self._linear = linear
        self._knots = tuple(knots)
        size = 1 + linear + len(knots)
        self._features = np.zeros((CELLS, size))
        self._time = np.zeros(CELLS)
        self._count = np.zeros(CELLS)
        self._seen = np.zeros(CELLS)
        self._cells: dict[tuple[int, ...], int] = {}
        self._quantile = quantile
        self._ratios = SlidingQuantile(quantile, RATIOS)
        self._spread = 0.1
        self._to_refit = 0
        self.steps = 0
        self.largest = 0
        self.level = 1.0
        self.ratio = 1.0
        self.upper = 1.0
        self.constant = 0.0
        self.prices: tuple[float, ...] = (0.0,) * linear
        self._slopes: tuple[float, ...] = (0.0,) * len(knots)
        self._bases: tuple[float, ...] = (0.0,) * len(knots)
        self.warm = False

    def piecewise(self, x: int) -> float:
        """Price of ``x`` units of the piecewise feature, in microseconds."""
        piece = bisect_right(self._knots, x) - 1
        return self._bases[piece] + self._slopes[piece] * (x - self._knots[piece])

    def central(self, linear: Sequence[int], x: int) -> float:
        """Predicted time in microseconds."""
        linear_us = sum(price * n for price, n in zip(self.prices, linear, strict=True))
        return self.level * (self.constant + self.piecewise(x) + linear_us)

    def observe(self, linear: Sequence[int], x: int, duration_us: int) -> None:
        """Add a step; refit after every few."""
        seen_us = float(duration_us)
        if self.warm:
            predicted_us = max(1.0, self.central(linear, x))
            ratio = min(RATIO_CAP, seen_us / predicted_us)
            self._ratios.push(ratio)
            self._spread += (abs(ratio - 1.0) - self._spread) / 16
            reach = max(0.1, 4 * self._spread)
            clipped = min(max(ratio, 1 - reach), 1 + reach)
            seen_us = clipped * predicted_us
            self.level *= 1 + LEVEL_GAIN * (clipped - 1)
            self.upper = self.level * self.ratio
        self._add(linear, x, seen_us / self.level)
        self.steps += 1
        self.largest = max(self.largest, x)
        self._to_refit -= 1
        if self._to_refit <= 0:
            self._refit()

    def _add(self, linear: Sequence[int], x: int, seen_us: float) -> None:
        row = np.array((1.0, *linear, *pieces(x, self._knots)))
        key = (*map(_coarse, linear), _fine(x))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._free_cell()
            self._cells[key] = cell
            self._features[cell], self._time[cell], self._count[cell] = row, seen_us, 0.0
        self._count[cell] = min(CELL_STEPS, self._count[cell] + 1)
        gain = 1.0 / self._count[cell]
        self._features[cell] += gain * (row - self._features[cell])
        self._time[cell] += gain * (seen_us - self._time[cell])
        self._seen[cell] = self.steps

    def _free_cell(self) -> int:
        if len(self._cells) < CELLS:
            return len(self._cells)
        oldest = min(self._cells, key=lambda key: self._seen[self._cells[key]])
        return self._cells.pop(oldest)

    def _refit(self) -> None:
        count = len(self._cells)
        self._to_refit = REFIT_STEPS if self.steps >= 4 * REFIT_STEPS else 4
        if self.steps < WARM_STEPS or count < WARM_CELLS:
            return
        time = np.maximum(self._time[:count], 1.0)
        age = self.steps - self._seen[:count]
        weight = np.sqrt(self._count[:count] * np.maximum(0.02, np.exp2(-age / FADE_STEPS)))
        rows = np.vstack((self._features[:count] * (weight / time)[:, None], self._smoothing(float(np.median(time)))))
        target = np.concatenate((weight, np.zeros(len(self._knots) - 1)))
        solution = solve_nnls(rows.T @ rows, rows.T @ target)
        self.constant = float(solution[0])
        self.prices = tuple(map(float, solution[1 : 1 + self._linear]))
        self._slopes = tuple(map(float, solution[1 + self._linear :]))
        widths = np.diff(self._knots)
        self._bases = (0.0, *map(float, np.cumsum(np.asarray(self._slopes[:-1]) * widths)))
        self.warm = True
        self._update_ratio()

    def _smoothing(self, time_us: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Rows that ask neighbouring slopes to agree, as strongly as a small part of one observation."""
        size = len(self._knots)
        rows = np.zeros((size - 1, 1 + self._linear + size))
        for piece, width in enumerate(np.diff(self._knots)):
            rows[piece, 1 + self._linear + piece] = 0.3 * width / time_us
            rows[piece, 2 + self._linear + piece] = -0.3 * width / time_us
        return rows

    def _update_ratio(self) -> None:
        """Few ratios say little about a tail, so below a hundred the margin is at least a tenth."""
        ratio = self._ratios.value()
        floor = 1.0 if len(self._ratios) >= 100 else 1.1
        self.ratio = max(floor, ratio if ratio is not None else floor)
        self.upper = self.level * self.ratio

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as plain JSON values."""
        cells = [
            {
                "key": list(key),
                "features": self._features[cell].tolist(),
                "time_us": float(self._time[cell]),
                "count": float(self._count[cell]),
                "age": float(self.steps - self._seen[cell]),
            }
            for key, cell in self._cells.items()
        ]
        return {
            "knots": list(self._knots),
            "largest": self.largest,
            "level": self.level,
            "cells": cells,
            "ratios": self._ratios.newest(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what :meth:`snapshot` gave; raises ValueError if it is of another form."""
        cells = snapshot["cells"]
        if tuple(snapshot["knots"]) != self._knots or any(len(c["features"]) != self._features.shape[1] for c in cells):
            raise ValueError("the step-time snapshot has other features; delete it and let the engine profile again")
        self.steps = sum(int(cell["count"]) for cell in cells)
        self.largest = int(snapshot["largest"])
        self.level = float(snapshot["level"])
        self._cells = {tuple(cell["key"]): index for index, cell in enumerate(cells[:CELLS])}
        for index, cell in enumerate(cells[:CELLS]):
            self._features[index] = cell["features"]
            self._time[index], self._count[index] = cell["time_us"], cell["count"]
            self._seen[index] = self.steps - cell["age"]
        self._ratios = SlidingQuantile(self._quantile, RATIOS)
        self._ratios.extend(snapshot["ratios"])
        self._refit()


class StepTimeModel:
    """Predicts step times, learns from every step. Times are microseconds.

    ``quantile`` is the share of steps that :meth:`bound_us` is to cover.
    """

    def __init__(self, *, quantile: float = 0.99) -> None:
        self.quantile = quantile
        self._decode = {graph: _Fit(1, _DECODE_KNOTS, quantile) for graph in (False, True)}
        self._mixed = {graph: _Fit(5, _CHUNK_KNOTS, quantile) for graph in (False, True)}
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
    ) -> tuple[float, _Fit] | None:
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
