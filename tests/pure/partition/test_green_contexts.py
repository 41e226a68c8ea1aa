"""vllm_plugin.green_contexts up to the driver call, against a cuda.core that implements its rules."""

from __future__ import annotations

import pytest

from partition.configs import MeasurementError, SmGeometry, Split
from tests.fakes.cuda_core import FakeCudaCore, SMResource
from vllm_plugin.green_contexts import GreenDevice


def device(**sm: object) -> tuple[GreenDevice, FakeCudaCore]:
    core = FakeCudaCore(SMResource(tuple(range(sm.pop("sms", 132))), **sm))
    return GreenDevice(0, core=core, wrap=lambda handle: handle), core


def test_two_streams_have_disjoint_sms_and_are_made_once() -> None:
    """A split's halves share no SM, have exactly the SMs asked for, and asking again makes nothing new."""
    green, core = device()
    assert green.streams(Split(100, 32)) == green.streams(Split(100, 32))
    base, lora = (set(context.resources[0].numbers) for context in core.made)
    assert (len(base), len(lora), base & lora) == (100, 32, set())
    assert len(core.made) == 2


@pytest.mark.parametrize(
    ("sm", "geometry"),
    [
        ({}, SmGeometry(132, 2, 2)),
        ({"sms": 131}, SmGeometry(131, 2, 2)),
        ({"min_partition_size": 4}, SmGeometry(132, 2, 4)),
        ({"min_partition_size": 8, "coscheduled_alignment": 8, "aligned": 8}, SmGeometry(132, 8, 8)),
        ({"min_partition_size": 8, "coscheduled_alignment": 8, "rounds_to": 8}, SmGeometry(132, 8, 8)),
    ],
)
def test_geometry_is_what_the_driver_cuts(sm: dict[str, int], geometry: SmGeometry) -> None:
    """The granule is two where the driver cuts in twos, else the driver's own."""
    assert device(**sm)[0].geometry == geometry


def test_groups_that_were_rounded_up_are_refused() -> None:
    """A driver that gives other counts than asked for would make every measurement one of something else."""
    green, core = device(min_partition_size=8, coscheduled_alignment=8, rounds_to=8)
    with pytest.raises(MeasurementError, match=r"asked NVIDIA H200 for \[20, 8\] SMs, the driver gave \[24, 8\]"):
        green.streams(Split(20, 8))
    assert core.made == []


def test_driver_errors_name_the_cut() -> None:
    """Whatever the driver raises becomes a reason to skip this cut."""
    green, _ = device(fails=True)
    with pytest.raises(MeasurementError, match=r"\(100, 32\) SMs: CUDAError: CUDA_ERROR_INVALID"):
        green.streams(Split(100, 32))
