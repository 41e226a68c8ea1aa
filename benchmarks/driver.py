"""Open-loop load on any OpenAI endpoint, judged against a promise per service.

    python -m benchmarks.driver --config cluster.yaml --rate 2 --seconds 60
    python -m benchmarks.driver --url http://127.0.0.1:8000 --service name:ttft_ms:tbt_ms ... --rate 2

Requests are sent when their time has come, whether or not earlier ones were answered. A table at the end; with --json
the last line is the same as JSON. benchmarks/attainment.py defines what is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console

from benchmarks.attainment import Observation, ServiceReport, Targets, quantile_ms, report
from benchmarks.openai_stream import EventSplitter, StreamError, TokenCounter
from benchmarks.progress import Progress
from benchmarks.report_table import print_reports, wide_console
from benchmarks.workload import (
    PlannedRequest,
    ServiceLoad,
    WorkloadError,
    compose,
    example_prompts,
    gamma_arrivals,
    generated_prompts,
    trace,
)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "services"
API_KEY_VARIABLE = "HALO_API_KEY"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send to. ``running_usage`` asks for exact token counts, which servers other than vLLM's may refuse."""

    url: str
    api_key: str | None = None
    running_usage: bool = True
    ignore_eos: bool = True
    timeout_s: float = 120.0

    def body(self, request: PlannedRequest) -> bytes:
        """The request's JSON."""
        body: dict[str, object] = {
            "model": request.service,
            "messages": request.messages,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.running_usage:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()


class Run:
    """One run of a workload against one endpoint."""

    def __init__(self, endpoint: Endpoint, requests: Sequence[PlannedRequest]) -> None:
        self._endpoint = endpoint
        self._requests = requests
        self._start_ns = 0
        self.observations = [Observation(request.service, request.at_us) for request in requests]
        self.active = 0

    async def execute(self, tick: Callable[[Run], None] | None = None, every_s: float = 1.0) -> list[Observation]:
        """Send everything and wait for the answers; ``tick`` is called about every ``every_s`` seconds."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(self._endpoint.timeout_s, connect=10.0)
        headers = {"content-type": "application/json"}
        if self._endpoint.api_key:
            headers["authorization"] = f"Bearer {self._endpoint.api_key}"
        async with httpx.AsyncClient(
            base_url=self._endpoint.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        ) as client:
            self._start_ns = time.monotonic_ns()
            ticker = asyncio.create_task(self._tick(tick, every_s)) if tick else None
            try:
                async with asyncio.TaskGroup() as group:
                    for request, observation in zip(self._requests, self.observations, strict=True):
                        delay_us = request.at_us - self.now_us()
                        if delay_us > 0:
                            await asyncio.sleep(delay_us / 1e6)
                        group.create_task(self._send(client, request, observation))
            finally:
                if ticker is not None:
                    ticker.cancel()
        return self.observations

    def now_us(self) -> int:
        """Microseconds since the run began."""
        return (time.monotonic_ns() - self._start_ns) // 1000

    async def _tick(self, tick: Callable[[Run], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            tick(self)

    async def _send(self, client: httpx.AsyncClient, request: PlannedRequest, seen: Observation) -> None:
        seen.sent_us = self.now_us()
        self.active += 1
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await self._stream(client, request, seen)
        except (httpx.HTTPError, StreamError, TimeoutError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        finally:
            seen.ended_us = self.now_us()
            self.active -= 1

    async def _stream(self, client: httpx.AsyncClient, request: PlannedRequest, seen: Observation) -> None:
        content = self._endpoint.body(request)
        async with client.stream("POST", "/v1/chat/completions", content=content) as response:
            seen.status = response.status_code
            if response.status_code != httpx.codes.OK:
                text = (await response.aread())[:300].decode(errors="replace")
                raise StreamError(f"status {response.status_code}: {text}")
            splitter, counter = EventSplitter(), TokenCounter()
            async for piece in response.aiter_raw():
                now_us = self.now_us()
                for data in splitter.feed(piece):
                    if count := counter.count(data):
                        seen.tokens.append((now_us, count))
            if not counter.finished:
                raise StreamError("the stream ended without [DONE]")


def drive(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    targets: Mapping[str, Targets],
    *,
    title: str = "",
    console: Console | None = None,
    tolerance_us: int = 0,
) -> list[Observation]:
    """Run ``requests`` with progress on ``console`` and return what was seen."""
    if unknown := {request.service for request in requests} - targets.keys():
        raise WorkloadError(f"no targets for {', '.join(sorted(unknown))}")
    with Progress(console or Console(stderr=True), title, len(requests), targets, tolerance_us) as progress:
        run = Run(endpoint, requests)
        return asyncio.run(run.execute(lambda state: progress.update(state.observations, state.active, state.now_us())))


def targets_of(config: Path) -> tuple[str, dict[str, Targets]]:
    """URL and targets of every service of a cluster.yaml."""
    from app.config import load_cluster  # noqa: PLC0415 - other endpoints are driven without a cluster.yaml

    cluster = load_cluster(config)
    host, port = cluster.address
    return (
        f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}",  # noqa: S104
        {s.name: Targets(s.ttft_us, s.tbt_us) for s in cluster.args.service_settings()},
    )


def service_argument(text: str) -> tuple[str, Targets]:
    """``name:ttft_ms:tbt_ms``; the name may contain colons."""
    try:
        name, ttft_ms, tbt_ms = text.rsplit(":", 2)
        targets = Targets(round(float(ttft_ms) * 1000), round(float(tbt_ms) * 1000))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not name:ttft_ms:tbt_ms") from None
    if not name or targets.ttft_us <= 0 or targets.tbt_us <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a name and targets above 0 are needed")
    return name, targets


def prompts_for(
    service: str, words: tuple[int, int] | None, rng: np.random.Generator
) -> list[tuple[Mapping[str, str], ...]]:
    """The held-out examples of a service where there are any and no length is asked for, made-up text otherwise."""
    examples = EXAMPLES / f"{service}.heldout.jsonl"
    if words is None and examples.exists():
        return example_prompts(examples)
    return generated_prompts(64, words or (40, 80), rng)


def to_json(reports: Mapping[str, ServiceReport], observations: Sequence[Observation]) -> dict[str, object]:
    """The results as plain values."""
    errors = sorted({f"{o.service}: {o.error}" for o in observations if o.error})
    return {
        "services": {name: values.as_dict() for name, values in reports.items()},
        "driver_late_p99_ms": quantile_ms([o.sent_us - o.planned_us for o in observations], 0.99),
        "errors": errors[:20],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="cluster.yaml: gives the URL and the targets")
    parser.add_argument("--url", help="base URL without /v1; default: the one of --config")
    parser.add_argument("--service", type=service_argument, action="append", default=[], metavar="NAME:TTFT_MS:TBT_MS")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, all services together")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the arrival window")
    parser.add_argument("--cv", type=float, default=1.0, help="burstiness of arrivals: 1 Poisson, above 1 burstier")
    parser.add_argument("--trace", type=Path, help="CSV with at_s,service,prompt_words,output_tokens instead of --rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompt-words", type=int, nargs=2, metavar=("LOW", "HIGH"), help="made-up prompts this long")
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(24, 48), metavar=("LOW", "HIGH"))
    parser.add_argument("--natural-end", action="store_true", help="let the model end its answers")
    parser.add_argument("--plain-usage", action="store_true", help="do not ask for running usage (vLLM's extension)")
    parser.add_argument("--tolerance-ms", type=float, default=0.0, help="allowed on every gap, for network and client")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    options = parser.parse_args(arguments)
    if not options.config and not (options.url and options.service):
        parser.error("give --config, or --url and --service")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    url, targets = targets_of(options.config) if options.config else (options.url, {})
    targets = {**targets, **dict(options.service)}
    rng = np.random.default_rng(options.seed)
    if options.trace:
        requests = trace(options.trace, rng)
    else:
        words = tuple(options.prompt_words) if options.prompt_words else None
        loads = [
            ServiceLoad(name, prompts_for(name, words, rng), output_tokens=tuple(options.output_tokens))
            for name in targets
        ]
        requests = compose(gamma_arrivals(options.rate, options.cv, options.seconds, rng), loads, rng)
    endpoint = Endpoint(
        options.url or url,
        os.environ.get(API_KEY_VARIABLE),
        running_usage=not options.plain_usage,
        ignore_eos=not options.natural_end,
        timeout_s=options.timeout_s,
    )
    tolerance_us = round(options.tolerance_ms * 1000)
    observations = drive(endpoint, requests, targets, title=endpoint.url, tolerance_us=tolerance_us)
    reports = report(observations, targets, options.seconds, tolerance_us)
    print_reports(wide_console(), {"": reports}, targets, tolerance_us)
    results = to_json(reports, observations)
    for error in results["errors"]:  # type: ignore[attr-defined]
        print(error, file=sys.stderr)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
