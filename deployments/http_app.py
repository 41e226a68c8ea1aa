"""HTTP in front of a gateway: routes, headers, error envelopes, and what a client's disconnect does.

``x-request-id`` is Serve's: its proxy takes the client's or makes one, logs it and sends it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from deployments.exchange import Call, Exchange, Piece
from deployments.gateway import Gateway
from deployments.openai_errors import ApiError, envelope
from deployments.protocol import Endpoint
from deployments.request_body import parse_object, read_body
from deployments.request_shape import check_shape
from deployments.settings import ServiceSettings
from deployments.slo_ledger import render_text

logger = logging.getLogger(__name__)

_PARSE_IN_THREAD_BYTES = 128 * 1024
_INTERNAL = ApiError(500, "Internal error; the server's log says more.")


def build_http_app(gateway: Gateway) -> FastAPI:
    """The ASGI application of a gateway. Its lifespan starts and stops the gateway."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)
    for endpoint in Endpoint:
        app.router.routes.append(Route(endpoint.value, _Generation(gateway, endpoint), methods=["POST"]))
    _add_read_routes(app, gateway)
    return app


def _add_read_routes(app: FastAPI, gateway: Gateway) -> None:
    started_s = int(time.time())  # a date for clients to show, nothing is decided by it

    async def models(request: Request) -> Response:
        holder = gateway.authenticate(request.headers.get("authorization"))
        usable = [service for service in gateway.services if holder is None or holder.may_use(service.name)]
        data = [_model(service, gateway.settings.base_name, started_s) for service in usable]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        holder = gateway.authenticate(request.headers.get("authorization"))
        service = gateway.service_for(request.path_params["model"], holder)
        return JSONResponse(_model(service, gateway.settings.base_name, started_s))

    async def slo(request: Request) -> Response:
        gateway.authenticate(request.headers.get("authorization"))
        table = await gateway.slo()
        if request.headers.get("accept", "").startswith("text/plain"):
            return PlainTextResponse(render_text(table))
        return JSONResponse({"services": table})

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        if gateway.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "no engine replica is ready"}, 503, {"retry-after": "5"})

    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/models/{model:path}", model, methods=["GET"])
    app.add_route("/slo", slo, methods=["GET"])
    app.add_route("/healthz", healthz, methods=["GET"])
    app.add_route("/readyz", readyz, methods=["GET"])


def _model(service: ServiceSettings, base_name: str, created_s: int) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": created_s,
        "owned_by": "halo-serve",
        "root": base_name,
        "parent": None if service.name == base_name else base_name,
        "ttft_ms": service.ttft_us / 1000,
        "tbt_ms": service.tbt_us / 1000,
    }


class _Generation:
    """The ASGI endpoint of one generating route."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_us = self._gateway.clock()
        request = Request(scope, receive)
        response: Response
        try:
            response = GenerationResponse(self._gateway, await self._read(request, arrival_us))
        except ClientDisconnect:
            return
        except ApiError as error:
            response = await _api_error(request, error)
        await response(scope, receive, send)

    async def _read(self, request: Request, arrival_us: int) -> Call:
        holder = self._gateway.authenticate(request.headers.get("authorization"))
        self._gateway.admit(holder)
        encoding = request.headers.get("content-encoding")
        raw = await read_body(request.stream(), encoding, self._gateway.settings.max_body_bytes)
        large = len(raw) > _PARSE_IN_THREAD_BYTES
        body = await asyncio.to_thread(_parse, raw) if large else _parse(raw)
        return self._gateway.call(self._endpoint, body, holder, arrival_us)


def _parse(raw: bytes) -> dict[str, Any]:
    body = parse_object(raw)
    check_shape(body)
    return body


class GenerationResponse(Response):
    """Sends a call's pieces. Headers go out with the first one, so that every earlier error has its HTTP status.

    When the client goes, by ASGI's ``http.disconnect`` or by a cancellation of the task as Serve does it, the call is
    closed at once, in whatever stage it is.
    """

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self.background = None
        self._gateway = gateway
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        exchange = self._gateway.exchange(self._call)
        sending = loop.create_task(self._send(send, exchange))
        gone = loop.create_task(_until_gone(receive))
        cut = loop.create_task(exchange.cut.wait())
        try:
            await asyncio.wait((sending, gone, cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            cut.cancel()
            if not sending.done():
                sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending

    async def _send(self, send: Send, exchange: Exchange) -> None:
        begun = False
        try:
            async with contextlib.aclosing(exchange.pieces()) as pieces:
                async for piece in pieces:
                    if not begun:
                        begun = True
                        await send(_start_message(piece))
                    await send(_body_message(piece.data, more=True))
            await send(_body_message("", more=False))
        except ApiError as error:
            if not begun:
                await send_error(send, error)
                return
            await send(_body_message(error.event(), more=False))
        except Exception:
            if not begun:
                raise
            logger.exception("request %s failed after its response had begun", self._call.request_id)
            await send(_body_message(_INTERNAL.event(), more=False))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start_message(piece: Piece) -> Message:
    if piece.streamed:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
    else:
        headers = [(b"content-type", b"application/json")]
    return {"type": "http.response.start", "status": piece.status, "headers": headers}


def _body_message(data: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data.encode(), "more_body": more}


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole response."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(dict(error.body), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    hint = "" if request.url.path.startswith("/v1/") else " The OpenAI API is below /v1: base_url ends in /v1."
    message = {404: f"{what} does not exist.{hint}", 405: f"{what}: this method is not allowed here."}
    body = envelope(error.status_code, message.get(error.status_code, str(error.detail)))
    return JSONResponse(body, error.status_code, error.headers)


async def _fault(_: Request, __: Exception) -> Response:
    """A fault of ours. The log has the traceback; the client gets none."""
    return JSONResponse(dict(_INTERNAL.body), 500)
