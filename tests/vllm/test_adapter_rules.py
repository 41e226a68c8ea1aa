"""Our adapter checks beside vLLM's and PEFT's own code: we accept what vLLM loads right, and refuse the rest sooner."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from app.args_checks import vllm_engine_args
from app.args_schema import LoraRank
from deployments.adapters import AdapterError, check_adapter, loadable_directory
from deployments.base_model import BaseModelFacts, read_model_facts

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def base(model_dir: Path) -> BaseModelFacts:
    return read_model_facts(model_dir)


def save(model_dir: Path, path: Path, **config: Any) -> Path:
    """An adapter as PEFT saves it."""
    model = LlamaForCausalLM.from_pretrained(model_dir)
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
    get_peft_model(model, LoraConfig(**options)).save_pretrained(path)
    return path


def load_in_vllm(path: Path, max_rank: int = 64) -> LoRAModel:
    helper = PEFTHelper.from_local_dir(str(path), None)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_rank, max_loras=1))
    modules = {*LINEAR, "embed_tokens", "lm_head"}
    return LoRAModel.from_local_checkpoint(str(path), modules, helper, lora_model_id=1, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": LINEAR},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.[qv]_proj"},
        {"r": 64, "lora_alpha": 16, "use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 2}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_what_peft_saves_is_accepted(
    model_dir: Path, base: BaseModelFacts, tmp_path: Path, config: dict[str, Any]
) -> None:
    """An adapter that PEFT saved for this base passes, and vLLM loads it with the modules, rank and scale we report."""
    path = save(model_dir, tmp_path, **config)
    report = check_adapter(path, base, 64)
    loaded = load_in_vllm(path)
    assert set(report.modules) == {name.rsplit(".", 1)[-1] for name in loaded.loras}
    assert report.rank == max(lora.lora_a.shape[0] for lora in loaded.loras.values())
    assert PEFTHelper.from_local_dir(str(path), None).vllm_lora_scaling_factor == pytest.approx(report.scale)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"use_dora": True}, "use_dora is set: DoRA is not supported"),
        ({"lora_bias": True}, "lora_bias is set: bias terms in LoRA layers is not supported"),
        ({"bias": "all"}, "bias is all; only none is supported"),
        ({"modules_to_save": ["lm_head"]}, "base_model.model.lm_head.weight is saved whole (modules_to_save)"),
    ],
    ids=str,
)
def test_what_vllm_refuses_is_refused_by_name(
    model_dir: Path, base: BaseModelFacts, tmp_path: Path, config: dict[str, Any], fault: str
) -> None:
    """What vLLM would refuse at the first request is refused before the engine starts."""
    path = save(model_dir, tmp_path, **config)
    with pytest.raises(AdapterError) as caught:
        check_adapter(path, base, 64)
    assert any(found.startswith(fault) for found in caught.value.faults)
    with pytest.raises(ValueError, match=r".+"):
        load_in_vllm(path)


def test_resized_embeddings(model_dir: Path, base: BaseModelFacts, tmp_path: Path) -> None:
    """An adapter trained with added tokens is refused with both sizes."""
    model = LlamaForCausalLM.from_pretrained(model_dir)
    model.resize_token_embeddings(192)
    get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"])).save_pretrained(
        tmp_path, save_embedding_layers=True
    )
    with pytest.raises(AdapterError, match="has 192 rows, the base model's vocabulary has 128 tokens"):
        check_adapter(tmp_path, base, 64)


def test_leftover_modules_to_save_become_loadable(model_dir: Path, base: BaseModelFacts, tmp_path: Path) -> None:
    """vLLM refuses the directory as it is, and loads the one we give it, with the same weights."""
    path = save(model_dir, tmp_path / "a")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    with pytest.raises(ValueError, match="modules_to_save"):
        load_in_vllm(path)
    copy = loadable_directory(check_adapter(path, base, 64), tmp_path / "cache")
    before = load_file(path / "adapter_model.safetensors")
    for name, lora in load_in_vllm(copy).loras.items():
        assert torch.equal(lora.lora_a, before[f"base_model.model.{name}.lora_A.weight"])


def test_ranks_are_those_of_vllm() -> None:
    """max_lora_rank takes the values that this vLLM takes."""
    assert typing.get_args(LoraRank) == typing.get_args(MaxLoRARanks)


def test_engine_arguments_are_read_from_source() -> None:
    """The names found without importing vLLM are those of its dataclass."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415

    names = {name for name in AsyncEngineArgs.__dataclass_fields__ if not name.startswith("_")}
    assert vllm_engine_args() == names


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": None},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": [0]},
        {"lora_alpha": 1e300},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"vproj": 2}},
        {"kasa_config": {"beta": 0.1}},
        {"use_new_feature": True},
    ],
    ids=str,
)
def test_what_vllm_would_ignore_is_refused(
    model_dir: Path, base: BaseModelFacts, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """vLLM loads these without a word; only our check stands before wrong answers."""
    path = save(model_dir, tmp_path)
    written = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**written, **changes}))
    assert load_in_vllm(path).loras
    with pytest.raises(AdapterError):
        check_adapter(path, base, 64)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*layers\.1.*"},
        {"target_modules": r"model\.layers\.0\..*(q|up)_proj"},
    ],
    ids=str,
)
def test_targets_are_read_as_peft_reads_them(
    model_dir: Path, base: BaseModelFacts, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The modules that PEFT chose are those that its own configuration names for us: none too many, none missing."""
    assert check_adapter(save(model_dir, tmp_path, **config), base, 64).warnings == ()
