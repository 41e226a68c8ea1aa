"""Settings of adapter_config.json that the engine would ignore, or that contradict the tensors beside them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.adapter_ranks import SCALE_MAX, SCALE_MIN
from deployments.adapters import AdapterError, check_adapter
from deployments.base_model import BaseModelFacts, read_model_facts
from tests.fakes.checkpoints import lora_tensors, write_adapter, write_model

QV = ("self_attn.q_proj", "self_attn.v_proj")
L0 = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelFacts:
    return read_model_facts(write_model(tmp_path_factory.mktemp("models") / "model"))


def faults(path: Path, base: BaseModelFacts) -> list[str]:
    with pytest.raises(AdapterError) as caught:
        check_adapter(path, base, 16)
    return list(caught.value.faults)


WITHOUT = "is not supported; train the adapter without it"
EXTRA = (
    "target_modules does not name {}, whose tensors are in the file: vLLM would apply them, PEFT would not. "
    "Write the target_modules that it was trained with, or save the adapter again"
)
MISSING = (
    "target_modules names {}, but the file has no tensors for them, so that they would not be changed: "
    "save the adapter again, or write the target_modules that it was trained with"
)
SCALED = (
    f"alpha {{}} at rank 4 scales {{}} by {{}}; trained adapters have {SCALE_MIN:g} to {SCALE_MAX:g}: "
    "write the lora_alpha (or alpha_pattern) that it was trained with"
)
IDLE = "{} names {}, which fits no module and would be ignored: correct it, or remove it"

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # Targets against tensors.
    ({"target_modules": None}, ["target_modules is null: write the names of the modules that it was trained on"]),
    ({"target_modules": []}, [EXTRA.format(f"{L0}.q_proj, {L0}.v_proj, model.layers.1.self_attn.q_proj and 1 more")]),
    ({"target_modules": ["q_proj"]}, [EXTRA.format(f"{L0}.v_proj, model.layers.1.self_attn.v_proj")]),
    ({"target_modules": ["k_proj"]}, [
        EXTRA.format(f"{L0}.q_proj, {L0}.v_proj, model.layers.1.self_attn.q_proj and 1 more"),
        MISSING.format(f"{L0}.k_proj, model.layers.1.self_attn.k_proj"),
    ]),
    ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, [
        MISSING.format(f"{L0}.o_proj, model.layers.1.self_attn.o_proj")
    ]),
    ({"target_modules": "q_proj"}, [  # As a text it is a pattern for the whole name.
        EXTRA.format(f"{L0}.q_proj, {L0}.v_proj, model.layers.1.self_attn.q_proj and 1 more")
    ]),
    ({"target_modules": ".*[qkv]_proj"}, [MISSING.format(f"{L0}.k_proj, model.layers.1.self_attn.k_proj")]),
    ({"target_modules": "("}, ["target_modules is (, which is not a pattern: missing ) at position 1"]),
    ({"target_modules": {"q_proj": 1}}, ["target_modules is neither text nor a list of texts"]),
    ({"target_modules": ["q_proj", 1]}, ["target_modules is neither text nor a list of texts"]),
    ({"exclude_modules": ["v_proj"]}, [EXTRA.format(f"{L0}.v_proj, model.layers.1.self_attn.v_proj")]),
    ({"exclude_modules": 5}, ["exclude_modules is neither text nor a list of texts"]),
    ({"layers_to_transform": [0]}, [
        EXTRA.format("model.layers.1.self_attn.q_proj, model.layers.1.self_attn.v_proj")
    ]),
    ({"layers_to_transform": "all"}, ["layers_to_transform is neither a whole number nor a list of them"]),
    ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, [
        EXTRA.format(f"{L0}.q_proj, {L0}.v_proj, model.layers.1.self_attn.q_proj and 1 more")
    ]),
    ({"layers_to_transform": [0, 1], "layers_pattern": 7}, ["layers_pattern is neither text nor a list of texts"]),
    ({"modules_to_save": "lm_head"}, ["modules_to_save is neither null nor a list of texts"]),
    # The scale.
    ({"lora_alpha": 1e300}, [SCALED.format("1e+300", f"{L0}.q_proj", "2.5e+299")]),
    ({"lora_alpha": 1e-300}, [SCALED.format("1e-300", f"{L0}.q_proj", "2.5e-301")]),
    ({"lora_alpha": 10**400}, ["lora_alpha is " + "1" + "0" * 76 + "...; it has to be a positive number"]),
    ({"lora_alpha": math.nan}, ["lora_alpha is nan; it has to be a positive number"]),
    ({"lora_alpha": math.inf}, ["lora_alpha is inf; it has to be a positive number"]),
    ({"lora_alpha": 0}, ["lora_alpha is 0; it has to be a positive number"]),
    ({"lora_alpha": -0.0}, ["lora_alpha is -0.0; it has to be a positive number"]),
    ({"lora_alpha": -16}, ["lora_alpha is -16; it has to be a positive number"]),
    ({"lora_alpha": None}, ["lora_alpha is None; it has to be a positive number"]),
    ({"lora_alpha": "16"}, ["lora_alpha is 16; it has to be a positive number"]),
    ({"lora_alpha": True}, ["lora_alpha is True; it has to be a positive number"]),
    ({"r": 10**400}, ["the rank r is " + "1" + "0" * 76 + "...; it has to be a positive whole number"]),
    ({"r": 4.0}, ["the rank r is 4.0; it has to be a positive whole number"]),
    ({"alpha_pattern": {"v_proj": 1e300}}, [SCALED.format("1e+300", f"{L0}.v_proj", "2.5e+299")]),
    ({"alpha_pattern": {"v_proj": -1}}, ["alpha_pattern gives v_proj the value -1; it has to be a positive number"]),
    ({"alpha_pattern": {"v_proj": math.nan}}, [
        "alpha_pattern gives v_proj the value nan; it has to be a positive number"
    ]),
    ({"rank_pattern": {"v_proj": 4.0}}, [
        "rank_pattern gives v_proj the value 4.0; it has to be a positive whole number"
    ]),
    ({"use_rslora": "false"}, ["use_rslora is false; it has to be true or false"]),
    ({"use_rslora": 1}, ["use_rslora is 1; it has to be true or false"]),
    # Patterns that fit nothing.
    ({"alpha_pattern": {"vproj": 16}}, [IDLE.format("alpha_pattern", "vproj")]),
    ({"rank_pattern": {"base_model.model.model.layers.0.self_attn.q_proj": 4}}, [
        IDLE.format("rank_pattern", "base_model.model.model.layers.0.self_attn.q_proj")
    ]),
    ({"rank_pattern": {"layers.7.self_attn.q_proj": 4}}, [IDLE.format("rank_pattern", "layers.7.self_attn.q_proj")]),
    # Features that vLLM's PEFTHelper drops or refuses.
    ({"fan_in_fan_out": True}, [
        f"fan_in_fan_out is set: a base model that stores its weights transposed {WITHOUT}"
    ]),
    ({"use_dora": True}, [f"use_dora is set: DoRA {WITHOUT}"]),
    ({"kasa_config": {"beta": 1}}, [f"kasa_config is set: KaSA {WITHOUT}"]),
    ({"arrow_config": {"top_k": 3}}, [f"arrow_config is set: Arrow routing {WITHOUT}"]),
    ({"monteclora_config": {"x": 1}}, [f"monteclora_config is set: MonteCLoRA {WITHOUT}"]),
    ({"ensure_weight_tying": True}, [
        f"ensure_weight_tying is set: tying an adapter to both embedding and output layer {WITHOUT}"
    ]),
    ({"trainable_token_indices": [1]}, [f"trainable_token_indices is set: trainable tokens {WITHOUT}"]),
    ({"target_parameters": ["w"]}, [f"target_parameters is set: LoRA on bare parameters {WITHOUT}"]),
    ({"next_config": {"x": 1}}, [f"next_config is set: this feature {WITHOUT}"]),
    ({"bias": "lora_only"}, ["bias is lora_only; only none is supported"]),
    ({"bias": None}, ["bias is None; only none is supported"]),
    ({"init_lora_weights": ["pissa"]}, [
        "init_lora_weights is ['pissa'], which also changes the base model's weights: convert it to a plain LoRA "
        "adapter (PEFT: path_initial_model_for_weight_conversion)"
    ]),
    ({"peft_type": "\x1b[31mIA3\n"}, [r"peft_type is '\x1b[31mIA3\n'; only LORA adapters are served"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), REFUSED, ids=[str(config)[:60] for config, _ in REFUSED])
def test_refused(tmp_path: Path, base: BaseModelFacts, config: dict[str, Any], expected: list[str]) -> None:
    """What would be ignored and change the answers is one fault with the cause and what to do."""
    assert faults(write_adapter(tmp_path / "a", **config), base) == expected


ACCEPTED: list[tuple[dict[str, Any], list[str]]] = [
    ({"target_modules": ["self_attn.q_proj", "model.layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"]}, []),
    ({"target_modules": ["q_proj", "v_proj", "c_attn"]}, [
        "target_modules names c_attn, for which there are no tensors; ignored"
    ]),
    ({"exclude_modules": ["lm_head"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}, []),
    ({"exclude_modules": ".*k_proj", "layers_to_transform": [0, 1], "layers_pattern": ["h", "model.layers"]}, []),
    ({"lora_alpha": 0.001}, []),
    ({"lora_alpha": 4e4}, []),
    ({"rank_pattern": None, "alpha_pattern": None, "modules_to_save": [], "use_rslora": None}, []),
    ({"alpha_pattern": {"down_proj": 3}}, ["alpha_pattern names down_proj, which has no tensors; ignored"]),
    ({"alpha_pattern": {r"^model\.layers\.\d\.self_attn\.q_proj": 3, "layers.1.self_attn.v_proj": 5}}, []),
    ({"fan_in_fan_out": False, "kasa_config": None, "use_new": False, "next_config": {}, "bias": "none"}, []),
    ({"eva_config": {"rho": 2}, "lora_dropout": 0.1, "runtime_config": {"a": 1}, "auto_mapping": {"a": "b"}}, []),
    ({"trainer": "x", "note": "y"}, ["adapter_config.json has unknown keys, which have no effect here: trainer, note"]),
    ({"task_type": "SEQ_CLS"}, ["says it was trained for the task SEQ_CLS; here it generates text (CAUSAL_LM)"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "warnings"), ACCEPTED, ids=[str(config)[:60] for config, _ in ACCEPTED])
def test_accepted(tmp_path: Path, base: BaseModelFacts, config: dict[str, Any], warnings: list[str]) -> None:
    """What PEFT writes, and what has no effect there either, passes, at most with a note."""
    assert list(check_adapter(write_adapter(tmp_path / "a", **config), base, 16).warnings) == warnings


def test_all_linear_without_some_layers_is_noted(tmp_path: Path, base: BaseModelFacts) -> None:
    """ "all-linear" is not a list of names, so that a file with some of them is no contradiction."""
    (warning,) = check_adapter(write_adapter(tmp_path / "a", target_modules="all-linear"), base, 16).warnings
    assert warning.startswith("target_modules is all-linear, but there are no tensors for model.layers.0.self_attn.k_")


def test_layers_that_were_left_out_need_no_tensors(tmp_path: Path, base: BaseModelFacts) -> None:
    """With layers_to_transform only those layers are expected."""
    tensors = {name: value for name, value in lora_tensors(QV).items() if ".layers.1." in name}
    assert check_adapter(write_adapter(tmp_path / "a", tensors, layers_to_transform=1), base, 16).warnings == ()
    assert faults(write_adapter(tmp_path / "b", tensors), base) == [MISSING.format(f"{L0}.q_proj, {L0}.v_proj")]


def test_two_tensors_for_one_module(tmp_path: Path, base: BaseModelFacts) -> None:
    """With and without PEFT's prefix it is the same module for vLLM, and the later one would win."""
    tensors = lora_tensors(QV)
    tensors[f"{L0}.q_proj.lora_A.weight"] = np.ones((4, 64), np.float32)
    assert faults(write_adapter(tmp_path / "a", tensors), base) == [
        f"these tensors are in the file twice, under two names: {L0}.q_proj.lora_A.weight; save the adapter again"
    ]


def test_other_architectures_are_compared_with_their_tensors_alone(tmp_path: Path) -> None:
    """Where the base model's modules are not known, a name without tensors is noted, one too few is a fault."""
    base = read_model_facts(write_model(tmp_path / "model", architectures=["NewForCausalLM"]))
    path = write_adapter(tmp_path / "a", target_modules=["q_proj", "v_proj", "x"], rank_pattern={"y": 4})
    assert check_adapter(path, base, 16).warnings == (
        "target_modules names x, for which there are no tensors; ignored",
        "rank_pattern names y, which has no tensors; ignored",
    )
    assert faults(write_adapter(tmp_path / "b", target_modules=["q_proj"]), base) == [
        EXTRA.format(f"{L0}.v_proj, model.layers.1.self_attn.v_proj")
    ]


SLOW = r"(?:[\w.]{1,3}){1,40}[!?]"
LONG = f"takes more than 0.2 s to match {L0}.q_proj; write it simpler"
FOREVER: list[tuple[str, Any, str]] = [
    ("target_modules", SLOW, f"target_modules or exclude_modules {LONG}"),
    ("exclude_modules", SLOW, f"target_modules or exclude_modules {LONG}"),
    ("rank_pattern", {SLOW: 4}, f"a pattern of rank_pattern or alpha_pattern {LONG}"),
    ("alpha_pattern", {SLOW: 4}, f"a pattern of rank_pattern or alpha_pattern {LONG}"),
    ("target_modules", "a|" * 1000, f"target_modules is {'a|' * 38}a..., which is longer than 1000 characters"),
    ("target_modules", "(" * 500, f"target_modules is {'(' * 77}..., which is not a pattern: "),
    ("rank_pattern", {f"n{i}": 4 for i in range(10**5)}, "rank_pattern has 100000 entries; at most 4096 are read"),
    ("target_modules", [f"n{i}" for i in range(10**5)], "target_modules does not name model.layers.0.self_attn.q_proj"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREVER, ids=[f"{key} {str(v)[:30]}" for key, v, _ in FOREVER])
def test_nothing_takes_for_ever(tmp_path: Path, base: BaseModelFacts, key: str, value: Any, expected: str) -> None:
    """A pattern that tries every way to match, and a configuration of many entries, end within seconds."""
    path = write_adapter(tmp_path / "a", **{key: value})
    start = time.monotonic()
    (fault,) = faults(path, base)
    assert time.monotonic() - start < 10
    assert fault.startswith(expected)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora", "init_lora_weights", "peft_type"),
    *("base_model_name_or_path", "task_type", "use_dora", "unknown", "new_config"),
]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=3))
def test_any_configuration(tmp_path: Path, base: BaseModelFacts, config: dict[str, Any]) -> None:
    """Whatever the configuration holds, the answer is a report or faults of one short line each."""
    path = tmp_path / "a"
    if not path.exists():
        write_adapter(path)
    written = json.loads((path / "adapter_config.json").read_text()) | config
    (path / "adapter_config.json").write_text(json.dumps({**written, **config}))
    try:
        found = check_adapter(path, base, 16).warnings
    except AdapterError as error:
        found = error.faults
    finally:
        write_adapter(path)
    for sentence in found:
        assert sentence.isprintable()
        assert len(sentence) < 600
