"""The GPU that a `MeasuringProcess` measures: torch's first device, with vLLM's kernels."""

from __future__ import annotations

import random

from deployments.partition_host import DeviceInfo
from partition.analytic_device import GPU_PROFILES, AnalyticPair, noisy
from partition.configs import Config, MeasurementError, Reading
from partition.pair_shapes import LayerPair

CUDA_DEVICE = ("deployments.partition_device:CudaPairDevice",)


def simulated_device(profile: str) -> tuple[str, str]:
    """The device of `SimulatedPairDevice`, for a ``MeasuringProcess``."""
    return "deployments.partition_device:SimulatedPairDevice", profile


class CudaPairDevice:
    """Keeps the kernels of the pair measured last; a search asks for one pair at a time."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415

        if not torch.cuda.is_available():
            raise MeasurementError("this machine has no CUDA device that torch can use")
        from vllm_plugin.green_contexts import GreenDevice  # noqa: PLC0415

        torch.cuda.set_device(0)
        torch.cuda.current_stream()  # makes the primary context current before cuda-python looks for one
        self._green = GreenDevice(0)
        self._pair: LayerPair | None = None

    def describe(self) -> DeviceInfo:
        """The GPU's name and SMs, and the driver's CUDA version as cuda-python reports it."""
        from cuda.bindings import driver  # type: ignore[import-not-found]  # noqa: PLC0415

        _, version = driver.cuDriverGetVersion()
        return DeviceInfo(self._green.name, str(version), self._green.geometry)

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        """One measurement of ``pair``."""
        from vllm_plugin.pair_timer import CudaGraphTimer, PairTimer, VllmPairWork  # noqa: PLC0415

        if pair != self._pair:
            self._timer = PairTimer(self._green, VllmPairWork(pair, "cuda"), CudaGraphTimer())
            self._pair = pair
        return self._timer.measure(config)


class SimulatedPairDevice:
    """An analytic GPU with 1 % noise, for machines without one. Every time it gives is simulated."""

    def __init__(self, profile: str) -> None:
        if profile not in GPU_PROFILES:
            raise MeasurementError(f"there is no analytic GPU {profile!r}; there are {', '.join(GPU_PROFILES)}")
        self._profile = GPU_PROFILES[profile]
        self._noise = random.Random(0)  # noqa: S311 - a reproducible device, nothing secret

    def describe(self) -> DeviceInfo:
        """The profile's name, marked as simulated."""
        return DeviceInfo(f"{self._profile.name} (simulated)", "analytic", self._profile.geometry)

    def measure(self, pair: LayerPair, config: Config) -> Reading:
        """One simulated measurement."""
        return noisy(AnalyticPair(self._profile, pair), lambda: self._noise.gauss(0, 1), 0.01)(config)
