"""What is wrong with ``args`` beyond the form of single values: values against each other, and against files.

Every check takes what it needs from the raw values and leaves out what is malformed, so that one wrong value never
hides another.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from app.args_schema import MAX_STEP_TOKENS, AppArgs, SchedulerArgs, resolve
from app.problems import ABSENT, Problem, unknown_key
from app.problems import Path as KeyPath
from deployments.adapters import AdapterError, AdapterReport, check_adapter
from deployments.auth import KeysError, load_keys
from deployments.base_model import BaseModelFacts, ModelError, directory_fault, read_model_facts
from deployments.module_names import some
from scheduling.registry import POLICIES

_HAS_OWN_KEY = {
    "model": "model",
    "served_model_name": "base.name",
    "tensor_parallel_size": "tensor_parallel_size",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_lora_rank": "max_lora_rank",
    "max_loras": "max_loras",
    "kv_cache_memory_bytes": "kv_cache_gb",
}
_SET_BY_HALO = {
    "enable_lora": "HALO switches LoRA on itself",
    "max_cpu_loras": "HALO keeps all adapters in memory",
    "additional_config": "HALO passes its own",
    "scheduler_cls": "HALO brings its own scheduler",
    "scheduling_policy": "HALO brings its own scheduler",
    "worker_extension_cls": "HALO brings its own",
    "enable_log_requests": "prompts are never logged",
}
_PICKLE_FORMATS = ("pt", "npcache")


@dataclass(slots=True)
class ArgsView:
    """The raw ``args`` without the values that are known to be malformed, and what the checks found."""

    data: Mapping[str, Any]
    bad: set[KeyPath]
    root: Path
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reports: dict[str, AdapterReport] = field(default_factory=dict)

    def get(self, *path: str) -> Any:
        """The value at ``path``; its default where it is absent; None where it has none, and where it is malformed.

        A malformed value is reported already: its default beside other values would only make up further errors.
        """
        value: Any = self.data
        for depth, part in enumerate(path):
            if path[: depth + 1] in self.bad:
                return None
            if not isinstance(value, Mapping) or part not in value:
                info = AppArgs.model_fields.get(path[0]) if len(path) == 1 else None
                return None if info is None or info.is_required() else info.default
            value = value[part]
        return value

    def report(self, path: KeyPath, message: str, value: Any, hint: str | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(path, message, value, hint))

    def services(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The services that are sections at all."""
        listed = self.data.get("services")
        for index, service in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(service, Mapping):
                yield index, service

    def path(self, written: str) -> Path:
        """As :meth:`AppArgs.path`."""
        return resolve(self.root, written)


def check_values(view: ArgsView) -> None:
    """Values against each other; no file is looked at."""
    _check_names(view)
    _check_batch(view)
    _check_scheduler(view)
    _check_engine_args(view)


def check_files(view: ArgsView) -> None:
    """Model, adapters and keys on disk, as far as that is possible without loading them."""
    facts = _check_model(view)
    _check_adapters(view, facts)
    _check_keys(view)


def _check_keys(view: ArgsView) -> None:
    keys_file = view.get("auth", "keys_file")
    if not isinstance(keys_file, str):
        return
    try:
        holders = load_keys(view.path(keys_file)).holders.values()
    except KeysError as error:
        for fault in error.faults:
            view.report(("auth", "keys_file"), fault, keys_file)
        return
    names = {str(view.get("base", "name")), *(str(service.get("name")) for _, service in view.services())}
    for holder in holders:
        unknown = sorted((holder.services or frozenset()) - names)
        if unknown:
            view.warnings.append(
                f"the key {holder.name} names {some(unknown)}, which this file does not serve; "
                "see `halo keys list`, and make the key anew if that is a mistake"
            )


def _check_names(view: ArgsView) -> None:
    if view.data.get("services") == []:
        view.report(("services",), "is empty; name at least one service", ABSENT)
    base = view.get("base", "name")
    first: dict[str, int] = {}
    for index, service in view.services():
        name = service.get("name")
        if not isinstance(name, str):
            continue
        path = ("services", index, "name")
        if name in first:
            view.report(path, f"is the name of services[{first[name]}] too; every service needs its own", name)
        elif name == base:
            view.report(path, "is also the name of the base model (base.name); clients could not tell them apart", name)
        first.setdefault(name, index)


def _check_batch(view: ArgsView) -> None:
    sequences, tokens = view.get("max_num_seqs"), view.get("max_num_batched_tokens")
    if isinstance(sequences, int) and isinstance(tokens, int) and tokens < sequences:
        message = f"is less than max_num_seqs ({sequences}): a step could not hold one token of every running request"
        view.report(("max_num_batched_tokens",), message, tokens)
    adapters = sum(isinstance(service.get("adapter"), str) for _, service in view.services())
    loras = view.get("max_loras")
    if isinstance(loras, int) and loras < adapters:
        message = f"is less than the number of services with an adapter ({adapters}): they would shut each other out"
        view.report(("max_loras",), message, loras)


def _check_scheduler(view: ArgsView) -> None:
    policy, options = view.get("scheduler", "policy"), view.get("scheduler", "options")
    if view.bad.intersection({("scheduler",), ("scheduler", "policy"), ("scheduler", "options")}):
        return
    policy, options = policy or SchedulerArgs().policy, options or {}
    if policy not in POLICIES:
        close = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = (
            f"Did you mean {close[0]}? The options are checked as its own" if close else "Its options are not checked"
        )
        view.report(
            ("scheduler", "policy"), f"is not a scheduling policy; there are {', '.join(POLICIES)}", policy, hint
        )
        if not close:
            return
        policy = close[0]
    known = POLICIES[policy].options
    for option, value in options.items():
        path = ("scheduler", "options", option)
        if option not in known:
            view.problems.append(unknown_key(path, value, known, {}))
        elif fault := known[option].fault(value):
            view.report(path, fault, value)
        elif option == "batch":
            _check_policy_batch(view, path, value)
    for option, entry in known.items():
        if entry.required and not entry.measured and option not in options:
            message = f"is missing; {policy} needs it: {entry.meaning}"
            view.report(("scheduler", "options", option), message, ABSENT)


def _check_policy_batch(view: ArgsView, path: KeyPath, batch: int) -> None:
    tokens = view.get("max_num_batched_tokens")
    if batch > MAX_STEP_TOKENS:
        view.report(path, f"is more than any step computes: max_num_batched_tokens is at most {MAX_STEP_TOKENS}", batch)
    elif isinstance(tokens, int) and batch > tokens:
        view.warnings.append(
            f"scheduler.options.batch is {batch}, above max_num_batched_tokens ({tokens}): no step computes more than "
            f"{tokens} tokens, so that it acts like {tokens}"
        )


def _check_engine_args(view: ArgsView) -> None:
    given = view.get("engine_args")
    known = vllm_engine_args()
    for key, value in given.items() if isinstance(given, Mapping) else ():
        path = ("engine_args", key)
        if key in _HAS_OWN_KEY:
            view.report(path, f"is set in another place: write {_HAS_OWN_KEY[key]} under args", value)
        elif key in _SET_BY_HALO:
            view.report(path, f"cannot be set: {_SET_BY_HALO[key]}", value)
        elif key == "load_format" and value in _PICKLE_FORMATS:
            view.report(path, "reads pickle files, which can run code when they are loaded; use safetensors", value)
        elif known and key not in known:
            view.problems.append(unknown_key(path, value, known, {}))


@cache
def vllm_engine_args() -> frozenset[str]:
    """The names of vLLM's engine arguments, read from its source so that vLLM need not be imported.

    Empty where vLLM is not installed.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    classes = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in {"EngineArgs", "AsyncEngineArgs"})
    fields = (field for node in classes for field in node.body if isinstance(field, ast.AnnAssign))
    names = (field.target.id for field in fields if isinstance(field.target, ast.Name))
    return frozenset(name for name in names if not name.startswith("_"))


def _check_model(view: ArgsView) -> BaseModelFacts | None:
    """The model's facts; None where the directory is at fault, facts without sizes for a model from the hub."""
    model = view.get("model")
    if not isinstance(model, str):
        return None
    directory = view.path(model)
    missing = directory_fault(directory) is not None
    if missing and ("allow_hub",) in view.bad:
        return None  # Whether it is a name on the hub is not known.
    if missing and view.get("allow_hub") is True:
        view.warnings.append(f"model {model} is not a directory here; it will be looked up on the hub")
        return BaseModelFacts(name=model)
    try:
        facts = read_model_facts(directory)
    except ModelError as error:
        hint = f"It was looked for at {directory}; `make serve` prepares the default model" if missing else None
        view.report(("model",), str(error), model, hint)
        return None
    _check_model_limits(view, facts)
    return facts


def _check_model_limits(view: ArgsView, facts: BaseModelFacts) -> None:
    length = view.get("max_model_len")
    if isinstance(length, int) and 0 < facts.max_positions < length:
        view.report(("max_model_len",), f"is more than the model's own {facts.max_positions} tokens", length)
    size = view.get("tensor_parallel_size")
    if not isinstance(size, int) or size < 1:
        return
    if facts.heads and facts.heads % size:
        message = f"does not divide the model's {facts.heads} attention heads"
    elif facts.kv_heads and facts.kv_heads % size and size % facts.kv_heads:
        message = f"neither divides the model's {facts.kv_heads} key-value heads nor is a multiple of them"
    else:
        return
    view.report(("tensor_parallel_size",), message, size)


def _check_adapters(view: ArgsView, facts: BaseModelFacts | None) -> None:
    max_rank = view.get("max_lora_rank")
    base = facts or BaseModelFacts(name=str(view.get("model")))
    for index, service in view.services():
        adapter, path = service.get("adapter"), ("services", index, "adapter")
        if not isinstance(adapter, str) or path in view.bad:
            continue
        try:
            report = check_adapter(view.path(adapter), base, max_rank)
        except AdapterError as error:
            for fault in error.faults:
                view.report(path, fault, adapter)
            continue
        name = str(service.get("name"))
        view.reports[name] = report
        view.warnings.extend(f"adapter of {name}: {warning}" for warning in report.warnings)
