"""How precisely the gateway's pacer releases tokens: lateness against each token's due time, on the real clock.

``python -m benchmarks.pacer --json`` prints {"streams", "tokens", "early", "p50_us", "p99_us", "max_us"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import dataclass, field

from deployments.clock import monotonic_us
from deployments.pacer import Pacer
from deployments.protocol import Delivery


@dataclass(slots=True)
class _Stream:
    """A sink that compares each release with when it was due."""

    due_us: int = 0
    held: int = 0
    wanted_us: list[int] = field(default_factory=list)
    late_us: list[int] = field(default_factory=list)

    def put(self, delivery: Delivery) -> None:
        self.late_us.append(monotonic_us() - self.wanted_us[len(self.late_us)])


async def measure(streams: int, steps: int, tick_us: int) -> dict[str, int]:
    """Engine steps of 20 to 60 ms, each with one token per stream, held for up to 250 ms."""
    generator = random.Random(1)  # noqa: S311 (a workload, not a secret)
    pacer = Pacer(tick_us)
    sinks = [_Stream() for _ in range(streams)]
    for _ in range(steps):
        await asyncio.sleep(generator.uniform(0.02, 0.06))
        for sink in sinks:
            hold_us = generator.randrange(1_000, 250_000)
            sink.wanted_us.append(max(monotonic_us() + hold_us, sink.due_us if sink.held else 0))
            pacer.offer(sink, Delivery("measured", "", hold_us=hold_us))
    while pacer.held:  # noqa: ASYNC110 (the pacer has no event for running empty)
        await asyncio.sleep(0.05)
    late_us = sorted(value for sink in sinks for value in sink.late_us)
    return {
        "streams": streams,
        "tokens": len(late_us),
        "early": sum(value < 0 for value in late_us),
        "p50_us": late_us[len(late_us) // 2],
        "p99_us": late_us[len(late_us) * 99 // 100],
        "max_us": late_us[-1],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tick-us", type=int, default=2_000)
    parser.add_argument("--json", action="store_true", help="print one line of JSON only")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.streams, arguments.steps, arguments.tick_us))
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:>8} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
