"""The figures of the HALO paper (arXiv:2610.04956, section 6), simulated.

    python -m benchmarks.reproduction --figure 13 --json

Every number is simulated. What is published beside it, and how the two compare, is in docs/reproduction.md. Results are
written to docs/measurements/reproduction.json figure by figure when --write is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deployments.durable_file import write_durably
from simulator.arrivals import envelope, gamma
from simulator.bound import upper_bound_rps
from simulator.hardware_profile import load_profile
from simulator.scenario import load_scenario
from simulator.search import SHARE_KEPT, Load, Runs, kept, max_rps
from simulator.summary import RunFigures, summarise
from simulator.system import ABLATION, PAPER_SYSTEMS, Deployment, System, simulate
from simulator.trace_files import load_azure

RESULTS = Path(__file__).parent.parent / "docs" / "measurements" / "reproduction.json"
LLAMA, YI = "llama3-8b-a100-80g", "yi-34b-4xa100-80g"
QWEN_7B, QWEN_32B, ADA = "qwen2.5-7b-a100-80g", "qwen2.5-32b-4xa100-80g", "llama3-8b-ada6000"
OURS = {
    "halo (ours)": "halo",
    "halo (ours) + overlap": "halo+overlap",
    "halo (ours) + overlap, release slo": "halo+overlap@slo",
}
LOAD = Load(seconds=180.0, warmup_s=20.0)
TOLERANCE = 0.03
TRACE_S = 300.0


def rates(profile: str, systems: Mapping[str, str], scenario_name: str = "hospital", seed: int = 1) -> dict[str, Any]:
    """The highest rate of each system under both criteria, and the bounds."""
    hardware = load_profile(profile)
    scenario = load_scenario(scenario_name, parameters_b=hardware.parameters_b)
    bounds = {
        overlap: upper_bound_rps(
            scenario,
            hardware.costs,
            lambda rate: LOAD.arrivals_us(rate, seed),
            seconds=LOAD.seconds,
            seed=seed,
            overlap=overlap,
        )
        for overlap in (False, True)
    }
    table: dict[str, Any] = {"bound_rps": {"plain": bounds[False], "overlap": bounds[True]}, "systems": {}}
    for name, label in systems.items():
        runs = Runs(System(label), Deployment(hardware), scenario, LOAD)
        bound = bounds[runs.system.overlap]
        row: dict[str, Any] = {"system": label}
        for criterion in ("ttft", "promises"):
            highest = max_rps(runs, bound, seed, criterion, tolerance=TOLERANCE)
            row[criterion] = {"max_rps": highest, "of_bound": round(highest / bound, 3)}
            if highest:
                row[criterion] |= short(runs.at(highest, seed))
        table["systems"][name] = row
        print(profile, name, row, file=sys.stderr, flush=True)
    return table


def attainment(profile: str, systems: Mapping[str, str], shares: tuple[float, ...], seed: int = 1) -> dict[str, Any]:
    """Attainment at rates that are ``shares`` of the rate at which SLoRA keeps its P99 TTFT."""
    hardware = load_profile(profile)
    scenario = load_scenario("hospital", parameters_b=hardware.parameters_b)
    base = _slora_rate(profile, seed)
    table: dict[str, Any] = {"slora_max_rps": base, "systems": {}}
    for name, label in systems.items():
        runs = Runs(System(label), Deployment(hardware), scenario, LOAD)
        table["systems"][name] = {f"{base * share:.2f}": short(runs.at(base * share, seed)) for share in shares}
    return table


def trace_run(profile: str, scenario_name: str, trace: str, seed: int = 1) -> dict[str, Any]:
    """Five minutes of a trace at 1.1 times the rate at which SLoRA keeps its P99 TTFT under Poisson arrivals."""
    hardware = load_profile(profile)
    scenario = load_scenario(scenario_name, parameters_b=hardware.parameters_b)
    rate = 1.1 * _slora_rate(profile, seed, scenario_name)
    if trace == "azure-conv":
        times = envelope([row.at_us for row in load_azure().rows], rate, TRACE_S, seed)
    else:
        times = gamma(rate, 2.0, TRACE_S, seed)
    arrivals = scenario.compose(times, seed)
    table: dict[str, Any] = {"rate": round(rate, 2), "arrivals": trace, "systems": {}}
    for name, label in {**PAPER_SYSTEMS, **OURS}.items():
        figures = summarise(simulate(System(label), Deployment(hardware), scenario, arrivals, seed=seed))
        services = {
            service: {"ttft_p99_ms": f.ttft_p99_ms, "ready_p99_ms": f.ready_p99_ms, "tbt_p99_ms": f.tbt_p99_ms}
            for service, f in figures.services.items()
        }
        table["systems"][name] = {**short(figures), "services": services}
    return table


_SLORA: dict[tuple[str, str, int], float] = {}


def _slora_rate(profile: str, seed: int, scenario_name: str = "hospital") -> float:
    key = (profile, scenario_name, seed)
    if key not in _SLORA:
        hardware = load_profile(profile)
        scenario = load_scenario(scenario_name, parameters_b=hardware.parameters_b)
        runs = Runs(System("fcfs"), Deployment(hardware), scenario, LOAD)
        _SLORA[key] = max_rps(runs, 32.0, seed, "ttft", tolerance=TOLERANCE)
    return _SLORA[key]


def short(figures: RunFigures) -> dict[str, Any]:
    """What the paper plots."""
    total = figures.total
    return {
        "ttft_met": round(total.ttft_met or 0, 4),
        "tbt_met": round(total.tbt_met or 0, 4),
        "worst_service_met": round(kept(figures, "promises"), 4),
        "ttft_p99_ms": total.ttft_p99_ms,
        "ready_p99_ms": total.ready_p99_ms,
        "tbt_p99_ms": total.tbt_p99_ms,
        "tokens_per_step": round(figures.tokens_per_step, 1),
    }


def markdown(result: Mapping[str, Any]) -> list[str]:
    """The rows of a figure's highest rates."""
    lines = ["| profile | system | highest rate, TTFT | of bound | highest rate, all promises | of bound | TBT met |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for profile, table in result.items():
        for name, row in table.get("systems", {}).items() if isinstance(table, dict) else ():
            if "promises" not in row:
                continue
            ttft, promises = row["ttft"], row["promises"]
            lines.append(
                f"| {profile} | {name} | {ttft['max_rps']:.2f} | {100 * ttft['of_bound']:.0f} % | "
                f"{promises['max_rps']:.2f} | {100 * promises['of_bound']:.0f} % | "
                f"{100 * ttft.get('tbt_met', 0):.1f} % |"
            )
    return lines


FIGURES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "3a": lambda: attainment(LLAMA, {"SLoRA": "fcfs"}, (0.8, 1.0, 1.2, 1.4)),
    "10": lambda: {
        f"{profile} {trace}": trace_run(profile, "hospital", trace)
        for profile in (LLAMA, YI)
        for trace in ("azure-conv", "burst")
    },
    "12": lambda: {
        f"{profile} {trace}": trace_run(profile, "service-center", trace)
        for profile in (LLAMA, YI)
        for trace in ("azure-conv", "burst")
    },
    "13": lambda: {profile: rates(profile, {**PAPER_SYSTEMS, **OURS}) for profile in (LLAMA, YI)},
    "14": lambda: {profile: rates(profile, {**PAPER_SYSTEMS, **OURS}) for profile in (QWEN_7B, QWEN_32B)},
    "16a": lambda: {LLAMA: rates(LLAMA, ABLATION)},
    "16b": lambda: {ADA: rates(ADA, {**PAPER_SYSTEMS, **OURS})},
}


def main() -> None:
    """Run figures and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="append", choices=list(FIGURES), help="default: all of them")
    parser.add_argument("--json", action="store_true", help="print the results; without it only --write makes sense")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULTS.name}")
    parser.add_argument("--table", action="store_true", help=f"print {RESULTS.name} as Markdown; runs nothing")
    args = parser.parse_args()
    if args.table:
        for figure, result in json.loads(RESULTS.read_text(encoding="utf-8")).items():
            print(f"\nFigure {figure}\n", *markdown(result), sep="\n")
        return
    for figure in args.figure or list(FIGURES):
        result = {"simulated": True, "share_kept": SHARE_KEPT, **FIGURES[figure]()}
        if args.write:
            known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
            write_durably(RESULTS, json.dumps({**known, figure: result}, indent=1) + "\n")
        if args.json or not args.write:
            print(json.dumps({figure: result}, indent=1))


if __name__ == "__main__":
    main()
