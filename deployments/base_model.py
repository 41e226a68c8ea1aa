"""What can be known of a base model from its config.json, without loading it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.regular_file import FileRefusedError, check_regular, read_regular

MAX_CONFIG_BYTES = 16 * 1024 * 1024

# Architectures whose layers are named and shaped like Llama's: q/k/v/o_proj and gate/up/down_proj, one each a layer.
LLAMA_LIKE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_BLOCKS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


class ModelError(ValueError):
    """A model directory that cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """Sizes of a base model. 0 stands for a size that the configuration does not tell.

    ``shapes`` maps the last part of a module's name (``q_proj``) to (input, output) features; empty when the
    architecture is not one whose layers we know.
    """

    name: str
    architecture: str = ""
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    max_positions: int = 0
    tied_embeddings: bool = False
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def module_names(self) -> list[str]:
        """The names of all modules that LoRA can be put on; empty when :attr:`shapes` is not known."""
        if not self.shapes:
            return []
        layers = [
            f"model.layers.{n}.{block}.{name}" for n in range(self.layers) for block, names in _BLOCKS for name in names
        ]
        return ["model.embed_tokens", *layers, "lm_head"]

    def module_shape(self, module: str) -> tuple[int, int] | None:
        """(input, output) features of a module by its full name, None when the model has no such module.

        Only meaningful when :attr:`shapes` is known.
        """
        parts = module.split(".")
        if module in {"lm_head", "model.embed_tokens"}:
            return (self.hidden, self.vocab) if module == "lm_head" else (self.vocab, self.hidden)
        known = (
            len(parts) == 5
            and parts[:2] == ["model", "layers"]
            and parts[2].isdecimal()
            and int(parts[2]) < self.layers
            and parts[4] in dict(_BLOCKS).get(parts[3], ())
        )
        return self.shapes.get(parts[4]) if known else None


def read_model_facts(directory: Path) -> BaseModelFacts:
    """Read config.json of a local model and see that its weights are safetensors. Raises :class:`ModelError`."""
    fault = directory_fault(directory)
    if fault is not None:
        raise ModelError(fault)
    path = directory / "config.json"
    config = read_json_object(path, ModelError)
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ModelError("the directory has no *.safetensors file; other weight formats are not read")
    for file in weights:
        try:
            check_regular(file)
        except OSError as error:
            raise ModelError(f"{file.name} cannot be read: {error.strerror}") from None
        except FileRefusedError as error:
            raise ModelError(f"{file.name} {error}") from None
    text = config.get("text_config")
    return _facts(directory.name, config, text if isinstance(text, Mapping) else config)


def directory_fault(path: Path) -> str | None:
    """Why ``path`` cannot be read as a directory, None when it can. Raises nothing, whatever the path is made of."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such directory"
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    except ValueError:
        return "is not a path: it holds a null character"
    if not stat.S_ISDIR(mode):
        return "is not a directory"
    return None if os.access(path, os.R_OK | os.X_OK) else "cannot be opened: permission denied"


def read_json_object(path: Path, error_type: type[ValueError]) -> dict[str, Any]:
    """The JSON object in a small file; raises ``error_type`` naming the file when there is none."""
    try:
        raw = read_regular(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise error_type(f"{path.name} is missing") from None
    except OSError as error:
        raise error_type(f"{path.name} cannot be read: {error.strerror}") from None
    except FileRefusedError as error:
        raise error_type(f"{path.name} {error}") from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path.name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise error_type(f"{path.name} does not hold a JSON object")
    return data


def _facts(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> BaseModelFacts:
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    kv_heads = _size(text, "num_key_value_heads") or heads
    head_size = _size(text, "head_dim") or (hidden // heads if heads else 0)
    inner = _size(text, "intermediate_size")
    shapes = {
        "q_proj": (hidden, heads * head_size),
        "k_proj": (hidden, kv_heads * head_size),
        "v_proj": (hidden, kv_heads * head_size),
        "o_proj": (heads * head_size, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    complete = architecture in LLAMA_LIKE and all(size > 0 for pair in shapes.values() for size in pair)
    return BaseModelFacts(
        name=name,
        architecture=architecture,
        hidden=hidden,
        layers=_size(text, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        vocab=_size(text, "vocab_size"),
        max_positions=_size(text, "max_position_embeddings"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        shapes=shapes if complete else {},
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
