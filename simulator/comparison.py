"""Systems side by side: attainment at given rates, the highest rate of each, and how far that is from the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from simulator.bound import upper_bound_rps
from simulator.scenario import Scenario
from simulator.search import CRITERIA, Load, Runs, max_rps
from simulator.system import Deployment, System


@dataclass(frozen=True, slots=True)
class Question:
    """What to compare. ``rates`` may be empty; ``find_max`` asks for the highest rate under ``criterion``."""

    scenario: Scenario
    deployment: Deployment
    systems: tuple[System, ...]
    seeds: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    load: Load = field(default_factory=Load)
    criterion: str = "promises"
    find_max: bool = True
    tolerance: float = 0.01


def compare(question: Question, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Answer ``question`` as plain values.

    ``max_rps`` is the mean over seeds, ``max_rps_by_seed`` each of them, ``of_bound`` the mean of each seed's rate over
    its own bound: both are about the same arrivals.
    """
    if question.criterion not in CRITERIA:
        raise ValueError(f"criterion {question.criterion!r}; use one of {', '.join(CRITERIA)}")
    profile = question.deployment.profile
    bounds = _bounds(question) if question.find_max else {}
    policies: dict[str, Any] = {}
    for system in question.systems:
        runs = Runs(system, question.deployment, question.scenario, question.load)
        answer: dict[str, Any] = {}
        if question.find_max:
            progress(f"{system.label}: searching the highest rate")
            answer |= _highest(question, runs, bounds[system.overlap])
        for rate in question.rates:
            progress(f"{system.label}: {rate:g} requests/s")
            figures = [runs.at(rate, seed).as_dict() for seed in question.seeds]
            answer.setdefault("rates", {})[f"{rate:g}"] = figures
        policies[system.label] = answer
    return {
        "simulated": True,
        "scenario": question.scenario.name,
        "profile": profile.name,
        "replicas": question.deployment.replicas,
        "seeds": list(question.seeds),
        "seconds": question.load.seconds,
        "criterion": question.criterion,
        "assumed": [*profile.assumed, *_assumed(question.scenario)],
        "bound_rps": {("overlap" if key else "plain"): [round(b, 3) for b in values] for key, values in bounds.items()},
        "policies": policies,
    }


def _highest(question: Question, runs: Runs, bounds: Sequence[float]) -> dict[str, Any]:
    found = [
        max_rps(runs, bound, seed, question.criterion, tolerance=question.tolerance)
        for seed, bound in zip(question.seeds, bounds, strict=True)
    ]
    shares = [rate / bound for rate, bound in zip(found, bounds, strict=True)]
    return {
        "max_rps": round(fmean(found), 3),
        "max_rps_by_seed": found,
        "bound_rps": round(fmean(bounds), 3),
        "of_bound": round(fmean(shares), 4),
        "at_max": [
            runs.at(rate, seed).as_dict() if rate else None for rate, seed in zip(found, question.seeds, strict=True)
        ],
    }


def _bounds(question: Question) -> dict[bool, list[float]]:
    deployment = question.deployment
    return {
        overlap: [
            upper_bound_rps(
                question.scenario,
                deployment.profile.costs,
                lambda rate, seed=seed: question.load.arrivals_us(rate, seed),  # type: ignore[misc]
                seconds=question.load.seconds,
                seed=seed,
                replicas=deployment.replicas,
                overlap=overlap,
            )
            for seed in question.seeds
        ]
        for overlap in sorted({system.overlap for system in question.systems})
    }


def _assumed(scenario: Scenario) -> list[str]:
    return [
        f"lengths of {load.service.name}: {load.assumed}"
        for load in scenario.loads
        if load.assumed and load.assumed != "nothing"
    ]
