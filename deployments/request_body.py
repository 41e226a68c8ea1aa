"""Reads a request body with a bound and parses it as strict JSON (RFC 8259). Every fault is the client's: a 4xx."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from deployments.openai_errors import ApiError

_GZIP = 31  # zlib's wbits for exactly the gzip format
_DECODED_PIECE = 64 * 1024
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
MAX_DEPTH = 100
"""Deepest nesting of arrays and objects. Tool schemas reach 20; the parser's own limit is some hundreds."""


async def read_body(pieces: AsyncIterator[bytes], content_encoding: str | None, max_bytes: int) -> bytes:
    """The decoded body. ``max_bytes`` bounds it before and after decoding; 413 above it.

    ``gzip`` is decoded; any other encoding is 415 with ``Accept-Encoding`` (RFC 9110 section 8.4, 15.5.16).
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise ApiError(
            415,
            f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is or gzip it.",
            headers={"accept-encoding": "gzip, identity"},
        )
    decoder = None if encoding == "identity" else zlib.decompressobj(_GZIP)
    body = bytearray()
    received = 0
    async for piece in pieces:
        received += len(piece)
        if received > max_bytes:
            raise _too_large(max_bytes)
        if decoder is None:
            body += piece
        else:
            _inflate(decoder, piece, body, max_bytes)
    if decoder is not None and not decoder.eof:
        raise ApiError(400, "The gzip body is cut short.")
    return bytes(body)


def _inflate(decoder: Any, piece: bytes, body: bytearray, max_bytes: int) -> None:
    try:
        while piece:
            if decoder.eof:
                raise ApiError(400, "The gzip body has data after its end.")
            body += decoder.decompress(piece, _DECODED_PIECE)
            piece = decoder.unconsumed_tail or decoder.unused_data
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except zlib.error as error:
        raise ApiError(400, f"The body is not valid gzip: {error}.") from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``; ApiError 400 naming what is wrong with it."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: byte {error.start} is invalid.") from None
    _check_depth(text)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
        # A lone surrogate (\ud800) parses, but no UTF-8 text can carry it any further.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "The body has an unpaired surrogate escape, which is no character.") from None
    except json.JSONDecodeError as error:
        raise ApiError(
            400, f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_kind(value)}.")
    return value


def _check_depth(text: str) -> None:
    """Refuse deep nesting before the recursive parser meets it. Brackets inside strings do not count."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _BRACKETS.finditer(text):
        first = token[0][0]
        depth += first in "[{"
        depth -= first in "]}"
        if depth > MAX_DEPTH:
            raise ApiError(400, f"The body is nested more than {MAX_DEPTH} levels deep.")


def _no_constant(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {literal[:40]} is out of range")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} appears twice in one object")
    return value


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
