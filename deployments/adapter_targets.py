"""Which modules adapter_config.json says an adapter changes, beside those that its tensors change.

vLLM applies every tensor in the file and looks at ``target_modules`` only to see that the key is there
(vllm/lora/lora_model.py), PEFT drops tensors of modules that the configuration does not name. Where the two disagree,
the adapter is not what was trained, or answers differently here than where it was tried out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.adapter_config import Findings, strings
from deployments.base_model import BaseModelFacts
from deployments.module_names import Pattern, PatternError, endings, shown, some

_ALL_LINEAR = "all-linear"
_NO_LINEAR = frozenset({"lm_head", "embed_tokens"})
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Names:
    """A setting that names modules: a pattern for whole names, or a list of endings."""

    pattern: Pattern | None
    listed: frozenset[str]

    @classmethod
    def read(cls, config: Mapping[str, Any], key: str, found: Findings) -> Names | None:
        """The setting ``key``; None where it is not set, or is no setting of this kind, which is a fault."""
        value = config.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                return cls(Pattern(value), frozenset())
            except PatternError as error:
                found.faults.append(f"{key} is {shown(value)}, which {error}")
                return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return cls(None, frozenset(value))
        found.faults.append(f"{key} is neither text nor a list of texts")
        return None

    def cover(self, module: str) -> bool:
        """Whether ``module`` is named. Raises :class:`PatternError`."""
        if self.pattern is not None:
            return self.pattern.matches(module)
        return not self.listed.isdisjoint(endings(module))


@dataclass(frozen=True, slots=True)
class Targets:
    """The modules that the configuration names, as PEFT reads it. ``names`` is None for "all-linear"."""

    names: Names | None
    excluded: Names | None
    layers: frozenset[int] | None
    layers_patterns: tuple[Pattern, ...]
    saved_whole: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], found: Findings) -> Targets | None:
        """What the configuration says; None, with the fault noted, when it says nothing usable."""
        before = len(found.faults)
        written = config.get("target_modules")
        if "target_modules" in config and written is None:
            found.faults.append("target_modules is null: write the names of the modules that it was trained on")
        everything = isinstance(written, str) and written.lower() == _ALL_LINEAR
        names = None if everything else Names.read(config, "target_modules", found)
        excluded = Names.read(config, "exclude_modules", found)
        layers = _layers(config, found)
        patterns = _layers_patterns(config, found)
        if len(found.faults) > before or (names is None and not everything):
            return None
        return cls(names, excluded, layers, patterns, strings(config.get("modules_to_save")))

    def cover(self, module: str) -> bool:
        """Whether PEFT would put LoRA on ``module``. Raises :class:`PatternError`."""
        if self.excluded is not None and self.excluded.cover(module):
            return False
        if any(f".{name}." in f".{module}." for name in self.saved_whole):
            return False
        if self.names is None:
            return module.rsplit(".", 1)[-1] not in _NO_LINEAR
        if not self.names.cover(module):
            return False
        whole_name = self.names.pattern is not None or module in self.names.listed
        return self.layers is None or whole_name or self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        if not self.layers_patterns:
            match = _LAYER.match(module)
            return int(match[1]) if match else None
        parts = module.split(".")
        for pattern in self.layers_patterns:
            for index, part in enumerate(parts[1:-1], start=1):
                if part.isdecimal() and any(pattern.matches(".".join(parts[i:index])) for i in range(index)):
                    return int(part)
        return None


def check_targets(
    config: Mapping[str, Any], modules: Collection[str], half: Collection[str], base: BaseModelFacts, found: Findings
) -> None:
    """Compare the targets with the ``modules`` that have tensors; ``half`` have only one and are reported elsewhere.

    Modules without tensors are a fault only where the base model's modules are known.
    """
    targets = Targets.from_config(config, found)
    if targets is None or not modules:
        return
    try:
        extra = [module for module in modules if not targets.cover(module)]
        known = [module for module in base.module_names() if targets.cover(module)]
    except PatternError as error:
        found.faults.append(f"target_modules or exclude_modules {error}")
        return
    if extra:
        found.faults.append(
            f"target_modules does not name {some(extra)}, whose tensors are in the file: vLLM would apply them, PEFT "
            "would not. Write the target_modules that it was trained with, or save the adapter again"
        )
    missing = [module for module in known if module not in modules and module not in half]
    if missing and targets.names is None:
        found.warnings.append(f"target_modules is {_ALL_LINEAR}, but there are no tensors for {some(missing)}")
    elif missing:
        found.faults.append(
            f"target_modules names {some(missing)}, but the file has no tensors for them, so that they would not be "
            "changed: save the adapter again, or write the target_modules that it was trained with"
        )
    if targets.names is not None:
        used = {ending for module in (*modules, *half, *base.module_names()) for ending in endings(module)}
        idle = sorted(targets.names.listed - used)
        if idle:
            found.warnings.append(f"target_modules names {some(idle)}, for which there are no tensors; ignored")


def _layers(config: Mapping[str, Any], found: Findings) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    listed = [value] if isinstance(value, int) else value
    if value is None or listed == []:
        return None
    if isinstance(listed, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return frozenset(listed)
    found.faults.append("layers_to_transform is neither a whole number nor a list of them")
    return None


def _layers_patterns(config: Mapping[str, Any], found: Findings) -> tuple[Pattern, ...]:
    value = config.get("layers_pattern")
    listed = [value] if isinstance(value, str) and value else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        found.faults.append("layers_pattern is neither text nor a list of texts")
        return ()
    try:
        return tuple(Pattern(item) for item in listed)
    except PatternError as error:
        found.faults.append(f"layers_pattern {error}")
        return ()
