"""cpu_waits: what waits for a step does not take a core from those who compute it."""

from __future__ import annotations

import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

from tests.vllm.engine_bench import SERVICES, Ask, Bench
from vllm_plugin.cpu_waits import install_cpu_waits
from vllm_plugin.scheduler import HaloScheduler

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU platform's queues")


def test_queues_sleep_at_once() -> None:
    """After the plug-in ran, a new queue does not spin; running it again changes nothing."""
    assert install_cpu_waits() == install_cpu_waits()
    assert SpinCondition.__init__.__defaults__ == (0.0,)


@pytest.mark.timeout(300)
def test_this_process_rests_while_the_worker_computes(bench: Bench) -> None:
    """The process that waits for steps, this one, uses a small part of their time."""
    bench.use(HaloScheduler, "fcfs", batch=256)
    asks = [Ask("The patient reports chest pain. " * 20, service, 24) for service in SERVICES]
    wall, cpu = time.monotonic(), time.process_time()
    bench.run(asks)
    assert time.process_time() - cpu < 0.5 * (time.monotonic() - wall)
