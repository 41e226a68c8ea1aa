"""Request headers that Ray Serve's proxy would fall over, in front of the proxy's own code; no cluster is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private import http_util
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest
from ray.serve.config import HTTPOptions

from app.launch import ENVIRONMENT

Headers = list[tuple[bytes, bytes]]
CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


class Handle:
    """The part of a deployment handle that the proxy touches here."""

    def options(self, **_: str) -> Handle:
        return self


async def proxy(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Serve's proxy up to where it has read the headers."""
    request = ASGIProxyRequest(scope, receive, send)
    setup = HTTPProxy.setup_request_context_and_handle
    _, request_id = setup(None, "halo", Handle(), "/", request, "internal")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"seen", request_id.encode())]})


def answer(headers: Headers, middlewares: list[Any]) -> Headers:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = http_util._apply_middlewares(proxy, middlewares)
    asyncio.run(app({"type": "http", "client": ("127.0.0.1", 1), "headers": list(headers)}, None, send))
    return sent[0]["headers"]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The middlewares that the proxy finds through the variable that `halo serve` sets."""
    monkeypatch.setattr(http_util, CALLBACK, ENVIRONMENT[CALLBACK])
    return http_util.configure_http_middlewares(HTTPOptions()).middlewares


BROKEN: list[tuple[bytes, bytes]] = [
    (b"x-request-id", b"caf\xe9"),
    (b"x-request-id", b"\xff\xfe"),
    (b"x-session-id", b"caf\xe9"),
    (b"serve_multiplexed_model_id", b"\xc3"),
    (b"serve-multiplexed-model-id", b"\xc3"),
]


@pytest.mark.parametrize("header", BROKEN, ids=str)
def test_unreadable_headers_are_dropped(ours: list[Any], header: tuple[bytes, bytes]) -> None:
    """Alone the proxy raises, which is a 500; behind ours it answers, with an id of its own where that was wrong."""
    with pytest.raises(UnicodeDecodeError):
        answer([header], [])
    headers = dict(answer([header], ours))
    assert headers[b"seen"].isascii()
    assert headers[b"x-request-id"] == headers[b"seen"]


def test_readable_headers_stay(ours: list[Any]) -> None:
    """An ordinary id comes back as it was sent; one of thousands of bytes, or beyond ASCII, does not."""
    assert dict(answer([(b"x-request-id", b"ward-3/17")], ours))[b"x-request-id"] == b"ward-3/17"
    for value in (b"x" * 5000, "é".encode()):
        assert value != dict(answer([(b"x-request-id", value)], ours))[b"x-request-id"]
