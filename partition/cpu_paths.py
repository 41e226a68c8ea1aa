"""Which rows of a step share a LoRA product on a CPU.

On a GPU the question is which SMs base and LoRA get; on a CPU it is which rows are multiplied together. Three forms
exist and none wins always: every row against all loaded adapters side by side, the wrong ones masked (``stacked``:
one call, wasted arithmetic), one product per adapter (``apart``: no waste, one call each), and long runs of one
adapter apart with the rest stacked (``runs``: a prefill chunk beside decodes). `group_rows` takes the cheapest by a
cost model that was measured; it depends on the rows alone, never on a timing, so that equal batches round equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class CpuLoraCosts:
    """Cost of one LoRA product (shrink, expand, add) of one linear layer, in microseconds.

    ``call_us`` per product; ``gather_us`` more when its rows do not lie together, and ``gather_row_us`` per such row;
    ``row_us`` per row (adding the result); ``rank_us`` per rank (reading the weights) and ``row_rank_us`` per row and
    rank (arithmetic). Defaults: docs/measurements/lora-cpu.md.
    """

    call_us: float = 7.6
    gather_us: float = 7.1
    gather_row_us: float = 0.03
    row_us: float = 0.16
    rank_us: float = 0.05
    row_rank_us: float = 0.0026

    def product_us(self, rows: int, ranks: int, *, gathered: bool) -> float:
        """Cost of a product of ``rows`` rows against adapters whose ranks sum to ``ranks``."""
        gather_us = self.gather_us + rows * self.gather_row_us if gathered else 0.0
        return self.call_us + gather_us + rows * self.row_us + ranks * (self.rank_us + rows * self.row_rank_us)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are multiplied together, ascending, and the adapter slot of each (`NO_ADAPTER`: none).

    Rows without an adapter are there only where leaving them out would tear the rows apart; they must not change.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the rows lie together, so that they need no gathering."""
        return self.rows[-1] - self.rows[0] + 1 == len(self.rows)

    @property
    def adapters(self) -> tuple[int, ...]:
        """The adapter slots in use, ascending, each once."""
        return tuple(sorted(set(self.slots) - {NO_ADAPTER}))


def group_rows(slots: Sequence[int], loaded: int, rank: int, costs: CpuLoraCosts) -> tuple[RowGroup, ...]:
    """The groups of a step in which row ``i`` uses adapter slot ``slots[i]``.

    ``loaded`` adapters of rank ``rank`` are in their slots; a group with several adapters is multiplied with all of
    them. Every row with an adapter is in exactly one group.
    """
    runs = list(_runs(slots))
    if all(slot == NO_ADAPTER for slot, _, _ in runs):
        return ()
    candidates = (_stacked(slots), _apart(slots), _runs_apart(slots, runs, loaded, rank, costs))
    return min(candidates, key=lambda groups: sum(_cost_us(group, loaded, rank, costs) for group in groups))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of one slot as (slot, start, stop)."""
    start = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[start]:
            yield slots[start], start, row
            start = row


def _cost_us(group: RowGroup, loaded: int, rank: int, costs: CpuLoraCosts) -> float:
    adapters = len(group.adapters)
    ranks = rank * (max(loaded, adapters) if adapters > 1 else 1)
    return costs.product_us(len(group.rows), ranks, gathered=not group.contiguous)


def _group(slots: Sequence[int], rows: Sequence[int]) -> tuple[RowGroup, ...]:
    """One group of the rows with an adapter among ``rows``, taking the others in where they are few.

    Taking a row without an adapter in costs its arithmetic, leaving it out makes the group gather its rows.
    """
    active = [row for row in rows if slots[row] != NO_ADAPTER]
    if not active:
        return ()
    window = range(active[0], active[-1] + 1)
    chosen = window if len(window) <= max(2 * len(active), 16) and set(window) <= set(rows) else active
    return (RowGroup(tuple(chosen), tuple(slots[row] for row in chosen)),)


def _stacked(slots: Sequence[int]) -> tuple[RowGroup, ...]:
    return _group(slots, range(len(slots)))


def _apart(slots: Sequence[int]) -> tuple[RowGroup, ...]:
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot != NO_ADAPTER:
            rows.setdefault(slot, []).append(row)
    return tuple(RowGroup(tuple(rows[slot]), (slot,) * len(rows[slot])) for slot in sorted(rows))


def _runs_apart(
    slots: Sequence[int], runs: Sequence[tuple[int, int, int]], loaded: int, rank: int, costs: CpuLoraCosts
) -> tuple[RowGroup, ...]:
    """Runs that are cheaper alone than as rows of a stacked product are groups of their own; the rest is stacked."""
    groups: list[RowGroup] = []
    rest: list[int] = []
    saved_us_per_row = costs.row_rank_us * rank * max(loaded - 1, 0)
    own_us = costs.product_us(0, rank, gathered=False)
    for slot, start, stop in runs:
        if slot != NO_ADAPTER and (stop - start) * saved_us_per_row > own_us:
            groups.append(RowGroup(tuple(range(start, stop)), (slot,) * (stop - start)))
        else:
            rest.extend(range(start, stop))
    return (*groups, *_group(slots, rest))
