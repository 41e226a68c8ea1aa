"""The simulated queue against queueing theory, where the answer is known."""

import random
from statistics import fmean

import pytest

from scheduling.policy import Limits
from scheduling.registry import make_policy
from scheduling.request import ReleasePolicy
from simulator.arrivals import poisson
from simulator.cluster import Cluster, RunResult
from simulator.replica import Replica, Step
from simulator.step_times import constant_time
from simulator.workload import Arrival, Service

ONE_AT_A_TIME = Limits(step_tokens=100_000, running=1, adapters=0, kv_blocks=100_000, kv_block_tokens=16)
SERVICE = Service("svc", 1_000_000, 1_000_000, release=ReleasePolicy.OFF)


def run(
    arrivals: list[Arrival], step_time, limits: Limits = ONE_AT_A_TIME, on_step=None, replicas: int = 1
) -> RunResult:
    hosts = [Replica(make_policy("fcfs", batch=100_000), limits, step_time, on_step=on_step) for _ in range(replicas)]
    return Cluster([SERVICE], hosts).run(arrivals)


def mean_wait_us(result: RunResult, service_us) -> float:
    return fmean(t.ended_us - t.arrival.at_us - service_us(t) for t in result.tracks)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_md1(load):
    """With Poisson arrivals and constant service the mean wait is D * load / (2 (1 - load)) (Pollaczek, Khinchine)."""
    service_us = 10_000
    waits = []
    for seed in range(5):
        arrivals = [Arrival(at, "svc", 1, 1) for at in poisson(load * 1e6 / service_us, 60, seed)]
        waits.append(mean_wait_us(run(arrivals, constant_time(service_us)), lambda _: service_us))
    assert fmean(waits) == pytest.approx(service_us * load / (2 * (1 - load)), rel=0.08)


def test_mm1():
    """With Poisson arrivals and exponential service the mean wait is S * load / (1 - load)."""
    load, mean_us = 0.6, 10_000
    waits = []
    for seed in range(4):
        rng = random.Random(seed)
        times = poisson(load * 1e6 / mean_us, 80, seed)
        arrivals = [Arrival(at, "svc", max(1, round(rng.expovariate(1 / 1000))), 1) for at in times]
        result = run(arrivals, lambda shape: (10 * shape.prefill_tokens, False))
        waits.append(mean_wait_us(result, lambda t: 10 * t.arrival.prompt_tokens))
    assert fmean(waits) == pytest.approx(mean_us * load / (1 - load), rel=0.08)


def test_littles_law():
    """Time spent running, summed over steps, is that summed over requests; a wait is half a step on average."""
    limits = Limits(step_tokens=100_000, running=64, adapters=0, kv_blocks=100_000, kv_block_tokens=16)
    held_us = 0

    def on_step(step: Step) -> None:
        nonlocal held_us
        held_us += (len(step.decodes) + len(step.prompts)) * (step.end_us - step.start_us)

    arrivals = [Arrival(at, "svc", 10, 20) for at in poisson(50, 60, 3)]
    result = run(arrivals, constant_time(10_000), limits, on_step)
    assert all(track.done for track in result.tracks)
    # 20 steps of 10 ms each, one of them for the prompt.
    assert held_us == len(arrivals) * 20 * 10_000
    waits = [t.ended_us - t.arrival.at_us - 200_000 for t in result.tracks]
    assert min(waits) >= 0
    assert fmean(waits) == pytest.approx(5_000, abs=500), "an arrival waits for the rest of the step in progress"


def test_two_replicas_share_the_load():
    """At the load of 0.8 on one replica each of two gets half of the requests and nobody waits for a third."""
    arrivals = [Arrival(at, "svc", 1, 1) for at in poisson(80, 100, 5)]
    one = mean_wait_us(run(arrivals, constant_time(10_000)), lambda _: 10_000)
    result = run(arrivals, constant_time(10_000), replicas=2)
    two = mean_wait_us(result, lambda _: 10_000)
    counts = [sum(t.replica == index for t in result.tracks) for index in (0, 1)]
    # Ties go to the first one, which therefore gets more.
    assert counts[0] > counts[1] > 0.2 * len(arrivals)
    assert two < one / 5
