"""The arithmetic of LoRA on a CPU: packed copies of a layer's adapters, and products of row groups with them.

A layer's adapters live in vLLM's stacked tensors, A ``(slots, 1, rank, in)`` and B ``(slots, 1, out, rank)`` per slice.
`AdapterStack` keeps packed copies of what is not zero in them. A copy is valid only for the tensor versions it was made
from (torch counts every in-place write), so weights that were loaded, replaced or reset are never served stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

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


Mask = Callable[[torch.Tensor], torch.Tensor]
# ``product(y, x, scale)`` adds one group's part.
Product = Callable[[torch.Tensor, torch.Tensor, float], None]


class _Buffers:
    """Intermediate results of one group for one layout; layers run one after the other and share them."""

    def __init__(self, rows: int, layout: _Layout, dtype: torch.dtype, slots: tuple[int, ...]) -> None:
        self.h = torch.empty(rows, len(layout.column_slots), dtype=dtype)
        self.h_slices = [self.h[:, start:stop] for start, stop in layout.ranks]
        self.delta: torch.Tensor | None = None
        if layout.strided:
            # Zero once: columns of slices that no adapter touches are never written.
            self.delta = torch.zeros(rows, layout.out_size, dtype=dtype)
            self.delta_slices = [self.delta[:, start:stop] for start, stop in layout.columns]
        else:
            self.delta_slices = [torch.empty(rows, stop - start, dtype=dtype) for start, stop in layout.columns]
        self.mask = _mask(slots, layout.column_slots, dtype)


def _mask(slots: tuple[int, ...], column_slots: tuple[int, ...], dtype: torch.dtype) -> Mask | None:
    """Zeroes, in a shrink's result, the columns of other adapters than the row's; None if every row owns all of them.

    One adapter in the columns is not enough for that: rows may use adapters that do not touch this layer.
    """
    if len((set(column_slots) | set(slots)) - {NO_ADAPTER}) < 2:
        return None
    own = torch.tensor(slots)[:, None] == torch.tensor(column_slots)[None, :]
    if dtype == torch.float16:  # it overflows at 65504, and 0 * inf is no zero; for the others see STACKABLE_WEIGHT_MAX
        others = ~own
        return lambda h: h.masked_fill_(others, 0)
    factors = own.to(dtype)
    return lambda h: h.mul_(factors)


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
        # What each layer does with this group, bound once, and the weights' version it holds for.
        self.products: dict[AdapterStack, tuple[int, Product]] = {}

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The group's rows of ``x``: a view where they lie together, else a copy."""
        if self.index is not None:
            return x.index_select(0, self.index)
        return x if x.shape[0] == self.count else x[self.start : self.start + self.count]

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


# Layouts are compared on every call; numbering them makes that a comparison of integers. Numbers are never used twice.
LAYOUTS_MAX = 4096
_layout_keys: dict[_Layout, int] = {}
_layout_numbers = count()


def _layout_key(layout: _Layout) -> int:
    key = _layout_keys.get(layout)
    if key is None:
        if len(_layout_keys) >= LAYOUTS_MAX:
            _layout_keys.clear()
        key = _layout_keys[layout] = next(_layout_numbers)
    return key


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
        plain = x.dtype is not self.dtype or y.dtype is not self.dtype
        if not x.is_contiguous():
            x = x.contiguous()
        for group in groups:
            if plain:
                self._add_plain(y, x, group, group.adapters, scale)
                continue
            bound = group.products.get(self)
            if bound is None or bound[0] != version:
                bound = group.products[self] = (version, self._bind(group))
            bound[1](y, x, scale)

    def _bind(self, group: StepGroup) -> Product:
        """How ``group`` is multiplied in this layer; packs its adapters on first use."""
        live = tuple(slot for slot in group.adapters if slot in self._live)
        together = live if len(group.adapters) == 1 else self._stackable
        alone = tuple(slot for slot in live if slot not in together)
        if not live:
            return _add_nothing
        if len(alone) == len(live):
            return lambda y, x, scale: self._add_plain(y, x, group, alone, scale)
        strided = group.count <= self._strided_rows
        packed = self._packed.get((together, strided))
        if packed is None:
            packed = self._packed[together, strided] = self._pack(together, strided)
        product = _packed_product(group, packed, group.buffers(packed, self.dtype))
        if not alone:
            return product

        def both(y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
            product(y, x, scale)
            self._add_plain(y, x, group, alone, scale)

        return both

    def _refresh(self, version: int) -> None:
        """Drop the packed copies and find out what is in the slots now."""
        self._packed.clear()
        self._ranks = []
        alone: set[int] = set()
        for a, b in zip(self.a, self.b, strict=True):
            a_max, b_max = _largest(a, dim=1), _largest(b, dim=0)
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
        other = self._packed.get((slots, not strided))  # the shrink is the same for both
        strided = strided and all(can_be_strided(expand) for expand in expands)
        layout = _Layout(tuple(column_slots), tuple(rank_spans), tuple(column_spans), offset, strided)
        return _Packed(
            layout,
            _layout_key(layout),
            other.shrink if other is not None else _either_gemm(torch.cat(shrinks)),
            tuple(strided_gemm(expand) if strided else contiguous_gemm(expand) for expand in expands),
        )

    def _add_plain(
        self, y: torch.Tensor, x: torch.Tensor, group: StepGroup, slots: Sequence[int], scale: float
    ) -> None:
        """The product of each adapter of ``slots`` without packed copies, exact as vLLM's own: shrink in float32."""
        for slot in slots:
            rows = group.rows_of(slot)
            x_rows = x.index_select(0, rows).float()
            start = 0
            for a, b, ranks, out_size in zip(self.a, self.b, self._ranks, self.out_sizes, strict=True):
                if rank := ranks[slot]:
                    h = (x_rows @ a[slot, 0, :rank].float().t()).mul_(scale).to(y.dtype)
                    delta = h @ b[slot, 0, :out_size, :rank].to(y.dtype).t()
                    y[:, start : start + out_size].index_add_(0, rows, delta)
                start += out_size


def _largest(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest magnitude along ``dim`` of each slot's matrix, (slots, rank), float32; not a number if one is in it.

    In float32, slot by slot: torch reduces bfloat16 ten times slower, and a head's B is large.
    """
    return torch.stack([matrix.float().abs().amax(dim) for matrix in stacked[:, 0]])


def _either_gemm(weight: torch.Tensor) -> Gemm:
    return strided_gemm(weight) if can_be_strided(weight) else contiguous_gemm(weight)


def _add_nothing(y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """No adapter of the group touches this layer."""


def _packed_product(group: StepGroup, packed: _Packed, buffers: _Buffers) -> Product:
    """The product with ``packed``, everything looked up beforehand: it runs a hundred times per step."""
    shrink, h, mask, delta = packed.shrink, buffers.h, buffers.mask, buffers.delta
    expands = tuple(zip(packed.expands, buffers.delta_slices, buffers.h_slices, strict=True))
    out_size, columns = packed.layout.out_size, packed.layout.columns

    def product(y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        shrink(h, group.take(x))
        if mask is not None:
            mask(h)
        if scale != 1.0:
            h.mul_(scale)
        for expand, delta_slice, h_slice in expands:
            expand(delta_slice, h_slice)
        if delta is not None:
            group.add(y if y.shape[1] == out_size else y[:, :out_size], delta)
            return
        for (_, delta_slice, _), (start, stop) in zip(expands, columns, strict=True):
            group.add(y[:, start:stop], delta_slice)

    return product
