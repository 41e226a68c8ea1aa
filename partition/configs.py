"""How a base layer and its LoRA layer may share a GPU, and what measuring one way gives.

A *pair* is one base linear layer and the LoRA product that is added to it, for one number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Layer(StrEnum):
    """The two halves of a pair."""

    BASE = "base"
    LORA = "lora"


class Unsplit(StrEnum):
    """Ways to run a pair on the whole GPU: one after the other, or on two streams that compete for every SM."""

    SEQUENTIAL = "sequential"
    DUAL_STREAM = "dual-stream"


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Base and LoRA side by side, each on SMs of its own."""

    base_sms: int
    lora_sms: int

    def __str__(self) -> str:
        return f"{self.base_sms}+{self.lora_sms} SMs"


@dataclass(frozen=True, slots=True)
class Solo:
    """One half alone on ``sms`` SMs: a point of the curves of the paper's Figure 6."""

    layer: Layer
    sms: int

    def __str__(self) -> str:
        return f"{self.layer} alone on {self.sms} SMs"


Candidate = Split | Unsplit
"""A way to run a pair in serving."""

Config = Candidate | Solo
"""Whatever can be measured."""


@dataclass(frozen=True, slots=True)
class Reading:
    """``time_us`` of one measurement and its relative standard error ``spread`` (0.01: one per cent), as stated by
    the device that measured it."""

    time_us: float
    spread: float


class MeasurementError(RuntimeError):
    """A configuration could not be measured. The message says why; the host that enforces time-outs raises it too."""


Measure = Callable[[Config], Reading]
"""Measures one configuration once. May raise `MeasurementError`."""


@dataclass(frozen=True, slots=True)
class SmGeometry:
    """The SMs of a GPU and the sizes its driver cuts them into: multiples of ``granularity``, ``smallest`` at least.

    An SM that is switched off is simply not in ``sms``; what does not fill a granule belongs to no partition.
    """

    sms: int
    granularity: int = 2
    smallest: int = 2

    def __post_init__(self) -> None:
        if min(self.sms, self.granularity, self.smallest) < 1:
            raise ValueError(f"an SM geometry needs positive counts, got {self}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of one partition, ascending."""
        first = -(-self.smallest // self.granularity) * self.granularity
        return tuple(range(first, self.sms + 1, self.granularity))

    @property
    def splits(self) -> tuple[Split, ...]:
        """Every way to give base and LoRA SMs of their own."""
        return tuple(Split(b, lora) for b in self.sizes for lora in self.sizes if self.fits(Split(b, lora)))

    def fits(self, split: Split) -> bool:
        """Whether the GPU has the SMs of both halves."""
        return split.base_sms + split.lora_sms <= self.sms
