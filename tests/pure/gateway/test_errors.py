"""What a client is told when its request cannot be served: an HTTP status and an OpenAI envelope, never a 200."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest

from deployments.settings import AdmissionSettings
from tests.fakes.house import chat, run_house
from tests.fakes.surroundings import FakeHolder, FakeKeys

pytestmark = pytest.mark.anyio


def error_of(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


async def test_models_and_health() -> None:
    """All services and the base model are listed; liveness and readiness differ while no replica is there."""
    async with run_house() as house:
        listed = (await house.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["triage", "records", "shedding", "base"]
        assert (await house.http.get("/v1/models/records")).json()["parent"] == "base"
        assert (await house.http.get("/healthz")).status_code == 200
        assert (await house.http.get("/readyz")).status_code == 200
    async with run_house(replicas=0) as house:
        assert (await house.http.get("/healthz")).status_code == 200
        assert (await house.http.get("/readyz")).status_code == 503


async def test_unknown_paths_and_methods() -> None:
    """Paths and methods that do not exist get the envelope as well."""
    async with run_house() as house:
        for path in ("/", "/v1/embeddings", "/v1/chat/completions/", "/docs", "/openapi.json"):
            error_of(await house.http.get(path), 404)
        answer = await house.http.get("/v1/completions")
        error_of(answer, 405)
        assert answer.headers["allow"] == "POST"
        error_of(await house.http.get("/v1/models/nothing"), 404)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"messages": []}, 400, "model", "missing_required_parameter"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"model": 7}, 400, "model", "invalid_type"),
        ({"model": ["triage"]}, 400, "model", "invalid_type"),
        ({"model": "Triage"}, 404, "model", "model_not_found"),
        ({"model": "x" * 5000}, 404, "model", "model_not_found"),
        ({"model": "triage", "messages": []}, 400, "messages", None),
        (chat(messages=[{"role": "user", "content": "w " * 60}]), 400, "messages", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_bodies(body, status, param, code, stream) -> None:
    """A request that cannot be served is refused with its status, streamed or not, and nothing is queued or counted."""
    async with run_house() as house:
        answer = await house.http.post("/v1/chat/completions", json=body | {"stream": stream})
        error = error_of(answer, status)
        assert (error["param"], error["code"]) == (param, code)
        assert not house.metrics.outcomes
        assert (await house.admission.slo())["triage"]["outcomes"] == dict.fromkeys(
            ("completed", "cancelled", "failed", "shed"), 0
        )


async def test_raw_bodies() -> None:
    """Cases R2 and C5 through HTTP: NaN 400, bad JSON 400, gzip decoded, bombs and large bodies 413, others 415."""
    packed = gzip.compress(json.dumps(chat()).encode())
    bomb = gzip.compress(b" " * 10_000_000)
    async with run_house() as house:

        async def post(content: bytes, encoding: str | None = None) -> httpx.Response:
            headers = {"content-encoding": encoding} if encoding else {}
            return await house.http.post("/v1/chat/completions", content=content, headers=headers)

        error_of(await post(b'{"model": "triage", "temperature": NaN}'), 400)
        error_of(await post(b"not json"), 400)
        error_of(await post(b"x" * 200_000), 413)
        assert (await post(packed, "gzip")).status_code == 200
        error_of(await post(packed[:-4], "gzip"), 400)
        error_of(await post(bomb, "gzip"), 413)
        error_of(await post(packed, "br"), 415)
        large = json.dumps(chat(padding="é" * 15_000)).encode()
        assert (await post(large)).status_code == 200


async def test_keys() -> None:
    """With keys, a missing or unknown one is 401, a service that it may not use 403; it is never echoed."""
    keys = FakeKeys({"Bearer good": FakeHolder(frozenset({"triage"}))})
    async with run_house(keys=keys) as house:
        answer = await house.http.post("/v1/chat/completions", content=b"not even json")
        error_of(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        answer = await house.http.post("/v1/chat/completions", json=chat(), headers={"authorization": "Bearer wrong"})
        assert "wrong" not in json.dumps(error_of(answer, 401))
        good = {"authorization": "Bearer good"}
        assert (await house.http.post("/v1/chat/completions", json=chat(), headers=good)).status_code == 200
        error_of(await house.http.post("/v1/chat/completions", json=chat("records"), headers=good), 403)
        listed = (await house.http.get("/v1/models", headers=good)).json()["data"]
        assert [model["id"] for model in listed] == ["triage"]
        error_of(await house.http.get("/slo"), 401)
        assert (await house.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_error_before_the_first_token_is_a_status(stream) -> None:
    """An engine's error before anything was sent is a real HTTP status, also for a stream."""
    async with run_house() as house:
        answer = await house.http.post("/v1/chat/completions", json=chat(stream=stream, fake={"fail_before": 503}))
        error_of(answer, 503)
        assert answer.headers["content-type"] == "application/json"
        assert [outcome.end for outcome in house.metrics.outcomes] == ["failed"]


async def test_engine_error_within_a_stream_is_an_event() -> None:
    """After the first token an error is an SSE event, the last one, and the request counts as failed."""
    async with run_house() as house:
        answer = await house.http.post("/v1/chat/completions", json=chat(stream=True, fake={"fail_after": 2}))
        assert answer.status_code == 200
        events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        assert "error" in json.loads(events[-1])
        assert [outcome.end for outcome in house.metrics.outcomes] == ["failed"]


async def test_no_replica_is_503() -> None:
    """Without any engine replica a request is refused at once, with a time to try again."""
    async with run_house(replicas=0) as house:
        answer = await house.http.post("/v1/chat/completions", json=chat())
        error_of(answer, 503)
        assert int(answer.headers["retry-after"]) >= 1


async def test_queue_timeout_is_503() -> None:
    """A request that waits too long in the queue gets 503 and a reason."""
    settings = AdmissionSettings(queue_timeout_us=2_000_000, heartbeat_timeout_us=4_000_000)
    async with run_house(admission_settings=settings) as house:
        for _ in range(2):
            house.call(chat(max_tokens=1_000, stream=True))
        await house.settle()
        answer = await house.http.post("/v1/chat/completions", json=chat("records"))
        error_of(answer, 503)
        assert answer.headers["x-halo-shed-reason"] == "queue_timeout"


async def test_full_queue_is_429() -> None:
    """A full queue sheds at once: 429, a computed Retry-After, the reason."""
    settings = AdmissionSettings(queue_requests=1, heartbeat_timeout_us=4_000_000)
    async with run_house(admission_settings=settings) as house:
        for _ in range(3):
            house.call(chat(max_tokens=1_000, stream=True))
            await house.settle()
        answer = await house.http.post("/v1/chat/completions", json=chat("records"))
        error_of(answer, 429)
        assert answer.headers["x-halo-shed-reason"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert house.metrics.sheds == ["queue_full"]
        assert (await house.admission.slo())["records"]["outcomes"]["shed"] == 1


async def test_key_rates() -> None:
    """A key with a rate gets 429 and the time to wait once it is used up, and may go on after it; others are free."""
    keys = FakeKeys(
        {
            "Bearer slow": FakeHolder(frozenset({"triage"}), "slow", 0.5),
            "Bearer free": FakeHolder(frozenset({"triage"}), "free"),
        }
    )
    async with run_house(keys=keys) as house:

        async def post(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await house.http.post("/v1/chat/completions", json=chat(), headers=headers)

        assert (await post("slow")).status_code == 200
        answer = await post("slow")
        error_of(answer, 429)
        assert answer.headers["retry-after"] == "2"
        assert (await post("free")).status_code == 200
        await asyncio.sleep(2)
        assert (await post("slow")).status_code == 200


async def test_a_fault_of_ours_is_500_without_details() -> None:
    """An exception in the engine is a 500 envelope; neither its text nor a traceback reaches the client."""
    async with run_house() as house:
        house.pool.replicas["r0"].engine.broken = True
        answer = await house.http.post("/v1/chat/completions", json=chat())
        assert "secret" not in json.dumps(error_of(answer, 500))
