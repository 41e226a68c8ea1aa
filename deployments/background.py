"""Owned background tasks of one process: started here, stopped here, never awaited by the request that started them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """A set of tasks. Their failures are logged; ``stop`` waits for them a while, then cancels what is left.

    Tasks run in an empty context. In the context of a Serve request, calls to other deployments count as the request's
    children and are cancelled with it, and these tasks exist because of such cancellations.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine until it ends or ``stop`` is called."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self, grace_s: float) -> None:
        """Give the tasks ``grace_s`` to end by themselves, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background task %s failed", task.get_name(), exc_info=task.exception())
