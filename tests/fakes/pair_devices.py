"""Devices for `deployments.partition_host.MeasuringProcess`, made in its child: well-behaved, absent, and harmful."""

from __future__ import annotations

import os
import time
from pathlib import Path

from deployments.partition_host import DeviceInfo
from partition.analytic_device import GPU_PROFILES, AnalyticPair
from partition.configs import Config, MeasurementError, Reading, Split, Unsplit
from partition.pair_shapes import LayerPair


class CountingDevice:
    """An exact analytic H200 in eights that writes a line per pair it ran; times are multiplied by ``factor``."""

    def __init__(self, log: str, factor: str = "1") -> None:
        self._log, self._factor = Path(log), float(factor)
        self._profile = GPU_PROFILES["H200/8"]

    def describe(self) -> DeviceInfo:
        return DeviceInfo("fake H200", "580", self._profile.geometry)

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        if isinstance(config, Split | Unsplit):
            with self._log.open("a") as log:
                log.write(f"{pair.group.name} {pair.tokens} {config}\n")
        return Reading(AnalyticPair(self._profile, pair).time_us(config) * self._factor, 0.0)


class HarmfulDevice(CountingDevice):
    """Hangs on one split, dies on another, fails on dual stream."""

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        if config == Split(64, 64):
            time.sleep(60)
        if config == Split(72, 56):
            os._exit(3)
        if config is Unsplit.DUAL_STREAM:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().measure(pair, config)


class NoDevice:
    """A machine without a GPU."""

    def __init__(self) -> None:
        raise MeasurementError("this machine has no CUDA device that torch can use")
