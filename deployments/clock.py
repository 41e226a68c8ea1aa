"""The monotonic clock of one process, in integer microseconds. Its readings never travel to another process."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]


def monotonic_us() -> int:
    """Microseconds on this process' monotonic clock."""
    return time.monotonic_ns() // 1000
