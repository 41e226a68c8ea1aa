"""The versioned table file: what was found for one GPU group, model and vLLM, as text. Reading and writing files is
the caller's (``deployments/partition_cache.py``).

A text that is not exactly what `to_text` writes, or was made for something else, is refused with the reason
(`TableRefusedError`); the caller then searches anew. On a CPU the same file records the measured costs by which
`partition.cpu_paths` chooses how rows share a LoRA product.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from partition.configs import Candidate, Split, Unsplit
from partition.cpu_paths import CpuLoraCosts
from partition.search_result import Verdict

FORMAT = "halo-partition-table"
VERSION = 1
TEXT_MAX = 4 * 1024 * 1024


class TableRefusedError(ValueError):
    """A table file cannot be used. The message says why; searching anew is the remedy."""


@dataclass(frozen=True, slots=True)
class TableKey:
    """What a table holds for. ``model`` names shapes, not weights; ``ranks`` are ascending; ``adapters`` is how many
    share a batch at most (vLLM's ``max_loras``). ``sms`` and ``granularity`` are 0 on a CPU."""

    device: str
    sms: int
    granularity: int
    driver: str
    model: str
    tensor_parallel: int
    ranks: tuple[int, ...]
    adapters: int
    vllm: str

    @property
    def digest(self) -> str:
        """A name for the file, different for different keys."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Entry:
    """What was found for ``tokens`` rows of one layer group and rank. Times in microseconds, None if not measured."""

    group: str
    rank: int
    tokens: int
    choice: Candidate
    verdict: Verdict
    time_us: float | None
    sequential_us: float | None
    dual_stream_us: float | None
    pair_measurements: int

    @property
    def wins(self) -> bool:
        """Whether the choice beats both sequential and plain dual stream by what was measured."""
        if not isinstance(self.choice, Split) or self.time_us is None or self.sequential_us is None:
            return False
        return self.time_us < min(self.sequential_us, self.dual_stream_us or math.inf)


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """Entries of one key; ``cpu_costs`` instead of entries on a CPU."""

    key: TableKey
    entries: tuple[Entry, ...] = ()
    cpu_costs: CpuLoraCosts | None = None

    def choice(self, group: str, rank: int, tokens: int) -> Candidate:
        """How to run ``tokens`` rows of ``group``: the entry of the next larger size; sequential where there is none.

        CUDA graphs pad a batch to the size they were captured for, so the next larger entry is what runs. A step with
        more rows than the largest entry is a large prefill, where LoRA fills the GPU by itself (paper, section 3).
        """
        sizes = [
            entry for entry in self.entries if (entry.group, entry.rank) == (group, rank) and entry.tokens >= tokens
        ]
        if not sizes:
            return Unsplit.SEQUENTIAL
        entry = min(sizes, key=lambda entry: entry.tokens)
        if isinstance(entry.choice, Split):
            return entry.choice if entry.wins else Unsplit.SEQUENTIAL
        return entry.choice


def to_text(table: PartitionTable) -> str:
    """The table as a text that `from_text` takes."""
    body = {
        "key": asdict(table.key),
        "entries": [{**asdict(entry), "choice": _choice_value(entry.choice)} for entry in table.entries],
        "cpu_costs": None if table.cpu_costs is None else asdict(table.cpu_costs),
    }
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": _checksum(body), **body}, indent=1) + "\n"


def from_text(text: str, key: TableKey | None) -> PartitionTable:
    """The table in ``text``, which has to be for ``key`` unless that is None. Raises `TableRefusedError`."""
    if len(text) > TEXT_MAX:
        raise TableRefusedError(f"it has {len(text)} characters, a table has {TEXT_MAX} at most")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableRefusedError(f"it is truncated or no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TableRefusedError(f"it is no partition table: its format is not {FORMAT}")
    if document.get("version") != VERSION:
        raise TableRefusedError(f"its version is {document.get('version')!r}, this program reads version {VERSION}")
    body = {name: document.get(name) for name in ("key", "entries", "cpu_costs")}
    if document.get("sha256") != _checksum(body):
        raise TableRefusedError("its content does not match its checksum: it is damaged or was edited")
    try:
        table = _read(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableRefusedError(f"an entry cannot be read: {type(error).__name__}: {error}") from None
    if key is not None:
        _check_key(table.key, key)
    _check_entries(table)
    return table


def _read(body: Mapping[str, Any]) -> PartitionTable:
    costs = body["cpu_costs"]
    return PartitionTable(
        key=TableKey(**{**body["key"], "ranks": tuple(body["key"]["ranks"])}),
        entries=tuple(
            Entry(**{**entry, "choice": _choice(entry["choice"]), "verdict": Verdict(entry["verdict"])})
            for entry in body["entries"]
        ),
        cpu_costs=None if costs is None else CpuLoraCosts(**costs),
    )


def _check_key(found: TableKey, wanted: TableKey) -> None:
    differences = [
        f"{field.name} is {getattr(found, field.name)!r}, here it is {getattr(wanted, field.name)!r}"
        for field in fields(TableKey)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if differences:
        raise TableRefusedError("it was made for something else: " + "; ".join(differences))


def _check_entries(table: PartitionTable) -> None:
    """A checksum proves that nothing was lost, not that a program without faults wrote it."""
    seen = set()
    for entry in table.entries:
        place = f"{entry.group}, rank {entry.rank}, {entry.tokens} tokens"
        if (entry.group, entry.rank, entry.tokens) in seen:
            raise TableRefusedError(f"it has two entries for {place}")
        seen.add((entry.group, entry.rank, entry.tokens))
        if isinstance(entry.choice, Split):
            split = entry.choice
            if min(split.base_sms, split.lora_sms) < 1 or split.base_sms + split.lora_sms > table.key.sms:
                raise TableRefusedError(f"{place}: {split} do not fit the GPU's {table.key.sms}")
        for time_us in (entry.time_us, entry.sequential_us, entry.dual_stream_us):
            if time_us is not None and not (math.isfinite(time_us) and time_us > 0):
                raise TableRefusedError(f"{place}: {time_us} is no time")
    if table.cpu_costs is not None:
        for name, cost in asdict(table.cpu_costs).items():
            if not (math.isfinite(cost) and cost >= 0):
                raise TableRefusedError(f"cpu_costs.{name}: {cost} is no cost")


def _choice_value(choice: Candidate) -> str | list[int]:
    return [choice.base_sms, choice.lora_sms] if isinstance(choice, Split) else str(choice)


def _choice(value: object) -> Candidate:
    if isinstance(value, str):
        return Unsplit(value)
    if isinstance(value, list) and len(value) == 2 and all(type(sms) is int for sms in value):
        return Split(value[0], value[1])
    raise ValueError(f"{value!r} is no way to run a pair")


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
