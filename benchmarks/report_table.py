"""The table at the end of a load run."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_caption(tolerance_us), caption_justify="left")
    for column in ("service", "TTFT/TBT ms", *(["policy"] if named else [])):
        table.add_column(column, no_wrap=True)
    for column in ("sent", "failed", "TTFT met", "TBT met", "deadlines", "TTFT p99", "TBT p99", "goodput/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in [*targets, "all"]:
        target = targets.get(name)
        shown = f"{target.ttft_us / 1000:g}/{target.tbt_us / 1000:g}" if target else ""
        for index, (policy, reports) in enumerate(policies.items()):
            first = [name, shown] if index == 0 else ["", ""]
            last = index == len(policies) - 1
            table.add_row(*first, *([policy] if named else []), *_cells(reports[name]), end_section=last)
    console.print(table)


def wide_console() -> Console:
    """Standard output; at least as wide as the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def _cells(values: ServiceReport) -> list[str]:
    return [
        str(values.requests),
        str(values.failed),
        percent(values.ttft_met),
        percent(values.tbt_met),
        percent(values.deadlines_met),
        _ms(values.ttft_p99_ms),
        _ms(values.tbt_p99_ms),
        f"{values.goodput_rps:.2f}",
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _caption(tolerance_us: int) -> str:
    allowed = f" + {tolerance_us / 1000:g} ms for client and network" if tolerance_us else ""
    return (
        f"Requests that met a promise, as the client saw it. TBT met: every gap within the target{allowed}. "
        "Deadlines met: token i within TTFT + i x TBT of the arrival. A failed request met nothing."
    )
