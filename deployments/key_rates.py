"""How many requests a second each API key may send: a token bucket per key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.clock import Clock
from deployments.gateway_ports import KeyHolder


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_us: int


class KeyRates:
    """A bucket holds one second's worth of requests, at least one. ``gateways`` share a key's rate evenly."""

    def __init__(self, clock: Clock) -> None:
        self.gateways = 1
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, holder: KeyHolder) -> int | None:
        """None when the key may send a request now, and counts it; else in how many seconds it may."""
        if holder.rate_per_s is None:
            return None
        rate = holder.rate_per_s / max(1, self.gateways)
        now_us = self._clock()
        size = max(1.0, rate)
        bucket = self._buckets.setdefault(holder.name, _Bucket(size, now_us))
        bucket.tokens = min(size, bucket.tokens + rate * (now_us - bucket.filled_us) / 1e6)
        bucket.filled_us = now_us
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return None
        return math.ceil((1 - bucket.tokens) / rate)
