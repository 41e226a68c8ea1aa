"""What adapter_config.json says: features that vLLM does not implement, and the rank and scale of every module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.base_model import BaseModelFacts, read_json_object

CONFIG_FILE = "adapter_config.json"

# Features of PEFT that change what an adapter computes and that vLLM does not implement.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "bias terms in LoRA layers",
    "alora_invocation_tokens": "Activated LoRA",
    "layer_replication": "layer replication",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "LoRA on bare parameters",
}
# Initialisations that only choose first values; all others (PiSSA, OLoRA, ...) also change the base model's weights.
_PLAIN_INITS = {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}


@dataclass(slots=True)
class Findings:
    """Sentences about an adapter: what forbids serving it, and what its owner should know."""

    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_config(path: Path, found: Findings) -> dict[str, Any] | None:
    """The configuration of the adapter in ``path``; None, with the fault noted, when it cannot be read."""
    try:
        return read_json_object(path / CONFIG_FILE, ValueError)
    except ValueError as error:
        found.faults.append(str(error))
        return None


def check_features(config: Mapping[str, Any], base: BaseModelFacts, found: Findings) -> None:
    """Refuse by name what vLLM does not implement."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        found.faults.append(f"peft_type is {kind}; only LORA adapters are served")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if missing:
        found.faults.append(f"{CONFIG_FILE} lacks {', '.join(missing)}")
    for key, feature in _UNSUPPORTED.items():
        if config.get(key):
            found.faults.append(f"{key} is set: {feature} is not supported")
    for key, value in config.items():
        if key.startswith("use_") and value and key not in _UNSUPPORTED and key != "use_rslora":
            found.faults.append(f"{key} is set: this feature is not supported")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        found.faults.append(
            f"init_lora_weights is {init}, which also changes the base model's weights: convert it to a plain LoRA "
            "adapter (PEFT: path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") != "none":
        found.faults.append(f"bias is {config['bias']}; only none is supported")
    targets = config.get("target_modules")
    if targets is not None and not isinstance(targets, str) and not _is_list_ofstrings(targets):
        found.faults.append("target_modules is neither text nor a list of texts")
    trained_on = config.get("base_model_name_or_path")
    if isinstance(trained_on, str) and trained_on:
        name = trained_on.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        if name.lower() != base.name.rsplit("/", 1)[-1].lower():
            found.warnings.append(f"says it was trained on {trained_on}; the base model here is {base.name}")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank and scale per module, as PEFT and vLLM's PEFTHelper work them out."""

    default: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], found: Findings) -> Ranks | None:
        rank, alpha = config.get("r"), config.get("lora_alpha")
        before = len(found.faults)
        if "r" in config and not _is_positive(rank, int):
            found.faults.append(f"the rank r is {rank!r}; it has to be a positive whole number")
        if "lora_alpha" in config and not _is_positive(alpha, int | float):
            found.faults.append(f"lora_alpha is {alpha!r}; it has to be a positive number")
        ranks = _pattern(config, "rank_pattern", int, found)
        alphas = _pattern(config, "alpha_pattern", int | float, found)
        if len(found.faults) > before or rank is None or alpha is None:
            return None
        return cls(rank, float(alpha), ranks, alphas, bool(config.get("use_rslora")))

    def of(self, module: str) -> int:
        """The rank configured for a module; the first matching pattern wins."""
        for pattern, rank in self.rank_pattern.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return rank
        return self.default

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def _pattern(config: Mapping[str, Any], key: str, kind: Any, found: Findings) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        found.faults.append(f"{key} is not a mapping")
        return {}
    for pattern, value in patterns.items():
        if not _is_positive(value, kind):
            found.faults.append(f"{key} gives {pattern!r} the value {value!r}; it has to be a positive number")
        try:
            re.compile(pattern)
        except re.error as error:
            found.faults.append(f"{key} has {pattern!r}, which is not a pattern: {error}")
    return patterns


def _is_positive(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _is_list_ofstrings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def strings(value: object) -> tuple[str, ...]:
    """A list of the configuration; empty when it is anything else."""
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
