"""The rate that no policy could exceed, however it plans: a bound on the work that promises make due.

A rate is impossible if keeping its promises needs more time than there is. What any policy must do by the end T of the
arrivals, counting only tokens that are due by then (token i of a request at arrival + TTFT + i * TBT):

- compute every due prompt token and decode every due token: so many rows, so much attention, whatever the order;
- run enough steps for the tokens of one request to come one after the other. Requests whose windows [arrival, last
  deadline] do not overlap share no step, so the tokens due in any chain of such requests is a number of steps that no
  policy can avoid; the best chain is found exactly;
- pay for every step what rows cost at least. The cost of a step is at or above the lower convex hull of the measured
  curve, so N rows in S steps take at least S * hull(N / S) (Jensen's inequality), whatever the steps' sizes.

Missed promises make it a bound for a share: with at most K requests missed, the K largest contributions are left out of
every sum on its own. For the steps, many chains are found that have no request in common: K misses take at most the K
largest weights from all of them together, so at least one chain keeps the mean of what is left;
and of K + 1 chains at least one is whole. Memory, host work that
could be hidden, padding and noise are left out: they only cost time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simulator.curve import lower_hull
from simulator.scenario import Scenario
from simulator.step_times import StepCosts
from simulator.workload import Arrival

Array = npt.NDArray[np.float64]
SHARE_KEPT = 0.99
CHAINS = 48


@dataclass(frozen=True, slots=True)
class Demand:
    """What is due by the end of the arrivals, summed over requests with the misses left out."""

    rows: float
    decodes: float
    context_tokens: float
    prompt_tokens: float
    pairs: float
    prompts: float
    sampled: float
    steps: int

    def time_us(self, costs: StepCosts, *, overlap: bool) -> float:
        """The least time that this takes."""
        linear_us = (
            costs.per_decode_us * self.decodes
            + costs.per_context_token_us * self.context_tokens
            + costs.per_prefill_token_us * self.prompt_tokens
            + costs.per_pair_us * self.pairs
            + costs.per_chunk_us * self.prompts
        )
        if not costs.host_overlapped:
            linear_us += costs.host_per_request_us * self.decodes
        if not self.rows:
            return linear_us
        hull = _row_hull(costs, overlap=overlap)
        head = Hull(costs.head.points) if costs.head is not None else None
        step_us = 0.0 if costs.host_overlapped else costs.host_us

        def of(steps: float) -> float:
            total = steps * (step_us + hull(self.rows / steps))
            return total + (steps * head(self.sampled / steps) if head else 0.0)

        return linear_us + _least(of, max(1.0, float(self.steps)), max(2.0, float(self.rows)))


class Hull:
    """The largest convex function at or below some points; continues with the last slope."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        corners = lower_hull(points)
        self._x = [x for x, _ in corners]
        self._y = [y for _, y in corners]
        self._slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(corners)] or [0.0]

    def __call__(self, x: float) -> float:
        """The value at ``x``; that of the first point before it."""
        if x <= self._x[0]:
            return self._y[0]
        piece = min(bisect_right(self._x, x), len(self._slopes)) - 1
        return self._y[piece] + self._slopes[piece] * (x - self._x[piece])


def upper_bound_rps(
    scenario: Scenario,
    costs: StepCosts,
    arrivals_at: Callable[[float], list[int]],
    *,
    seconds: float,
    seed: int,
    replicas: int = 1,
    overlap: bool = False,
    share_kept: float = SHARE_KEPT,
) -> float:
    """The rate above which no policy keeps ``share_kept`` of the promises of ``arrivals_at(rate)``, to 0.5 %."""

    def possible(rate: float) -> bool:
        arrivals = scenario.compose(arrivals_at(rate), seed)
        demand = due_by(arrivals, scenario, round(seconds * 1e6), share_kept)
        return demand.time_us(costs, overlap=overlap) <= seconds * 1e6 * replicas

    low, high = 0.0, 1.0
    while possible(high):
        low, high = high, high * 2
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return high


def due_by(arrivals: Sequence[Arrival], scenario: Scenario, end_us: int, share_kept: float = SHARE_KEPT) -> Demand:
    """Sum up what ``arrivals`` make due by ``end_us``."""
    if not arrivals:
        return Demand(0, 0, 0, 0, 0, 0, 0, 0)
    services = {service.name: service for service in scenario.services}
    at = np.array([a.at_us for a in arrivals], dtype=float)
    ttft = np.array([services[a.service].ttft_us for a in arrivals], dtype=float)
    tbt = np.array([services[a.service].tbt_us for a in arrivals], dtype=float)
    prompt = np.array([a.prompt_tokens for a in arrivals], dtype=float)
    outputs = np.array([a.output_tokens for a in arrivals], dtype=float)
    due = np.clip(np.floor((end_us - at - ttft) / tbt) + 1, 0, outputs)
    answered = due > 0
    decodes = np.maximum(0, due - 1)
    prompt = prompt * answered
    missed = int((1 - share_kept) * len(arrivals))
    ends = np.minimum(at + ttft + np.maximum(0, outputs - 1) * tbt, float(end_us))
    return Demand(
        rows=_without_largest(prompt + decodes, missed),
        decodes=_without_largest(decodes, missed),
        context_tokens=_without_largest(decodes * prompt + decodes * (decodes - 1) / 2, missed),
        prompt_tokens=_without_largest(prompt, missed),
        pairs=_without_largest(np.floor(prompt * prompt / 2), missed),
        prompts=max(0.0, float(answered.sum() - missed)),
        sampled=_without_largest(due, missed),
        steps=_chained_steps(at, ends, due, missed),
    )


def _without_largest(values: Array, count: int) -> float:
    return float(np.sort(values)[: max(0, len(values) - count)].sum())


def _chained_steps(starts: Array, ends: Array, weights: Array, missed: int) -> int:
    """Steps that cannot be avoided when ``missed`` requests may be left out."""
    order = np.argsort(ends, kind="stable")
    left = [(float(starts[i]), float(ends[i]), int(weights[i])) for i in order if weights[i] > 0]
    total, best, lightest = 0, 0, 0
    members: list[int] = []
    for count in range(1, CHAINS + 1):
        if not left:
            break
        weight, chosen = _heaviest_chain(left)
        total += weight
        members += [left[index][2] for index in chosen]
        left = [interval for index, interval in enumerate(left) if index not in chosen]
        lightest = weight if count == 1 else min(lightest, weight)
        best = max(best, (total - sum(nlargest(missed, members))) // count)
        if count > missed:
            return max(best, lightest)
    return best


def _heaviest_chain(intervals: list[tuple[float, float, int]]) -> tuple[int, set[int]]:
    """Weighted interval scheduling over intervals sorted by end: (weight, indices of the chain)."""
    ends = [end for _, end, _ in intervals]
    best = [0]
    before = []
    for index, (start, _, weight) in enumerate(intervals):
        previous = bisect_right(ends, start, 0, index)
        before.append(previous)
        best.append(max(best[index], best[previous] + weight))
    chosen, index = set(), len(intervals)
    while index:
        if best[index] == best[index - 1]:
            index -= 1
        else:
            chosen.add(index - 1)
            index = before[index - 1]
    return best[-1], chosen


def _row_hull(costs: StepCosts, *, overlap: bool) -> Hull:
    counts = {count for count, _ in costs.dense.points}
    for curve in (*costs.lora.values(), *((costs.communication,) if costs.communication else ())):
        counts |= {count for count, _ in curve.points}
    if overlap:
        counts |= {float(costs.overlap_rows_max), float(costs.overlap_rows_max + 1)}
    points = [
        (count, costs.base_us(round(count), 0) + costs.lora_us(round(count), overlap=overlap))
        for count in sorted(counts)
    ]
    return Hull(points)


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a convex function between ``low`` and ``high``, by golden section."""
    if high <= low:
        return function(low)
    ratio = 0.6180339887498949
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 1e-4 * high:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return min(function(low), at_a, at_b, function(high))
