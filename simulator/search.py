"""The highest rate at which a system keeps its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.arrivals import poisson
from simulator.scenario import Scenario
from simulator.summary import RunFigures, summarise
from simulator.system import Deployment, System, simulate

CRITERIA = ("promises", "ttft")
"""``promises``: of every service, 99 % of the first tokens and 99 % of the gaps are in time. ``ttft``: of all requests
together, 99 % of the first tokens are in time, the paper's "P99 TTFT guarantees"."""

SHARE_KEPT = 0.99


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: Poisson at a rate for ``seconds``, after ``warmup_s`` that are not measured."""

    seconds: float = 300.0
    warmup_s: float = 30.0

    def arrivals_us(self, rate: float, seed: int) -> list[int]:
        """Arrival times at a rate."""
        return poisson(rate, self.seconds, seed)


def kept(figures: RunFigures, criterion: str) -> float:
    """The share that decides: 0.99 and more means that the promises are kept."""
    if criterion == "ttft":
        return figures.total.ttft_met if figures.total.ttft_met is not None else 1.0
    return min(figures.worst("ttft_met"), figures.worst("tbt_met"))


class Runs:
    """Runs of one system, kept by rate and seed, so that two criteria and a table need each only once."""

    def __init__(self, system: System, deployment: Deployment, scenario: Scenario, load: Load) -> None:
        self.system = system
        self._deployment = deployment
        self._scenario = scenario
        self._load = load
        self._done: dict[tuple[float, int], RunFigures] = {}

    def at(self, rate: float, seed: int) -> RunFigures:
        """The figures at a rate."""
        rate = round(rate, 3)
        if (rate, seed) not in self._done:
            arrivals = self._scenario.compose(self._load.arrivals_us(rate, seed), seed)
            result = simulate(
                self.system,
                self._deployment,
                self._scenario,
                arrivals,
                seed=seed,
                warmup_us=round(self._load.warmup_s * 1e6),
            )
            self._done[rate, seed] = summarise(result)
        return self._done[rate, seed]


def highest_rate(holds: Callable[[float], bool], low: float, high: float, tolerance: float = 0.01) -> float:
    """The highest rate for which ``holds`` is true, by bisection between ``low`` and ``high``; 0 if not even there.

    ``tolerance`` is relative. Below ``low`` the search goes on downwards by halves, to a 32nd of it.
    """
    floor = low / 32
    while not holds(low):
        low, high = low / 2, low
        if low < floor:
            return 0.0
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def max_rps(runs: Runs, bound: float, seed: int, criterion: str, *, tolerance: float = 0.01) -> float:
    """The highest rate at which ``runs``' system keeps its promises with one seed; ``bound`` is a rate it cannot."""

    def holds(rate: float) -> bool:
        return kept(runs.at(rate, seed), criterion) >= SHARE_KEPT

    return round(highest_rate(holds, bound / 2, bound, tolerance), 3)
