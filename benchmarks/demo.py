"""`make demo`: the same requests against the same server under one policy after another, attainment side by side.

    python -m benchmarks.demo
    python -m benchmarks.demo --policies fcfs,fcfs@64,halo-paper --rate 2.5 --seconds 60 --seed 7 --json

A policy may carry a step budget, as in fcfs@64: the server then runs with max_num_batched_tokens 64. Every run starts
the real server (`halo serve`) with a variant of cluster.yaml, warms it up with 16 requests at once and sends the same
arrivals, prompts and output lengths. Without --rate the first server's warm-up decides the rate for all of them: the
one that keeps about 16 requests under way, so that slow and fast machines are equally busy.

With --json the last line is {"policies": {NAME: {"services": {NAME: {"ttft_met": 0-1, ...}}}}}.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from app.config import ClusterConfig, ConfigErrors, load_cluster
from benchmarks.attainment import Observation, ServiceReport, Targets, report
from benchmarks.driver import Endpoint, drive, prompts_for, to_json
from benchmarks.report_table import print_reports, wide_console
from benchmarks.server import ROOT, ServerError, free_port, running_server, tail
from benchmarks.workload import PlannedRequest, ServiceLoad, compose, lengthened, poisson_arrivals

BURST = 16
FIRST_TOKENS = 8
# Admission would hand requests to the engine in order of deadline; let the policy under test see all of them instead.
IN_ENGINE = 256
LONG_PROMPT_WORDS = (250, 450)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's run."""

    reports: Mapping[str, ServiceReport]
    observations: Sequence[Observation]


@dataclass(slots=True)
class Load:
    """What every policy is sent; ``rate`` None until the first warm-up has told what the machine manages."""

    services: Sequence[str]
    rate: float | None
    seconds: float
    seed: int

    def burst(self) -> list[PlannedRequest]:
        """Requests like those of the load, all at once."""
        planned = workload(self.services, 4.0 * BURST, 1.0, self.seed + 1)[:BURST]
        return [replace(request, at_us=0) for request in planned]

    def first_of_each(self) -> list[PlannedRequest]:
        """A short request to every service: the first one loads its adapter."""
        planned = {request.service: request for request in workload(self.services, 64.0, 2.0, self.seed + 2)}
        return [replace(request, at_us=0, max_tokens=FIRST_TOKENS) for request in planned.values()]

    def settle_rate(self, burst_s: float) -> None:
        """Turn an open rate into the one that keeps as many requests under way as the burst had.

        ``burst_s`` is how long a request of the burst took on average (Little's law).
        """
        if self.rate is None:
            self.rate = round(BURST / burst_s, 2)

    def requests(self, burst_s: float) -> list[PlannedRequest]:
        """The load, at the rate of :meth:`settle_rate`."""
        self.settle_rate(burst_s)
        assert self.rate is not None
        return workload(self.services, self.rate, self.seconds, self.seed)


def workload(services: Sequence[str], rate: float, seconds: float, seed: int) -> list[PlannedRequest]:
    """Poisson arrivals spread evenly over ``services``; one prompt in four carries a long history before it."""
    rng = np.random.default_rng(seed)
    loads = []
    for name in services:
        short = prompts_for(name, None, rng)
        long = lengthened(short[: max(1, len(short) // 3)], LONG_PROMPT_WORDS, rng)
        loads.append(ServiceLoad(name, [*short, *long], output_tokens=(24, 56)))
    return compose(poisson_arrivals(rate, seconds, rng), loads, rng)


def overlay(policy: str) -> dict[str, Any]:
    """What a policy changes in cluster.yaml: ``name`` or ``name@tokens``."""
    name, _, budget = policy.partition("@")
    changes: dict[str, Any] = {
        "scheduler": {"policy": name},
        "admission": {"inflight_per_replica": IN_ENGINE},
        "auth": {"keys_file": None},
    }
    if budget:
        changes["max_num_batched_tokens"] = int(budget)
    return changes


def run_policy(
    policy: str,
    cluster: ClusterConfig,
    load: Load,
    options: argparse.Namespace,
    console: Console,
) -> Outcome:
    """Serve under ``policy``, send ``load``, return what was seen. ServerError when the server fails."""
    tolerance_us = round(options.tolerance_ms * 1000)
    targets = targets_of(cluster)
    with warmed_server(policy, cluster, load, console) as (endpoint, burst_s):
        requests = load.requests(burst_s)
        _say(
            console,
            policy,
            f"{len(requests)} requests over {load.seconds:g} s ({load.rate:g} a second), seed {load.seed}",
        )
        observations = drive(
            endpoint, requests, targets, title=f"{policy}:", console=console, tolerance_us=tolerance_us
        )
    return Outcome(report(observations, targets, options.seconds, tolerance_us), observations)


@contextmanager
def warmed_server(
    policy: str, cluster: ClusterConfig, load: Load, console: Console
) -> Iterator[tuple[Endpoint, float]]:
    """A server under ``policy`` that has answered every service and the burst of ``load``.

    Gives where it listens and how long a request of the burst took on average, in seconds. ServerError when the server
    fails, at the end too.
    """
    say = partial(_say, console, policy)
    with tempfile.TemporaryDirectory(prefix="halo-bench-") as folder:
        variant = cluster.derive(Path(folder, "cluster.yaml"), overlay(policy), host="127.0.0.1", port=free_port())
        log = Path(folder, "server.log")
        say("starting the server")
        with running_server(variant.path, variant.address, log, say=say) as server:
            say(f"ready after {server.start_s:.0f} s")
            endpoint = Endpoint(server.url)
            send = partial(drive, endpoint, targets=targets_of(cluster), console=console)
            answered(send(load.first_of_each(), title=f"{policy}: first answers"), log)
            burst_s = answered(send(load.burst(), title=f"{policy}: warm-up"), log)
            yield endpoint, burst_s
            server.check()


def _say(console: Console, policy: str, text: str) -> None:
    console.print(f"{policy}: {text}", highlight=False)


def answered(observations: Sequence[Observation], log: Path) -> float:
    """Seconds from a request to its last token, on average. ServerError when one failed."""
    if failed := [observation.error for observation in observations if observation.error]:
        raise ServerError(f"a request of the warm-up failed: {failed[0]}\n{tail(log)}")
    return sum(observation.ended_us - observation.sent_us for observation in observations) / len(observations) / 1e6


def targets_of(cluster: ClusterConfig) -> dict[str, Targets]:
    """The promises in force, the scale of cluster.yaml applied."""
    return {service.name: Targets(service.ttft_us, service.tbt_us) for service in cluster.args.service_settings()}


def policy_names(text: str) -> list[str]:
    """A list with commas, each ``name`` or ``name@tokens``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    bad = [name for name in names if not re.fullmatch(r"[a-z0-9-]+(@[1-9]\d*)?", name)]
    if bad or not names or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like fcfs,fcfs@64,halo-paper without repetitions")
    return names


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=ROOT / "cluster.yaml", help="default: this project's cluster.yaml"
    )
    parser.add_argument(
        "--policies",
        type=policy_names,
        default=["fcfs", "halo-paper", "halo"],
        metavar="NAME[@TOKENS],...",
        help="default fcfs,halo-paper,halo",
    )
    parser.add_argument(
        "--rate",
        type=positive,
        help="requests per second, all services together; default: as many as keep 16 under way",
    )
    parser.add_argument("--seconds", type=positive, default=40.0, help="length of the arrival window; default 40")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, prompts and lengths; default 1")
    parser.add_argument(
        "--tolerance-ms", type=float, default=10.0, help="allowed on every gap, for network and client; default 10"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True)
    begun = time.monotonic()
    try:
        cluster = load_cluster(options.config)
        targets = targets_of(cluster)
        load = Load(list(targets), options.rate, options.seconds, options.seed)
        outcomes = {name: run_policy(name, cluster, load, options, console) for name in options.policies}
    except (ConfigErrors, ServerError, OSError) as error:
        console.print(f"demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted")
        return 130
    reports = {name: outcome.reports for name, outcome in outcomes.items()}
    print_reports(wide_console(), reports, targets, round(options.tolerance_ms * 1000))
    console.print(f"took {time.monotonic() - begun:.0f} s")
    if options.json:
        print(json.dumps({"policies": {n: to_json(o.reports, o.observations) for n, o in outcomes.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
