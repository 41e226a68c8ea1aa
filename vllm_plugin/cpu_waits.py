"""Waiting without burning a core: EngineCore and worker of a CPU engine.

vLLM's shared-memory queue spins with ``sched_yield`` for a second after its last message before it goes to sleep
(``SpinCondition`` in ``vllm/distributed/device_communicators/shm_broadcast.py``). While a step runs, EngineCore spins
for its result; between steps the worker spins for the next one. That suits a GPU server with cores to spare. On a CPU
engine the spinning process takes a core from the very threads that compute the step. Here each turn of the spin sleeps
for a moment instead.

Going to sleep on the queue's socket at once was tried and is wrong: its notifications may be dropped, and both sides
then wait for ever.
"""

from __future__ import annotations

import time

from vllm.platforms import current_platform

from vllm_plugin.compat import UpstreamChangedError

TURN_S = 50e-6


def install_cpu_waits() -> str:
    """Make queues in this process sleep between looks; calling it again changes nothing.

    Raises `UpstreamChangedError` when vLLM's queue no longer yields through the name that is replaced.
    """
    if not current_platform.is_cpu():
        return "not needed: no CPU engine"
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415

    if not callable(getattr(shm_broadcast, "sched_yield", None)):
        raise UpstreamChangedError("vllm.distributed.device_communicators.shm_broadcast.sched_yield is gone")
    shm_broadcast.sched_yield = sleep_a_turn
    return "active: EngineCore and workers sleep between looks at their queues"


def sleep_a_turn() -> None:
    """Give the core away for `TURN_S`."""
    time.sleep(TURN_S)
