"""Which adapters are served, which are refused, and what is said about them."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.adapters import AdapterError, AdapterReport, check_adapter, loadable_directory, prepare_adapters
from deployments.base_model import BaseModelFacts, ModelError, read_model_facts
from deployments.settings import EngineSettings, ServiceSettings
from tests.fakes.checkpoints import Tensors, lora_tensors, write_adapter, write_model

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def base(tmp_path: Path) -> BaseModelFacts:
    return read_model_facts(write_model(tmp_path / "model"))


def faults(path: Path, base: BaseModelFacts, max_rank: int = 16) -> list[str]:
    with pytest.raises(AdapterError) as caught:
        check_adapter(path, base, max_rank)
    return list(caught.value.faults)


def test_sound_adapter_is_described(tmp_path: Path, base: BaseModelFacts) -> None:
    """Rank, scale and sizes come from the files, and nothing is warned about."""
    path = write_adapter(tmp_path / "a")
    assert check_adapter(path, base, 16) == AdapterReport(
        path=path,
        rank=4,
        alpha=8.0,
        scale=2.0,
        modules=("q_proj", "v_proj"),
        tensors=8,
        parameters=2 * (4 * 64 + 64 * 4 + 4 * 64 + 32 * 4),
    )


def test_every_module_of_a_layer_may_be_changed(tmp_path: Path, base: BaseModelFacts) -> None:
    """All seven linear layers pass in their own shapes, k and v with fewer heads."""
    modules = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    modules += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    report = check_adapter(write_adapter(tmp_path / "a", lora_tensors(modules)), base, 16)
    assert report.modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize("targets", [".*\\.[qv]_proj", "all-linear", ["q_proj", "v_proj"]])
def test_target_modules_may_be_text(tmp_path: Path, base: BaseModelFacts, targets: Any) -> None:
    """PEFT allows a pattern, "all-linear" or a list; what is changed is read from the tensors in each case."""
    report = check_adapter(write_adapter(tmp_path / "a", target_modules=targets), base, 16)
    assert report.modules == ("q_proj", "v_proj")


def test_rank_stabilised_scale(tmp_path: Path, base: BaseModelFacts) -> None:
    """rsLoRA divides alpha by the root of the rank: 16 / sqrt(64) = 2."""
    path = write_adapter(tmp_path / "a", lora_tensors(rank=64), r=64, lora_alpha=16, use_rslora=True)
    report = check_adapter(path, base, 64)
    assert (report.rank, report.scale) == (64, 2.0)


def test_rank_and_alpha_patterns(tmp_path: Path, base: BaseModelFacts) -> None:
    """The rank of a module is its pattern's; the largest is the adapter's."""
    tensors = {**lora_tensors(("self_attn.q_proj",), 8), **lora_tensors(("self_attn.v_proj",), 4)}
    path = write_adapter(tmp_path / "a", tensors, rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 16})
    assert check_adapter(path, base, 8).rank == 8
    assert faults(path, base, 4) == ["its rank is 8, the engine is built for ranks up to 4 (max_lora_rank)"]


def test_leftover_modules_to_save_load_after_rewriting(tmp_path: Path, base: BaseModelFacts) -> None:
    """modules_to_save without such a tensor is a warning; the engine gets a copy without it, once."""
    report = check_adapter(write_adapter(tmp_path / "a", modules_to_save=["lm_head"]), base, 16)
    assert report.warnings == ("modules_to_save names lm_head but the file has no such tensors; ignored",)
    copy = loadable_directory(report, tmp_path / "cache")
    assert copy.parent == tmp_path / "cache"
    assert json.loads((copy / "adapter_config.json").read_text())["modules_to_save"] is None
    assert (copy / "adapter_model.safetensors").read_bytes() == (report.path / "adapter_model.safetensors").read_bytes()
    assert loadable_directory(report, tmp_path / "cache") == copy
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [copy.name]
    assert check_adapter(copy, base, 16).warnings == ()


def test_plain_adapter_is_loaded_from_its_own_directory(tmp_path: Path, base: BaseModelFacts) -> None:
    """Nothing is copied that need not be."""
    report = check_adapter(write_adapter(tmp_path / "a"), base, 16)
    assert loadable_directory(report, tmp_path / "cache") == report.path
    assert not (tmp_path / "cache").exists()


def test_all_adapters_of_an_engine(tmp_path: Path, base: BaseModelFacts) -> None:
    """The engine gets a directory per service that has an adapter, and all adapters' faults together."""
    plain, leftover = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", modules_to_save=["lm_head"])
    services = (_service("x", plain), _service("y", leftover), _service("z", None))
    settings = EngineSettings(str(tmp_path / "model"), "base", services, _service("base", None))
    directories = prepare_adapters(settings, tmp_path / "cache")
    assert directories == {"x": plain, "y": loadable_directory(check_adapter(leftover, base, 16), tmp_path / "cache")}
    with pytest.raises(ExceptionGroup) as caught:
        prepare_adapters(replace(settings, max_lora_rank=1), tmp_path / "cache")
    assert [error.path for error in caught.value.exceptions if isinstance(error, AdapterError)] == [plain, leftover]


def _service(name: str, adapter: Path | None) -> ServiceSettings:
    return ServiceSettings(name, adapter, 1_000_000, 100_000)


def test_tokenizer_files_of_the_base_are_no_new_tokens(tmp_path: Path, base: BaseModelFacts) -> None:
    """A directory that also holds the base's own tokenizer files loads."""
    path = write_adapter(tmp_path / "a")
    (path / "added_tokens.json").write_text(json.dumps({"<pad>": 127}))
    (path / "tokenizer_config.json").write_text("{}")
    assert check_adapter(path, base, 16).warnings == ()


def test_another_name_of_the_base_is_only_a_warning(tmp_path: Path, base: BaseModelFacts) -> None:
    """Names say little: the shapes decide."""
    path = write_adapter(tmp_path / "a", base_model_name_or_path="hub/Other-7B")
    assert check_adapter(path, base, 16).warnings == (
        "says it was trained on hub/Other-7B; the base model here is model",
    )


def with_tensor(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensors:
    return {**lora_tensors(), name: np.ones(shape, dtype)}


WRONG_CONFIG: list[tuple[dict[str, Any], list[str]]] = [
    ({"use_dora": True}, ["use_dora is set: DoRA is not supported; train the adapter without it"]),
    (
        {"lora_bias": True},
        ["lora_bias is set: bias terms in LoRA layers is not supported; train the adapter without it"],
    ),
    (
        {"use_something_new": True},
        ["use_something_new is set: this feature is not supported; train the adapter without it"],
    ),
    (
        {"layer_replication": [[0, 1]]},
        ["layer_replication is set: layer replication is not supported; train the adapter without it"],
    ),
    ({"bias": "all"}, ["bias is all; only none is supported"]),
    ({"peft_type": "IA3"}, ["peft_type is IA3; only LORA adapters are served"]),
    ({"target_modules": 7}, ["target_modules is neither text nor a list of texts"]),
    (
        {"init_lora_weights": "pissa"},
        [
            "init_lora_weights is pissa, which also changes the base model's weights: convert it to a plain LoRA "
            "adapter (PEFT: path_initial_model_for_weight_conversion)"
        ],
    ),
    ({"r": 0}, ["the rank r is 0; it has to be a positive whole number"]),
    ({"r": True}, ["the rank r is True; it has to be a positive whole number"]),
    ({"lora_alpha": -1}, ["lora_alpha is -1; it has to be a positive number"]),
    ({"rank_pattern": [1]}, ["rank_pattern is not a mapping"]),
    (
        {"rank_pattern": {"[": 4}},
        ["rank_pattern has [, which is not a pattern: unterminated character set at position 1"],
    ),
    (
        {"r": 8},
        [
            "adapter_config.json says rank 8 for model.layers.0.self_attn.q_proj, its tensors have rank 4: "
            "its output would be scaled wrongly"
        ],
    ),
]


@pytest.mark.parametrize(("config", "expected"), WRONG_CONFIG, ids=[str(config) for config, _ in WRONG_CONFIG])
def test_configuration_that_is_refused(
    tmp_path: Path, base: BaseModelFacts, config: dict[str, Any], expected: list[str]
) -> None:
    """What vLLM does not implement, or would get wrong, is refused by name before an engine starts."""
    assert faults(write_adapter(tmp_path / "a", **config), base) == expected


def test_required_keys(tmp_path: Path, base: BaseModelFacts) -> None:
    """The keys without which an adapter cannot be read are named together."""
    path = write_adapter(tmp_path / "a", without=("r", "lora_alpha", "target_modules"))
    assert faults(path, base) == ["adapter_config.json lacks r, lora_alpha, target_modules"]


WRONG_TENSORS: list[tuple[str, Tensors, list[str]]] = [
    ("none", {"base_model.model.model.norm.lora_C.weight": np.ones((2, 2), np.float32)}, [
        "these tensors are not LoRA weights and would be ignored: base_model.model.model.norm.lora_C.weight",
        "it has no LoRA tensor that the model uses",
    ]),
    ("half", {key: value for key, value in lora_tensors().items() if key != f"{Q0}.lora_B.weight"}, [
        "these modules have only one of lora_A and lora_B: model.layers.0.self_attn.q_proj"
    ]),
    ("dora", with_tensor(f"{Q0}.lora_magnitude_vector", (64,)), [
        f"these tensors belong to DoRA, which is not supported: {Q0}.lora_magnitude_vector"
    ]),
    ("integers", with_tensor(f"{Q0}.lora_A.weight", (4, 64), np.int32), [
        f"these tensors are not float32, float16 or bfloat16: {Q0}.lora_A.weight (I32)"
    ]),
    ("resized embedding", with_tensor("base_model.model.model.embed_tokens.weight", (192, 64)), [
        "base_model.model.model.embed_tokens.weight has 192 rows, the base model's vocabulary has 128 tokens: "
        "resized embeddings are not supported"
    ]),
    ("stranger", with_tensor("base_model.model.model.layers.0.mlp.experts.lora_A.weight", (4, 64))
     | {"base_model.model.model.layers.0.mlp.experts.lora_B.weight": np.ones((64, 4), np.float32)}, [
        "the base model has no such modules, their tensors would be ignored: model.layers.0.mlp.experts"
    ]),
    ("more layers", with_tensor("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", (4, 64))
     | {"base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": np.ones((64, 4), np.float32)}, [
        "it was trained for another base model: it has tensors for layer 7, model has layers 0 to 1"
    ]),
    ("wider", {f"{Q0}.lora_A.weight": np.ones((4, 128), np.float32),
               f"{Q0}.lora_B.weight": np.ones((128, 4), np.float32)}, [
        "it was trained for another base model than model (hidden size 64, 4 heads, 2 of them for keys and values): "
        "q_proj maps 128 to 128 features, there 64 to 64"
    ]),
    ("uneven", with_tensor(f"{Q0}.lora_B.weight", (64, 2)), [
        "lora_A and lora_B of these modules have different ranks: model.layers.0.self_attn.q_proj"
    ]),
    ("not a number", with_tensor(f"{Q0}.lora_B.weight", (64, 4)) | {
        f"{Q0}.lora_A.weight": np.full((4, 64), math.nan, np.float32)}, [
        f"tensor {Q0}.lora_A.weight holds values that are not finite numbers"
    ]),
    ("infinite half", with_tensor(f"{Q0}.lora_B.weight", (64, 4)) | {
        f"{Q0}.lora_A.weight": np.full((4, 64), math.inf, np.float16)}, [
        f"tensor {Q0}.lora_A.weight holds values that are not finite numbers"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "expected"), [row[1:] for row in WRONG_TENSORS], ids=[row[0] for row in WRONG_TENSORS]
)
def test_tensors_that_are_refused(tmp_path: Path, base: BaseModelFacts, tensors: Tensors, expected: list[str]) -> None:
    """Every tensor belongs to a complete pair of a module of the base model, in its shape."""
    assert faults(write_adapter(tmp_path / "a", tensors), base) == expected


def test_whole_layer_in_modules_to_save(tmp_path: Path, base: BaseModelFacts) -> None:
    """A trained lm_head is refused by name, not silently left out."""
    path = write_adapter(
        tmp_path / "a", with_tensor("base_model.model.lm_head.weight", (128, 64)), modules_to_save=["lm_head"]
    )
    assert faults(path, base) == [
        "base_model.model.lm_head.weight is saved whole (modules_to_save): only LoRA pairs are supported, "
        "not lm_head itself"
    ]


def test_everything_at_once(tmp_path: Path, base: BaseModelFacts) -> None:
    """One run names all faults, of configuration and tensors."""
    path = write_adapter(tmp_path / "a", lora_tensors(rank=64), r=64, use_dora=True, bias="all")
    assert faults(path, base) == [
        "use_dora is set: DoRA is not supported; train the adapter without it",
        "bias is all; only none is supported",
        "its rank is 64, the engine is built for ranks up to 16 (max_lora_rank)",
    ]


def test_pickle_is_not_read(tmp_path: Path, base: BaseModelFacts) -> None:
    """An adapter_model.bin alone is refused, saying why and what to do; it is never opened."""
    path = write_adapter(tmp_path / "a")
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.bin").write_bytes(b"not even a pickle")
    assert faults(path, base) == [
        "adapter_model.safetensors is missing; adapter_model.bin is not read, because pickle files can run code when "
        "they are loaded: save the adapter with safe_serialization=True"
    ]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_cut_off_file(tmp_path: Path, base: BaseModelFacts, share: float) -> None:
    """A file cut anywhere, in its header or its data, is refused."""
    path = write_adapter(tmp_path / "a")
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    (fault,) = faults(path, base)
    assert fault.startswith("adapter_model.safetensors is damaged or cut off (")


def test_missing_files(tmp_path: Path, base: BaseModelFacts) -> None:
    """A missing directory, and an empty one, say what is missing."""
    assert faults(tmp_path / "none", base) == ["there is no such directory"]
    (tmp_path / "empty").mkdir()
    assert faults(tmp_path / "empty", base) == [
        "adapter_config.json is missing",
        "adapter_model.safetensors is missing",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"{",
            "adapter_config.json is not JSON: Expecting property name enclosed in double quotes",
        ),
        (b"[]", "adapter_config.json does not hold a JSON object"),
        (b"[" * 100_000, "adapter_config.json is not JSON: maximum recursion depth exceeded"),
    ],
)
def test_damaged_configuration(tmp_path: Path, base: BaseModelFacts, content: bytes, expected: str) -> None:
    """adapter_config.json has to hold one JSON object."""
    path = write_adapter(tmp_path / "a")
    (path / "adapter_config.json").write_bytes(content)
    (fault,) = faults(path, base)
    assert fault.startswith(expected)


def test_unknown_architecture_is_judged_by_pairs_alone(tmp_path: Path) -> None:
    """Shapes of an architecture we do not know are left to vLLM; incomplete pairs are not."""
    base = read_model_facts(write_model(tmp_path / "model", architectures=["NewForCausalLM"]))
    tensors: Tensors = {
        "base_model.model.h.0.mixer.lora_A.weight": np.ones((4, 7), np.float32),
        "base_model.model.h.0.mixer.lora_B.weight": np.ones((9, 4), np.float32),
    }
    assert check_adapter(write_adapter(tmp_path / "a", tensors), base, 16).modules == ("mixer",)
    del tensors["base_model.model.h.0.mixer.lora_B.weight"]
    assert faults(write_adapter(tmp_path / "b", tensors), base) == [
        "these modules have only one of lora_A and lora_B: h.0.mixer"
    ]


def test_error_survives_pickling(tmp_path: Path, base: BaseModelFacts) -> None:
    """Ray carries errors between processes by pickling them."""
    error = AdapterError(tmp_path, ["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.faults) == (f"adapter {tmp_path}: one; two", ("one", "two"))


def test_model_facts(tmp_path: Path) -> None:
    """Sizes come from config.json; head_dim may differ from hidden size over heads."""
    facts = read_model_facts(write_model(tmp_path / "model", head_dim=32))
    assert (facts.hidden, facts.layers, facts.heads, facts.kv_heads, facts.vocab) == (64, 2, 4, 2, 128)
    assert (facts.max_positions, facts.tied_embeddings) == (512, True)
    assert facts.shapes["q_proj"] == (64, 128)
    assert facts.module_shape("model.layers.1.self_attn.o_proj") == (128, 64)
    assert facts.module_shape("model.layers.2.self_attn.o_proj") is None
    assert facts.module_shape("model.layers.0.mlp.q_proj") is None
    assert facts.module_shape("lm_head") == (64, 128)


def test_models_that_are_refused(tmp_path: Path) -> None:
    """No directory, no config.json, no safetensors weights: each says which."""
    with pytest.raises(ModelError, match="there is no such directory"):
        read_model_facts(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_facts(tmp_path / "empty")
    path = write_model(tmp_path / "pickled")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        read_model_facts(path)
