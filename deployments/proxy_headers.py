"""Headers that Ray Serve's HTTP proxy cannot read, taken out before it does.

The proxy decodes a few request headers as UTF-8 outside of every error handler
(``HTTPProxy.setup_request_context_and_handle`` in ``ray/serve/_private/proxy.py``): one wrong byte in ``x-request-id``
and the client gets a 500, which the OpenAI SDK sends again. The proxy asks the function that
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names for middlewares around itself; ``halo serve`` sets that
(``app/launch.py``).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

MAX_VALUE_BYTES = 256
_SESSION = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")
_DECODED = frozenset({"x-request-id", "serve-multiplexed-model-id", _SESSION.lower().replace("_", "-")})


def middlewares() -> list[Middleware]:
    """What Serve's proxy is to be wrapped in; called by the proxy when it starts."""
    return [Middleware(ReadableHeaders)]


class ReadableHeaders:
    """Drops those headers when they hold anything but ASCII, or very much of it. Serve then makes an id of its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass the request on."""
        headers = scope.get("headers")
        if headers is not None:
            scope["headers"] = [(name, value) for name, value in headers if _is_readable(name, value)]
        await self._app(scope, receive, send)


def _is_readable(name: bytes, value: bytes) -> bool:
    if not name.isascii():
        return False
    if name.decode("ascii").lower().replace("_", "-") not in _DECODED:
        return True
    return value.isascii() and len(value) <= MAX_VALUE_BYTES
