"""Tables and plots of simulated results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simulator.capacity_plan import CapacityPlan, Peak
from simulator.workload import WorkloadError

_COLUMNS = 120


def print_comparison(answer: Mapping[str, Any]) -> None:
    """Print what :func:`simulator.comparison.compare` answered."""
    console = _console()
    console.print(
        f"simulated: {escape(answer['scenario'])} on {answer['replicas']} x {answer['profile']}, "
        f"{answer['seconds']:g} s, seeds {', '.join(map(str, answer['seeds']))}"
    )
    if any("max_rps" in policy for policy in answer["policies"].values()):
        table = Table("policy", "highest rate", "no policy above", "of bound", "TTFT p99", "TBT p99", box=box.SIMPLE)
        for name, policy in answer["policies"].items():
            first = policy["at_max"][0]
            table.add_row(
                name,
                f"{policy['max_rps']:.2f}/s",
                f"{policy['bound_rps']:.2f}/s",
                f"{100 * policy['of_bound']:.0f} %",
                _ms(first and first["total"]["ttft_p99_ms"]),
                _ms(first and first["total"]["tbt_p99_ms"]),
            )
        console.print(f"highest rate that keeps the criterion '{answer['criterion']}':")
        console.print(table)
    _print_rates(console, answer)
    for line in answer["assumed"]:
        console.print(f"[yellow]assumed[/yellow] {escape(line)}", soft_wrap=True)


def _print_rates(console: Console, answer: Mapping[str, Any]) -> None:
    table = Table("policy", "rate", "seed", "service", "TTFT met", "TBT met", "TTFT p99", "TBT p99", box=box.SIMPLE)
    for name, policy in answer["policies"].items():
        for rate, by_seed in policy.get("rates", {}).items():
            for seed, figures in zip(answer["seeds"], by_seed, strict=True):
                for service, values in {**figures["services"], "all": figures["total"]}.items():
                    table.add_row(
                        name,
                        rate,
                        str(seed),
                        escape(service),
                        _percent(values["ttft_met"]),
                        _percent(values["tbt_met"]),
                        _ms(values["ttft_p99_ms"]),
                        _ms(values["tbt_p99_ms"]),
                    )
    if table.row_count:
        console.print(table)


def print_plan(plan: CapacityPlan, rates: Mapping[str, float], peak: Peak | None) -> None:
    """Print a capacity plan."""
    console = _console()
    if peak is not None:
        console.print(
            f"trace: {peak.mean_rate:.2f} requests/s on average over {peak.trace_s:.0f} s; sized on the busiest "
            f"{peak.window_s:.0f} s, from {peak.start_s:.0f} s on: {peak.rate:.2f}/s"
        )
    wanted = ", ".join(f"{escape(name)} {rate:.2f}/s" for name, rate in rates.items())
    console.print(f"simulated, {plan.policy} on {plan.profile}, {plan.seeds} seeds: {wanted}", soft_wrap=True)
    console.print(
        f"[bold]{plan.replicas} replica{'s' if plan.replicas > 1 else ''}[/bold] ({plan.gpus} GPUs) keep 99 % of every "
        f"promise at {plan.rate:g}/s; they do up to {plan.max_rps:g}/s: {plan.headroom_pct:g} % headroom",
        soft_wrap=True,
    )
    for count, share in plan.tried.items():
        console.print(f"  {count} replicas: promises kept with {100 * share:.0f} % of the seeds")
    if plan.breaks_first is not None:
        first = plan.breaks_first
        console.print(
            f"beyond that {escape(first.service)} breaks first: at {first.rate:g}/s it keeps "
            f"{100 * first.share_met:.1f} % of its {first.promise}",
            soft_wrap=True,
        )
    if plan.tightened:
        table = Table("service", "promise", "target", "highest rate", "change", box=box.SIMPLE)
        for row in plan.tightened:
            table.add_row(
                escape(row.service),
                row.promise,
                f"{row.target_ms:g} ms",
                f"{row.max_rps:.2f}/s",
                f"{row.change_pct:+g} %",
            )
        console.print("what a target at 75 % of today's would cost on the same replicas:")
        console.print(table)
    for line in plan.assumed:
        console.print(f"[yellow]assumed[/yellow] {escape(line)}", soft_wrap=True)


def draw_rates(answer: Mapping[str, Any], path: Path) -> None:
    """Draw the share of first tokens and of gaps in time over the rate, one line per policy."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise WorkloadError("--plot needs matplotlib: pip install 'halo-serve[bench]'") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    for axis, key, title in zip(axes, ("ttft_met", "tbt_met"), ("first tokens in time", "gaps in time"), strict=True):
        for name, policy in answer["policies"].items():
            points = [
                (float(rate), 100 * sum(f["total"][key] or 0 for f in figures) / len(figures))
                for rate, figures in policy["rates"].items()
            ]
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.axhline(99, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=f"{title} (simulated)", xlabel="requests/s", ylabel="%")
    axes[0].legend()
    figure.suptitle(f"{answer['scenario']} on {answer['replicas']} x {answer['profile']}")
    figure.savefig(path, dpi=130)


def _console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, _COLUMNS)
    return console


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
