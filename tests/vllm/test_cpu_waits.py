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


def test_a_reader_sleeps_at_once() -> None:
    """A queue's reader that just read sleeps until its time-out and computes nothing; installing twice is harmless."""
    assert install_cpu_waits() == install_cpu_waits()
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    writer = SpinCondition(is_reader=False, context=context, notify_address=address)
    reader = SpinCondition(is_reader=True, context=context, notify_address=address)
    try:
        reader.record_read()
        wall, cpu = time.monotonic(), time.thread_time()
        reader.wait(timeout_ms=200)
        assert time.monotonic() - wall > 0.15
        assert time.thread_time() - cpu < 0.05
    finally:
        for condition in (reader, writer):
            condition.local_notify_socket.close(linger=0)
        reader.write_cancel_socket.close(linger=0)
        reader.read_cancel_socket.close(linger=0)
        context.term()
