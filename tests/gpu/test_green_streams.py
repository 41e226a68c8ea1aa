"""What only a GPU can show. Run with `pytest -m gpu tests/gpu`; nothing here has run yet (docs/partition.md)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from partition.configs import Layer, Solo, Split, Unsplit  # noqa: E402
from partition.pair_shapes import LLAMA3_8B, LayerPair  # noqa: E402


def timer():
    from vllm_plugin.green_contexts import GreenDevice  # noqa: PLC0415
    from vllm_plugin.pair_timer import CudaGraphTimer, PairTimer, VllmPairWork  # noqa: PLC0415

    device = GreenDevice(torch.cuda.current_device())
    return device, PairTimer(device, VllmPairWork(LayerPair(LLAMA3_8B[0], 16, 16, 4), "cuda"), CudaGraphTimer())


def test_side_by_side_computes_what_sequential_computes():
    """The pair's output on two partitions equals the sequential one within bfloat16 rounding."""
    from vllm_plugin.green_contexts import GreenDevice  # noqa: PLC0415
    from vllm_plugin.pair_timer import VllmPairWork  # noqa: PLC0415

    work = VllmPairWork(LayerPair(LLAMA3_8B[0], 16, 16, 4), "cuda")
    expected = work.base(0)
    work.lora_onto(expected, 0)
    device = GreenDevice(torch.cuda.current_device())
    size = max(16, device.geometry.smallest)
    base_stream, lora_stream = device.streams(Split(2 * size, size))
    current = torch.cuda.current_stream()
    for stream in (base_stream, lora_stream):
        stream.wait_stream(current)
    with torch.cuda.stream(base_stream):
        output = work.base(0)
    with torch.cuda.stream(lora_stream):
        delta = work.lora(0)
    torch.cuda.synchronize()
    torch.testing.assert_close((output + delta).float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_every_kind_of_configuration_can_be_measured_in_a_graph():
    """Solo, split, sequential and dual stream are captured and give times above zero and a stated spread."""
    device, pair = timer()
    size = max(16, device.geometry.smallest)
    for config in (Solo(Layer.BASE, 2 * size), Solo(Layer.LORA, size), Split(2 * size, size), *Unsplit):
        reading = pair.measure(config)
        assert reading.time_us > 0
        assert reading.spread < 0.2


def test_fewer_sms_take_longer():
    """A base layer on a few SMs takes clearly longer than on most of them: the partition confines the kernels."""
    device, pair = timer()
    sizes = device.geometry.sizes
    few = next(size for size in sizes if size >= 8)
    assert pair.measure(Solo(Layer.BASE, few)).time_us > 2 * pair.measure(Solo(Layer.BASE, sizes[-1])).time_us
