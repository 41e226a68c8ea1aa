"""How fast the simulator is: a 20-minute trace of the hospital scenario on one core, per policy.

    python -m benchmarks.simulator_speed --json

Arrivals follow the shape of the Azure 2023 conversation trace (rate over 10-second bins, Poisson inside) at 13 requests
per second, on the profile llama3-8b-a100-80g.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from scheduling.registry import POLICIES
from simulator.arrivals import envelope
from simulator.hardware_profile import load_profile
from simulator.scenario import load_scenario
from simulator.summary import summarise
from simulator.system import Deployment, System, simulate
from simulator.trace_files import load_azure


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU seconds that one policy's run took."""

    policy: str
    seconds: float
    requests: int
    steps: int
    ttft_met: float | None


def measure(policy: str, rate: float, seconds: float) -> Speed:
    """Run one policy."""
    scenario = load_scenario("hospital")
    trace = load_azure()
    arrivals = scenario.compose(envelope([row.at_us for row in trace.rows], rate, seconds, 1), 1)
    deployment = Deployment(load_profile("llama3-8b-a100-80g"))
    started = time.process_time()
    result = simulate(System(policy), deployment, scenario, arrivals, seed=1)
    took = time.process_time() - started
    figures = summarise(result)
    return Speed(policy, round(took, 2), len(arrivals), figures.steps, figures.total.ttft_met)


def main() -> None:
    """Print seconds, requests and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="one policy; may be repeated")
    parser.add_argument("--rate", type=float, default=13.0, help="requests per second")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds = [measure(policy, args.rate, args.minutes * 60) for policy in args.policy or list(POLICIES)]
    if args.json:
        print(json.dumps([asdict(speed) for speed in speeds], indent=1))
        return
    for speed in speeds:
        print(f"{speed.policy:12} {speed.seconds:6.2f} s for {speed.requests} requests, {speed.steps} steps")


if __name__ == "__main__":
    main()
