"""LoRA on the CPU platform: rows grouped by adapter instead of one adapter copy per token.

vLLM 0.32's ``PunicaWrapperCPU`` (``vllm/lora/punica_wrapper/punica_cpu.py``) gathers a full copy of the adapter for
every token, which makes a step several times as long as without LoRA, and in a batch with rows of both kinds it gives
rows without an adapter the last slot's (index -1). `GroupedPunicaWrapper` replaces its products; `install_cpu_lora`
makes the CPU platform name it. docs/adr/0003-cpu-lora.md says why this seam, docs/measurements/lora-cpu.md what it
brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from partition.cpu_paths import NO_ADAPTER, CpuLoraCosts, group_rows
from vllm_plugin.compat import check_punica_interface
from vllm_plugin.cpu_costs import measured_costs
from vllm_plugin.cpu_lora_ops import AdapterStack, StepGroup

WRAPPER = "vllm_plugin.cpu_lora.GroupedPunicaWrapper"
# Layers known to one wrapper. Models stay far below; only a caller that makes tensors anew each time could reach it.
LAYERS_MAX = 16_384
RANK_DEFAULT = 16


def install_cpu_lora() -> str:
    """Make the CPU platform use `GroupedPunicaWrapper`; on other platforms do nothing. Calling it again is harmless.

    Returns what was done, for the operator. Raises `UpstreamChangedError` if vLLM's interface is not the one this was
    written for: an engine that serves LoRA wrongly must not start.
    """
    if not current_platform.is_cpu():
        return f"not used on {current_platform.device_name}: vLLM's own LoRA kernels serve there"
    check_punica_interface()
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: WRAPPER)
    BaseLinearLayerWithLoRA.set_mapping = _set_mapping
    return "active: rows grouped by adapter"


def _set_mapping(layer: BaseLinearLayerWithLoRA, punica_wrapper: PunicaWrapperBase) -> None:
    """``BaseLayerWithLoRA.set_mapping``, then shorten the way to the base layer.

    vLLM asks ``self.base_layer`` eight times per call, each time through ``__getattr__``: 1 ms of a 14 ms decode step.
    As an instance attribute it is found at once. `torch.nn.Module` keeps both places in step when it is assigned anew.
    """
    BaseLayerWithLoRA.set_mapping(layer, punica_wrapper)
    layer.__dict__["base_layer"] = layer._modules["base_layer"]


def is_active() -> bool:
    """Whether an engine built now in this process would use `GroupedPunicaWrapper`."""
    return bool(current_platform.get_punica_wrapper() == WRAPPER)


class _StepRows:
    """The row groups of one step, made when first asked for."""

    def __init__(self, slots: tuple[int, ...], loaded: int, rank: int, costs: CpuLoraCosts) -> None:
        self.slots = slots
        self._loaded, self._rank, self._costs = loaded, rank, costs
        self._groups: tuple[StepGroup, ...] | None = None

    @property
    def groups(self) -> tuple[StepGroup, ...]:
        if self._groups is None:
            groups = group_rows(self.slots, self._loaded, self._rank, self._costs)
            self._groups = tuple(StepGroup(group) for group in groups)
        return self._groups


class GroupedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """`PunicaWrapperCPU` with every product done per group of rows; same arguments, same results in place."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        lora_config = kwargs.get("lora_config")
        self._rank = lora_config.max_lora_rank if lora_config is not None else RANK_DEFAULT
        self._costs = measured_costs()
        self._tokens = self._samples = _StepRows((), 0, self._rank, self._costs)
        self._stacks: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], AdapterStack]] = {}
        self._by_tensor: dict[int, AdapterStack] = {}
        # Stacked B of an embedding, the version seen, and whether anything was in it.
        self._embeddings: dict[int, tuple[torch.Tensor, int, bool]] = {}

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take over which adapter each row of the coming steps uses. ``mapping`` may be empty."""
        if mapping.index_mapping:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        else:
            self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
            self.is_prefill, self.no_lora, self.batch_size, self.token_nums = mapping.is_prefill, True, 0, 0
        slot_of = {lora_id: slot for slot, lora_id in enumerate(lora_index_to_id) if lora_id is not None}
        self._tokens = self._step_rows(mapping.index_mapping, slot_of)
        self._samples = self._step_rows(mapping.prompt_mapping, slot_of)

    def _step_rows(self, lora_ids: Sequence[int], slot_of: dict[int, int]) -> _StepRows:
        slots = tuple(slot_of[lora_id] if lora_id > 0 else NO_ADAPTER for lora_id in lora_ids)
        return _StepRows(slots, len(slot_of), self._rank, self._costs)

    def _groups(self, rows: _StepRows, count: int) -> tuple[StepGroup, ...]:
        """The groups for tensors of ``count`` rows; rows beyond the mapping are padding and have no adapter."""
        if count < len(rows.slots):
            raise ValueError(f"LoRA layer got {count} rows, but {len(rows.slots)} rows were mapped to adapters")
        return rows.groups

    def _stack(
        self, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], out_sizes: tuple[int, ...]
    ) -> AdapterStack:
        # A layer passes the same tuples every time: two identity checks find its stack.
        known = self._stacks.get(id(a))
        if known is not None and known[0] is a and known[1] is b:
            return known[2]
        stack = self._stack_of_tensors(a, b, out_sizes)
        if len(self._stacks) >= LAYERS_MAX:
            self._stacks.clear()
        self._stacks[id(a)] = (a, b, stack)
        return stack

    def _stack_of_tensors(
        self, a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], out_sizes: tuple[int, ...]
    ) -> AdapterStack:
        stack = self._by_tensor.get(id(a[0]))
        if stack is None or not stack.serves(a, b, out_sizes):
            if len(self._by_tensor) >= LAYERS_MAX:
                self._by_tensor.clear()
            stack = self._by_tensor[id(a[0])] = AdapterStack(a, b, out_sizes)
        return stack

    def add_lora_linear(  # noqa: PLR0917 - vLLM's signature
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """``y[row] += scale * B A x[row]`` per slice, in place. ``x`` (rows, in), ``y`` (rows, sum of slices).

        ``add_inputs=False`` overwrites ``y`` instead. ``buffer`` is scratch of vLLM's own kernels and not used.
        """
        if kwargs and not kwargs.get("add_inputs", True):
            y.zero_()
        if x.dim() != 2:
            y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if groups := self._groups(self._tokens, x.shape[0]):
            self._stack(lora_a_stacked, lora_b_stacked, output_slices).add_product(y, x, groups, scale)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """`add_lora_linear` for the head: ``y`` (samples, vocabulary, maybe padded); free if no adapter has a head."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        groups = self._groups(self._samples, x.shape[0])
        if groups:
            columns = min(lora_b_stacked.shape[-2], y.shape[1])
            stack = self._stack_of_tensors((lora_a_stacked,), (lora_b_stacked,), (columns,))
            stack.add_product(y, x, groups, scale)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y[row] += B x[row]``; ``x`` (rows, rank) are the rows' entries of their adapters' embedding A.

        Free if no adapter has an embedding; vLLM calls it all the same.
        """
        known = self._embeddings.get(id(lora_b_stacked))
        if known is None or known[0] is not lora_b_stacked or known[1] != lora_b_stacked._version:
            if len(self._embeddings) >= LAYERS_MAX:
                self._embeddings.clear()
            known = (lora_b_stacked, lora_b_stacked._version, bool(lora_b_stacked.any()))
            self._embeddings[id(lora_b_stacked)] = known
        if known[2] or not add_inputs:
            self.add_expand(y, (x,), (lora_b_stacked,), (y.shape[-1],), add_inputs=add_inputs)

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """``y[slice][row] = scale * A x[row]`` in ``y``'s dtype (float32); 0 for rows without an adapter.

        Only fully sharded adapters (tensor parallel) come here: vLLM reduces ``y`` before `add_expand`.
        """
        x = x.view(-1, x.shape[-1])
        groups = self._groups(self._tokens, x.shape[0])
        for buffer, a in zip(y, lora_a_stacked, strict=True):
            buffer.zero_()
            for slot, rows in _rows_by_slot(groups):
                h = x.index_select(0, rows).to(buffer.dtype) @ a[slot].flatten(0, -2).to(buffer.dtype).t()
                buffer[rows, : h.shape[1]] = h.mul_(scale)

    def add_expand(  # noqa: PLR0917 - vLLM's signature
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y[row, slice] += B x[slice][row]``, from column ``offset_start`` on; see `add_shrink`."""
        y = y.view(-1, y.shape[-1])
        groups = self._groups(self._tokens, y.shape[0])
        start = offset_start
        for h, b, size in zip(x, lora_b_stacked, output_slices, strict=True):
            columns = y[:, start : start + size]
            if not add_inputs:
                columns.zero_()
            for slot, rows in _rows_by_slot(groups):
                h_rows = h.index_select(0, rows).to(y.dtype)
                columns.index_add_(0, rows, h_rows @ b[slot].flatten(0, -2)[: columns.shape[1]].to(y.dtype).t())
            start += size


def _rows_by_slot(groups: Sequence[StepGroup]) -> list[tuple[int, torch.Tensor]]:
    return [(slot, group.rows_of(slot)) for group in groups for slot in group.adapters]
