"""What adapter_config.json says beside ranks and targets: which features it uses, and whether vLLM has them.

vLLM drops every key that it does not know (``PEFTHelper.from_dict``), so that an adapter which needs one would load and
answer wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.base_model import BaseModelFacts, read_json_object
from deployments.module_names import shown, some

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
    "fan_in_fan_out": "a base model that stores its weights transposed",
    "ensure_weight_tying": "tying an adapter to both embedding and output layer",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow routing",
    "monteclora_config": "MonteCLoRA",
}
# Keys of PEFT 0.21 that other checks look at, and those that say only how the adapter was trained or where it is from.
_CHECKED = {
    *("peft_type", "r", "lora_alpha", "target_modules", "bias", "modules_to_save", "use_rslora", "init_lora_weights"),
    *("rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "task_type"),
}
_WITHOUT_EFFECT = {
    *("auto_mapping", "inference_mode", "lora_dropout", "peft_version", "revision", "runtime_config"),
    *("megatron_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
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
    """Refuse by name what vLLM does not implement, and what it would ignore."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        found.faults.append(f"peft_type is {shown(kind)}; only LORA adapters are served")
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if missing:
        found.faults.append(f"{CONFIG_FILE} lacks {', '.join(missing)}")
    for key, feature in _UNSUPPORTED.items():
        if config.get(key):
            found.faults.append(f"{key} is set: {feature} is not supported; train the adapter without it")
    _check_unknown(config, found)
    _check_values(config, found)
    _check_origin(config, base, found)


def _check_unknown(config: Mapping[str, Any], found: Findings) -> None:
    known = _CHECKED | _WITHOUT_EFFECT | _UNSUPPORTED.keys()
    unknown = [key for key in config if config[key] and key not in known]
    features = [key for key in unknown if key.startswith("use_") or key.endswith("_config")]
    found.faults.extend(
        f"{shown(key)} is set: this feature is not supported; train the adapter without it" for key in features
    )
    others = [key for key in unknown if key not in features]
    if others:
        found.warnings.append(f"{CONFIG_FILE} has unknown keys, which have no effect here: {some(others)}")


def _check_values(config: Mapping[str, Any], found: Findings) -> None:
    init = config.get("init_lora_weights", True)
    if init is not None and not isinstance(init, bool) and str(init).lower() not in _PLAIN_INITS:
        found.faults.append(
            f"init_lora_weights is {shown(init)}, which also changes the base model's weights: convert it to a plain "
            "LoRA adapter (PEFT: path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") != "none":
        found.faults.append(f"bias is {shown(config['bias'])}; only none is supported")
    stabilised = config.get("use_rslora")
    if stabilised is not None and not isinstance(stabilised, bool):
        found.faults.append(f"use_rslora is {shown(stabilised)}; it has to be true or false")
    saved = config.get("modules_to_save")
    if saved is not None and not is_list_of_strings(saved):
        found.faults.append("modules_to_save is neither null nor a list of texts")


def _check_origin(config: Mapping[str, Any], base: BaseModelFacts, found: Findings) -> None:
    trained_on = config.get("base_model_name_or_path")
    if isinstance(trained_on, str) and trained_on:
        name = trained_on.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        if name.lower() != base.name.rsplit("/", 1)[-1].lower():
            found.warnings.append(f"says it was trained on {shown(trained_on)}; the base model here is {base.name}")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        found.warnings.append(f"says it was trained for the task {shown(task)}; here it generates text (CAUSAL_LM)")


def is_list_of_strings(value: object) -> bool:
    """Whether a value of the configuration is a list that holds only texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def strings(value: object) -> tuple[str, ...]:
    """A list of the configuration; empty when it is anything else."""
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
