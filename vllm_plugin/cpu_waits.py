"""Waiting without burning a core: EngineCore and worker of a CPU engine.

vLLM's shared-memory queue spins for a second after its last message before it goes to sleep
(``SpinCondition`` in ``vllm/distributed/device_communicators/shm_broadcast.py``). While a step runs, EngineCore spins
for its result; between steps the worker spins for the next one. That suits a GPU server with cores to spare. On a CPU
engine the spinning process takes a core from the very threads that compute the step, so here both sleep on the queue's
socket at once, which wakes them when something is written.
"""

from __future__ import annotations

import inspect

from vllm.platforms import current_platform

from vllm_plugin.compat import UpstreamChangedError

_PARAMETER = "busy_loop_s"


def install_cpu_waits() -> str:
    """Make queues created from now on in this process sleep at once; calling it again changes nothing.

    Raises `UpstreamChangedError` when vLLM's queue no longer takes the time for which it spins.
    """
    if not current_platform.is_cpu():
        return "not needed: no CPU engine"
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    parameters = inspect.signature(SpinCondition.__init__).parameters
    if list(parameters)[-1] != _PARAMETER or parameters[_PARAMETER].default is inspect.Parameter.empty:
        raise UpstreamChangedError(f"SpinCondition no longer ends in an optional parameter {_PARAMETER}")
    defaults = SpinCondition.__init__.__defaults__ or ()
    SpinCondition.__init__.__defaults__ = (*defaults[:-1], 0.0)
    return "active: EngineCore and workers sleep while they wait for each other"
