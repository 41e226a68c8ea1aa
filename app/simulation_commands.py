"""``halo simulate`` and ``halo plan``: answers from the simulator. Nothing is started, no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from app.config import AppArgs, ConfigErrors, load_cluster
from app.simulation_report import draw_rates, print_comparison, print_plan
from simulator.capacity_plan import CapacityPlan, Peak, busiest_window, plan_capacity
from simulator.comparison import Question, compare
from simulator.hardware_profile import load_profile
from simulator.lengths import Pairs
from simulator.scenario import Scenario, ServiceLoad, load_scenario, scenario_names
from simulator.search import CRITERIA, Load
from simulator.system import Deployment, System
from simulator.trace_files import Trace, load_own
from simulator.workload import Service, WorkloadError

_PROFILE = "A shipped hardware profile, or a .json file of the same form."


def simulate_command(  # noqa: PLR0917  # a command's options
    scenario: Annotated[str, typer.Option(help="hospital, service-center, or a .yaml file.")] = "hospital",
    profile: Annotated[str, typer.Option(help=_PROFILE)] = "llama3-8b-a100-80g",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy, also as halo+overlap or halo@slo (release); repeat for more."),
    ] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second to report on; repeat for more.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed; repeat for more.")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Engine replicas.")] = 1,
    seconds: Annotated[float, typer.Option(min=30, max=86_400, help="How long requests come.")] = 300.0,
    criterion: Annotated[
        str, typer.Option(help="promises: 99 % of TTFTs and gaps of every service; ttft: of all first tokens.")
    ] = "promises",
    find_max: Annotated[bool, typer.Option("--max/--no-max", help="Search the highest rate of each policy.")] = True,
    prefix_caching: Annotated[bool, typer.Option(help="Keep shared prompt beginnings in the KV cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw attainment over rates into this file (.png, .svg).")] = None,
) -> None:
    """Compare policies by simulation: attainment at rates, the highest rate, and how far it is from the bound."""
    try:
        if criterion not in CRITERIA:
            raise WorkloadError(f"--criterion {criterion!r}: use one of {', '.join(CRITERIA)}")
        if plot is not None and len(set(rate or [])) < 2:
            raise WorkloadError("--plot needs two or more --rate")
        hardware = load_profile(profile)
        question = Question(
            scenario=load_scenario(scenario, parameters_b=hardware.parameters_b),
            deployment=Deployment(hardware, replicas=replicas, prefix_caching=prefix_caching),
            systems=tuple(System(label) for label in policy or ["fcfs", "qoserve", "halo-paper", "halo"]),
            seeds=tuple(seed or [1]),
            rates=tuple(rate or []),
            load=Load(seconds, min(30.0, seconds / 10)),
            criterion=criterion,
            find_max=find_max,
        )
        answer = compare(question, _note)
        if plot is not None:
            draw_rates(answer, plot)
    except (WorkloadError, OSError) as error:
        raise _failure(error) from None
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
    else:
        print_comparison(answer)


def plan_command(  # noqa: PLR0917  # a command's options
    config: Annotated[Path, typer.Argument(help="The Serve config file.")] = Path("cluster.yaml"),
    profile: Annotated[str, typer.Option(help=_PROFILE)] = "llama3-8b-a100-80g",
    rps: Annotated[float | None, typer.Option(help="Requests per second in all, at the busiest time.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help="SERVICE=REQUESTS_PER_SECOND at the busiest time.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="CSV with at_s, service, prompt_tokens, output_tokens; sized on its peak.")
    ] = None,
    window: Annotated[
        float, typer.Option(min=10, help="Seconds of the window that counts as the peak of --trace.")
    ] = 180,
    lengths: Annotated[
        str, typer.Option(help="Scenario whose lengths stand for services of the same name, or a .yaml file.")
    ] = "hospital",
    overlap: Annotated[bool, typer.Option(help="With base-LoRA overlap.")] = False,
    seconds: Annotated[float, typer.Option(min=30, max=86_400, help="How long requests come in a simulation.")] = 180.0,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="How many times everything is simulated.")] = 3,
    tighten: Annotated[bool, typer.Option(help="Also say what tighter targets cost.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how many replicas a cluster.yaml needs for the expected load, and what breaks first. Starts nothing."""
    try:
        cluster = load_cluster(config, files=False)
        hardware = load_profile(profile)
        loads, total, peak = _expected(
            cluster.args, rps=rps, rates=rate or [], trace=trace, window_s=window, lengths=lengths
        )
        scenario = Scenario(str(config), str(config), loads)
        label = cluster.args.scheduler.policy + ("+overlap" if overlap else "")
        plan = plan_capacity(
            scenario,
            Deployment(hardware, inflight=cluster.args.admission.inflight_per_replica, keep_release=True),
            System(label),
            total,
            seeds=tuple(range(1, seeds + 1)),
            load=Load(seconds, min(20.0, seconds / 10)),
            tighten=tighten,
            progress=_note,
        )
    except ConfigErrors as errors:
        raise _failure(str(errors)) from None
    except WorkloadError as error:
        raise _failure(error) from None
    if cluster.args.slo_scale != 1:
        _note(f"targets are those of {config} times its slo_scale, {cluster.args.slo_scale:g}")
    _print_answer(plan, loads, peak, as_json=as_json)


def _print_answer(plan: CapacityPlan, loads: tuple[ServiceLoad, ...], peak: Peak | None, *, as_json: bool) -> None:
    rates = {load.service.name: round(load.share, 4) for load in loads}
    if not as_json:
        print_plan(plan, rates, peak)
        return
    data: dict[str, Any] = plan.as_dict() | {"services": rates}
    if peak is not None:
        data["peak"] = {"window_s": peak.window_s, "start_s": peak.start_s, "rate": peak.rate, "mean": peak.mean_rate}
    typer.echo(json.dumps(data, indent=1))


def _expected(
    args: AppArgs, *, rps: float | None, rates: list[str], trace: Path | None, window_s: float, lengths: str
) -> tuple[tuple[ServiceLoad, ...], float, Peak | None]:
    """Services with their rates as shares, the rate in all, and the peak when it came from a trace."""
    if sum((rps is not None, bool(rates), trace is not None)) != 1:
        raise WorkloadError("say how much load to expect: one of --rps, --rate SERVICE=RPS for each service, --trace")
    services = {
        s.name: Service(s.name, s.ttft_us, s.tbt_us, index + 1, s.release, s.hold_max_us, str(s.overload) == "shed")
        for index, s in enumerate(args.service_settings())
    }
    if trace is not None:
        return _from_trace(load_own(trace), services, window_s)
    if rps is not None:
        wanted = {name: rps / len(services) for name in services}
    else:
        wanted = dict(_one_rate(text, services) for text in rates)
    known = {load.service.name: load for load in load_scenario(lengths).loads}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise WorkloadError(
            f"no lengths for {', '.join(missing)} in {lengths}: name a .yaml file in the form of the shipped scenarios "
            f"({', '.join(scenario_names())}) with --lengths, or give a --trace"
        )
    loads = tuple(
        ServiceLoad(services[name], known[name].lengths, share, known[name].assumed) for name, share in wanted.items()
    )
    return loads, sum(wanted.values()), None


def _from_trace(
    trace: Trace, services: dict[str, Service], window_s: float
) -> tuple[tuple[ServiceLoad, ...], float, Peak]:
    unknown = sorted({row.service for row in trace.rows} - set(services))
    if unknown:
        raise WorkloadError(f"{trace.name}: the configuration has no service {', '.join(unknown)}")
    peak = busiest_window(trace, window_s)
    begin_us, end_us = peak.start_s * 1e6, (peak.start_s + peak.window_s) * 1e6
    busy = [row for row in trace.rows if begin_us <= row.at_us <= end_us]
    loads = []
    for name, service in services.items():
        pairs = tuple((row.prompt_tokens, row.output_tokens) for row in busy if row.service == name)
        if pairs:
            loads.append(ServiceLoad(service, Pairs(pairs), len(pairs) * peak.rate / len(busy)))
    return tuple(loads), peak.rate, peak


def _one_rate(text: str, services: dict[str, Service]) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if name not in services or not 0 < value < 1e6:
        raise WorkloadError(
            f"--rate {text!r}: has to be SERVICE=REQUESTS_PER_SECOND with a number above 0 and one of the services "
            f"{', '.join(services)}"
        )
    return name, value


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[dim]{text}[/dim]")


def _failure(reason: object) -> typer.Exit:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error {reason}")
    return typer.Exit(1)
