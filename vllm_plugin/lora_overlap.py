"""The LoRA linear layers run base and LoRA side by side where the partition table says that it wins.

The seam: with ``VLLM_LORA_ENABLE_DUAL_STREAM=1``, vLLM 0.32 sends every LoRA linear layer through an opaque operator
into ``BaseLinearLayerWithLoRA._apply_async_impl`` (``vllm/lora/layers/base_linear.py``), which runs at graph capture
with the padded number of tokens. That method is replaced by one that asks the table: sequential is vLLM's own
``_apply_sync``, plain dual stream the original method, a split two green-context streams.

On a CPU, without a table, or with one that was made for something else, nothing is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.platforms import current_platform

from partition.configs import Split, Unsplit
from partition.table import PartitionTable, TableRefusedError, from_text
from vllm_plugin.compat import check_overlap_interface

logger = logging.getLogger(__name__)

TABLE_VARIABLE = "HALO_PARTITION_TABLE"
"""The file of the table, set by the engine replica for its workers."""

DUAL_STREAM_VARIABLE = "VLLM_LORA_ENABLE_DUAL_STREAM"

GROUP_OF_LAYER = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
"""vLLM's names of a Llama-like model's linear layers. Any other layer stays sequential."""

Part = Callable[[], torch.Tensor]


class SideBySide(Protocol):
    """Runs two halves at once. `prepare` is called before any graph is captured."""

    def prepare(self, splits: frozenset[Split]) -> None:
        """Make what the splits need. Raises where one cannot be had."""

    def run(self, split: Split, base: Part, lora: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Both results, complete as far as work queued afterwards on the current stream is concerned."""

    def may_prepare(self) -> bool:
        """Whether now is a time to make streams: not while a graph is being captured."""


class GreenSideBySide:
    """Two green-context streams per split, forked from the current stream and joined to it by events.

    Tensors that a half allocates belong to its stream's pool. They are reused only by later work on that stream, which
    waits for the fork and so for everything the current stream did with them before.
    """

    def __init__(self) -> None:
        self._streams: dict[Split, list[Any]] = {}
        self._events: list[Any] = []

    def may_prepare(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def prepare(self, splits: frozenset[Split]) -> None:
        from vllm_plugin.green_contexts import GreenDevice  # noqa: PLC0415

        device = GreenDevice(torch.cuda.current_device())
        self._device = device
        self._events = [torch.cuda.Event() for _ in range(3)]
        for split in splits:
            self._streams[split] = list(device.streams(split))

    def run(self, split: Split, base: Part, lora: Part) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.utils.multi_stream_utils import execute_in_parallel  # noqa: PLC0415

        start, *done = self._events
        _, results = execute_in_parallel(
            lambda: None, [base, lora], start, done, self._streams[split], enable=True, default_first=False
        )
        return results[0], results[1]


class LoraOverlap:
    """What one worker process does with a table. ``stock`` is vLLM's own dual-stream method."""

    def __init__(self, table: PartitionTable, side_by_side: SideBySide, stock: Callable[..., torch.Tensor]) -> None:
        self._table, self._side_by_side, self._stock = table, side_by_side, stock
        self._rank = max(table.key.ranks)
        choices = {table.choice(entry.group, entry.rank, entry.tokens) for entry in table.entries}
        self._splits = frozenset(choice for choice in choices if isinstance(choice, Split))
        self._prepared = not self._splits
        self.failure: str | None = None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``BaseLinearLayerWithLoRA._apply_async_impl``: base layer and LoRA of ``x`` (rows, in) or (1, rows, in)."""
        choice = self._choice(layer, x)
        if choice is Unsplit.DUAL_STREAM:
            return self._stock(layer, x, bias)
        if isinstance(choice, Split) and self._ready():
            return self._apply_split(choice, layer, x, bias)
        result: torch.Tensor = layer._apply_sync(x, bias)
        return result

    def _choice(self, layer: Any, x: torch.Tensor) -> Split | Unsplit:
        group = GROUP_OF_LAYER.get(str(getattr(layer.base_layer, "prefix", "")).rpartition(".")[2])
        if group is None:
            return Unsplit.SEQUENTIAL
        return self._table.choice(group, self._rank, x.shape[-2])

    def _ready(self) -> bool:
        """Whether the streams are there; makes them at the first chance, which is vLLM's profiling run."""
        if self._prepared or self.failure is not None or not self._side_by_side.may_prepare():
            return self._prepared
        try:
            self._side_by_side.prepare(self._splits)
        except Exception as error:  # whatever the driver says: serving goes on without overlap, visibly
            self.failure = f"{type(error).__name__}: {error}"
            logger.warning("LoRA overlap is off, base and LoRA run one after the other: %s", self.failure)
            return False
        self._prepared = True
        return True

    def _apply_split(self, split: Split, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.flatten(0, 1) if x.ndim == 3 else x

        def base() -> torch.Tensor:
            output: torch.Tensor = layer._get_quant_method().apply(layer.base_layer, x, bias)
            return output

        def lora() -> torch.Tensor:
            # Zeros: the expand kernel does not write rows without an adapter (as in vLLM's own dual-stream method).
            delta = torch.zeros((rows.shape[0], sum(layer.output_slices)), device=x.device, dtype=x.dtype)
            layer.punica_wrapper.add_lora_linear(
                delta, rows, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices, add_inputs=False
            )
            return delta

        output, delta = self._side_by_side.run(split, base, lora)
        return output.add_(delta.view_as(output))

    @property
    def state(self) -> str:
        """What is done, for the operator."""
        if self.failure is not None:
            return f"off: {self.failure}"
        return f"active: {len(self._splits)} SM splits for {len(self._table.entries)} batch sizes of layer groups"


_installed: LoraOverlap | None = None


def install_lora_overlap() -> str:
    """Install the overlap if this process is to have one; calling it again changes nothing.

    Returns what was done. Raises `UpstreamChangedError` when a table is to be used and vLLM's layers changed.
    """
    global _installed  # noqa: PLW0603 - one method of vLLM's is replaced, once per process
    if _installed is not None:
        return _installed.state
    if current_platform.is_cpu():
        return "not used on a CPU: there are no SMs to share out"
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return "off: no partition table"
    if os.environ.get(DUAL_STREAM_VARIABLE) != "1":
        return f"off: {DUAL_STREAM_VARIABLE} is not 1"
    try:
        table = from_text(Path(path).read_text(encoding="utf-8"), None)
    except (OSError, UnicodeDecodeError, TableRefusedError) as error:
        return f"off: partition table {path}: {error}"
    check_overlap_interface()
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # noqa: PLC0415

    overlap = _installed = LoraOverlap(table, GreenSideBySide(), BaseLinearLayerWithLoRA._apply_async_impl)
    BaseLinearLayerWithLoRA._apply_async_impl = lambda layer, x, bias=None: overlap.apply(layer, x, bias)
    return overlap.state


def current_state() -> str | None:
    """The state of the overlap now, which may have failed since it was installed; None where none is installed."""
    return None if _installed is None else _installed.state
