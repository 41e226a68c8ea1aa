"""The measuring process with the real torch, where there is no GPU for it."""

from __future__ import annotations

import pytest
import torch

from deployments.partition_device import CUDA_DEVICE
from deployments.partition_host import MeasuringProcess
from partition.configs import MeasurementError


def test_torch_without_a_gpu_is_a_sentence() -> None:
    """Made in the child, the device says that it has no GPU; nothing else fails before."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with (
        MeasuringProcess(CUDA_DEVICE) as process,
        pytest.raises(MeasurementError, match="this machine has no CUDA device that torch can use"),
    ):
        process.describe()
