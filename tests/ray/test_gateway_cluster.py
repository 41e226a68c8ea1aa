"""The real builders in a local Serve with fake engines: what only separate processes can show."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import ray
from openai import APIError, AsyncOpenAI
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

from deployments.builders import build
from deployments.protocol import ReplicaAddress, WrongReplicaError
from deployments.serve_ports import ServeEnginePool

pytestmark = pytest.mark.anyio

SERVICES = ("triage", "assessment", "analysis", "records")
PROMPT = [{"role": "user", "content": "one two"}]


@pytest.fixture
async def openai(cluster) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client against the cluster; it does not retry."""
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def admission_load() -> dict:
    """Admission's own view of queue and replicas."""
    handle = serve.get_deployment_handle("admission", "halo")
    return await asyncio.to_thread(lambda: handle.load.remote().result(timeout_s=10))


async def until_load(condition, timeout_s: float) -> dict:
    """Wait until admission's view is as wanted."""
    deadline = time.monotonic() + timeout_s
    while not condition(load := await admission_load()):
        assert time.monotonic() < deadline, load
        await asyncio.sleep(0.1)
    return load


def idle(load: dict) -> bool:
    """Nothing is queued or held."""
    return load["queued"] == load["held"] == 0


def two_replicas(load: dict) -> bool:
    """Both replicas take requests."""
    return sum(replica["eligible"] for replica in load["replicas"].values()) == 2


async def completed(url: str, service: str) -> int:
    """How many requests of a service completed so far."""
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{url}/slo")).json()["services"][service]["outcomes"]["completed"]


async def stream_words(openai: AsyncOpenAI, service: str, tokens: int, **fields) -> list[str]:
    """The words of a streamed answer."""
    stream = await openai.chat.completions.create(
        model=service, messages=PROMPT, stream=True, max_tokens=tokens, extra_body=fields or None
    )
    return [chunk.choices[0].delta.content.strip() async for chunk in stream]


async def test_all_services_at_once(cluster, openai) -> None:
    """The OpenAI SDK, streaming and not, on all four services at once, over both gateways and replicas."""

    async def whole(service: str) -> list[str]:
        answer = await openai.completions.create(model=service, prompt="one two", max_tokens=12)
        return answer.choices[0].text.split()

    asks = [stream_words(openai, service, 12) for service in SERVICES for _ in range(6)]
    asks += [whole(service) for service in SERVICES for _ in range(6)]
    answers = await asyncio.gather(*asks)
    assert answers == [[f"w{i}" for i in range(12)]] * len(asks)
    load = await until_load(idle, 5)
    assert len(load["gateways"]) == 2
    assert len(load["replicas"]) == 2


async def test_slo_table_counts_over_gateways(cluster, openai) -> None:
    """GET /slo counts every completed request, whichever gateway it went through."""
    before = await completed(cluster.url, "records")
    for _ in range(6):
        await openai.completions.create(model="records", prompt="one", max_tokens=2)
    await until_load(idle, 5)
    assert await completed(cluster.url, "records") == before + 6


async def test_errors_keep_their_status(cluster) -> None:
    """404, 400 and 413 come through Serve's proxy as they are, with the envelope and one request id."""
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        unknown = await http.post("/v1/chat/completions", json={"model": "x", "messages": PROMPT})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert len(unknown.headers.get_list("x-request-id")) == 1
        bad = await http.post(
            "/v1/chat/completions", content=b'{"temperature": NaN}', headers={"x-request-id": "ward-1"}
        )
        assert bad.status_code == 400
        assert bad.headers.get_list("x-request-id") == ["ward-1"]
        long = {"model": "triage", "messages": [{"role": "user", "content": "w " * 200}], "stream": True}
        refused = await http.post("/v1/chat/completions", json=long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await http.get("/nowhere")).json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_frees_the_replica(cluster, stream: bool) -> None:
    """Clients that close their connections free queue and replicas within seconds (case C4)."""
    body = {"model": "triage", "messages": PROMPT, "stream": stream, "max_tokens": 50_000}

    async def leave_after(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
                await http.post("/v1/chat/completions", json=body)
                pytest.fail("the response ended before its client left")

    leaving = [asyncio.create_task(leave_after(1.0)) for _ in range(10)]
    await until_load(lambda load: load["held"] == 10, 5)
    await asyncio.gather(*leaving)
    await until_load(idle, 3)
    handle = serve.get_deployment_handle("engine", "halo")
    for _ in range(6):
        status = await asyncio.to_thread(lambda: handle.status.remote().result(timeout_s=10))
        assert (status.running, status.waiting) == (0, 0)


async def test_kill_9_of_a_replica(cluster, openai) -> None:
    """SIGKILL of an engine's process: begun streams on it raise in the SDK, all others are whole, and it comes back."""
    await until_load(two_replicas, 20)
    streams = [asyncio.create_task(stream_words(openai, "records", 200)) for _ in range(8)]
    await until_load(lambda load: load["held"] == 8, 5)
    await asyncio.sleep(0.5)
    killer = asyncio.create_task(stream_words(openai, "triage", 50, fake={"kill_after": 5}))
    results = await asyncio.gather(*streams, killer, return_exceptions=True)
    broken = [result for result in results if isinstance(result, Exception)]
    assert all(isinstance(error, APIError) and "replica was lost" in str(error) for error in broken), broken
    assert 1 <= len(broken) <= 5
    assert all(result == [f"w{i}" for i in range(200)] for result in results if isinstance(result, list))
    answers = await asyncio.gather(*(stream_words(openai, "triage", 5) for _ in range(8)))
    assert all(len(answer) == 5 for answer in answers)
    await until_load(two_replicas, 30)


async def test_kill_9_before_the_first_token(cluster, openai) -> None:
    """Requests that have not begun when their replica is killed are served by another one; no client sees it."""
    await until_load(two_replicas, 20)

    async def whole(**fields) -> list[str]:
        answer = await openai.completions.create(
            model="records", prompt="one", max_tokens=150, extra_body=fields or None
        )
        return answer.choices[0].text.split()

    asks = [asyncio.create_task(whole()) for _ in range(8)]
    await until_load(lambda load: load["held"] == 8, 5)
    with pytest.raises(APIError):
        await stream_words(openai, "triage", 50, fake={"kill_after": 1})
    assert await asyncio.gather(*asks) == [[f"w{i}" for i in range(150)]] * 8
    await until_load(two_replicas, 30)


async def test_metrics_are_exported(cluster, openai) -> None:
    """Every metric appears on Ray's metrics port with its labels, and TTFT and TBT have an edge at each target."""
    await stream_words(openai, "assessment", 10)
    deadline = time.monotonic() + 20
    wanted = (
        "ray_halo_requests_total{",
        "ray_halo_slo_requests_total{",
        "ray_halo_tokens_total{",
        "ray_halo_ttft_seconds_bucket{",
        "ray_halo_tbt_seconds_bucket{",
        "ray_halo_queue_seconds_bucket{",
        "ray_halo_held_tokens{",
    )
    text = ""
    while time.monotonic() < deadline and not all(name in text for name in wanted):
        async with httpx.AsyncClient() as http:
            text = (await http.get(cluster.metrics_url)).text
        await asyncio.sleep(0.5)
    assert [name for name in wanted if name not in text] == []
    lines = [line for line in text.splitlines() if 'service="assessment"' in line]
    assert any("halo_tbt_seconds_bucket" in line and 'le="0.12"' in line for line in lines)
    assert any("halo_ttft_seconds_bucket" in line and 'le="0.8"' in line for line in lines)


async def test_scale_down_drains(cluster, openai) -> None:
    """Scaling to one replica, as the dashboard does it, cuts no stream, and the drained replica goes after its last."""
    await until_load(two_replicas, 20)
    streams = [asyncio.create_task(stream_words(openai, "records", 300)) for _ in range(8)]
    await until_load(lambda load: load["held"] == 8, 5)
    await asyncio.to_thread(scale_engines, 1)
    more = [stream_words(openai, "triage", 20) for _ in range(8)]
    assert all(len(words) == 20 for words in await asyncio.gather(*more))
    assert all(len(words) == 300 for words in await asyncio.gather(*streams))
    await until_load(lambda load: len(load["replicas"]) == 1, 10)
    await asyncio.to_thread(scale_engines, 2)
    await until_load(two_replicas, 30)


def scale_engines(replicas: int) -> None:
    """What the dashboard's scaling calls."""
    engine = DeploymentID("engine", "halo")
    ray.get(_get_global_client()._controller.update_deployment_replicas.remote(engine, replicas), timeout=20)


async def test_redeploy_cuts_no_stream(cluster, openai, deployments_of) -> None:
    """Replacing every process, admission too, cuts no stream and fails no request."""
    await until_load(two_replicas, 20)
    stop = asyncio.Event()
    answers: list[int] = []

    async def ask_on() -> None:
        while not stop.is_set():
            answers.append(len(await stream_words(openai, "triage", 20)))

    streams = [asyncio.create_task(stream_words(openai, "records", 400)) for _ in range(6)]
    asking = [asyncio.create_task(ask_on()) for _ in range(3)]
    await asyncio.sleep(0.5)
    application = build(deployments_of())
    await asyncio.to_thread(lambda: serve.run(application, name="halo", route_prefix="/", external_scaler_enabled=True))
    assert all(len(words) == 400 for words in await asyncio.gather(*streams))
    await until_load(two_replicas, 30)
    stop.set()
    await asyncio.gather(*asking)
    assert set(answers) == {20}
    await until_load(idle, 10)


async def test_wrong_addresses_cross_processes(cluster) -> None:
    """A call for a replica that does not exist is refused as such by whoever gets it, on calls and on streams."""
    pool = ServeEnginePool(serve.get_deployment_handle("engine", "halo"))
    nobody = ReplicaAddress("nobody", "never")
    with pytest.raises(WrongReplicaError):
        await pool.abort(nobody, ["x"])
    with pytest.raises(WrongReplicaError):
        await anext(pool.deliveries(nobody, "g"))
