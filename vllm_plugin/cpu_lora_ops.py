"""The arithmetic of LoRA on a CPU: packed copies of a layer's adapters, and products of row groups with them.

A layer's adapters live in vLLM's stacked tensors, A ``(slots, 1, rank, in)`` and B ``(slots, 1, out, rank)`` per slice.
`AdapterStack` keeps packed copies of what is not zero in them. A copy is valid only for the tensor versions it was made
from (torch counts every in-place write), so weights that were loaded, replaced or reset are never served stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partition.cpu_paths import NO_ADAPTER, RowGroup
from vllm_plugin.cpu_gemm import Gemm, can_be_strided, contiguous_gemm, strided_gemm

# Up to this many results (rows x columns of the widest slice) the kernel with strided output and one addition is
# faster, above it one product and one addition per slice (docs/measurements/lora-cpu.md).
STRIDED_RESULTS_MAX = 16_384
# The ranks of a slice are padded with zeros to a multiple of this: the strided kernel needs it, others lose nothing.
RANK_STEP = 32
# An adapter with a larger weight, or one that is no number, is multiplied alone: 0 * inf would reach its neighbours.
STACKABLE_WEIGHT_MAX = 2.0**20
# Combinations of adapters remembered per layer; what they refer to is kept once per slot.
COMBINATIONS_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the columns of a packed shrink mean; equal for all layers of one shape with the same adapters.

    ``column_slots``: the adapter slot of each column (`NO_ADAPTER`: padding). ``ranks`` and ``columns``: for each slice
    that an adapter touches, its range among those columns and its range among the output's columns.
    """

    column_slots: tuple[int, ...]
    ranks: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    out_size: int
    strided: bool


@dataclass(frozen=True, slots=True)
class _Packed:
    """Adapters of one layer side by side: one shrink for all slices, an expand per slice."""

    layout: _Layout
    layout_key: int
    shrink: Gemm
    expands: tuple[Gemm, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a group is multiplied: with ``packed`` (masked if it holds several adapters), then each of ``alone``.

    ``live``: the group's adapters that do anything in this layer, for groups that cannot be multiplied packed.
    """

    packed: _Packed | None
    alone: tuple[int, ...]
    live: tuple[int, ...]


class _Buffers:
    """Intermediate results of one group for one layout; layers run one after the other and share them."""

    def __init__(self, count: int, layout: _Layout, dtype: torch.dtype, slots: tuple[int, ...]) -> None:
        self.h = torch.empty(count, len(layout.column_slots), dtype=dtype)
        self.h_slices = [self.h[:, start:stop] for start, stop in layout.ranks]
        self.delta: torch.Tensor | None = None
        if layout.strided:
            # Zero once: columns of slices that no adapter touches are never written.
            self.delta = torch.zeros(count, layout.out_size, dtype=dtype)
            self.delta_slices = [self.delta[:, start:stop] for start, stop in layout.columns]
        else:
            self.delta_slices = [torch.empty(count, stop - start, dtype=dtype) for start, stop in layout.columns]
        self.mask: torch.Tensor | None = None
        self.mask_out: torch.Tensor | None = None
        if len(set(layout.column_slots) - {NO_ADAPTER}) > 1:
            own = torch.tensor(slots)[:, None] == torch.tensor(layout.column_slots)[None, :]
            # float16 overflows at 65504, and 0 * inf is no zero; the others cannot, see STACKABLE_WEIGHT_MAX.
            if dtype == torch.float16:
                self.mask_out = ~own
            else:
                self.mask = own.to(dtype)

    def keep_own(self) -> None:
        """Zero the entries of ``h`` whose column belongs to another adapter than the row's."""
        if self.mask is not None:
            self.h.mul_(self.mask)
        elif self.mask_out is not None:
            self.h.masked_fill_(self.mask_out, 0)


class StepGroup:
    """A `RowGroup` with the tensors its products need, made once per step and shared by all layers."""

    def __init__(self, group: RowGroup) -> None:
        self.adapters = group.adapters
        self.count = len(group.rows)
        self.start = group.rows[0]
        self.slots = group.slots
        self.index = None if group.contiguous else torch.tensor(group.rows)
        bare = [position for position, slot in enumerate(group.slots) if slot == NO_ADAPTER]
        self.bare = torch.tensor(bare) if bare else None
        self._buffers: dict[tuple[int, torch.dtype], _Buffers] = {}

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

    def buffers(self, packed: _Packed, dtype: torch.dtype) -> _Buffers:
        """The group's buffers for products with ``packed``."""
        key = (packed.layout_key, dtype)
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = self._buffers[key] = _Buffers(self.count, packed.layout, dtype, self.slots)
        return buffers

    def rows_of(self, slot: int) -> torch.Tensor:
        """Row numbers (in the step) of the group's rows that use ``slot``."""
        rows = torch.tensor([position for position, own in enumerate(self.slots) if own == slot])
        return rows + self.start if self.index is None else self.index[rows]


# Layouts are compared on every call; numbering them once makes that an integer comparison. A few per model.
_layout_keys: dict[_Layout, int] = {}


class AdapterStack:
    """Packed copies of the adapters of one linear layer and the products with them.

    ``a`` and ``b``: one stacked tensor per slice; ``out_sizes``: columns of the output per slice.
    """

    def __init__(self, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out_sizes: tuple[int, ...]) -> None:
        self.a, self.b, self.out_sizes = tuple(a), tuple(b), out_sizes
        self.tensors = (*self.a, *self.b)
        self.dtype = self.a[0].dtype
        self._strided_rows = STRIDED_RESULTS_MAX // max(out_sizes)
        self._version = -1
        self._packed: dict[tuple[tuple[int, ...], bool], _Packed] = {}
        self._plans: dict[tuple[tuple[int, ...], bool], _Plan] = {}
        self._ranks: list[list[int]] = []
        self._live: frozenset[int] = frozenset()
        self._stackable: tuple[int, ...] = ()

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
        version = sum([tensor._version for tensor in self.tensors])  # versions only grow, so their sum tells as well
        if version != self._version:
            self._refresh(version)
        for group in groups:
            key = (group.adapters, group.count <= self._strided_rows)
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= COMBINATIONS_MAX:
                    self._plans.clear()
                plan = self._plans[key] = self._plan(*key)
            if plan.packed is not None and x.dtype == y.dtype == self.dtype:
                _add_packed(y, x, group, plan.packed, scale)
            alone = plan.alone if x.dtype == y.dtype == self.dtype else plan.live
            for slot in alone:
                self._add_plain(y, x, group.rows_of(slot), slot, scale)

    def _plan(self, adapters: tuple[int, ...], strided: bool) -> _Plan:
        """How rows that use ``adapters`` are multiplied. Packing is done here, on first use of the combination."""
        live = tuple(slot for slot in adapters if slot in self._live)
        together = live if len(adapters) == 1 else self._stackable
        alone = tuple(slot for slot in live if slot not in together)
        if len(alone) == len(live):
            return _Plan(None, alone, live)
        packed = self._packed.get((together, strided))
        if packed is None:
            packed = self._packed[together, strided] = self._pack(together, strided)
        return _Plan(packed, alone, live)

    def _refresh(self, version: int) -> None:
        """Drop the packed copies and find out what is in the slots now."""
        self._packed.clear()
        self._plans.clear()
        self._ranks = []
        alone: set[int] = set()
        for a, b in zip(self.a, self.b, strict=True):
            a_max, b_max = a[:, 0].abs().amax(-1).float(), b[:, 0].abs().amax(1).float()
            used = (a_max != 0) & (b_max != 0)
            self._ranks.append((used * torch.arange(1, used.shape[1] + 1)).amax(1).tolist())
            fits = (a_max <= STACKABLE_WEIGHT_MAX).all(1) & (b_max <= STACKABLE_WEIGHT_MAX).all(1)
            alone.update(slot for slot, fit in enumerate(fits.tolist()) if not fit)
        slots = range(self.a[0].shape[0])
        self._live = frozenset(slot for slot in slots if any(ranks[slot] for ranks in self._ranks))
        self._stackable = tuple(slot for slot in slots if slot in self._live and slot not in alone)
        self._version = version

    def _pack(self, slots: tuple[int, ...], strided: bool) -> _Packed:
        shrinks: list[torch.Tensor] = []
        expands: list[torch.Tensor] = []
        column_slots: list[int] = []
        rank_spans: list[tuple[int, int]] = []
        column_spans: list[tuple[int, int]] = []
        offset = 0
        for a, b, ranks, out_size in zip(self.a, self.b, self._ranks, self.out_sizes, strict=True):
            parts = [(slot, ranks[slot]) for slot in slots if ranks[slot]]
            if parts:
                padding = -sum(rank for _, rank in parts) % RANK_STEP
                start = len(column_slots)
                column_slots.extend(slot for slot, rank in parts for _ in range(rank))
                column_slots.extend([NO_ADAPTER] * padding)
                rank_spans.append((start, len(column_slots)))
                column_spans.append((offset, offset + out_size))
                shrinks.extend(a[slot, 0, :rank] for slot, rank in parts)
                shrinks.append(a.new_zeros(padding, a.shape[-1]))
                side_by_side = [b[slot, 0, :out_size, :rank] for slot, rank in parts]
                expands.append(torch.cat([*side_by_side, b.new_zeros(out_size, padding)], 1))
            offset += out_size
        strided = strided and all(can_be_strided(expand) for expand in expands)
        layout = _Layout(tuple(column_slots), tuple(rank_spans), tuple(column_spans), offset, strided)
        shrink = torch.cat(shrinks)
        return _Packed(
            layout,
            _layout_keys.setdefault(layout, len(_layout_keys)),
            strided_gemm(shrink) if can_be_strided(shrink) else contiguous_gemm(shrink),
            tuple(strided_gemm(expand) if strided else contiguous_gemm(expand) for expand in expands),
        )

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


def _add_packed(y: torch.Tensor, x: torch.Tensor, group: StepGroup, packed: _Packed, scale: float) -> None:
    buffers = group.buffers(packed, x.dtype)
    rows = group.take(x)
    packed.shrink(buffers.h, rows if rows.stride(-1) == 1 else rows.contiguous())
    buffers.keep_own()
    if scale != 1.0:
        buffers.h.mul_(scale)
    for expand, delta, h in zip(packed.expands, buffers.delta_slices, buffers.h_slices, strict=True):
        expand(delta, h)
    if buffers.delta is not None:
        group.add(y if packed.layout.out_size == y.shape[1] else y[:, : packed.layout.out_size], buffers.delta)
        return
    for delta, (start, stop) in zip(buffers.delta_slices, packed.layout.columns, strict=True):
        group.add(y[:, start:stop], delta)
