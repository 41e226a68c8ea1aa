"""Check a LoRA adapter directory against a base model before an engine loads it.

vLLM finds most faults when the first request arrives, and some never: it ignores tensors of modules that the model
does not have, keys of adapter_config.json that it does not know, and a rank that disagrees with the tensors
(vllm/lora/peft_helper.py, lora_model.py, model_manager.py). Here everything is read from adapter_config.json and the
safetensors file, without torch, and every fault is reported at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.adapter_config import CONFIG_FILE, Findings, check_features, read_config, strings
from deployments.adapter_ranks import Ranks, check_ranks
from deployments.adapter_targets import check_targets
from deployments.adapter_tensors import AdapterTensors, TensorFileError, Weight, first_non_finite, read_tensors
from deployments.base_model import BaseModelFacts, directory_fault, read_model_facts
from deployments.durable_file import place_directory_durably
from deployments.module_names import some
from deployments.regular_file import FileRefusedError, check_regular
from deployments.settings import EngineSettings

TENSOR_FILE = "adapter_model.safetensors"


class AdapterError(ValueError):
    """An adapter that cannot be served. ``faults`` holds a sentence for everything that is wrong with it."""

    def __init__(self, path: Path, faults: Iterable[str]) -> None:
        self.path = path
        self.faults = tuple(faults)
        super().__init__(path, self.faults)

    def __str__(self) -> str:
        return f"adapter {self.path}: {'; '.join(self.faults)}"


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an adapter is. ``rank`` is the largest of its ranks, ``scale`` what ``B @ A`` is multiplied with at rank r.

    ``modules`` are the kinds of modules it changes (``q_proj``). ``leftover_modules_to_save`` names layers that the
    configuration says are saved whole and that are not in the file: harmless, but vLLM refuses them, see
    :func:`loadable_directory`.
    """

    path: Path
    rank: int
    alpha: float
    scale: float
    modules: tuple[str, ...]
    tensors: int
    parameters: int
    warnings: tuple[str, ...] = ()
    leftover_modules_to_save: tuple[str, ...] = ()


def check_adapter(path: Path, base: BaseModelFacts, max_rank: int | None) -> AdapterReport:
    """Return what the adapter in ``path`` is; raise :class:`AdapterError` with every reason not to serve it.

    The shapes are compared only when ``base.shapes`` is known, its rank with ``max_rank`` only when that is not None.
    """
    fault = directory_fault(path)
    if fault is not None:
        raise AdapterError(path, [fault])
    found = Findings()
    config, tensors = read_config(path, found), _read_tensors(path, found)
    if config is not None:
        check_features(config, base, found)
    ranks = Ranks.from_config(config, found) if config is not None else None
    if tensors is not None:
        _check_tensors(tensors, config or {}, base, found)
        check_ranks(tensors.pairs, ranks, base, max_rank, found)
        bad = first_non_finite(path / TENSOR_FILE)
        if bad is not None:
            found.faults.append(f"tensor {bad} holds values that are not finite numbers")
    if found.faults or config is None or tensors is None or ranks is None:
        raise AdapterError(path, found.faults)
    saved = strings(config.get("modules_to_save"))
    if saved:
        found.warnings.append(f"modules_to_save names {', '.join(saved)} but the file has no such tensors; ignored")
    return AdapterReport(
        path=path,
        rank=max(weight.rank for weight in tensors.pairs.values()),
        alpha=ranks.alpha,
        scale=ranks.scale(ranks.default, ranks.alpha),
        modules=tuple(sorted({module.rsplit(".", 1)[-1] for module in tensors.pairs})),
        tensors=2 * len(tensors.pairs),
        parameters=sum(weight.parameters for weight in tensors.pairs.values()),
        warnings=tuple(found.warnings),
        leftover_modules_to_save=saved,
    )


def loadable_directory(report: AdapterReport, cache: Path) -> Path:
    """A directory that vLLM loads: the adapter's own, or a copy in ``cache`` without the leftovers it would refuse.

    The copy's name is a digest of the content, so that a changed adapter gets a new one. Raises OSError.
    """
    if not report.leftover_modules_to_save:
        return report.path
    config = json.loads((report.path / CONFIG_FILE).read_bytes())
    config["modules_to_save"] = None
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (report.path / TENSOR_FILE).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    target = cache / digest.hexdigest()[:32]
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=cache, prefix=".draft-"))
    try:
        shutil.copyfile(report.path / TENSOR_FILE, draft / TENSOR_FILE)
        (draft / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
        place_directory_durably(draft, target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not target.is_dir():  # Another process may have been first.
            raise
    return target


def prepare_adapters(settings: EngineSettings, cache: Path) -> dict[str, Path]:
    """Check every adapter of an engine where it runs; by service, the directory that vLLM is to load.

    Raises :class:`ModelError` and, for all adapters together, an ExceptionGroup of :class:`AdapterError`.
    """
    model = Path(settings.model)
    base = read_model_facts(model) if directory_fault(model) is None else BaseModelFacts(name=settings.model)
    directories: dict[str, Path] = {}
    errors: list[AdapterError] = []
    for service in settings.services:
        if service.adapter is None:
            continue
        try:
            report = check_adapter(service.adapter, base, settings.max_lora_rank)
            directories[service.name] = loadable_directory(report, cache)
        except AdapterError as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} adapters cannot be served", errors)
    return directories


def _read_tensors(path: Path, found: Findings) -> AdapterTensors | None:
    try:
        check_regular(path / TENSOR_FILE)
    except FileRefusedError as error:
        found.faults.append(f"{TENSOR_FILE} {error}")
        return None
    except FileNotFoundError:
        pickles = sorted(file.name for file in path.glob("adapter_model.*") if file.suffix in {".bin", ".pt", ".pth"})
        found.faults.append(
            f"{TENSOR_FILE} is missing; {pickles[0]} is not read, because pickle files can run code when they are "
            "loaded: save the adapter with safe_serialization=True"
            if pickles
            else f"{TENSOR_FILE} is missing"
        )
        return None
    except OSError as error:
        found.faults.append(f"{TENSOR_FILE} cannot be read: {error.strerror}")
        return None
    try:
        return read_tensors(path / TENSOR_FILE)
    except TensorFileError as error:
        found.faults.append(f"{TENSOR_FILE} {error}")
        return None


def _check_tensors(tensors: AdapterTensors, config: Mapping[str, Any], base: BaseModelFacts, found: Findings) -> None:
    """Every tensor has to belong to a complete pair of a module that the base model has, in its shape."""
    if tensors.half_pairs:
        found.faults.append(f"these modules have only one of lora_A and lora_B: {some(tensors.half_pairs)}")
    if tensors.wrong_dtypes:
        found.faults.append(f"these tensors are not float32, float16 or bfloat16: {some(tensors.wrong_dtypes)}")
    if tensors.repeated:
        found.faults.append(
            f"these tensors are in the file twice, under two names: {some(tensors.repeated)}; save the adapter again"
        )
    if tensors.magnitudes and not config.get("use_dora"):
        found.faults.append(f"these tensors belong to DoRA, which is not supported: {some(tensors.magnitudes)}")
    _check_full_weights(tensors, config, base, found)
    if tensors.unknown:
        found.faults.append(f"these tensors are not LoRA weights and would be ignored: {some(tensors.unknown)}")
    if not tensors.pairs and not tensors.half_pairs:
        found.faults.append("it has no LoRA tensor that the model uses")
    before = len(found.faults)
    if base.shapes:
        _check_shapes(tensors.pairs, base, found)
    if len(found.faults) == before:
        # For another model everything would be missing.
        check_targets(config, tensors.pairs, tensors.half_pairs, base, found)


def _check_full_weights(
    tensors: AdapterTensors, config: Mapping[str, Any], base: BaseModelFacts, found: Findings
) -> None:
    saved = strings(config.get("modules_to_save"))
    for name, shape in tensors.full_weights.items():
        module = name.removesuffix(".weight").removesuffix(".base_layer").rsplit(".", 1)[-1]
        if base.vocab and module in {"embed_tokens", "lm_head"} and shape[0] != base.vocab:
            found.faults.append(
                f"{name} has {shape[0]} rows, the base model's vocabulary has {base.vocab} tokens: "
                "resized embeddings are not supported"
            )
        elif name.endswith(".base_layer.weight"):
            found.warnings.append(f"{name} is a copy of the base model's weights; ignored")
        else:
            reason = "modules_to_save" if module in saved else "a whole layer"
            found.faults.append(f"{name} is saved whole ({reason}): only LoRA pairs are supported, not {module} itself")


def _check_shapes(pairs: Mapping[str, Weight], base: BaseModelFacts, found: Findings) -> None:
    layers = {int(match[1]) for module in pairs if (match := re.match(r"model\.layers\.(\d+)\.", module))}
    too_deep = bool(layers) and max(layers) >= base.layers
    if too_deep:
        found.faults.append(
            f"it was trained for another base model: it has tensors for layer {max(layers)}, "
            f"{base.name} has layers 0 to {base.layers - 1}"
        )
    strangers: list[str] = []
    differing: dict[str, str] = {}
    for module, weight in pairs.items():
        expected = base.module_shape(module)
        if expected is None:
            layer = re.match(r"model\.layers\.(\d+)\.", module)
            if layer is None or int(layer[1]) < base.layers:
                strangers.append(module)
        elif (weight.inputs, weight.outputs) != expected:
            kind = module.rsplit(".", 1)[-1]
            differing.setdefault(
                kind, f"{kind} maps {weight.inputs} to {weight.outputs} features, there {expected[0]} to {expected[1]}"
            )
    if differing:
        found.faults.append(
            f"it was trained for another base model than {base.name} (hidden size {base.hidden}, {base.heads} heads, "
            f"{base.kv_heads} of them for keys and values): {', '.join(differing.values())}"
        )
    if strangers:
        found.faults.append(f"the base model has no such modules, their tensors would be ignored: {some(strangers)}")
