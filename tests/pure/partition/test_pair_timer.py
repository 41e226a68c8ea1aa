"""vllm_plugin.pair_timer up to the driver call: which kernels run where, and what a reading states."""

from __future__ import annotations

import random

import pytest

from partition.configs import Layer, MeasurementError, Solo, Split, Unsplit
from partition.pair_shapes import LLAMA3_8B, LayerPair
from tests.fakes.cuda_core import FakeCudaCore, SMResource
from vllm_plugin.green_contexts import GreenDevice
from vllm_plugin.pair_timer import PairTimer, copies_of, median_reading


class Work:
    """Kernels that note their names."""

    copies = 2

    def __init__(self) -> None:
        self.ran: list[object] = []

    def base(self, copy: int) -> str:
        self.ran.append(("base", copy))
        return f"output {copy}"

    def lora(self, copy: int) -> None:
        self.ran.append(("lora", copy))

    def lora_onto(self, output: str, copy: int) -> None:
        self.ran.append(("lora onto", output, copy))

    def together(self, copy: int, base_stream: object, lora_stream: object) -> None:
        self.ran.append(("together", copy, base_stream, lora_stream))


class Timer:
    """Runs the work once and reports 20 us a replay."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.streams = failure, []

    def times_us(self, work, stream, replays) -> list[float]:
        if self.failure is not None:
            raise self.failure
        self.streams.append(stream)
        work()
        return [20.0] * replays


def pair_timer(timer: Timer) -> tuple[PairTimer, Work]:
    work = Work()
    core = FakeCudaCore(SMResource(tuple(range(132))))
    return PairTimer(GreenDevice(core=core, wrap=lambda handle: f"stream {len(core.made)}"), work, timer), work


def test_each_configuration_runs_its_kernels_on_its_streams() -> None:
    """Solo on one green stream, a split on two, sequential and dual stream on none; every copy once; time per copy."""
    timer = Timer()
    measure, work = pair_timer(timer)
    assert measure.measure(Unsplit.SEQUENTIAL).time_us == 10.0
    assert work.ran == [("base", 0), ("lora onto", "output 0", 0), ("base", 1), ("lora onto", "output 1", 1)]
    work.ran.clear()
    measure.measure(Solo(Layer.LORA, 24))
    measure.measure(Split(96, 24))
    measure.measure(Unsplit.DUAL_STREAM)
    assert work.ran == [
        ("lora", 0),
        ("lora", 1),
        ("together", 0, "stream 2", "stream 3"),
        ("together", 1, "stream 2", "stream 3"),
        ("together", 0, None, None),
        ("together", 1, None, None),
    ]
    assert timer.streams == [None, "stream 1", None, None]


def test_what_cuda_reports_is_a_reason_to_skip() -> None:
    """A failing capture or replay becomes a MeasurementError that names the configuration."""
    measure, _ = pair_timer(Timer(RuntimeError("CUDA error: operation not permitted when stream is capturing")))
    with pytest.raises(MeasurementError, match=r"96\+24 SMs: CUDA error: operation not permitted"):
        measure.measure(Split(96, 24))


def test_the_stated_spread_is_the_medians() -> None:
    """Over many samples of noisy replays, medians scatter as their readings say, within a third."""
    draw = random.Random(3)
    readings = [median_reading([draw.gauss(100, 5) for _ in range(15)]) for _ in range(400)]
    scatter = (sum((reading.time_us - 100) ** 2 for reading in readings) / len(readings)) ** 0.5 / 100
    stated = sum(reading.spread for reading in readings) / len(readings)
    assert stated == pytest.approx(scatter, rel=0.33)


def test_copies_exceed_every_cache() -> None:
    """Small layers are copied often, large ones at least once."""
    assert [copies_of(LayerPair(group, 16, 16, 4)) for group in LLAMA3_8B] == [6, 8, 2, 3]
