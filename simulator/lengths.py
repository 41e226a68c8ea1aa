"""How long prompts and answers are: measured pairs, quantiles, or Zipf.

Sampling uses uniform random numbers only, so that the same seed gives the same lengths on every machine.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from simulator.trace_files import load_azure
from simulator.workload import WorkloadError

SHIPPED = Path(__file__).parent / "data" / "lengths"


class Lengths(Protocol):
    """A distribution of (prompt tokens, output tokens)."""

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw ``count`` pairs."""
        ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs drawn with replacement, which keeps how prompt and output go together."""

    pairs: tuple[tuple[int, int], ...]

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw ``count`` pairs."""
        return [self.pairs[index] for index in rng.integers(len(self.pairs), size=count).tolist()]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Prompt and output drawn apart, each linear between equally spaced quantiles, minimum and maximum included."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (("prompt", self.prompt), ("output", self.output)):
            if len(values) < 2 or values[0] < 1 or any(b < a for a, b in pairwise(values)):
                raise WorkloadError(f"{name} quantiles have to be two or more whole numbers of 1 or more that rise")

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw ``count`` pairs."""
        uniform = rng.random((count, 2)).tolist()
        return [(_at(self.prompt, u), _at(self.output, v)) for u, v in uniform]


@dataclass(frozen=True, slots=True)
class Zipf:
    """Lengths from 1 to a maximum with chance proportional to length**-exponent: BurstGPT's own generator."""

    prompt_max: int
    output_max: int
    exponent: float = 1.1

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw ``count`` pairs."""
        prompt, output = _zipf_sums(self.prompt_max, self.exponent), _zipf_sums(self.output_max, self.exponent)
        uniform = rng.random((count, 2)).tolist()
        return [(bisect_left(prompt, u * prompt[-1]) + 1, bisect_left(output, v * output[-1]) + 1) for u, v in uniform]


def load_pairs(name: str) -> Pairs:
    """Pairs of a shipped file (``sharegpt-4k``), or the lengths of a shipped trace (``azure-conv``, ``azure-code``)."""
    if name.startswith("azure-"):
        trace = load_azure(kind=name.removeprefix("azure-"))
        return Pairs(tuple((row.prompt_tokens, row.output_tokens) for row in trace.rows))
    path = SHIPPED / f"{name}.csv"
    if not path.is_file():
        known = sorted([p.stem for p in SHIPPED.glob("*.csv")] + ["azure-conv", "azure-code"])
        raise WorkloadError(f"no lengths {name!r}; there are {', '.join(known)}")
    with path.open(encoding="utf-8", newline="") as handle:
        return Pairs(tuple((int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(handle)))


def _at(values: Sequence[int], share: float) -> int:
    place = share * (len(values) - 1)
    index = min(int(place), len(values) - 2)
    return round(values[index] + (values[index + 1] - values[index]) * (place - index))


def _zipf_sums(most: int, exponent: float) -> list[float]:
    if most < 1 or not 0 <= exponent < 100:
        raise WorkloadError(f"Zipf lengths need a maximum of 1 or more and a finite exponent, got {most}, {exponent}")
    return list(accumulate(length**-exponent for length in range(1, most + 1)))
