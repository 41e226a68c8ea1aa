"""Figures of a run. All are simulated.

- TTFT counts from arrival to release; ``ready`` is when the first token was computed. Under ``slo`` the released one is
  the target by construction, so both are kept.
- A TBT is the gap between two released tokens of a request that streams.
- *deadlines*: every token released by arrival + TTFT + index * TBT.
- A request that was shed or refused met nothing.

Quantiles are the smallest value with at least that share at or below it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulator.cluster import RunResult
from simulator.track import Track


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """One service, or all together. Shares are 0 to 1; None where there was nothing to measure."""

    requests: int
    dropped: int
    ttft_met: float | None
    tbt_met: float | None
    both_met: float | None
    deadlines_met: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ready_p50_ms: float | None
    ready_p99_ms: float | None
    tbt_p50_ms: float | None
    tbt_p99_ms: float | None
    end_to_end_mean_ms: float | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run: figures per service, of all, and of the replicas."""

    services: dict[str, ServiceFigures]
    total: ServiceFigures
    steps: int
    busy_share: float
    tokens_per_step: float
    preemptions: int
    kv_peak_share: float
    prefix_hit_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def worst(self, figure: str) -> float:
        """The smallest share of any service, 1 where nothing was measured."""
        return min((1.0 if (v := getattr(s, figure)) is None else v for s in self.services.values()), default=1.0)


def summarise(result: RunResult) -> RunFigures:
    """Work out the figures of the requests that arrived in the measured part of a run."""
    measured = [track for track in result.tracks if track.arrival.at_us >= result.measured_from_us]
    refused = [arrival for arrival in result.refused if arrival.at_us >= result.measured_from_us]
    services = {
        service.name: _figures(
            [track for track in measured if track.service.name == service.name],
            result.gaps[service.name],
            service.tbt_us,
            sum(arrival.service == service.name for arrival in refused),
        )
        for service in result.services
    }
    late = sum(_late(result.gaps[service.name], service.tbt_us) for service in result.services)
    every = array("q")
    for gaps in result.gaps.values():
        every.extend(gaps)
    steps = sum(replica.counts.steps for replica in result.replicas)
    tokens = sum(r.counts.decode_tokens + r.counts.prefill_tokens for r in result.replicas)
    span_us = max(1, result.ended_us) * len(result.replicas)
    return RunFigures(
        services,
        _figures(measured, every, None, len(refused), late),
        steps,
        sum(replica.counts.busy_us for replica in result.replicas) / span_us,
        tokens / max(1, steps),
        sum(replica.counts.preemptions for replica in result.replicas),
        max(replica.kv.peak / replica.kv.blocks for replica in result.replicas),
        sum(replica.kv.hit_tokens for replica in result.replicas),
    )


def quantile_ms(values_us: Sequence[int] | array[int], share: float) -> float | None:
    """A quantile in milliseconds of microseconds; None of nothing."""
    if not len(values_us):
        return None
    return float(np.quantile(np.asarray(values_us, dtype=np.int64), share, method="inverted_cdf")) / 1000.0


def _figures(
    tracks: Sequence[Track], gaps: array[int], tbt_us: int | None, refused: int, late: int | None = None
) -> ServiceFigures:
    count = len(tracks) + refused
    answered = [track for track in tracks if track.first_us]
    first = [track.first_us - track.arrival.at_us for track in answered]
    ready = [track.ready_us - track.arrival.at_us for track in answered]
    ended = [track.ended_us - track.arrival.at_us for track in answered if track.done]
    if late is None:
        late = _late(gaps, tbt_us or 0)
    return ServiceFigures(
        requests=count,
        dropped=refused + sum(track.shed for track in tracks),
        ttft_met=_share(sum(track.ttft_met for track in tracks), count),
        tbt_met=_share(len(gaps) - late, len(gaps)),
        both_met=_share(sum(track.met for track in tracks), count),
        deadlines_met=_share(sum(t.done and t.ttft_met and not t.late_tokens for t in tracks), count),
        ttft_p50_ms=quantile_ms(first, 0.5),
        ttft_p99_ms=quantile_ms(first, 0.99),
        ready_p50_ms=quantile_ms(ready, 0.5),
        ready_p99_ms=quantile_ms(ready, 0.99),
        tbt_p50_ms=quantile_ms(gaps, 0.5),
        tbt_p99_ms=quantile_ms(gaps, 0.99),
        end_to_end_mean_ms=sum(ended) / len(ended) / 1000 if ended else None,
    )


def _late(gaps: array[int], tbt_us: int) -> int:
    return int((np.asarray(gaps, dtype=np.int64) > tbt_us).sum())


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
