"""Errors in the envelope of the OpenAI API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployments.protocol import Refusal

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def envelope(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error body of an HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiError(Exception):
    """Ends a request with an HTTP status and an OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: Mapping[str, Any] = envelope(status, message, param=param, code=code)

    @classmethod
    def from_refusal(cls, refusal: Refusal) -> ApiError:
        """The engine's own refusal, as it stands."""
        error = cls(refusal.status, "refused by the engine", headers=refusal.headers)
        error.body = refusal.body
        return error

    def event(self) -> str:
        """The error as an SSE event, for a response that has begun. OpenAI's SDK raises on it."""
        return f"data: {json.dumps(self.body, separators=(',', ':'))}\n\n"
