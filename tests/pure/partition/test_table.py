"""The partition table as text."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.configs import Split, Unsplit
from partition.cpu_paths import CpuLoraCosts
from partition.search_result import Verdict
from partition.table import Entry, PartitionTable, TableKey, TableRefusedError, from_text, to_text

KEY = TableKey("NVIDIA H200", 132, 2, "580.65", "llama-4096", 1, (16,), 4, "0.32.0")
ENTRY = Entry("qkv", 16, 32, Split(96, 24), Verdict.CLEAR, 20.0, 25.0, 22.0, 7)
TABLE = PartitionTable(KEY, (ENTRY, replace(ENTRY, group="o", choice=Unsplit.SEQUENTIAL, time_us=25.0)))


def test_reads_what_it_wrote() -> None:
    """A table and a CPU's costs come back as they were."""
    assert from_text(to_text(TABLE), KEY) == TABLE
    cpu_key = replace(KEY, device="Xeon", sms=0, granularity=0)
    costs = PartitionTable(cpu_key, cpu_costs=CpuLoraCosts(call_us=9.0))
    assert from_text(to_text(costs), cpu_key) == costs


@given(st.integers(0, len(to_text(TABLE)) - 3))
def test_truncated_texts_are_refused(length: int) -> None:
    """No beginning of a table passes for a table."""
    with pytest.raises(TableRefusedError, match="truncated"):
        from_text(to_text(TABLE)[:length], KEY)


@given(st.data())
def test_damaged_texts_are_refused_or_mean_the_same(data: st.DataObject) -> None:
    """A changed character is noticed unless it changes nothing (white space)."""
    text = to_text(TABLE)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.characters(max_codepoint=126)) + text[place + 1 :]
    with contextlib.suppress(TableRefusedError):
        assert from_text(damaged, KEY) == TABLE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA A100"}, "device is 'NVIDIA H200', here it is 'NVIDIA A100'"),
        ({"driver": "590.1"}, "driver is '580.65', here it is '590.1'"),
        ({"vllm": "0.33.0"}, "vllm"),
        ({"ranks": (16, 64)}, "ranks"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"sms": 131}, "sms"),
    ],
)
def test_foreign_and_stale_tables_are_refused(change: dict[str, object], reason: str) -> None:
    """A table of another GPU, driver, vLLM or engine is refused, and the refusal names the difference."""
    with pytest.raises(TableRefusedError, match="made for something else") as refusal:
        from_text(to_text(TABLE), replace(KEY, **change))
    assert reason in str(refusal.value)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "\x00", "[" * 100_000, '{"format": "other"}', "9" * 5000])
def test_other_texts_are_refused(text: str) -> None:
    """Whatever the file holds, reading it gives a reason and no other exception."""
    with pytest.raises(TableRefusedError):
        from_text(text, KEY)


def test_versions_to_come_are_refused() -> None:
    """A newer format is not guessed at."""
    document = json.loads(to_text(TABLE)) | {"version": 2}
    with pytest.raises(TableRefusedError, match="version is 2"):
        from_text(json.dumps(document), KEY)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (replace(ENTRY, choice=Split(120, 24)), "do not fit the GPU's 132"),
        (replace(ENTRY, choice=Split(0, 24)), "do not fit"),
        (replace(ENTRY, time_us=-1.0), "no time"),
        (replace(ENTRY, sequential_us=float("nan")), "no time"),
    ],
)
def test_impossible_entries_are_refused(entry: Entry, reason: str) -> None:
    """A right checksum does not excuse a wrong content."""
    with pytest.raises(TableRefusedError, match=reason):
        from_text(to_text(PartitionTable(KEY, (entry,))), KEY)


def test_two_entries_for_one_size_are_refused() -> None:
    """Which one would hold is anybody's guess."""
    with pytest.raises(TableRefusedError, match="two entries for qkv, rank 16, 32 tokens"):
        from_text(to_text(PartitionTable(KEY, (ENTRY, ENTRY))), KEY)


def test_the_next_larger_size_decides_and_beyond_the_last_it_is_sequential() -> None:
    """20 rows run as the graph of 32; 33 rows are more than was searched."""
    assert TABLE.choice("qkv", 16, 20) == Split(96, 24)
    assert TABLE.choice("qkv", 16, 32) == Split(96, 24)
    assert TABLE.choice("qkv", 16, 33) is Unsplit.SEQUENTIAL
    assert TABLE.choice("qkv", 8, 20) is Unsplit.SEQUENTIAL
    assert TABLE.choice("o", 16, 20) is Unsplit.SEQUENTIAL


@pytest.mark.parametrize("change", [{"sequential_us": 19.0}, {"dual_stream_us": 19.0}, {"sequential_us": None}])
def test_a_split_that_does_not_win_is_not_used(change: dict[str, float | None]) -> None:
    """A split is used only where it beats both sequential and plain dual stream."""
    table = PartitionTable(KEY, (replace(ENTRY, **change),))
    assert table.choice("qkv", 16, 20) is Unsplit.SEQUENTIAL
