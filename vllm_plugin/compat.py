"""What the plug-in relies on in vLLM, checked when it is installed.

vLLM's interfaces used here are not public. A version that changed one must stop the engine with a sentence, not serve
wrong results.
"""

from __future__ import annotations

import importlib
import inspect

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

# Parameters of the methods GroupedPunicaWrapper replaces, as of vLLM 0.32.0.
PUNICA_METHODS: dict[str, tuple[str, ...]] = {
    "__init__": ("self", "max_num_batched_tokens", "max_batches", "device", "kwargs"),
    "update_metadata": ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs"),
    "_update_base_metadata": ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"),
    "add_shrink": ("self", "y", "x", "lora_a_stacked", "scale", "kwargs"),
    "add_expand": (
        "self", "y", "x", "lora_b_stacked", "output_slices", "offset_start", "add_inputs", "kwargs",
    ),
    "add_lora_embedding": ("self", "y", "x", "lora_b_stacked", "add_inputs", "kwargs"),
    "add_lora_linear": (
        "self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs",
    ),
    "add_lora_logits": ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "kwargs"),
}  # fmt: skip


# What `vllm_plugin.lora_overlap` calls and replaces, as module:attribute and its parameters.
OVERLAP_CALLS: dict[str, tuple[str, ...]] = {
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._apply_async_impl": ("self", "x", "bias"),
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._apply_sync": ("self", "x", "bias"),
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA._get_quant_method": ("self",),
    "vllm.utils.multi_stream_utils:execute_in_parallel": (
        "default_fn", "aux_fns", "start_event", "done_events", "aux_streams", "enable", "default_first",
    ),
}  # fmt: skip


class UpstreamChangedError(RuntimeError):
    """vLLM no longer has the interface the plug-in was written for."""


def check_punica_interface() -> None:
    """Raise `UpstreamChangedError`, naming every difference, unless vLLM's CPU LoRA interface is the known one."""
    problems = [
        f"PunicaWrapperCPU.{name}{inspect.signature(method)} should take {', '.join(expected)}"
        if (method := getattr(PunicaWrapperCPU, name, None)) is not None
        else f"PunicaWrapperCPU.{name} is gone"
        for name, expected in PUNICA_METHODS.items()
        if _parameters(name) != expected
    ]
    if not callable(getattr(type(current_platform), "get_punica_wrapper", None)):
        problems.append(f"{type(current_platform).__name__}.get_punica_wrapper is gone")
    # The packed copies are trusted by tensor version, which inference mode does not count.
    if current_platform.inference_mode is not None and not isinstance(current_platform.inference_mode(), torch.no_grad):
        problems.append(f"{type(current_platform).__name__}.inference_mode is no longer torch.no_grad")
    if problems:
        raise UpstreamChangedError("vLLM's CPU LoRA interface changed: " + "; ".join(problems))


def check_overlap_interface() -> None:
    """Raise `UpstreamChangedError`, naming every difference, unless vLLM's LoRA linear layers are the known ones."""
    problems = []
    for path, expected in OVERLAP_CALLS.items():
        module, _, attribute = path.partition(":")
        try:
            found: object = importlib.import_module(module)
            for name in attribute.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{path} is gone ({error})")
            continue
        parameters = tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]
        if parameters != expected:
            problems.append(f"{path} takes {', '.join(parameters)}, not {', '.join(expected)}")
    if problems:
        raise UpstreamChangedError("vLLM's LoRA linear layers changed: " + "; ".join(problems))


def _parameters(name: str) -> tuple[str, ...]:
    method = getattr(PunicaWrapperCPU, name, None)
    return tuple(inspect.signature(method).parameters) if method is not None else ()
