"""Writes what the scheduler and its policy told each other to a file (:mod:`scheduling.trace`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from vllm.logger import init_logger

from scheduling.policy import Limits, StepPlan, StepRecord, View
from scheduling.trace import Entry, TraceEncoder

logger = init_logger(f"vllm.{__name__}")

MAX_BYTES = 1024**3
FLUSH_EVERY = 64

_numbers = count(1)


class TraceFile:
    """One JSON entry a line, in ``directory``. A full disk, or :data:`MAX_BYTES`, ends the trace, not the engine."""

    def __init__(
        self,
        directory: Path,
        policy: str,
        options: dict[str, Any],
        limits: Limits,
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        number = next(_numbers)
        self.path = directory / f"steps-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{number}.jsonl"
        self._encoder = TraceEncoder()
        self._file: TextIO | None = None
        self._left = max_bytes
        self._unflushed = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", encoding="utf-8")
        except OSError as error:
            logger.warning("No scheduler trace: %s", error)
            return
        self._write([self._encoder.header(policy, options, limits)])
        logger.info("Scheduler trace goes to %s", self.path)

    def step(self, view: View, plan: StepPlan) -> None:
        """Write a view and its plan."""
        if self._file:
            self._write([*self._encoder.view(view), self._encoder.plan(plan)])

    def record(self, record: StepRecord) -> None:
        """Write a finished step."""
        if self._file:
            self._write([self._encoder.record(record)])

    def forget(self, request_id: str) -> None:
        """Write that a request is gone."""
        if self._file:
            self._write(self._encoder.forget(request_id))

    def close(self) -> None:
        """Write what is buffered."""
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, entries: Iterable[Entry]) -> None:
        file = self._file
        if file is None:
            return
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)
        self._left -= len(text)
        try:
            if self._left < 0:
                raise OSError(f"{self.path} has reached its largest size")
            file.write(text)
            self._unflushed += 1
            if self._unflushed >= FLUSH_EVERY:
                file.flush()
                self._unflushed = 0
        except OSError as error:
            logger.warning("The scheduler trace ends: %s", error)
            self._file = None
            try:
                file.close()
            except OSError:
                logger.warning("The end of %s may be missing", self.path)
