"""Rank and scale of every module of an adapter, as PEFT and vLLM's PEFTHelper work them out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.adapter_config import CONFIG_FILE, Findings
from deployments.adapter_tensors import Weight
from deployments.base_model import BaseModelFacts
from deployments.module_names import Pattern, PatternError, shown, some

RANK_MAX = 65_536
SCALE_MIN, SCALE_MAX = 1e-4, 1e4
"""Trained adapters have scales around 1. Beyond these, bfloat16 products vanish beside the base model's or overflow."""
PATTERNS_MAX = 4096


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One entry of ``rank_pattern`` or ``alpha_pattern``."""

    written: str
    pattern: Pattern
    value: float


@dataclass(frozen=True, slots=True)
class Ranks:
    """``default`` and ``alpha`` hold where no pattern matches; of several patterns that match, the first counts."""

    default: int
    alpha: float
    rank_patterns: tuple[ModulePattern, ...]
    alpha_patterns: tuple[ModulePattern, ...]
    rank_stabilised: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], found: Findings) -> Ranks | None:
        """What the configuration says; None, with the faults noted, when it says nothing usable."""
        rank, alpha = config.get("r"), config.get("lora_alpha")
        before = len(found.faults)
        if "r" in config and not _is_rank(rank):
            found.faults.append(f"the rank r is {shown(rank)}; it has to be a positive whole number")
        if "lora_alpha" in config and not _is_alpha(alpha):
            found.faults.append(f"lora_alpha is {shown(alpha)}; it has to be a positive number")
        ranks = _patterns(config, "rank_pattern", found)
        alphas = _patterns(config, "alpha_pattern", found)
        if len(found.faults) > before or rank is None or alpha is None:
            return None
        return cls(rank, float(alpha), ranks, alphas, config.get("use_rslora") is True)

    def rank(self, module: str) -> int:
        """The rank configured for a module. Raises :class:`PatternError`."""
        return int(_first(self.rank_patterns, module, self.default))

    def alpha_of(self, module: str) -> float:
        """The alpha configured for a module. Raises :class:`PatternError`."""
        return _first(self.alpha_patterns, module, self.alpha)

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank

    @property
    def largest(self) -> int:
        """The largest rank that the configuration names, whether a module has it or not: what vLLM judges by."""
        return max([self.default, *(int(entry.value) for entry in self.rank_patterns)])


def check_ranks(
    pairs: Mapping[str, Weight], ranks: Ranks | None, base: BaseModelFacts, max_rank: int | None, found: Findings
) -> None:
    """Compare the configured ranks and scales with the tensors and with the engine's ``max_rank``, if that is known."""
    uneven = [module for module, weight in pairs.items() if weight.rank != weight.rank_b]
    if uneven:
        found.faults.append(f"lora_A and lora_B of these modules have different ranks: {some(uneven)}")
    if ranks is not None:
        try:
            _check_rank_of_modules({name: pairs[name] for name in pairs if name not in uneven}, ranks, found)
            _check_scales(pairs, ranks, found)
            _check_unmatched(pairs, ranks, base, found)
        except PatternError as error:
            found.faults.append(f"a pattern of rank_pattern or alpha_pattern {error}")
    largest = max((weight.rank for weight in pairs.values()), default=0)
    # vLLM judges by the configuration, the engine's buffers by the tensors: neither may exceed what it was built for.
    largest = max(largest, ranks.largest if ranks is not None else 0)
    if max_rank is not None and largest > max_rank:
        found.faults.append(f"its rank is {largest}, the engine is built for ranks up to {max_rank} (max_lora_rank)")


def _check_rank_of_modules(pairs: Mapping[str, Weight], ranks: Ranks, found: Findings) -> None:
    for module, weight in pairs.items():
        if weight.rank != ranks.rank(module):
            found.faults.append(
                f"{CONFIG_FILE} says rank {ranks.rank(module)} for {shown(module)}, its tensors have rank "
                f"{weight.rank}: its output would be scaled wrongly"
            )
            return


def _check_scales(modules: Iterable[str], ranks: Ranks, found: Findings) -> None:
    for module in modules:
        rank, alpha = ranks.rank(module), ranks.alpha_of(module)
        scale = ranks.scale(rank, alpha)
        if not SCALE_MIN <= scale <= SCALE_MAX:
            found.faults.append(
                f"alpha {alpha:g} at rank {rank} scales {shown(module)} by {scale:.3g}; trained adapters have "
                f"{SCALE_MIN:g} to {SCALE_MAX:g}: write the lora_alpha (or alpha_pattern) that it was trained with"
            )
            return


def _check_unmatched(pairs: Mapping[str, Weight], ranks: Ranks, base: BaseModelFacts, found: Findings) -> None:
    """Patterns that fit no module: vLLM and PEFT ignore them alike, so that a misspelled one goes unnoticed."""
    others = [name for name in base.module_names() if name not in pairs]
    for key, patterns in (("rank_pattern", ranks.rank_patterns), ("alpha_pattern", ranks.alpha_patterns)):
        idle = [entry for entry in patterns if not any(entry.pattern.matches(module) for module in pairs)]
        strange = [entry for entry in idle if not any(entry.pattern.matches(module) for module in others)]
        if strange and base.shapes:
            found.faults.append(
                f"{key} names {some(e.written for e in strange)}, which fits no module and would be ignored: "
                "correct it, or remove it"
            )
        elif idle:
            found.warnings.append(f"{key} names {some(e.written for e in idle)}, which has no tensors; ignored")


def _first(patterns: tuple[ModulePattern, ...], module: str, default: float) -> float:
    return next((entry.value for entry in patterns if entry.pattern.matches(module)), default)


def _patterns(config: Mapping[str, Any], key: str, found: Findings) -> tuple[ModulePattern, ...]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        found.faults.append(f"{key} is not a mapping")
        return ()
    if len(patterns) > PATTERNS_MAX:
        found.faults.append(f"{key} has {len(patterns)} entries; at most {PATTERNS_MAX} are read")
        return ()
    kept: list[ModulePattern] = []
    for written, value in patterns.items():
        if not (_is_rank(value) if key == "rank_pattern" else _is_alpha(value)):
            kind = "whole number" if key == "rank_pattern" else "number"
            found.faults.append(
                f"{key} gives {shown(written)} the value {shown(value)}; it has to be a positive {kind}"
            )
            continue
        try:
            kept.append(ModulePattern(written, Pattern(written, ending=True), value))
        except PatternError as error:
            found.faults.append(f"{key} has {shown(written)}, which {error}")
    return tuple(kept)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= RANK_MAX


def _is_alpha(value: object) -> bool:
    # An integer may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= 1.7e308
