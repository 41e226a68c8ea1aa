"""Which promises were kept: requests and tokens met and missed per service, and histograms with edges at the targets.

What counts:
- A request that completed counts once. A streamed one meets its TTFT target when its first token was released in time,
  and its TBT target in two forms: ``gaps`` when no gap between released tokens exceeded TBT, ``deadlines`` when every
  token i was released by arrival + TTFT + i * TBT. The forms differ a lot under load, so both are kept.
- A response that is not streamed has one deadline, arrival + TTFT + (tokens - 1) * TBT for its last token, and no gaps.
- A request that failed counts as missed in everything that had not been kept: the server owed it.
- A request that its client cancelled, or that was shed, is counted by outcome only. Neither moves the attainment.
  The time to first token of a cancelled request still enters the histogram, its gaps as well: they were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.protocol import End, Outcome
from deployments.settings import ServiceSettings

EDGE_PERCENT = (25, 50, 75, 90, 100, 110, 125, 150, 200, 400, 800)
"""Histogram edges in percent of the target. The edge at 100 separates met from missed exactly."""


def edges_us(target_us: int) -> tuple[int, ...]:
    """Upper edges of the histogram of a time with this target, in microseconds, inclusive; the overflow comes after."""
    return tuple(target_us * percent // 100 for percent in EDGE_PERCENT)


@dataclass(slots=True)
class Histogram:
    """Counts of times per bucket. ``counts`` has one more entry than ``edges_us``: the overflow."""

    edges_us: tuple[int, ...]
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges_us) + 1)

    def observe(self, value_us: int) -> None:
        """Count one time."""
        self.counts[bisect_left(self.edges_us, value_us)] += 1

    def add(self, counts: Sequence[int]) -> None:
        """Add a whole histogram over the same edges."""
        if len(counts) != len(self.counts):
            raise ValueError(f"histogram of {len(counts)} buckets added to one of {len(self.counts)}")
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, counts, strict=True)]

    def quantile_us(self, fraction: float) -> int | None:
        """Upper edge of the bucket that holds the quantile; None when empty or in the overflow."""
        total = sum(self.counts)
        if total == 0:
            return None
        rank = fraction * total
        seen = 0
        for edge, count in zip(self.edges_us, self.counts, strict=False):
            seen += count
            if seen >= rank and seen > 0:
                return edge
        return None

    def as_dict(self) -> dict[str, Any]:
        """Edges in milliseconds beside their counts."""
        return {"edges_ms": [edge / 1000 for edge in self.edges_us], "counts": list(self.counts)}


@dataclass(slots=True)
class MetMissed:
    """Promises kept and broken."""

    met: int = 0
    missed: int = 0

    def count(self, met: bool) -> None:
        """Count one promise."""
        if met:
            self.met += 1
        else:
            self.missed += 1

    def as_dict(self) -> dict[str, Any]:
        """Both counts and the share met, null while there is none: an idle service breaks nothing."""
        total = self.met + self.missed
        return {"met": self.met, "missed": self.missed, "attainment": self.met / total if total else None}


KINDS = ("ttft", "tbt", "deadlines", "whole")
"""What a request promises: the first token in time, every gap, every token's deadline; or the whole response."""


def judge(outcome: Outcome) -> list[tuple[str, bool]]:
    """Which promises a request made, by kind, and whether each was kept. Empty when it does not count."""
    if outcome.end not in (End.COMPLETED, End.FAILED):
        return []
    completed = outcome.end is End.COMPLETED
    if not outcome.streamed:
        return [("whole", completed and outcome.late_tokens == 0)]
    if completed and not outcome.tokens:
        return []
    return [
        ("ttft", outcome.ttft_met),
        ("tbt", completed and outcome.late_gaps == 0),
        ("deadlines", completed and outcome.late_tokens == 0),
    ]


@dataclass(slots=True)
class ServiceLedger:
    """The account of one service."""

    service: ServiceSettings
    outcomes: dict[End, int] = field(default_factory=lambda: dict.fromkeys(End, 0))
    requests: dict[str, MetMissed] = field(default_factory=lambda: {kind: MetMissed() for kind in KINDS})
    tokens_gaps: MetMissed = field(default_factory=MetMissed)
    tokens_deadlines: MetMissed = field(default_factory=MetMissed)
    tokens: int = 0
    max_gap_us: int = 0
    ttft: Histogram = field(init=False)
    tbt: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self.ttft = Histogram(edges_us(self.service.ttft_us))
        self.tbt = Histogram(edges_us(self.service.tbt_us))

    def record(self, outcome: Outcome) -> None:
        """Account for one ended request."""
        self.outcomes[outcome.end] += 1
        self.tokens += outcome.tokens
        if outcome.ttft_us is not None:
            self.ttft.observe(outcome.ttft_us)
        if outcome.gap_counts:
            self.tbt.add(outcome.gap_counts)
            self.max_gap_us = max(self.max_gap_us, outcome.max_gap_us)
        for kind, met in judge(outcome):
            self.requests[kind].count(met)
        if outcome.streamed and outcome.end in (End.COMPLETED, End.FAILED):
            self.tokens_gaps.met += outcome.gaps - outcome.late_gaps
            self.tokens_gaps.missed += outcome.late_gaps
            self.tokens_deadlines.met += outcome.tokens - outcome.late_tokens
            self.tokens_deadlines.missed += outcome.late_tokens

    def as_dict(self) -> dict[str, Any]:
        """The account in plain values, times in milliseconds."""
        return {
            "targets": {"ttft_ms": self.service.ttft_us / 1000, "tbt_ms": self.service.tbt_us / 1000},
            "outcomes": {end.value: count for end, count in self.outcomes.items()},
            "requests": {kind: counts.as_dict() for kind, counts in self.requests.items()},
            "tokens": {
                "total": self.tokens,
                "gaps": self.tokens_gaps.as_dict(),
                "deadlines": self.tokens_deadlines.as_dict(),
            },
            "ttft": self.ttft.as_dict(),
            "tbt": self.tbt.as_dict() | {"max_ms": self.max_gap_us / 1000},
        }


class SloLedger:
    """The accounts of all services. Outcomes of services that are not configured are ignored."""

    def __init__(self, services: Iterable[ServiceSettings]) -> None:
        self._services = {service.name: ServiceLedger(service) for service in services}

    def record(self, outcome: Outcome) -> None:
        """Account for one ended request."""
        ledger = self._services.get(outcome.service)
        if ledger is not None:
            ledger.record(outcome)

    def table(self) -> dict[str, Any]:
        """All accounts in plain values, by service."""
        return {name: ledger.as_dict() for name, ledger in self._services.items()}


COLUMNS = ("service", "ttft", "tbt", *(end.value for end in End), *(f"{kind} met" for kind in KINDS))


def render_text(table: dict[str, Any]) -> str:
    """The table of ``SloLedger.table`` for a terminal, one service a line."""
    rows: list[Sequence[str]] = [COLUMNS]
    for name, account in table.items():
        targets, outcomes, requests = account["targets"], account["outcomes"], account["requests"]
        rows.append(
            (
                name,
                f"{targets['ttft_ms']:g} ms",
                f"{targets['tbt_ms']:g} ms",
                *(str(outcomes[end.value]) for end in End),
                *(_percent(requests[kind]["attainment"]) for kind in KINDS),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
