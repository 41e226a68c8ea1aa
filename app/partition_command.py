"""``halo partition``: run the partition search by hand, print what it found, plot curves and the search path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deployments.partition_cache import default_cache
from deployments.partition_device import CUDA_DEVICE, simulated_device
from deployments.partition_job import JobReport, run_partition_job
from deployments.settings import EngineSettings
from partition.configs import Layer, Solo, Split, Unsplit
from partition.pair_shapes import LayerPair
from partition.search_result import SearchResult


class PlotError(RuntimeError):
    """The plot cannot be drawn; the message says what is missing."""


def run(
    settings: EngineSettings, console: Console, *, search: str, simulate: str | None, minutes: float, reuse: bool
) -> JobReport:
    """Run the job on this machine's GPU, or on an analytic one, with progress on ``console``."""
    return run_partition_job(
        settings,
        device=CUDA_DEVICE if simulate is None else simulated_device(simulate),
        cache=default_cache(),
        search=search,
        time_box_s=minutes * 60,
        progress=lambda line: console.print(escape(line), soft_wrap=True),
        reuse=reuse,
    )


def show(report: JobReport, console: Console) -> None:
    """Print the table and where it is."""
    assert report.table is not None
    key = report.table.key
    console.print(f"{escape(key.device)}, {key.sms} SMs, rank {key.ranks[0]}, {key.adapters} adapters, vLLM {key.vllm}")
    table = Table("layers", "tokens", "choice", "verdict", "time", "sequential", "dual stream", "pair runs")
    for entry in report.table.entries:
        times = (entry.time_us, entry.sequential_us, entry.dual_stream_us)
        shown = ["-" if time_us is None else f"{time_us:.1f} us" for time_us in times]
        choice, verdict = str(entry.choice), str(entry.verdict)
        table.add_row(entry.group, str(entry.tokens), choice, verdict, *shown, str(entry.pair_measurements))
    console.print(table)
    console.print(f"{escape(report.reason)}: {escape(str(report.path))}", soft_wrap=True)


def plot(report: JobReport, path: Path) -> None:
    """Draw each searched pair: the two solo curves and the splits in the order they were measured.

    As the paper's Figures 6 and 7. Raises `PlotError` when nothing was searched or matplotlib is missing.
    """
    if not report.results:
        raise PlotError("nothing was searched, the stored table was used: add --anew to search and plot")
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise PlotError("matplotlib is not installed: pip install 'halo-serve[bench]'") from None
    rows = len(report.results)
    figure = Figure(figsize=(11, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for (curves, path_axes), (pair, result) in zip(axes, report.results, strict=True):
        _plot_curves(curves, pair, result)
        _plot_path(path_axes, result)
    assert report.table is not None
    figure.suptitle(report.table.key.device)
    figure.savefig(path)


def _plot_curves(axes: Any, pair: LayerPair, result: SearchResult) -> None:
    """Time alone against SMs."""
    for layer in Layer:
        points = [
            (step.config.sms, step.time_us)
            for step in result.path
            if isinstance(step.config, Solo) and step.config.layer is layer
        ]
        axes.plot(*zip(*points, strict=True), marker=".", label=f"{layer} alone") if points else None
    axes.set(xlabel="SMs", ylabel="us", title=str(pair), yscale="log")
    axes.legend()


def _plot_path(axes: Any, result: SearchResult) -> None:
    """Measured splits, numbered in order, coloured by what they take less than sequential."""
    splits = [step for step in result.path if isinstance(step.config, Split)]
    sequential_us = result.sequential_us or 0.0
    if splits:
        x = [step.config.lora_sms for step in splits if isinstance(step.config, Split)]
        y = [step.config.base_sms for step in splits if isinstance(step.config, Split)]
        gains = [sequential_us - step.time_us for step in splits]
        axes.plot(x, y, color="0.7", linewidth=1)
        shown = axes.scatter(x, y, c=gains, cmap="RdYlGn", zorder=2)
        axes.figure.colorbar(shown, ax=axes, label="us less than sequential")
        for number, place in enumerate(zip(x, y, strict=True), 1):
            axes.annotate(str(number), place, textcoords="offset points", xytext=(4, 4))
    dual = [step.time_us for step in result.path if step.config is Unsplit.DUAL_STREAM]
    beside = f"; dual stream {sequential_us - dual[0]:+.1f} us" if dual else ""
    axes.set(xlabel="SMs of LoRA", ylabel="SMs of the base layer", title=f"choice: {result.choice}{beside}")
