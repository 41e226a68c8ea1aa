"""The table at the end of a load run."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.attainment import ServiceReport, Targets
from benchmarks.progress import percent


def print_reports(
    console: Console,
    policies: Mapping[str, Mapping[str, ServiceReport]],
    targets: Mapping[str, Targets],
    tolerance_us: int,
) -> None:
    """Print attainment per service, the policies under each other. A policy without a name leaves its column out."""
    named = any(policies)
    table = Table(caption=_caption(tolerance_us), caption_justify="left")
    columns = ["service", "targets ms", *(["policy"] if named else []), "requests", "failed"]
    columns += [
        "TTFT met",
        "TBT met",
        "deadlines met",
        "gaps met",
        "TTFT p50 / p99 ms",
        "TBT p50 / p99 ms",
        "goodput/s",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column in {"service", "policy"} else "right")
    for name in [*targets, "all"]:
        for index, (policy, reports) in enumerate(policies.items()):
            target = targets.get(name)
            shown = f"{target.ttft_us / 1000:g} / {target.tbt_us / 1000:g}" if target else ""
            first = [name, shown] if index == 0 else ["", ""]
            last = index == len(policies) - 1
            table.add_row(*first, *([policy] if named else []), *_cells(reports[name]), end_section=last)
    console.print(table)


def _cells(values: ServiceReport) -> list[str]:
    return [
        str(values.requests),
        str(values.failed),
        percent(values.ttft_met),
        percent(values.tbt_met),
        percent(values.deadlines_met),
        percent(values.gaps_met),
        f"{_ms(values.ttft_p50_ms)} / {_ms(values.ttft_p99_ms)}",
        f"{_ms(values.tbt_p50_ms)} / {_ms(values.tbt_p99_ms)}",
        f"{values.goodput_rps:.2f}",
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _caption(tolerance_us: int) -> str:
    allowed = f" + {tolerance_us / 1000:g} ms for client and network" if tolerance_us else ""
    return (
        f"Requests that met a promise, as the client saw it. TBT met: every gap within the target{allowed}. "
        "Deadlines met: token i within TTFT + i x TBT of the arrival. A failed request met nothing."
    )
