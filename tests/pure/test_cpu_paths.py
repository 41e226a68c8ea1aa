"""partition.cpu_paths: which rows of a step share a LoRA product on a CPU."""

from hypothesis import given
from hypothesis import strategies as st

from partition.cpu_paths import NO_ADAPTER, CpuLoraCosts, RowGroup, group_rows

COSTS = CpuLoraCosts()
STEPS = st.lists(st.tuples(st.integers(NO_ADAPTER, 7), st.sampled_from([1, 1, 1, 2, 5, 60, 300])), max_size=24).map(
    lambda runs: tuple(slot for slot, count in runs for _ in range(count))
)


@given(slots=STEPS, loaded=st.integers(1, 16), rank=st.sampled_from([8, 16, 64]))
def test_every_row_with_an_adapter_is_in_exactly_one_group(slots, loaded, rank):
    """No LoRA row is left out or multiplied twice, and each keeps its adapter, whatever the batch."""
    groups = group_rows(slots, loaded, rank, COSTS)
    grouped = [(row, slot) for group in groups for row, slot in zip(group.rows, group.slots, strict=True)]
    assert len({row for row, _ in grouped}) == len(grouped)
    assert all(slots[row] == slot for row, slot in grouped)
    assert {row for row, slot in grouped if slot != NO_ADAPTER} == {
        row for row, slot in enumerate(slots) if slot != NO_ADAPTER
    }


@given(slots=STEPS)
def test_rows_ascend_and_every_group_has_an_adapter(slots):
    """Groups are usable as windows: rows ascending, none without any adapter."""
    for group in group_rows(slots, 8, 16, COSTS):
        assert list(group.rows) == sorted(group.rows)
        assert group.adapters
        assert len(group.rows) == len(group.slots)


@given(slots=STEPS, loaded=st.integers(1, 16))
def test_same_rows_give_the_same_groups(slots, loaded):
    """The choice depends on the rows alone, so that equal batches round equally."""
    assert group_rows(slots, loaded, 16, COSTS) == group_rows(slots, loaded, 16, COSTS)


def test_no_rows_and_no_adapters_give_no_groups():
    """An empty step and a step of base rows cost nothing."""
    assert group_rows((), 4, 16, COSTS) == ()
    assert group_rows((NO_ADAPTER,) * 9, 4, 16, COSTS) == ()


def test_mixed_decodes_are_stacked():
    """Sixteen decodes of four adapters are one product."""
    slots = tuple(row % 4 for row in range(16))
    assert group_rows(slots, 4, 32, COSTS) == (RowGroup(tuple(range(16)), slots),)


def test_a_prefill_chunk_stands_apart_from_the_decodes_beside_it():
    """A chunk of one adapter is multiplied with that adapter alone, the decodes with all."""
    slots = (0, 1, 2, 3, *(2,) * 256)
    chunk = RowGroup(tuple(range(4, 260)), (2,) * 256)
    assert group_rows(slots, 4, 32, COSTS)[0].rows in (chunk.rows, tuple(range(2, 260)))
    assert {group.adapters for group in group_rows(slots, 4, 32, COSTS)} == {(2,), (0, 1, 2, 3)}


def test_two_of_many_adapters_are_not_multiplied_with_all():
    """With 64 adapters loaded and two in use, two products beat one with all 64."""
    groups = group_rows((3, 3, 9, 9), 64, 64, COSTS)
    assert [group.adapters for group in groups] == [(3,), (9,)]


def test_a_long_base_prefill_is_left_out():
    """A few LoRA rows on both sides of a long base prefill do not pull it into their product."""
    slots = (0, 1, *(NO_ADAPTER,) * 400, 1)
    rows = [row for group in group_rows(slots, 4, 16, COSTS) for row in group.rows]
    assert sorted(rows) == [0, 1, 402]


def test_a_base_row_between_adapter_rows_rides_along():
    """One base row between decodes does not make the step gather its rows."""
    slots = (0, 1, NO_ADAPTER, 2, 3)
    assert group_rows(slots, 4, 16, COSTS) == (RowGroup((0, 1, 2, 3, 4), slots),)
