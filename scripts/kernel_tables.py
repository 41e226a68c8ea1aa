"""Read measured kernel tables (the aiconfigurator CSV files) and add them up to what a whole model takes."""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduling.nnls import solve_nnls

Grid = dict[tuple[int, int], dict[int, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes, and over how many GPUs each layer is split."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tp: int = 1
    head_dim: int = 128

    @property
    def matmuls(self) -> dict[str, tuple[int, int]]:
        """(n, k) of a layer's products on one GPU, by layer group."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv // self.tp, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim // self.tp),
            "gate_up": (2 * self.ffn // self.tp, self.hidden),
            "down": (self.hidden, self.ffn // self.tp),
        }

    @property
    def weight_bytes(self) -> int:
        """bfloat16 weights on one GPU."""
        layer = sum(n * k for n, k in self.matmuls.values())
        return 2 * (self.layers * layer + 2 * self.vocab * self.hidden // self.tp)

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of one token on one GPU."""
        return 2 * 2 * self.layers * max(1, self.kv_heads // self.tp) * self.head_dim


def read_gemm(path: Path) -> Grid:
    """Milliseconds by (n, k) and m."""
    grid: Grid = defaultdict(dict)
    with path.open(newline="") as handle:
        for row in csv.DictReader(handle):
            grid[int(row["n"]), int(row["k"])][int(row["m"])] = float(row["latency"])
    return grid


def gemm_ms(grid: Grid, m: int, n: int, k: int) -> float:
    """Milliseconds of an (m, k) x (k, n) product, linear between the measured sizes."""
    n0, n1, fn = _between(sorted({a for a, _ in grid}), n)
    k0, k1, fk = _between(sorted({b for _, b in grid}), k)

    def at(n: int, k: int) -> float:
        points = grid[n, k]
        m0, m1, fm = _between(sorted(points), m)
        return points[m0] * (1 - fm) + points[m1] * fm

    low = at(n0, k0) * (1 - fn) + at(n1, k0) * fn
    high = at(n0, k1) * (1 - fn) + at(n1, k1) * fn
    return low * (1 - fk) + high * fk


def read_allreduce(path: Path, gpus: int) -> list[tuple[int, float]]:
    """(elements, milliseconds) of the custom all-reduce inside a CUDA graph."""
    with path.open(newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["backend"].endswith("_graph")]
    return sorted((int(r["message_size"]), float(r["latency"])) for r in rows if int(r["num_gpus"]) == gpus)


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Linear between points."""
    return float(np.interp(x, [p for p, _ in points], [v for _, v in points]))


Attention = dict[tuple[int, int], dict[tuple[int, int], float]]


def read_attention(path: Path, *, decode: bool) -> Attention:
    """Milliseconds of one layer by (heads, kv_heads) and (batch, length); the length of a decode is its context."""
    table: Attention = defaultdict(dict)
    with path.open(newline="") as handle:
        for row in csv.DictReader(handle):
            length = int(row["step"]) + 1 if decode else int(row["isl"])
            heads = (int(row["num_heads"]), int(row["num_key_value_heads"]))
            table[heads][int(row["batch_size"]), length] = float(row["latency"])
    return table


def at_heads(table: Attention, heads: int, kv_heads: int) -> dict[tuple[int, int], float]:
    """The table of a number of heads, linear between the measured ones."""
    known = sorted({q for q, kv in table if kv == kv_heads})
    q0, q1, share = _between(known, heads)
    low, high = table[q0, kv_heads], table[q1, kv_heads]
    return {key: low[key] * (1 - share) + high[key] * share for key in low if key in high}


@dataclass(frozen=True, slots=True)
class AffineFit:
    """Prices in milliseconds per feature, and the relative errors of the fit: median size, 95 %, signed mean."""

    prices: tuple[float, ...]
    error_median: float
    error_p95: float
    error_mean: float


def fit_affine(rows: Sequence[Sequence[float]], times: Sequence[float]) -> AffineFit:
    """Non-negative least squares of relative errors."""
    features, time = np.array(rows, dtype=float), np.array(times)
    scaled = features / time[:, None]
    prices = solve_nnls(scaled.T @ scaled, scaled.sum(axis=0))
    errors = features @ prices / time - 1
    sizes = np.abs(errors)
    return AffineFit(
        tuple(map(float, prices)),
        float(np.median(sizes)),
        float(np.quantile(sizes, 0.95)),
        float(errors.mean()),
    )


def fit_decode_attention(table: Mapping[tuple[int, int], float], least_tokens: int) -> AffineFit:
    """Prices of (a layer, a decode, a token of context) for batches and contexts as a server sees them.

    Below ``least_tokens`` of context in all, the KV cache of the one layer that was measured stayed in the GPU's L2
    cache, which that of a whole model does not.
    """
    kept = {
        (batch, length): time
        for (batch, length), time in table.items()
        if 8 <= batch <= 512 and 64 <= length <= 8192 and least_tokens <= batch * length <= 600_000
    }
    return fit_affine([(1, batch, batch * length) for batch, length in kept], list(kept.values()))


def fit_prefill_attention(table: Mapping[tuple[int, int], float]) -> AffineFit:
    """Prices of (a chunk, a token, a query-key pair)."""
    kept = {k: v for k, v in table.items() if 64 <= k[1] <= 8192 and k[0] * k[1] <= 16_384}
    return fit_affine([(1, batch * length, batch * length * length / 2) for batch, length in kept], list(kept.values()))


def _between(values: Sequence[int], x: int) -> tuple[int, int, float]:
    """The measured values around ``x`` and how far it is from the first to the second."""
    if len(values) == 1:
        return values[0], values[0], 0.0
    index = max(1, min(len(values) - 1, bisect_left(values, x)))
    low, high = values[index - 1], values[index]
    return low, high, (x - low) / (high - low)
