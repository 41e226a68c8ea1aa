"""cpu_waits: what waits for a step does not take a core from those who compute it."""

from __future__ import annotations

import time

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_zmq_ipc_path

from vllm_plugin.cpu_waits import install_cpu_waits

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU platform's queues")


def test_a_spinning_reader_computes_little() -> None:
    """A reader that spins for 0.3 s looks often but uses little of a core; installing twice is harmless."""
    assert install_cpu_waits() == install_cpu_waits()
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    writer = SpinCondition(is_reader=False, context=context, notify_address=address)
    reader = SpinCondition(is_reader=True, context=context, notify_address=address)
    try:
        looks, begun, cpu = 0, time.monotonic(), time.thread_time()
        reader.record_read()
        while time.monotonic() - begun < 0.3:
            reader.wait(timeout_ms=200)
            looks += 1
        assert looks > 100
        assert time.thread_time() - cpu < 0.15
    finally:
        for condition in (reader, writer):
            condition.local_notify_socket.close(linger=0)
        reader.write_cancel_socket.close(linger=0)
        reader.read_cancel_socket.close(linger=0)
        context.term()
