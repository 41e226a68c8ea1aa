"""A GPU as arithmetic: what the searches are tested on where no GPU is.

Every figure it gives is simulated. The model: a kernel runs in waves of thread blocks over its SMs, the last wave
partly filled; a wave lasts as long as its blocks compute or as its bytes take, and an SM draws only so much bandwidth
(paper 4.2.1, Observation 1). Side by side, kernels share the memory's bandwidth in proportion to their demand and
lose a part of it to each other; forking and joining costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partition.configs import Config, Layer, Measure, Reading, SmGeometry, Solo, Split, Unsplit
from partition.pair_shapes import Kernel, LayerPair, base_kernels, lora_kernels

BANDWIDTH_REACHED = 0.9
RATE_REACHED = 0.7
"""The share of a data sheet's figures that kernels reach."""

ADDED_PASSES = 2.0
"""Zeroing an output and adding it to another are four passes over it, half of them served by the cache."""

ROUNDING = 1e-9
"""A phase of which less than this share is left has ended."""

Noise = Callable[[], float]
"""Draws from a normal distribution of mean 0 and deviation 1; the caller owns the seed."""


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A GPU: SMs, how its driver cuts them, dense bf16 rate, memory bandwidth, and what a launch and a fork cost.

    ``saturating_share`` is the share of its SMs that can draw the whole bandwidth.
    """

    name: str
    geometry: SmGeometry
    tflops: float
    bandwidth_gb_s: float
    saturating_share: float = 0.55
    launch_us: float = 1.0
    fork_join_us: float = 2.0


GPU_PROFILES: dict[str, GpuProfile] = {
    profile.name: profile
    for profile in (
        GpuProfile("A100", SmGeometry(108, 2, 4), 312, 2039),
        GpuProfile("Ada6000", SmGeometry(142, 2, 4), 364, 960),
        GpuProfile("H100", SmGeometry(132, 2, 2), 989, 3350),
        GpuProfile("H100/8", SmGeometry(132, 8, 8), 989, 3350),
        GpuProfile("H200", SmGeometry(132, 2, 2), 989, 4800),
        GpuProfile("H200/8", SmGeometry(132, 8, 8), 989, 4800),
        GpuProfile("RTX5090", SmGeometry(170, 2, 2), 210, 1792),
        GpuProfile("RTX5090/8", SmGeometry(170, 8, 8), 210, 1792),
    )
}
"""Vendor data sheets (dense bf16 with float32 sums). ``/8``: cut in eights, as drivers before 13.1 do from compute
capability 9.0 on."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What running side by side costs beyond sharing the bandwidth.

    ``bandwidth_lost``: the share of it that two kernels lose to each other. ``slowed``: how much longer each computes.
    ``co_resident``: without a partition, the share of the shorter half that finds room beside the longer one's blocks.
    """

    bandwidth_lost: float = 0.06
    slowed: float = 0.03
    co_resident: float = 0.3


_Phase = tuple[float, float, float]
"""A part of a kernel with a constant rate: it computes for so long at least, is so long when alone (microseconds), and
then draws so many bytes per microsecond."""


class AnalyticPair:
    """One layer pair on one GPU, exactly; `noisy` measures it."""

    def __init__(self, profile: GpuProfile, pair: LayerPair, contention: Contention | None = None) -> None:
        self.geometry = profile.geometry
        self._profile, self._contention = profile, contention or Contention()
        self._bandwidth = profile.bandwidth_gb_s * 1e3 * BANDWIDTH_REACHED  # bytes per microsecond
        self._phases: dict[Solo, tuple[_Phase, ...]] = {}
        sms = self.geometry.sms
        self._base = min(base_kernels(pair), key=lambda kernel: _alone_us(self._kernel_phases(kernel, sms)))
        self._lora = lora_kernels(pair)
        # The LoRA product goes to an output of its own, which is zeroed before and added afterwards.
        added_us = profile.launch_us + ADDED_PASSES * pair.output_bytes / self._bandwidth
        self._join_us = profile.fork_join_us + added_us

    def time_us(self, config: Config) -> float:
        """The time of ``config`` without noise."""
        match config:
            case Solo():
                return _alone_us(self._solo_phases(config))
            case Split(base_sms, lora_sms):
                if not self.geometry.fits(config):
                    raise ValueError(f"{config} do not fit a GPU of {self.geometry.sms}")
                base, lora = Solo(Layer.BASE, base_sms), Solo(Layer.LORA, lora_sms)
                return self._join_us + self._side_by_side_us(self._solo_phases(base), self._solo_phases(lora))
            case Unsplit.SEQUENTIAL:
                return sum(self.time_us(Solo(layer, self.geometry.sms)) for layer in Layer)
            case Unsplit.DUAL_STREAM:
                return self._join_us + self._dual_stream_us()

    def _solo_phases(self, solo: Solo) -> tuple[_Phase, ...]:
        phases = self._phases.get(solo)
        if phases is None:
            kernels = (self._base,) if solo.layer is Layer.BASE else self._lora
            phases = tuple(phase for kernel in kernels for phase in self._kernel_phases(kernel, solo.sms))
            self._phases[solo] = phases
        return phases

    def _kernel_phases(self, kernel: Kernel, sms: int) -> list[_Phase]:
        """The launch, the full waves together, and the wave that is left."""
        profile = self._profile
        flops_us = profile.tflops * 1e6 / profile.geometry.sms * RATE_REACHED
        sm_bandwidth = self._bandwidth / (profile.geometry.sms * profile.saturating_share)
        phases: list[_Phase] = [(profile.launch_us, profile.launch_us, 0.0)]

        def add(waves: int, blocks: int) -> None:
            together = -(-blocks // (waves * sms))  # blocks of one wave on the busiest SM
            compute_us = waves * max(together * kernel.flops / flops_us, kernel.latency_us)
            traffic = blocks * kernel.bytes
            alone_us = max(compute_us, traffic / min(self._bandwidth, sm_bandwidth * min(sms, blocks)))
            phases.append((compute_us, alone_us, traffic / alone_us))

        waves, rest = divmod(kernel.blocks, sms * kernel.per_sm)
        if waves:
            add(waves, waves * sms * kernel.per_sm)
        if rest:
            add(1, rest)
        return phases

    def _side_by_side_us(self, base: Sequence[_Phase], lora: Sequence[_Phase]) -> float:
        """Both halves at once, until the later one ends. Never shorter than the longer half alone."""
        shared = self._bandwidth * (1 - self._contention.bandwidth_lost)
        slower = 1 + self._contention.slowed
        at_base = at_lora = 0
        base_left = lora_left = 1.0
        clock_us = 0.0
        while at_base < len(base) and at_lora < len(lora):
            base_compute_us, base_alone_us, base_demand = base[at_base]
            lora_compute_us, lora_alone_us, lora_demand = lora[at_lora]
            # Where together they ask for more than there is, each gets its part of it.
            crowd = max((base_demand + lora_demand) / shared, 1.0)
            base_us = max(base_compute_us * slower, base_alone_us * (crowd if base_demand else 1.0))
            lora_us = max(lora_compute_us * slower, lora_alone_us * (crowd if lora_demand else 1.0))
            step_us = min(base_left * base_us, lora_left * lora_us)
            clock_us += step_us
            base_left -= step_us / base_us
            lora_left -= step_us / lora_us
            if base_left <= ROUNDING:
                at_base, base_left = at_base + 1, 1.0
            if lora_left <= ROUNDING:
                at_lora, lora_left = at_lora + 1, 1.0
        for phases, at, left in ((base, at_base, base_left), (lora, at_lora, lora_left)):
            if at < len(phases):
                clock_us += left * phases[at][1] + _alone_us(phases[at + 1 :])
        return clock_us

    def _dual_stream_us(self) -> float:
        """Two streams without a partition: LoRA gets what the base layer's blocks leave free, then the whole GPU."""
        sms, contention, kernel = self.geometry.sms, self._contention, self._base
        base_us = self.time_us(Solo(Layer.BASE, sms))
        lora_us = self.time_us(Solo(Layer.LORA, sms))
        rest = kernel.blocks % (sms * kernel.per_sm)
        last_wave_us = self._solo_phases(Solo(Layer.BASE, sms))[-1][1]
        idle_us = last_wave_us * (1 - min(rest / sms, 1.0)) if rest else 0.0
        hidden_us = min(idle_us + contention.co_resident * min(base_us, lora_us), lora_us)
        lost = contention.slowed + contention.bandwidth_lost
        base_bytes = kernel.blocks * kernel.bytes
        lora_bytes = sum(part.blocks * part.bytes for part in self._lora)
        traffic = base_bytes + lora_bytes + 2 * contention.bandwidth_lost * min(base_bytes, lora_bytes)
        moved_us = self._profile.launch_us + traffic / self._bandwidth
        return max(base_us + lora_us - hidden_us + lost * min(base_us, lora_us), moved_us)


def _alone_us(phases: Sequence[_Phase]) -> float:
    return sum([alone_us for _, alone_us, _ in phases])


def noisy(pair: AnalyticPair, noise: Noise, spread: float) -> Measure:
    """``pair`` measured with a relative error of ``spread``, which every reading states truthfully."""

    def measure(config: Config) -> Reading:
        return Reading(max(pair.time_us(config) * (1 + spread * noise()), 1e-3), spread)

    return measure
