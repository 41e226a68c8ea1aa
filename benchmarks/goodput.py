"""The highest request rate at which promises are kept, policy by policy, on the real server.

    python -m benchmarks.goodput --policies halo,fcfs --json
    python -m benchmarks.goodput --policies halo,fcfs@48,fcfs@64,fcfs@96 --seconds 300 --seeds 1,2,3 --minutes 0

A rate holds when at least 99 % of its requests met both targets: the first token in time, and every gap between the
tokens as the client got them. Rates are steps of 10 % from one that keeps about 16 requests under way; the search goes
up or down from there until it has a rate that holds beside one that does not. All policies get the same requests at the
same rate, and the same server settings. ``fcfs`` runs with the step budget measured at start-up; name budgets (fcfs@64)
to find its best one. Policies other than the first run first; the first one is also measured at the lowest rate at
which one of them failed, to compare TTFT there.

--minutes is the time for all policies together, half an hour without limit (0) or less: a policy whose time is up
reports the best rate it had, and ``bracketed`` false. The last line with --json is {"policies": {NAME: {"max_rps": x,
"p99_ttft_ms": {SERVICE: x}, ...}}}; p99_ttft_ms is at ``compared_rps``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.config import ClusterConfig, ConfigErrors, load_cluster
from benchmarks.attainment import Observation, Targets, quantile_ms
from benchmarks.demo import Load, policy_names, positive, targets_of, warmed_server, workload
from benchmarks.driver import Endpoint, drive
from benchmarks.report_table import wide_console
from benchmarks.server import ROOT, ServerError

HOLDS = 0.99
STEP = 1.1


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate under one policy, all seeds together."""

    rate: float
    requests: int
    met: float
    deadlines_met: float
    p99_ttft_ms: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """Whether the promises were kept."""
        return self.met >= HOLDS


def judged(
    rate: float, observations: Sequence[Observation], targets: Mapping[str, Targets], tolerance_us: int
) -> Probe:
    """What ``observations`` say about a rate. A failed request met nothing and has no TTFT; see ``attainment``."""
    verdicts = [(o.service, o.judge(targets[o.service], tolerance_us)) for o in observations]
    ttfts: dict[str, list[int]] = {}
    for service, verdict in verdicts:
        if verdict.ttft_us is not None:
            ttfts.setdefault(service, []).append(verdict.ttft_us)
    count = max(1, len(verdicts))
    return Probe(
        rate,
        len(verdicts),
        sum(v.ttft_met and v.tbt_met for _, v in verdicts) / count,
        sum(v.deadlines_met for _, v in verdicts) / count,
        {service: quantile_ms(values, 0.99) or 0.0 for service, values in sorted(ttfts.items())},
    )


@dataclass(slots=True)
class Search:
    """Finds the highest step that holds, as few steps as it can; steps count from a starting rate.

    ``out_of_time`` is asked before every probe but the first.
    """

    holds: Callable[[int], bool]
    out_of_time: Callable[[], bool] = lambda: False
    seen: dict[int, bool] = field(default_factory=dict)

    def run(self, *, lowest: int = -24, highest: int = 24) -> tuple[int | None, bool]:
        """The highest step that holds (None when none did) and whether its next one was seen to fail."""
        low, high, stride = None, None, 2
        step = 0
        while low is None or high is None or high - low > 1:
            if self.seen and self.out_of_time():
                return low, False
            self.seen[step] = self.holds(step)
            if self.seen[step]:
                low = step
            else:
                high = step
            if low is not None and high is not None:
                step = (low + high) // 2
                continue
            step += stride if self.seen[step] else -stride
            stride *= 2
            if step > highest or step < lowest:
                return low, False
        return low, True


@dataclass(slots=True)
class Bench:
    """Settings of a run, and what was found."""

    cluster: ClusterConfig
    seconds: float
    seeds: Sequence[int]
    tolerance_us: int
    console: Console
    start_rate: float | None
    ends_at: float | None
    probes: dict[str, dict[float, Probe]] = field(default_factory=dict)
    bracketed: dict[str, bool] = field(default_factory=dict)

    def run(self, policies: Sequence[str]) -> None:
        """Search every policy's rate, the first policy last."""
        order = [*policies[1:], policies[0]]
        for place, policy in enumerate(order):
            self._serve(policy, remaining=len(order) - place, compare=place == len(order) - 1 and len(order) > 1)

    def compared_rate(self, policies: Sequence[str]) -> float | None:
        """The lowest rate at which one of the opponents failed."""
        failed = [p.rate for policy in policies[1:] for p in self.probes[policy].values() if not p.holds]
        return min(failed, default=None)

    def _serve(self, policy: str, remaining: int, compare: bool) -> None:
        begun = time.monotonic()
        share_s = None if self.ends_at is None else (self.ends_at - begun) / remaining
        targets = targets_of(self.cluster)
        self.probes[policy] = {}
        load = Load(list(targets), self.start_rate, self.seconds, 1)
        with warmed_server(policy, self.cluster, load, self.console) as (endpoint, burst_s):
            load.settle_rate(burst_s)
            self.start_rate = load.rate
            patient = replace(endpoint, timeout_s=max(endpoint.timeout_s, 3 * self.seconds))

            def out_of_time() -> bool:
                return share_s is not None and time.monotonic() - begun + self._probe_s() > share_s

            def at(rate: float) -> Probe:
                return self._probe(policy, patient, rate, targets)

            if compare and (rate := self.compared_rate([policy, *(p for p in self.probes if p != policy)])):
                at(rate)
            search = Search(lambda step: at(self.rate_of(step)).holds, out_of_time)
            _, self.bracketed[policy] = search.run()

    def rate_of(self, step: int) -> float:
        """The rate of a step of the search."""
        return round((self.start_rate or 1.0) * STEP**step, 3)

    def _probe_s(self) -> float:
        """How long a probe takes, the answers to its last requests included."""
        return len(self.seeds) * self.seconds * 1.3

    def _probe(self, policy: str, endpoint: Endpoint, rate: float, targets: Mapping[str, Targets]) -> Probe:
        done = self.probes[policy]
        if rate not in done:
            observations: list[Observation] = []
            for seed in self.seeds:
                requests = workload(list(targets), rate, self.seconds, seed)
                title = f"{policy} at {rate:g}/s, seed {seed}:"
                observations += drive(
                    endpoint, requests, targets, title=title, console=self.console, tolerance_us=self.tolerance_us
                )
            done[rate] = judged(rate, observations, targets, self.tolerance_us)
            self.console.print(f"{policy}: {done[rate].met:.1%} met both at {rate:g} a second", highlight=False)
        return done[rate]

    def results(self, policies: Sequence[str]) -> dict[str, Any]:
        """Everything found, as JSON values."""
        compared = self.compared_rate(policies)
        found: dict[str, Any] = {}
        for policy in policies:
            probes = self.probes[policy]
            held = [probe.rate for probe in probes.values() if probe.holds]
            at = probes.get(compared) if compared is not None else None
            found[policy] = {
                "max_rps": max(held, default=0.0),
                "bracketed": self.bracketed[policy],
                "p99_ttft_ms": dict(at.p99_ttft_ms) if at else {},
                "probes": [
                    {"rps": p.rate, "requests": p.requests, "met": p.met, "deadlines_met": p.deadlines_met}
                    for p in sorted(probes.values(), key=lambda p: p.rate)
                ],
            }
        return {"policies": found, "compared_rps": compared, "seconds": self.seconds, "seeds": list(self.seeds)}


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """A table of the policies."""
    compared = results["compared_rps"]
    table = Table("policy", "highest rate", "P99 TTFT" + (f" at {compared:g}/s" if compared else ""), "rates tried")
    for name, found in results["policies"].items():
        ttfts = ", ".join(f"{service} {value:.0f} ms" for service, value in found["p99_ttft_ms"].items())
        tried = ", ".join(f"{probe['rps']:g}: {probe['met']:.1%}" for probe in found["probes"])
        if found["max_rps"]:
            rate = f"{found['max_rps']:g}/s" + ("" if found["bracketed"] else " or more")
        else:
            rate = "none tried held"
        table.add_row(name, rate, ttfts or "-", tried)
    console.print(table)


def seed_list(text: str) -> list[int]:
    """A list with commas."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 1,2,3") from None
    if min(seeds) < 0 or len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} has a negative or repeated seed")
    return seeds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "cluster.yaml", help="default: this project's")
    parser.add_argument("--policies", type=policy_names, default=["halo", "fcfs"], metavar="NAME[@TOKENS],...")
    parser.add_argument("--seconds", type=positive, default=45.0, help="arrival window of one rate; default 45")
    parser.add_argument("--seeds", type=seed_list, default=[1], help="every rate is run with each; default 1")
    parser.add_argument("--rate", type=positive, help="where the search starts; default: 16 requests under way")
    parser.add_argument("--minutes", type=float, default=14.0, help="for all policies together, 0 without limit")
    parser.add_argument("--tolerance-ms", type=float, default=10.0, help="allowed on every gap; default 10")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True)
    ends_at = time.monotonic() + 60 * options.minutes if options.minutes > 0 else None
    try:
        bench = Bench(
            load_cluster(options.config),
            options.seconds,
            options.seeds,
            round(options.tolerance_ms * 1000),
            console,
            options.rate,
            ends_at,
        )
        bench.run(options.policies)
    except (ConfigErrors, ServerError, OSError) as error:
        console.print(f"goodput: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("goodput: interrupted")
        return 130
    results = bench.results(options.policies)
    print_results(wide_console(), results)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
