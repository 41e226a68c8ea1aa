"""Make the costs of a profile from measured steps: the half of ``halo profile`` that needs no engine.

The engine side runs steps of many shapes, or records those of a load, and hands over
:class:`simulator.recording.RecordedStep` lists. Rows are priced by a rising curve through knots, attention by affine
terms, all by non-negative least squares of relative errors, as :mod:`scheduling.step_fit` does online. What was held
out says how good the costs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduling.nnls import solve_nnls
from scheduling.step_fit import pieces
from simulator.curve import Curve
from simulator.recording import RecordedStep
from simulator.step_times import StepCosts, StepTimes
from simulator.workload import WorkloadError

KNOTS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LEAST_STEPS = 50


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Relative errors on steps that were not fitted: signed mean, median and 95 % of the sizes."""

    steps: int
    signed_mean: float
    median: float
    p95: float


def fit_costs(steps: Sequence[RecordedStep], *, held_out_every: int = 5) -> tuple[StepCosts, FitErrors]:
    """Fit costs to ``steps``; every ``held_out_every``-th is left out and judged. Raises WorkloadError if too few."""
    if len(steps) < LEAST_STEPS:
        raise WorkloadError(f"{len(steps)} measured steps; at least {LEAST_STEPS} of different shapes are needed")
    kept = [step for index, step in enumerate(steps) if index % held_out_every]
    unseen = steps[::held_out_every]
    rows = np.array([_features(step) for step in kept])
    times = np.array([step.duration_us for step in kept], dtype=float)
    scaled = rows / times[:, None]
    prices = solve_nnls(scaled.T @ scaled, scaled.sum(axis=0))
    constant, per_decode, per_context, per_pair, per_prefix, eager = map(float, prices[:6])
    slopes = prices[6:]
    values = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(KNOTS))))
    end = KNOTS[-1] * 8
    points = [(float(x), float(y)) for x, y in zip(KNOTS, values, strict=True)]
    points.append((float(end), float(values[-1] + slopes[-1] * (end - KNOTS[-1]))))
    residual = rows @ prices / times - 1
    costs = StepCosts(
        dense=Curve(points),
        per_decode_us=per_decode,
        per_context_token_us=per_context,
        per_pair_us=per_pair,
        per_prefix_token_us=per_prefix,
        host_us=constant,
        eager_us=eager,
        graph_sizes=_graph_sizes(steps),
        noise_pct=round(float(np.quantile(np.abs(residual), 0.68)) * 100, 2),
    )
    exact = StepTimes(costs)
    errors = np.array([exact.exact_us(step.shape)[0] / step.duration_us - 1 for step in unseen])
    sizes = np.abs(errors)
    return costs, FitErrors(len(unseen), float(errors.mean()), float(np.median(sizes)), float(np.quantile(sizes, 0.95)))


def _features(step: RecordedStep) -> list[float]:
    shape = step.shape
    return [
        1.0,
        shape.decodes,
        shape.context_tokens,
        shape.pairs,
        sum(prefix for _, prefix in shape.chunks),
        0.0 if step.graph else 1.0,
        *pieces(shape.tokens, KNOTS),
    ]


def _graph_sizes(steps: Sequence[RecordedStep]) -> tuple[int, ...]:
    """Without knowing what was captured: every decode batch up to the largest that ran as a graph, unpadded."""
    largest = max((step.shape.decodes for step in steps if step.graph), default=0)
    return tuple(range(1, largest + 1))
