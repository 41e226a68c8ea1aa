"""The ``halo`` command: check a configuration, serve it, manage API keys, simulate, plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app import launch, partition_command
from app.config import ClusterConfig, ConfigErrors, load_cluster
from app.durations import format_duration
from app.simulation_commands import plan_command, simulate_command
from deployments.auth import ALL_SERVICES, KeysError, add_key, list_keys, remove_key
from partition.analytic_device import GPU_PROFILES
from partition.searches import DEFAULT_SEARCH, SEARCHES

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
keys_app = typer.Typer(no_args_is_help=True, help="Manage the file of API keys that auth.keys_file names.")
app.add_typer(keys_app, name="keys")
app.command("simulate")(simulate_command)
app.command("plan")(plan_command)

KeysFile = Annotated[Path, typer.Option("--file", help="The key file; made if need be.")]
DEFAULT_KEYS_FILE = Path("keys.jsonl")
_TABLE_COLUMNS = 120


@app.callback()
def _root() -> None:
    """HALO Serve: LoRA services with a promise each, on your own machines."""


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="The Serve config file.")] = Path("cluster.yaml"),
) -> None:
    """Say what is wrong with a cluster.yaml, or how it was understood. Starts nothing."""
    try:
        cluster = load_cluster(config)
    except ConfigErrors as errors:
        _print_errors(errors)
        raise typer.Exit(1) from None
    _print_understood(cluster)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="The Serve config file.")] = Path("cluster.yaml"),
) -> None:
    """Check a cluster.yaml and serve it on this machine until Ctrl-C, on a Ray cluster of its own."""
    check(config)
    raise typer.Exit(launch.main(config))


@app.command()
def partition(  # noqa: PLR0917 - typer makes options of them
    config: Annotated[Path, typer.Argument(help="The Serve config file.")] = Path("cluster.yaml"),
    search: Annotated[str, typer.Option(help=f"One of {', '.join(SEARCHES)}.")] = DEFAULT_SEARCH,
    simulate: Annotated[str | None, typer.Option(help=f"An analytic GPU: {', '.join(GPU_PROFILES)}.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw curves and search path into this file (png, pdf, svg).")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Stop searching after this time.", min=0.1)] = 10.0,
    anew: Annotated[bool, typer.Option(help="Search although there is a stored table.")] = False,
) -> None:
    """Find on which SMs of this GPU base and LoRA layers run, print it, and store it for the engines."""
    if search not in SEARCHES:
        raise _failure(f"--search: there is no search {search}; there are {', '.join(SEARCHES)}")
    try:
        settings = load_cluster(config).args.engine_settings()
    except ConfigErrors as errors:
        _print_errors(errors)
        raise typer.Exit(1) from None
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_COLUMNS)
    report = partition_command.run(settings, console, search=search, simulate=simulate, minutes=minutes, reuse=not anew)
    if report.table is None:
        raise _failure(report.reason)
    partition_command.show(report, console)
    if plot is not None:
        try:
            partition_command.plot(report, plot)
        except (partition_command.PlotError, OSError, ValueError) as error:
            raise _failure(f"--plot: {error}") from None


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Who the key is for.")],
    services: Annotated[str, typer.Option(help="Services it opens, with commas between, or * for all.")] = ALL_SERVICES,
    rate: Annotated[float | None, typer.Option(help="Requests per second it may send; no limit if left out.")] = None,
    file: KeysFile = DEFAULT_KEYS_FILE,
) -> None:
    """Make a key, store its hash, and print the key: the only time that it is seen."""
    listed = [service.strip() for service in services.split(",") if service.strip()]
    try:
        key = add_key(file, name, None if ALL_SERVICES in listed else listed, rate)
    except (KeysError, OSError) as error:
        raise _failure(error) from None
    Console(stderr=True).print(f"The key of {escape(name)}; it is stored only as a hash in {escape(str(file))}:")
    typer.echo(key)


@keys_app.command("remove")
def keys_remove(
    name: Annotated[str, typer.Argument(help="Whose key to remove.")], file: KeysFile = DEFAULT_KEYS_FILE
) -> None:
    """Remove a key."""
    try:
        removed = remove_key(file, name)
    except (KeysError, OSError) as error:
        raise _failure(error) from None
    if not removed:
        raise _failure(f"key file {file}: there is no key named {name}")


@keys_app.command("list")
def keys_list(file: KeysFile = DEFAULT_KEYS_FILE) -> None:
    """Show who has a key, and what it opens."""
    try:
        holders = list_keys(file)
    except KeysError as error:
        raise _failure(error) from None
    table = Table("name", "services", "requests per second")
    for holder in holders:
        services = "all" if holder.services is None else ", ".join(sorted(holder.services))
        rate = "no limit" if holder.rate_per_s is None else f"{holder.rate_per_s:g}"
        table.add_row(escape(holder.name), escape(services), rate)
    Console().print(table)


def _print_errors(errors: ConfigErrors) -> None:
    # One error a line whatever the terminal's width, so that it can be searched and piped.
    console = Console(soft_wrap=True, highlight=False)
    count = len(errors.problems)
    console.print(f"[red]{escape(errors.source)}: {count} error{'s' if count != 1 else ''}[/red]")
    for problem in errors.problems:
        console.print(f"  {escape(str(problem))}")


def _print_understood(cluster: ClusterConfig) -> None:
    args, console = cluster.args, Console(highlight=False)
    # A name cut short is no use, also in a pipe, where rich assumes 80 columns.
    console.width = max(console.width, _TABLE_COLUMNS)
    host, port = cluster.address
    engine = args.engine_settings()
    console.print(f"[green]OK[/green] {escape(str(cluster.path))}")
    console.print(f"model     {escape(engine.model)}, named {escape(engine.base_name)}", soft_wrap=True)
    console.print(
        f"engine    {args.replicas} replica{_s(args.replicas)} of {args.tensor_parallel_size} "
        f"device{_s(args.tensor_parallel_size)}, {engine.max_num_seqs} requests and {engine.max_num_batched_tokens} "
        f"tokens a step, scheduler {engine.policy}",
        soft_wrap=True,
    )
    keys = "API keys from " + escape(str(args.path(args.auth.keys_file))) if args.auth.keys_file else "no API keys"
    console.print(f"gateway   {args.gateways} on {escape(host)}:{port}, {keys}", soft_wrap=True)
    scale = "" if args.slo_scale == 1 else f" (as written, times slo_scale {args.slo_scale:g})"
    console.print(f"promises{scale}:")
    console.print(_promises(cluster))
    for warning in args.warnings:
        console.print(f"[yellow]note[/yellow] {escape(warning)}", soft_wrap=True)


def _promises(cluster: ClusterConfig) -> Table:
    args = cluster.args
    table = Table("service", "adapter", "rank", "ttft", "tbt", "release", "overload", box=box.SIMPLE)
    for service in (*args.service_settings(), args.base_settings()):
        report = args.adapter_reports.get(service.name)
        release = str(service.release)
        if release == "bounded":
            release += f" {format_duration(service.hold_max_us)}"
        table.add_row(
            escape(service.name),
            "(base model)" if service.adapter is None else escape(service.adapter.name),
            "" if report is None else str(report.rank),
            format_duration(service.ttft_us),
            format_duration(service.tbt_us),
            release,
            str(service.overload),
        )
    return table


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _failure(reason: object) -> typer.Exit:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error[/red] {escape(str(reason))}")
    return typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
