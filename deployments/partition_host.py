"""Measures layer pairs in a process of its own, which can be ended when the GPU hangs.

A hanging kernel cannot be interrupted from inside its process, and a CUDA context that failed stays failed. So the
child is ended and started anew, and the search sees a `MeasurementError` with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from partition.configs import Config, MeasurementError, Reading, SmGeometry
from partition.pair_shapes import LayerPair

START_TIMEOUT_S = 180.0
MEASURE_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a table is keyed by, as the measuring process sees it."""

    name: str
    driver: str
    geometry: SmGeometry


class PairDevice(Protocol):
    """What the child makes: a device that describes itself and measures pairs."""

    def describe(self) -> DeviceInfo:
        """Name, driver and geometry. Raises `MeasurementError` where there is no device."""

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        """One measurement. Raises `MeasurementError`."""


class MeasuringProcess:
    """A child process around a `PairDevice`. Use it in a ``with`` block.

    ``device``: the ``module:callable`` that makes it in the child, and its arguments.
    """

    def __init__(
        self,
        device: Sequence[str],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        measure_timeout_s: float = MEASURE_TIMEOUT_S,
    ) -> None:
        self._device, self._start_timeout_s, self._measure_timeout_s = tuple(device), start_timeout_s, measure_timeout_s
        self._child: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def describe(self) -> DeviceInfo:
        """What the device is. Raises `MeasurementError`."""
        info = self._ask(None, self._start_timeout_s)
        assert isinstance(info, DeviceInfo)
        return info

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        """One measurement. Raises `MeasurementError`, also when the child died or gave no answer in time."""
        if self._pipe is None:
            self.describe()  # a child that was just started needs longer than a measurement
        reading = self._ask((pair, config), self._measure_timeout_s)
        assert isinstance(reading, Reading)
        return reading

    def _ask(self, question: tuple[LayerPair, Config] | None, timeout_s: float) -> DeviceInfo | Reading:
        pipe = self._pipe or self._start()
        try:
            pipe.send(question)
            if not pipe.poll(timeout_s):
                self._end()
                raise MeasurementError(f"no result within {timeout_s:g} s; the measuring process was ended")
            answer = pipe.recv()
        except (EOFError, OSError):
            self._end()
            raise MeasurementError("the measuring process died") from None
        if isinstance(answer, str):
            raise MeasurementError(answer)
        assert isinstance(answer, (DeviceInfo, Reading))
        return answer

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, self._device), daemon=True)
        self._child.start()
        theirs.close()
        return self._pipe

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._child is not None:
            self._child.kill()
            self._child.join(END_TIMEOUT_S)
            self._child = None


def _serve(pipe: Connection, device_path: tuple[str, ...]) -> None:
    """The child: answer questions until the parent closes the pipe."""
    device: PairDevice | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = pipe.recv()
            try:
                if device is None:
                    module, _, name = device_path[0].partition(":")
                    device = getattr(importlib.import_module(module), name)(*device_path[1:])
                answer: object = device.describe() if question is None else device.measure(*question)
            except Exception as error:  # it crosses the process as its message; the parent decides
                answer = str(error) if isinstance(error, MeasurementError) else f"{type(error).__name__}: {error}"
            pipe.send(answer)
