"""An OpenAI endpoint without a model: each service answers with a scripted timeline of events.

Raw asyncio, so that the times are the script's. It reads just enough HTTP for one request per connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Headers = dict[str, str]


@dataclass(frozen=True, slots=True)
class Event:
    """``tokens`` tokens, sent ``after_ms`` after the event before (the first: after the request was read)."""

    after_ms: float
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Script:
    """How one service answers. ``status`` other than 200 is a plain error; ``fault`` ends the stream in that way."""

    events: Sequence[Event] = ()
    status: int = 200
    fault: str = ""  # "", "error event", "cut", "no done"


@dataclass(slots=True)
class FakeOpenAI:
    """The running server: where it is, and the bodies it was sent in order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)


@asynccontextmanager
async def fake_openai(scripts: Mapping[str, Script]) -> AsyncIterator[FakeOpenAI]:
    """Serve ``scripts`` by model name on a free port of the loopback interface."""
    seen = FakeOpenAI("")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            headers, body = await _read_request(reader)
            seen.headers.append(headers)
            seen.bodies.append(body)
            await _answer(writer, scripts[body["model"]], usage="stream_options" in body)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield seen


async def _read_request(reader: asyncio.StreamReader) -> tuple[Headers, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    assert head[0].startswith("POST /v1/chat/completions "), head[0]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def _answer(writer: asyncio.StreamWriter, script: Script, *, usage: bool) -> None:
    if script.status != 200:
        body = json.dumps({"error": {"message": "scripted refusal"}}).encode()
        writer.write(f"HTTP/1.1 {script.status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        return
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n")
    _send(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    sent = 0
    for event in script.events:
        await asyncio.sleep(event.after_ms / 1000)
        sent += event.tokens
        chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "word " * event.tokens}}]}
        if usage:
            chunk["usage"] = {"completion_tokens": sent}
        _send(writer, chunk)
        await writer.drain()
    if script.fault == "error event":
        _send(writer, {"error": {"message": "scripted failure", "code": 500}})
    elif script.fault == "cut":
        writer.transport.abort()
    elif script.fault != "no done":
        writer.write(b"data: [DONE]\n\n")


def _send(writer: asyncio.StreamWriter, event: Mapping[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
