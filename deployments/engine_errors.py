"""OpenAI error envelopes for what goes wrong in the engine replica.

vLLM's texts and statuses, with two repairs: a client's mistake is never a 5xx, and a prompt beyond the context names
both counts and carries OpenAI's code ``context_length_exceeded``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.protocol import Delivery, Refusal

_MAX_REPORTED_ERRORS = 5


class PromptTooLongError(Exception):
    """The prompt has ``tokens`` tokens, the model's context only ``limit``."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has {tokens} tokens. "
            "Shorten the prompt."
        )


def is_prompt_too_long(error: Exception) -> bool:
    """Whether vLLM refused the prompt for its length (``vllm.renderers.params``)."""
    return isinstance(error, VLLMValidationError) and error.parameter in ("input_tokens", "input_text")


def error_response(error: Exception) -> ErrorResponse:
    """The OpenAI error for an exception raised while a request was validated or run."""
    if isinstance(error, PromptTooLongError):
        return create_error_response(str(error), param="messages")
    if isinstance(error, ValidationError | RequestValidationError):
        entries = error.errors()
        first = entries[0]
        where = clean_loc_for_param(tuple(first["loc"])) if first["loc"] else None
        what = "; ".join(_validation_text(entry) for entry in entries[:_MAX_REPORTED_ERRORS])
        return create_error_response(what, param=where)
    return create_error_response(error)


def validation_fault(error: Exception) -> ErrorResponse:
    """The error for an exception raised while a request was only validated.

    Nothing ran, so whatever vLLM stumbles over (a recursion, an overflow, an assertion) is in the request: a 400. Only
    an engine that is gone is the server's fault.
    """
    response = error_response(error)
    if response.error.code < HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, GenerationError | EngineDeadError):
        return response
    return create_error_response(f"The request cannot be processed: {type(error).__name__}: {str(error)[:200]}")


def grammar_fault(body: Mapping[str, Any], response: ErrorResponse) -> ErrorResponse:
    """``response``, or a 400 where the engine failed before the first token of a request with structured output.

    vLLM compiles grammars in the engine and reports one that cannot be compiled as an internal error.
    """
    response_format = body.get("response_format")
    is_plain = response_format is None or (isinstance(response_format, dict) and response_format.get("type") == "text")
    fields = [name for name in ("structured_outputs", "tools") if body.get(name)]
    fields += [] if is_plain else ["response_format"]
    if response.error.code != HTTPStatus.INTERNAL_SERVER_ERROR or not fields:
        return response
    return create_error_response(f"{fields[0]} could not be compiled into a grammar.", param=fields[0])


def _validation_text(entry: Mapping[str, Any]) -> str:
    where = clean_loc_for_param(tuple(entry["loc"])) if entry["loc"] else "body"
    return f"{where}: {entry['msg']}"


def envelope(response: ErrorResponse) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI envelope of an error."""
    status = int(response.error.code)
    body = response.model_dump(mode="json")
    if status == HTTPStatus.BAD_REQUEST and "maximum context length" in body["error"]["message"]:
        body["error"]["code"] = "context_length_exceeded"
    return status, body


def refusal(response: ErrorResponse) -> Refusal:
    """An error found before the request was queued."""
    status, body = envelope(response)
    return Refusal(status, body)


def error_delivery(request_id: str, response: ErrorResponse) -> Delivery:
    """An error as the whole response."""
    status, body = envelope(response)
    return Delivery(request_id, json.dumps(body, ensure_ascii=False), last=True, status=status)


def early_error(event: str) -> ErrorResponse:
    """The error that vLLM reports inside a stream before any token."""
    return ErrorResponse.model_validate(json.loads(event.removeprefix("data: ")))
