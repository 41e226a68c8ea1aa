"""The adapters in the repository: portable, small, complete."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from app.default_model import HUB_NAME
from scripts.compose_examples import SERVICES

ADAPTERS = Path(__file__).resolve().parents[2] / "adapters"
LAYERS = 30

services = pytest.mark.parametrize("service", SERVICES)


def config(service: str) -> dict[str, Any]:
    return json.loads((ADAPTERS / service / "adapter_config.json").read_text(encoding="utf-8"))


@services
def test_adapter_is_two_small_files_and_a_card(service: str) -> None:
    """Safetensors of at most 2 MB, PEFT's configuration and a card; nothing else, no pickle."""
    files = {path.name: path.stat().st_size for path in (ADAPTERS / service).iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert files["adapter_model.safetensors"] <= 2_000_000


@services
def test_config_names_the_base_model_and_no_machine(service: str) -> None:
    """The base model is called by its published name, and no value is a path of the machine that trained."""
    assert config(service)["base_model_name_or_path"] == HUB_NAME
    assert not [value for value in config(service).values() if isinstance(value, str) and value.startswith(("/", "~"))]


@services
def test_every_target_of_every_layer_has_a_pair_of_the_configured_rank(service: str) -> None:
    """One A of (rank, inputs) and one B of (outputs, rank) in bfloat16 for each target module of each layer."""
    rank, targets = config(service)["r"], config(service)["target_modules"]
    with safe_open(ADAPTERS / service / "adapter_model.safetensors", framework="numpy") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == LAYERS * len(targets) * 2
    for name, tensor in tensors.items():
        assert tensor.get_dtype() == "BF16"
        assert tensor.get_shape()[0 if name.endswith("lora_A.weight") else 1] == rank
        assert name.split(".")[-3] in targets


def test_ranks_and_targets_are_mixed() -> None:
    """Together the four adapters have three ranks, and touch attention and feed-forward layers."""
    assert {config(service)["r"] for service in SERVICES} == {8, 16, 32}
    assert {"q_proj", "v_proj", "o_proj", "down_proj"} <= {
        t for name in SERVICES for t in config(name)["target_modules"]
    }
