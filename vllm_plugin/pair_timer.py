"""Times one layer pair on a GPU: vLLM's own base and LoRA kernels at the real shapes, captured in a CUDA graph.

What is timed is what serving runs: fork from the capturing stream, base and LoRA on their streams, join, add. Several
copies of weights and adapters are run through in turn, so that no cache holds what serving would read from memory.

Nothing here has run on a GPU yet (docs/partition.md). Imports of torch and vLLM's GPU kernels happen in `CudaPair`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from partition.configs import Config, Layer, MeasurementError, Reading, Solo, Split, Unsplit
from partition.pair_shapes import BYTES, LayerPair
from vllm_plugin.green_contexts import GreenDevice

WARM_UP_REPLAYS = 3
REPLAYS = 15
COPIED_BYTES = 256 * 1024 * 1024
"""Copies together exceed every second-level cache there is (B200: 126 MB)."""
COPIES_MAX = 64


def median_reading(times_us: Sequence[float]) -> Reading:
    """The median of ``times_us`` and its relative standard error, from the median absolute deviation.

    For normal errors the deviation is 1.4826 of the median absolute deviation, and a median's error 1.2533 of a mean's.
    """
    middle = statistics.median(times_us)
    deviation = 1.4826 * statistics.median(abs(time_us - middle) for time_us in times_us)
    return Reading(middle, 1.2533 * deviation / math.sqrt(len(times_us)) / middle if middle > 0 else math.inf)


class GraphTimer(Protocol):
    """Captures work into a graph and times its replays."""

    def times_us(self, work: Callable[[], None], stream: Any | None, replays: int) -> list[float]:
        """Capture ``work`` on ``stream`` (None: one on all SMs) and time every replay; microseconds."""


class CudaGraphTimer:
    """`GraphTimer` on torch's current GPU."""

    def times_us(self, work: Callable[[], None], stream: Any | None, replays: int) -> list[float]:
        import torch  # noqa: PLC0415

        stream = stream if stream is not None else torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles Triton kernels and lets cuBLAS choose, outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_REPLAYS):
                graph.replay()
            for start, end in zip(starts, ends, strict=True):
                start.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]


class PairWork(Protocol):
    """The kernels of a pair; ``copy`` says which copy of the weights is read."""

    copies: int

    def base(self, copy: int) -> Any: ...
    def lora(self, copy: int) -> Any: ...
    def lora_onto(self, output: Any, copy: int) -> None: ...
    def together(self, copy: int, base_stream: Any | None, lora_stream: Any | None) -> None: ...


class PairTimer:
    """`partition.configs.Measure` for one pair. Streams come from ``device``, times from ``timer``."""

    def __init__(self, device: GreenDevice, work: PairWork, timer: GraphTimer) -> None:
        self._device, self._work, self._timer = device, work, timer

    def measure(self, config: Config) -> Reading:
        """One measurement: the median of `REPLAYS` replays, per copy. Raises `MeasurementError`."""
        run, stream = self._prepare(config)

        def all_copies() -> None:
            for copy in range(self._work.copies):
                run(copy)

        try:
            times_us = self._timer.times_us(all_copies, stream, REPLAYS)
        except RuntimeError as error:  # torch's class for whatever CUDA reports, out of memory included
            raise MeasurementError(f"{config}: {error}") from error
        return median_reading([time_us / self._work.copies for time_us in times_us])

    def _prepare(self, config: Config) -> tuple[Callable[[int], Any], Any | None]:
        work = self._work
        match config:
            case Solo(layer, sms):
                half = work.base if layer is Layer.BASE else work.lora
                return half, self._device.stream(sms)
            case Split():
                base_stream, lora_stream = self._device.streams(config)
                return lambda copy: work.together(copy, base_stream, lora_stream), None
            case Unsplit.DUAL_STREAM:
                return lambda copy: work.together(copy, None, None), None
            case Unsplit.SEQUENTIAL:
                return lambda copy: work.lora_onto(work.base(copy), copy), None


class VllmPairWork:
    """`PairWork` with ``F.linear`` (what vLLM's unquantised layers call) and ``PunicaWrapperGPU`` on torch's GPU.

    Rows use the pair's adapters evenly, every adapter with the full rank: a decode batch of all services.
    """

    def __init__(self, pair: LayerPair, device: Any) -> None:
        import torch  # noqa: PLC0415
        from vllm.lora.layers import LoRAMapping  # noqa: PLC0415
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU  # noqa: PLC0415

        group, bfloat16 = pair.group, torch.bfloat16
        self.copies = copies_of(pair)
        self._slices = group.slices
        self._x = torch.randn(pair.tokens, group.size_in, dtype=bfloat16, device=device)
        self._weights = torch.randn(self.copies, group.size_out, group.size_in, dtype=bfloat16, device=device) * 0.02
        self._a = [
            tuple(
                torch.randn(pair.adapters, 1, pair.rank, group.size_in, dtype=bfloat16, device=device) * 0.02
                for _ in group.slices
            )
            for _ in range(self.copies)
        ]
        self._b = [
            tuple(
                torch.randn(pair.adapters, 1, size, pair.rank, dtype=bfloat16, device=device) * 0.02
                for size in group.slices
            )
            for _ in range(self.copies)
        ]
        config = SimpleNamespace(
            max_loras=pair.adapters, max_lora_rank=pair.rank, specialize_active_lora=False, fully_sharded_loras=False
        )
        self._punica = PunicaWrapperGPU(pair.tokens, pair.tokens, device, lora_config=config)
        ids = tuple(row % pair.adapters + 1 for row in range(pair.tokens))
        self._punica.update_metadata(
            LoRAMapping(ids, ids), list(range(1, pair.adapters + 1)), pair.adapters, vocab_size=32_000
        )
        self._aux = torch.cuda.Stream()
        self._events = [torch.cuda.Event() for _ in range(3)]

    def base(self, copy: int) -> Any:
        """The base layer's product, (tokens, size_out)."""
        import torch  # noqa: PLC0415

        return torch.nn.functional.linear(self._x, self._weights[copy])

    def lora(self, copy: int) -> Any:
        """The LoRA product in an output of its own, (tokens, size_out)."""
        import torch  # noqa: PLC0415

        delta = torch.zeros(self._x.shape[0], sum(self._slices), dtype=self._x.dtype, device=self._x.device)
        self._punica.add_lora_linear(delta, self._x, self._a[copy], self._b[copy], 1.0, self._slices, add_inputs=False)
        return delta

    def lora_onto(self, output: Any, copy: int) -> None:
        """The LoRA product added onto ``output`` by the kernel itself, as vLLM's sequential path does."""
        self._punica.add_lora_linear(output, self._x, self._a[copy], self._b[copy], 1.0, self._slices)

    def together(self, copy: int, base_stream: Any | None, lora_stream: Any | None) -> None:
        """Both at once and the sum. Without streams: vLLM's own dual stream."""
        from vllm.utils.multi_stream_utils import (  # noqa: PLC0415
            execute_in_parallel,
            maybe_execute_in_parallel,
        )

        start, *done = self._events
        if base_stream is None:
            output, delta = maybe_execute_in_parallel(
                lambda: self.base(copy), lambda: self.lora(copy), start, done[0], self._aux
            )
        else:
            _, (output, delta) = execute_in_parallel(
                lambda: None,
                [lambda: self.base(copy), lambda: self.lora(copy)],
                start,
                done,
                [base_stream, lora_stream],
                enable=True,
            )
        output.add_(delta)


def copies_of(pair: LayerPair) -> int:
    """How many copies of the pair's weights exceed every cache, within reason."""
    group = pair.group
    adapters = pair.adapters * pair.rank * (group.size_in * len(group.slices) + group.size_out)
    return min(-(-COPIED_BYTES // (BYTES * (group.size_in * group.size_out + adapters))), COPIES_MAX)
