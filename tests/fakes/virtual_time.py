"""An event loop whose clock jumps to the next timer instead of waiting: seconds pass in no time, always alike."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Reports what is ready now; when nothing is, moves the loop's clock on instead of sleeping."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select(None)
        self.loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For tests: ``loop_factory=VirtualTimeLoop``. Code under test takes its clock from ``virtual_us``."""

    def __init__(self, *arguments: Any) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._virtual_s = 1000.0
        super().__init__(selector, *arguments)

    def time(self) -> float:
        """The loop's clock."""
        return self._virtual_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Rounded up to whole microseconds, so that timers are due when their time has come."""
        self._virtual_s = (int((self._virtual_s + seconds) * 1e6) + 1) / 1e6


def virtual_us() -> int:
    """The running loop's clock in microseconds."""
    return int(asyncio.get_running_loop().time() * 1e6)
