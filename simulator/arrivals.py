"""When requests come: random processes, published burst patterns, and ways to scale a trace.

Everything takes a seed and gives integer microseconds. How a trace is scaled changes the result, so each method says
what it keeps:

- ``compress``: time runs faster. Bursts and their order stay, each becomes shorter.
- ``thin``: every request is kept with the same chance. Time scales stay, bursts become weaker.
- ``envelope``: the rate over bins of time is kept in shape, requests are Poisson inside a bin. Bursts shorter than a
  bin are lost, any rate can be reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.workload import WorkloadError

SCALINGS = ("compress", "thin", "envelope")


def poisson(rate: float, seconds: float, seed: int) -> list[int]:
    """A Poisson process of ``rate`` per second over ``seconds``."""
    return gamma(rate, 1.0, seconds, seed)


def gamma(rate: float, cv: float, seconds: float, seed: int) -> list[int]:
    """Gamma-distributed gaps with coefficient of variation ``cv``: 1 is Poisson, more is burstier, 0 is even."""
    if not (0 < rate < 1e6 and 0 < seconds < 1e9 and 0 <= cv < 1e3):
        raise WorkloadError(f"rate {rate} and seconds {seconds} have to be above 0, cv {cv} not below 0, all finite")
    rng = np.random.default_rng(seed)
    times: list[int] = []
    now = 0.0
    shape = 1.0 if cv == 0 else cv**-2
    while now < seconds:
        gaps = (
            np.full(1024, 1.0)
            if cv == 0
            else (rng.standard_exponential(1024) if cv == 1 else rng.standard_gamma(shape, 1024) / shape)
        )
        for gap in gaps.tolist():
            now += gap / rate
            if now >= seconds:
                break
            times.append(round(now * 1e6))
    return times


def piecewise(rates: Sequence[float], bin_s: float, seed: int) -> list[int]:
    """A Poisson process whose rate is ``rates[i]`` in the i-th bin of ``bin_s`` seconds."""
    rng = np.random.default_rng(seed)
    times: list[int] = []
    bin_us = round(bin_s * 1e6)
    for index, rate in enumerate(rates):
        count = int(rng.poisson(rate * bin_s))
        times += sorted((index * bin_us + rng.integers(0, bin_us, count)).tolist())
    return times


def bursts(
    peak: float, *, seconds_on: float, seconds_off: float, seconds: float = 60.0, lead_s: float = 3.0
) -> list[int]:
    """Evenly spaced requests at ``peak`` per second for ``seconds_on``, then none for ``seconds_off``, repeated.

    DeltaServe section 4.1 (Figure 4): burst-light has 2-second peaks at 80 requests per second, burst-dense 4-second
    peaks at 120, both over one minute; its released timelines repeat every 6 seconds and end at 49 seconds.
    """
    times, start, end_s = [], lead_s, seconds * 49 / 60
    while start < end_s:
        times += [round((start + index / peak) * 1e6) for index in range(round(peak * seconds_on))]
        start += seconds_on + seconds_off
    return times


def burst_light(scale: float = 1.0) -> list[int]:
    """DeltaServe's burst-light for four GPUs, its rate times ``scale``."""
    return bursts(80 * scale, seconds_on=2, seconds_off=4, lead_s=5)


def burst_dense(scale: float = 1.0) -> list[int]:
    """DeltaServe's burst-dense for four GPUs, its rate times ``scale``."""
    return bursts(120 * scale, seconds_on=4, seconds_off=2)


def production_like(peak: float = 110.0, seconds: int = 1200, seed: int = 0) -> list[int]:
    """A synthetic trace with what is published of DeltaServe's production trace, which is not public.

    Section 4.1: 20 minutes, irregular, bursts on several time scales, spikes above 100 requests per second, long
    stretches near zero; section 1: the mean is about 60 % of provisioned capacity. How these are put together is
    assumed here: levels held for 20 to 90 s, times levels held for 2 to 8 s, two fifths of the long ones near zero, and
    spikes of 1 to 2 s.
    """
    rng = np.random.default_rng(seed)
    slow = _levels(rng, seconds, (20, 90), (0.01, 0.01, 0.4, 0.6, 0.8))
    fast = _levels(rng, seconds, (2, 8), (0.4, 0.8, 1.0, 1.2, 1.6))
    rates = slow * fast * peak * 0.6
    for start in rng.integers(0, max(1, seconds - 2), max(1, seconds // 60)).tolist():
        rates[start : start + int(rng.integers(1, 3))] = peak
    return piecewise(rates.tolist(), 1.0, int(rng.integers(2**31)))


def compress(at_us: Sequence[int], rate: float) -> list[int]:
    """Let time run so that the mean rate becomes ``rate`` per second."""
    factor = _mean_rate(at_us) / _positive(rate)
    return [round((time_us - at_us[0]) * factor) for time_us in at_us]


def thin(at_us: Sequence[int], rate: float, seed: int) -> list[int]:
    """Indices of the requests that stay when each is kept with the chance that makes the mean rate ``rate``."""
    share = _positive(rate) / _mean_rate(at_us)
    if share > 1:
        raise WorkloadError(f"thinning cannot raise {_mean_rate(at_us):.2f} requests/s to {rate:g}; use compress")
    kept = np.random.default_rng(seed).random(len(at_us)) < share
    return [int(index) for index in np.flatnonzero(kept)]


def envelope(at_us: Sequence[int], rate: float, seconds: float, seed: int, *, bin_s: float = 10.0) -> list[int]:
    """Poisson arrivals over ``seconds`` that follow the rate of the trace's first ``seconds`` in bins of ``bin_s``."""
    bins = max(1, round(seconds / bin_s))
    bin_us = round(bin_s * 1e6)
    counts = np.bincount([t // bin_us for t in at_us if t < bins * bin_us], minlength=bins).astype(float)
    if not counts.sum():
        raise WorkloadError(f"the trace has no request in its first {seconds:g} s")
    rates = counts / counts.mean() * _positive(rate)
    return piecewise(rates.tolist(), bin_s, seed)


def _levels(rng: np.random.Generator, seconds: int, held: tuple[int, int], levels: Sequence[float]) -> np.ndarray:
    values: list[float] = []
    while len(values) < seconds:
        level = levels[int(rng.integers(len(levels)))]
        values += [level] * int(rng.integers(held[0], held[1] + 1))
    return np.array(values[:seconds])


def _mean_rate(at_us: Sequence[int]) -> float:
    if len(at_us) < 2 or at_us[-1] <= at_us[0]:
        raise WorkloadError("a trace needs two requests at different times to be scaled")
    return (len(at_us) - 1) * 1e6 / (at_us[-1] - at_us[0])


def _positive(rate: float) -> float:
    if not 0 < rate < 1e6:
        raise WorkloadError(f"the rate has to be above 0 and finite, got {rate}")
    return rate
