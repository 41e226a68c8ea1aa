"""The arithmetic of LoRA on a CPU: packed copies of a layer's adapters, and products of row groups with them.

A layer's adapters live in vLLM's stacked tensors, A ``(slots, 1, rank, in)`` and B ``(slots, 1, out, rank)`` per
slice. `AdapterStack` keeps oneDNN-packed copies of what is not zero in them. A copy is valid only for the tensor
versions it was made from (torch counts every in-place write), so weights that were loaded, replaced or reset are
never served stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm import _custom_ops as vllm_ops

from partition.cpu_paths import NO_ADAPTER, RowGroup

# Up to this many rows one product with a block-diagonal B beats one product per slice (docs/measurements/lora-cpu.md).
DIAGONAL_ROWS_MAX = 32
# Ranks are packed in multiples of this; oneDNN pads to at least as much anyway.
RANK_STEP = 8
# An adapter with a larger weight, or one that is no number, is multiplied alone: 0 * inf would reach its neighbours.
STACKABLE_WEIGHT_MAX = 2.0**20
# oneDNN keeps this many row counts per packed weight ready; vLLM uses the same number for the base layers.
ROW_COUNTS_CACHED = 32


class PackedWeight:
    """One weight ``(out, in)`` in oneDNN's blocked layout, or as it is where vLLM has no oneDNN."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_size = weight.shape[0]
        self._weight: torch.Tensor | None = None
        # The handler owns the packed copy and frees it with this object.
        self._handler = _onednn_handler(weight)
        if self._handler is None:
            self._weight = weight.contiguous()
        else:
            self._handler_tensor = self._handler.handler_tensor
            self._onednn_mm = torch.ops._C.onednn_mm.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` for ``x`` (rows, in) with adjacent columns, accumulated in float32, in ``x``'s dtype."""
        if self._weight is not None:
            return torch.nn.functional.linear(x, self._weight)
        out = torch.empty((x.shape[0], self.out_size), dtype=x.dtype)
        self._onednn_mm(out, x, None, self._handler_tensor)
        return out


def _onednn_handler(weight: torch.Tensor) -> Any | None:
    """vLLM's handler of ``weight`` packed by oneDNN; None where oneDNN cannot do this dtype on this CPU."""
    if not vllm_ops._supports_onednn:
        return None
    try:
        return vllm_ops.create_onednn_mm(weight.t(), ROW_COUNTS_CACHED)
    except RuntimeError:  # float16 on a CPU without its instructions; vLLM's own layers fall back the same way
        return None


class StepGroup:
    """A `RowGroup` with the index tensors its products need, made once per step and shared by all layers."""

    def __init__(self, group: RowGroup) -> None:
        self.adapters = group.adapters
        self.count = len(group.rows)
        self.start = group.rows[0]
        self._slots = group.slots
        self.index = None if group.contiguous else torch.tensor(group.rows)
        bare = [position for position, slot in enumerate(group.slots) if slot == NO_ADAPTER]
        self.bare = torch.tensor(bare) if bare else None
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    @cached_property
    def slots(self) -> torch.Tensor:
        """The adapter slot of each row, int64."""
        return torch.tensor(self._slots)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The group's rows of ``x``: a view where they lie together, else a copy."""
        if self.index is not None:
            return x.index_select(0, self.index)
        return x if self.count == x.shape[0] else x[self.start : self.start + self.count]

    def add(self, y: torch.Tensor, delta: torch.Tensor) -> None:
        """Add ``delta`` (count, columns) to the group's rows of ``y``; rows without an adapter stay bit for bit."""
        if self.bare is not None:
            delta.index_fill_(0, self.bare, -0.0)  # y + -0.0 is y for every y; y + 0.0 turns -0.0 into 0.0
        if self.index is not None:
            y.index_add_(0, self.index, delta)
        else:
            self.take(y).add_(delta)

    def mask(self, h: torch.Tensor, column_slots: tuple[int, ...]) -> None:
        """Zero the entries of ``h`` (count, columns) whose column belongs to another adapter than the row's."""
        mask = self._masks.get(column_slots)
        if mask is None:
            mask = self.slots[:, None] == torch.tensor(column_slots)[None, :]
            # float16 overflows at 65504, and 0 * inf is no zero; bfloat16 and float32 cannot, see STACKABLE_WEIGHT_MAX.
            mask = ~mask if h.dtype == torch.float16 else mask.to(h.dtype)
            self._masks[column_slots] = mask
        if mask.dtype == torch.bool:
            h.masked_fill_(mask, 0)
        else:
            h.mul_(mask)

    def rows_of(self, slot: int) -> torch.Tensor:
        """Row numbers (in the step) of the group's rows that use ``slot``."""
        rows = (self.slots == slot).nonzero().flatten()
        return rows + self.start if self.index is None else self.index[rows]


@dataclass(slots=True)
class _Packed:
    """Adapters ``slots`` of one layer side by side: one shrink for all slices, an expand per slice or one for all."""

    column_slots: tuple[int, ...]
    shrink: PackedWeight
    widths: tuple[int, ...]
    expands: tuple[torch.Tensor | None, ...]
    spans: tuple[tuple[int, int], ...]
    _per_slice: list[PackedWeight | None] = field(default_factory=list)
    _diagonal: PackedWeight | None = None

    def diagonal(self) -> PackedWeight:
        """B of all slices as one block-diagonal weight."""
        if self._diagonal is None:
            blocks = [
                b if b is not None else self.shrink_zeros(stop - start)
                for b, (start, stop) in zip(self.expands, self.spans, strict=True)
            ]
            self._diagonal = PackedWeight(torch.block_diag(*blocks))
        return self._diagonal

    def shrink_zeros(self, rows: int) -> torch.Tensor:
        """B of a slice that no adapter touches: ``rows`` outputs, no rank."""
        dtype = next(b.dtype for b in self.expands if b is not None)
        return torch.zeros(rows, 0, dtype=dtype)

    def per_slice(self) -> list[PackedWeight | None]:
        """B of each slice; None where no adapter touches the slice."""
        if not self._per_slice:
            self._per_slice.extend(None if b is None else PackedWeight(b) for b in self.expands)
        return self._per_slice


class AdapterStack:
    """Packed copies of the adapters of one linear layer and the products with them.

    ``a`` and ``b``: one stacked tensor per slice; ``out_sizes``: columns of the output per slice.
    """

    def __init__(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out_sizes: tuple[int, ...]) -> None:
        self.a, self.b, self.out_sizes = tuple(a), tuple(b), out_sizes
        self.tensors = (*self.a, *self.b)
        self.dtype = self.a[0].dtype
        self._versions: tuple[int, ...] | None = None
        self._packed: dict[tuple[int, ...], _Packed] = {}
        self._ranks: list[list[int]] = []
        self._stackable: tuple[int, ...] = ()
        self._alone: frozenset[int] = frozenset()
        self._live: frozenset[int] = frozenset()

    def serves(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out_sizes: tuple[int, ...]) -> bool:
        """Whether this stack was made for exactly these tensors."""
        given = (*a, *b)
        return (
            out_sizes == self.out_sizes
            and len(given) == len(self.tensors)
            and all(mine is theirs for mine, theirs in zip(self.tensors, given, strict=True))
        )

    def add_product(self, y: torch.Tensor, x: torch.Tensor, groups: Sequence[StepGroup], scale: float) -> None:
        """``y[row] += scale * B A x[row]`` with the adapter of each row; ``x`` (rows, in), ``y`` (rows, out)."""
        self._refresh()
        for group in groups:
            live = [slot for slot in group.adapters if slot in self._live]
            if not live:
                continue
            if x.dtype != self.dtype or y.dtype != self.dtype:
                stacked, alone = [], live
            elif len(group.adapters) == 1:
                self._add_packed(y, x, group, (live[0],), scale)
                continue
            else:
                stacked = [slot for slot in live if slot not in self._alone]
                alone = [slot for slot in live if slot in self._alone]
            if stacked:
                self._add_packed(y, x, group, self._stackable, scale)
            for slot in alone:
                self._add_plain(y, x, group.rows_of(slot), slot, scale)

    def _refresh(self) -> None:
        """Drop the packed copies if any weight was written since they were made."""
        versions = tuple([tensor._version for tensor in self.tensors])
        if versions == self._versions:
            return
        self._packed.clear()
        self._ranks = []
        alone: set[int] = set()
        for a, b in zip(self.a, self.b, strict=True):
            a_max, b_max = a[:, 0].abs().amax(-1).float(), b[:, 0].abs().amax(1).float()
            used = (a_max != 0) & (b_max != 0)
            positions = torch.arange(1, used.shape[1] + 1)
            ranks = (used * positions).amax(1).tolist()
            self._ranks.append([min(-(-rank // RANK_STEP) * RANK_STEP, used.shape[1]) for rank in ranks])
            fits = (a_max <= STACKABLE_WEIGHT_MAX).all(1) & (b_max <= STACKABLE_WEIGHT_MAX).all(1)
            alone.update(slot for slot, fit in enumerate(fits.tolist()) if not fit)
        slots = range(self.a[0].shape[0])
        self._live = frozenset(slot for slot in slots if any(ranks[slot] for ranks in self._ranks))
        self._alone = frozenset(alone)
        self._stackable = tuple(slot for slot in slots if slot in self._live and slot not in self._alone)
        self._versions = versions

    def _pack(self, slots: tuple[int, ...]) -> _Packed:
        packed = self._packed.get(slots)
        if packed is not None:
            return packed
        columns: list[int] = []
        shrinks: list[torch.Tensor] = []
        widths: list[int] = []
        expands: list[torch.Tensor | None] = []
        spans: list[tuple[int, int]] = []
        offset = 0
        for a, b, ranks, out_size in zip(self.a, self.b, self._ranks, self.out_sizes, strict=True):
            parts = [(slot, ranks[slot]) for slot in slots if ranks[slot]]
            shrinks.extend(a[slot, 0, :rank] for slot, rank in parts)
            columns.extend(slot for slot, rank in parts for _ in range(rank))
            widths.append(sum(rank for _, rank in parts))
            expands.append(torch.cat([b[slot, 0, :out_size, :rank] for slot, rank in parts], 1) if parts else None)
            spans.append((offset, offset + out_size))
            offset += out_size
        packed = _Packed(tuple(columns), PackedWeight(torch.cat(shrinks)), tuple(widths), tuple(expands), tuple(spans))
        self._packed[slots] = packed
        return packed

    def _add_packed(
        self, y: torch.Tensor, x: torch.Tensor, group: StepGroup, slots: tuple[int, ...], scale: float
    ) -> None:
        packed = self._pack(slots)
        rows = group.take(x)
        h = packed.shrink(rows if rows.stride(-1) == 1 else rows.contiguous())
        if len(slots) > 1:
            group.mask(h, packed.column_slots)
        if scale != 1.0:
            h.mul_(scale)
        if group.count <= DIAGONAL_ROWS_MAX or len(self.out_sizes) == 1:
            columns = packed.spans[-1][1]
            group.add(y if columns == y.shape[1] else y[:, :columns], packed.diagonal()(h))
            return
        taken = 0
        for expand, width, (start, stop) in zip(packed.per_slice(), packed.widths, packed.spans, strict=True):
            if expand is not None:
                group.add(y[:, start:stop], expand(h[:, taken : taken + width]))
                taken += width

    def _add_plain(self, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, slot: int, scale: float) -> None:
        """The product of one adapter without packed copies, as exact as vLLM's own: shrink in float32."""
        x_rows = x.index_select(0, rows).float()
        start = 0
        for a, b, ranks, out_size in zip(self.a, self.b, self._ranks, self.out_sizes, strict=True):
            if rank := ranks[slot]:
                h = (x_rows @ a[slot, 0, :rank].float().t()).mul_(scale).to(y.dtype)
                delta = h @ b[slot, 0, :out_size, :rank].to(y.dtype).t()
                y[:, start : start + out_size].index_add_(0, rows, delta)
            start += out_size
