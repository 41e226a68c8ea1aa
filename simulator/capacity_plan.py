"""How many replicas keep the promises, what breaks first, how much room is left, and what tighter promises cost.

Traffic is sized on its peak: a rate is taken as what the busiest minutes bring, and of a trace the busiest window
counts, not the mean. Requests come as a Poisson process; every answer is checked with several seeds, and the number of
replicas is the smallest with which all of them keep 99 % of every service's promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.scenario import Scenario
from simulator.search import SHARE_KEPT, Load, Runs, highest_rate, kept
from simulator.summary import RunFigures
from simulator.system import Deployment, System
from simulator.trace_files import Trace
from simulator.workload import WorkloadError

REPLICAS_MAX = 64
PLAN_LOAD = Load(180.0, 20.0)
TIGHTER = 0.75


@dataclass(frozen=True, slots=True)
class Peak:
    """The busiest window of a trace. Times are seconds from its first request, rates requests per second."""

    window_s: float
    start_s: float
    rate: float
    mean_rate: float
    trace_s: float


@dataclass(frozen=True, slots=True)
class FirstToBreak:
    """The service that misses first when the load grows, and the promise it misses."""

    service: str
    promise: str
    rate: float
    share_met: float


@dataclass(frozen=True, slots=True)
class Tightened:
    """A target at ``factor`` of what it is, and the highest rate with it on the planned replicas."""

    service: str
    promise: str
    target_ms: float
    max_rps: float
    change_pct: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The answer. ``tried`` is the share of seeds that kept the promises, by number of replicas; all are simulated."""

    policy: str
    profile: str
    rate: float
    replicas: int
    gpus: int
    seeds: int
    tried: dict[int, float]
    max_rps: float
    headroom_pct: float
    breaks_first: FirstToBreak | None
    tightened: tuple[Tightened, ...]
    assumed: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"simulated": True, **asdict(self)}


def busiest_window(trace: Trace, window_s: float = 180.0) -> Peak:
    """The window of a trace in which most requests come."""
    times = [row.at_us for row in trace.rows]
    width = min(round(window_s * 1e6), max(times[-1] - times[0], 1))
    best, begin, start = 0, 0, 0
    for end, time_us in enumerate(times):
        while times[start] <= time_us - width:
            start += 1
        if end - start + 1 > best:
            best, begin = end - start + 1, start
    seconds = width / 1e6
    return Peak(seconds, times[begin] / 1e6, best / seconds, len(times) / max(trace.seconds, seconds), trace.seconds)


def plan_capacity(
    scenario: Scenario,
    deployment: Deployment,
    system: System,
    rate: float,
    *,
    seeds: tuple[int, ...] = (1, 2, 3),
    load: Load = PLAN_LOAD,
    tighten: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> CapacityPlan:
    """Work out the plan for ``rate`` requests per second in all.

    Raises WorkloadError when no number of replicas helps.
    """
    if not 0 < rate < 1e6:
        raise WorkloadError(f"the rate has to be above 0 and finite, got {rate}")
    tried: dict[int, float] = {}
    count, runs = 1, _runs(scenario, deployment, system, load, 1)
    while True:
        progress(f"{count} replica{'s' if count > 1 else ''}")
        tried[count] = sum(kept(runs.at(rate, seed), "promises") >= SHARE_KEPT for seed in seeds) / len(seeds)
        if tried[count] == 1:
            break
        _check_hope(runs.at(rate, seeds[0]), count)
        count = count + 1 if count < 4 else -(-count * 5 // 4)
        runs = _runs(scenario, deployment, system, load, count)
    below = max((n for n, share in tried.items() if share < 1), default=0)
    while count - below > 1:  # Larger and larger steps left a gap.
        middle = (count + below) // 2
        candidate = _runs(scenario, deployment, system, load, middle)
        tried[middle] = sum(kept(candidate.at(rate, seed), "promises") >= SHARE_KEPT for seed in seeds) / len(seeds)
        if tried[middle] == 1:
            count, runs = middle, candidate
        else:
            below = middle
    progress("headroom")
    highest = _highest(runs, rate, seeds)
    tightened: tuple[Tightened, ...] = ()
    if tighten:
        progress("tighter targets")
        tightened = _tighten(
            scenario, replace(deployment, replicas=count), system, load, highest=highest, seed=seeds[0]
        )
    profile = deployment.profile
    return CapacityPlan(
        policy=system.label,
        profile=profile.name,
        rate=rate,
        replicas=count,
        gpus=count * profile.gpus,
        seeds=len(seeds),
        tried=dict(sorted(tried.items())),
        max_rps=round(highest, 3),
        headroom_pct=round(100 * (highest / rate - 1), 1),
        breaks_first=_first_to_break(runs, highest, seeds[0]),
        tightened=tightened,
        assumed=profile.assumed,
    )


def _runs(scenario: Scenario, deployment: Deployment, system: System, load: Load, replicas: int) -> Runs:
    return Runs(system, replace(deployment, replicas=replicas), scenario, load)


def _check_hope(figures: RunFigures, count: int) -> None:
    """Stop when more replicas cannot help: this many are idle most of the time, and promises still break."""
    if count >= REPLICAS_MAX or (figures.busy_share < 0.05 and count > 1):
        service, promise, share = _weakest(figures)
        raise WorkloadError(
            f"with {count} replicas {service} still keeps only {100 * share:.1f} % of its {promise}: a single request "
            "takes longer than promised on this hardware; relax the target or use faster hardware"
        )


def _highest(runs: Runs, rate: float, seeds: tuple[int, ...], tolerance: float = 0.02) -> float:
    """The highest rate, from ``rate`` up, that all seeds keep."""

    def holds(candidate: float) -> bool:
        return all(kept(runs.at(candidate, seed), "promises") >= SHARE_KEPT for seed in seeds)

    low, high = rate, rate * 1.25
    while holds(high):
        low, high = high, high * 1.25
    return highest_rate(holds, low, high, tolerance)


def _first_to_break(runs: Runs, highest: float, seed: int) -> FirstToBreak | None:
    """Raise the load from the highest rate until a service misses its promise."""
    for percent in (103, 106, 110, 115, 120, 130, 150):
        rate = highest * percent / 100
        figures = runs.at(rate, seed)
        if kept(figures, "promises") < SHARE_KEPT:
            service, promise, share = _weakest(figures)
            return FirstToBreak(service, promise, round(rate, 3), round(share, 4))
    return None


def _weakest(figures: RunFigures) -> tuple[str, str, float]:
    met = [
        (share, name, promise)
        for name, service in figures.services.items()
        for promise, share in (("TTFT", service.ttft_met), ("TBT", service.tbt_met))
        if share is not None
    ]
    if not met:
        raise WorkloadError("no request was measured; simulate more seconds")
    share, name, promise = min(met)
    return name, promise, share


def _tighten(
    scenario: Scenario, deployment: Deployment, system: System, load: Load, *, highest: float, seed: int
) -> tuple[Tightened, ...]:
    rows = []
    for index, entry in enumerate(scenario.loads):
        for promise, key in (("TTFT", "ttft_us"), ("TBT", "tbt_us")):
            target_us = round(getattr(entry.service, key) * TIGHTER)
            loads = list(scenario.loads)
            loads[index] = replace(entry, service=replace(entry.service, **{key: target_us}))
            runs = Runs(system, deployment, replace(scenario, loads=tuple(loads)), load)

            def holds(rate: float, runs: Runs = runs) -> bool:
                return kept(runs.at(rate, seed), "promises") >= SHARE_KEPT

            found = highest if holds(highest) else highest_rate(holds, highest / 2, highest, 0.04)
            change = round(100 * (found / highest - 1), 1)
            rows.append(Tightened(entry.service.name, promise, target_us / 1000, round(found, 3), change))
    return tuple(rows)
