"""The load driver against a server whose timing is scripted."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from benchmarks.attainment import Observation, Targets, report
from benchmarks.driver import Endpoint, Run, parse, service_argument, to_json
from benchmarks.progress import Progress
from benchmarks.report_table import print_reports
from benchmarks.workload import PlannedRequest
from tests.fakes.openai_server import Event, FakeOpenAI, Script, fake_openai

MS = 1000
HELLO = ({"role": "user", "content": "hello"},)

# Margins of at least 60 ms on both sides of each target, so that a busy machine changes no verdict.
SCRIPTS = {
    "kept": Script([Event(20), *[Event(10)] * 5]),
    "late first": Script([Event(500), Event(10)]),
    "late gap": Script([Event(20), Event(10), Event(300), Event(10)]),
    "several": Script([Event(20), Event(10, tokens=4), Event(10)]),
    "refused": Script(status=429),
    "error": Script([Event(20), Event(10)], fault="error event"),
    "cut": Script([Event(20), Event(10)], fault="cut"),
    "no done": Script([Event(20)], fault="no done"),
}
TARGETS = {name: Targets(250 * MS, 150 * MS) for name in SCRIPTS}


def drive_scripts(
    requests: Sequence[PlannedRequest], *, usage: bool = True, key: str | None = None, timeout_s: float = 20
) -> tuple[list[Observation], FakeOpenAI]:
    async def run() -> tuple[list[Observation], FakeOpenAI]:
        async with fake_openai(SCRIPTS) as server:
            endpoint = Endpoint(server.url, key, running_usage=usage, timeout_s=timeout_s)
            return await Run(endpoint, requests).execute(), server

    return asyncio.run(run())


def test_verdicts_follow_the_scripts() -> None:
    """Three requests per script, sent 5 ms apart: what was met and missed, tokens and failures are exactly right."""
    names = list(SCRIPTS)
    requests = [PlannedRequest(i * 5 * MS, names[i % len(names)], HELLO, 8) for i in range(3 * len(names))]
    observations, _ = drive_scripts(requests)
    reports = report(observations, TARGETS, seconds=1)
    results = {name: (r.requests, r.failed, r.tokens, r.ttft_met, r.tbt_met) for name, r in reports.items()}
    assert results == {
        "kept": (3, 0, 18, 1, 1),
        "late first": (3, 0, 6, 0, 1),
        "late gap": (3, 0, 12, 1, 0),
        "several": (3, 0, 18, 1, 1),
        "refused": (3, 3, 0, 0, 0),
        "error": (3, 3, 6, 0, 0),
        "cut": (3, 3, 6, 0, 0),
        "no done": (3, 3, 3, 0, 0),
        "all": (24, 12, 69, 9 / 24, 9 / 24),
    }  # fmt: skip
    assert reports["late gap"].gaps_met == 6 / 9
    assert {o.status for o in observations if o.service == "refused"} == {429}
    assert all("scripted failure" in o.error for o in observations if o.service == "error")
    assert all(o.ended_us >= o.sent_us >= o.planned_us for o in observations)


def test_arrivals_do_not_wait_for_answers() -> None:
    """An open loop: with answers of half a second, ten requests 20 ms apart are all sent within their 200 ms."""
    requests = [PlannedRequest(i * 20 * MS, "late first", HELLO, 2) for i in range(10)]
    observations, _ = drive_scripts(requests)
    first_answer = min(o.tokens[0][0] for o in observations)
    assert all(o.sent_us < first_answer for o in observations)


def test_ttft_counts_from_the_planned_time() -> None:
    """A request that could only be sent late has waited all the same."""
    (observation,), _ = drive_scripts([PlannedRequest(-400 * MS, "kept", HELLO, 6)])
    verdict = observation.judge(TARGETS["kept"])
    assert verdict.ttft_us is not None
    assert verdict.ttft_us > 400 * MS
    assert not verdict.ttft_met


def test_without_usage_an_event_is_a_token() -> None:
    """For servers that know no running usage."""
    (observation,), server = drive_scripts([PlannedRequest(0, "several", HELLO, 6)], usage=False)
    assert len(observation.token_times_us) == 3
    assert "stream_options" not in server.bodies[0]


def test_what_is_sent() -> None:
    """The body is the planned request; the key travels in the header and nowhere else."""
    _, server = drive_scripts([PlannedRequest(0, "kept", HELLO, 6)], key="secret-key")
    body = server.bodies[0]
    assert (body["model"], body["messages"], body["max_tokens"], body["stream"]) == ("kept", list(HELLO), 6, True)
    assert server.headers[0]["authorization"] == "Bearer secret-key"
    assert "secret-key" not in json.dumps(body)


def test_a_server_that_stops_answering_is_given_up() -> None:
    """Every wait has an end, and the request counts as failed."""
    scripts_timeout = 0.2
    (observation,), _ = drive_scripts([PlannedRequest(0, "late first", HELLO, 2)], timeout_s=scripts_timeout)
    assert "Timeout" in observation.error
    assert observation.ended_us < 5_000 * MS


def test_nobody_listening_is_a_failure_not_a_crash() -> None:
    """The run ends and says why."""
    observation = asyncio.run(Run(Endpoint("http://127.0.0.1:9"), [PlannedRequest(0, "kept", HELLO, 2)]).execute())[0]
    assert observation.error.startswith("ConnectError")


def test_table_and_json_agree() -> None:
    """The table shows each service under each policy; the JSON carries the same numbers and the errors."""
    observation = Observation("kept", 0, 0, 200, [(10 * MS, 1), (200 * MS, 1)], ended_us=1)
    refused = Observation("refused", 0, 30 * MS, 429, ended_us=1, error="status 429")
    targets = {name: TARGETS[name] for name in ("kept", "refused")}
    reports = report([observation, refused], targets, seconds=2)
    output = io.StringIO()
    print_reports(Console(file=output, width=200), {"fcfs": reports, "halo": reports}, targets, 10 * MS)
    text = " ".join(output.getvalue().split())
    assert text.count("fcfs") == text.count("halo") == 3
    assert "250/150" in text
    assert "10 ms for client and network" in text
    results = to_json(reports, [observation, refused])
    assert json.loads(json.dumps(results))["services"]["kept"]["tbt_p99_ms"] == 190
    assert results["driver_late_p99_ms"] == 30
    assert results["errors"] == ["refused: status 429"]


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    """Logs get a line every 15 seconds, not one a second."""
    output = io.StringIO()
    with Progress(Console(file=output), "run", 10, TARGETS, 0) as progress:
        for second in range(40):
            progress.update([], 3, second * 1_000_000)
    assert output.getvalue().count("\n") == 2
    assert "0 of 10 answered, 3 open" in output.getvalue()


def test_service_arguments() -> None:
    """A name may hold colons; nonsense is refused."""
    assert service_argument("ft:a:b:100:50.5") == ("ft:a:b", Targets(100_000, 50_500))
    for bad in ("a", "a:1", "a:x:1", ":1:1", "a:0:1"):
        with pytest.raises(SystemExit):
            parse(["--url", "http://x", "--service", bad])
    with pytest.raises(SystemExit):
        parse(["--url", "http://x"])
