"""Small model and adapter directories on disk: real files with the real names, shapes and headers, random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 96),
    "mlp.up_proj": (64, 96),
    "mlp.down_proj": (96, 64),
}

Tensors = dict[str, np.ndarray[Any, Any]]


def write_model(directory: Path, **config: Any) -> Path:
    """A model directory: config.json with ``config`` laid over a two-layer Llama's, and a weights file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **config}))
    save_file({"model.norm.weight": np.ones(4, np.float32)}, directory / "model.safetensors")
    return directory


def lora_tensors(modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"), rank: int = 4) -> Tensors:
    """The tensors PEFT saves for ``modules`` in both layers."""
    random = np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in range(2):
        for module in modules:
            inputs, outputs = SHAPES[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32)
    return tensors


def write_adapter(
    directory: Path, tensors: Tensors | None = None, without: tuple[str, ...] = (), **config: Any
) -> Path:
    """An adapter directory of rank 4 on q_proj and v_proj; ``config`` is laid over its adapter_config.json.

    The configuration names the kinds of modules that ``tensors`` have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = lora_tensors() if tensors is None else tensors
    kinds = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors if ".lora_" in name}
    full: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "model",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": sorted(kinds),
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    kept = {key: value for key, value in full.items() if key not in without}
    (directory / "adapter_config.json").write_text(json.dumps(kept))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
