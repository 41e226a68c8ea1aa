"""What the client saw of each request, and how that compares with the promises.

Definitions, for a request planned for time a with targets TTFT and TBT whose tokens arrived at t_0, t_1, ...:

- *TTFT met*: t_0 - a <= TTFT. The planned time counts, not the time of sending, so that a slow driver or a full
  connection pool is not hidden.
- *TBT met*: every gap t_i - t_(i-1) <= TBT + tolerance. One late gap breaks it.
- *deadlines met*: every t_i <= a + TTFT + i * TBT + tolerance. A token that comes late after others that came early
  can still be in time.
- A request that failed, was refused, or produced no token met nothing.
- *goodput*: requests per second that met TTFT and TBT.

Quantiles are the smallest observed value with at least that share at or below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Targets:
    """A service's promise, in integer microseconds."""

    ttft_us: int
    tbt_us: int


@dataclass(slots=True)
class Observation:
    """One request as the client saw it. Times are microseconds from the start of the run.

    ``tokens`` holds (arrival time, number of tokens) per message that carried tokens. ``error`` is empty for a
    response that came to its end.
    """

    service: str
    planned_us: int
    sent_us: int = 0
    status: int = 0
    tokens: list[tuple[int, int]] = field(default_factory=list)
    ended_us: int = 0
    error: str = ""

    @property
    def token_times_us(self) -> list[int]:
        """One arrival time per token."""
        return [at_us for at_us, count in self.tokens for _ in range(count)]

    def judge(self, targets: Targets, tolerance_us: int = 0) -> Verdict:
        """Compare with ``targets``; ``tolerance_us`` is allowed on gaps and on deadlines after the first token."""
        times = self.token_times_us
        if not times:
            return Verdict(complete=False)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        ttft_us = times[0] - self.planned_us
        complete = not self.error
        late_gaps = sum(gap > targets.tbt_us + tolerance_us for gap in gaps)
        due_us = self.planned_us + targets.ttft_us
        late_tokens = sum(
            at_us > due_us + index * targets.tbt_us + (tolerance_us if index else 0)
            for index, at_us in enumerate(times)
        )
        return Verdict(
            complete=complete,
            ttft_us=ttft_us,
            gaps_us=gaps,
            late_gaps=late_gaps,
            ttft_met=complete and ttft_us <= targets.ttft_us,
            tbt_met=complete and late_gaps == 0,
            deadlines_met=complete and late_tokens == 0,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A request's timing and what it met."""

    complete: bool
    ttft_us: int | None = None
    gaps_us: Sequence[int] = ()
    late_gaps: int = 0
    ttft_met: bool = False
    tbt_met: bool = False
    deadlines_met: bool = False


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The results of one service, or of all together. Shares are 0 to 1, None where there was nothing to measure."""

    requests: int
    failed: int
    tokens: int
    ttft_met: float | None
    tbt_met: float | None
    both_met: float | None
    deadlines_met: float | None
    gaps_met: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tbt_p50_ms: float | None
    tbt_p99_ms: float | None
    tbt_max_ms: float | None
    goodput_rps: float

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain values, as printed with --json."""
        return asdict(self)


def report(
    observations: Sequence[Observation], targets: Mapping[str, Targets], seconds: float, tolerance_us: int = 0
) -> dict[str, ServiceReport]:
    """Reports per service in the order of ``targets``, and ``all``.

    ``seconds`` is the length of the arrival window, which goodput is divided by.
    """
    judged = [(o.service, o.judge(targets[o.service], tolerance_us)) for o in observations]
    result = {}
    for name in targets:
        verdicts = [verdict for service, verdict in judged if service == name]
        result[name] = summarise(verdicts, seconds)
    result["all"] = summarise([verdict for _, verdict in judged], seconds)
    return result


def summarise(verdicts: Sequence[Verdict], seconds: float) -> ServiceReport:
    """One report over ``verdicts``."""
    count = len(verdicts)
    ttfts = [verdict.ttft_us for verdict in verdicts if verdict.ttft_us is not None]
    gaps = [gap for verdict in verdicts for gap in verdict.gaps_us]
    both = sum(verdict.ttft_met and verdict.tbt_met for verdict in verdicts)
    late_gaps = sum(verdict.late_gaps for verdict in verdicts)
    return ServiceReport(
        requests=count,
        failed=sum(not verdict.complete for verdict in verdicts),
        tokens=len(ttfts) + len(gaps),
        ttft_met=_share(sum(verdict.ttft_met for verdict in verdicts), count),
        tbt_met=_share(sum(verdict.tbt_met for verdict in verdicts), count),
        both_met=_share(both, count),
        deadlines_met=_share(sum(verdict.deadlines_met for verdict in verdicts), count),
        gaps_met=_share(len(gaps) - late_gaps, len(gaps)),
        ttft_p50_ms=quantile_ms(ttfts, 0.50),
        ttft_p99_ms=quantile_ms(ttfts, 0.99),
        tbt_p50_ms=quantile_ms(gaps, 0.50),
        tbt_p99_ms=quantile_ms(gaps, 0.99),
        tbt_max_ms=quantile_ms(gaps, 1.0),
        goodput_rps=both / seconds,
    )


def quantile_ms(values_us: Sequence[int], q: float) -> float | None:
    """The ``q`` quantile in milliseconds of values in microseconds; None of nothing."""
    if not values_us:
        return None
    return float(np.quantile(np.asarray(values_us), q, method="inverted_cdf")) / 1000.0


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
