"""A gateway with real admission and fake engines in one process, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from deployments.admission import Admission
from deployments.gateway import Gateway
from deployments.gateway_ports import Keys
from deployments.http_app import build_http_app
from deployments.settings import AdmissionSettings, EngineSettings, GatewaySettings, Overload, ServiceSettings
from tests.fakes.surroundings import FakePool, FakeReplica, RecordedMetrics
from tests.fakes.virtual_time import virtual_us

TRIAGE = ServiceSettings("triage", None, 300_000, 50_000)
RECORDS = ServiceSettings("records", None, 3_000_000, 200_000)
SHEDDING = ServiceSettings("shedding", None, 300_000, 50_000, overload=Overload.SHED)
BASE = ServiceSettings("base", None, 2_000_000, 200_000)
SERVICES = (TRIAGE, RECORDS, SHEDDING)
ENGINE = EngineSettings(
    "none", "base", SERVICES, BASE, max_num_seqs=2, max_model_len=50, engine_args={"step_us": 10_000}
)
ADMISSION = AdmissionSettings(heartbeat_timeout_us=4_000_000)
GATEWAY = GatewaySettings(SERVICES, "base", BASE, max_body_bytes=100_000, stream_timeout_us=60_000_000)


class RawCall:
    """One HTTP request at the ASGI level, so that a test can leave at any moment."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        self.reading = asyncio.Event()
        self.reading.set()
        self.task = asyncio.create_task(app(scope, self._received.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self.messages.append(message)

    def disconnect(self) -> None:
        """The client closes its connection."""
        self._received.put_nowait({"type": "http.disconnect"})

    @property
    def text(self) -> str:
        """The body sent so far."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def status(self) -> int | None:
        """The status sent, if one was."""
        return self.messages[0]["status"] if self.messages else None


@dataclass
class House:
    """A running gateway and everything around it."""

    gateway: Gateway
    admission: Admission
    pool: FakePool
    metrics: RecordedMetrics
    app: Any
    http: httpx.AsyncClient
    engine: EngineSettings
    raw: list[RawCall] = field(default_factory=list)

    async def add_replica(self, name: str, **engine_args: Any) -> FakeReplica:
        """Start one more replica."""
        settings = replace(self.engine, engine_args={**self.engine.engine_args, **engine_args})
        replica = FakeReplica(name, settings, self.admission)
        self.pool.replicas[name] = replica
        await replica.endpoint.start()
        await asyncio.sleep(0.01)
        return replica

    def call(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> RawCall:
        """Start a request that can disconnect."""
        call = RawCall(self.app, path, body)
        self.raw.append(call)
        return call

    async def settle(self) -> None:
        """Let what was started arrive."""
        await asyncio.sleep(0.02)

    async def load(self) -> dict[str, Any]:
        """Admission's view."""
        return await self.admission.load()


def chat(model: str = "triage", **fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": model, "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5} | fields


@contextlib.asynccontextmanager
async def run_house(
    *,
    replicas: int = 1,
    engine: EngineSettings = ENGINE,
    gateway_settings: GatewaySettings = GATEWAY,
    admission_settings: AdmissionSettings = ADMISSION,
    keys: Keys | None = None,
) -> AsyncIterator[House]:
    """Start a house, stop it at the end, and check that nothing is left behind."""
    admission = Admission(admission_settings, [*SERVICES, BASE], virtual_us)
    pool, metrics = FakePool(), RecordedMetrics()
    gateway = Gateway(gateway_settings, pool, admission, metrics, keys=keys, clock=virtual_us)
    app = build_http_app(gateway)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://house") as http:
        house = House(gateway, admission, pool, metrics, app, http, engine)
        for number in range(replicas):
            await house.add_replica(f"r{number}")
        await gateway.start()
        await gateway.report()
        try:
            yield house
        finally:
            for call in house.raw:
                call.disconnect()
                call.reading.set()
            await asyncio.gather(*(call.task for call in house.raw), return_exceptions=True)
            await gateway.stop()
            for replica in pool.replicas.values():
                await replica.endpoint.stop()
    assert all(count == 0 for count in pool.open_streams.values())
    assert (await admission.load())["held"] == 0
