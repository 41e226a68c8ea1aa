"""Request bodies: strict JSON, bounded, decoded; every fault is a 4xx that says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.openai_errors import ApiError
from deployments.request_body import MAX_DEPTH, parse_object, read_body


def refused(raw: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert caught.value.status == 400
    json.dumps(dict(caught.value.body), allow_nan=False)
    return str(caught.value)


def read(pieces: list[bytes], encoding: str | None = None, limit: int = 1000) -> bytes:
    async def arrive() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return asyncio.run(read_body(arrive(), encoding, limit))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have(literal: str) -> None:
    """Case R2: NaN and infinities, also as overflowing numbers, are refused with an error that is itself valid JSON."""
    assert "number" in refused(f'{{"temperature": {literal}}}'.encode())


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "line 1, column 1"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1,}', "column"),
        (b"[1]", "an array"),
        (b"null", "null"),
        (b"1", "a number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"m": {"x": 1, "x": 1}}', "'x'"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_faults_are_named(raw: bytes, named: str) -> None:
    """Whatever is wrong with a body is named."""
    assert named in refused(raw)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting(opening: bytes) -> None:
    """Nesting is bounded, however deep a client goes; brackets in strings do not count."""
    assert "levels deep" in refused(b'{"x":' + opening * 200_000)
    text = "[" * 5000 + '\\"' + "{" * 5000
    assert parse_object(json.dumps({"x": text}).encode()) == {"x": text}
    assert parse_object(json.dumps({"x": [[]] * MAX_DEPTH}).encode())


def test_byte_order_mark() -> None:
    """A byte order mark is skipped (RFC 8259 section 8.1 allows it)."""
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


json_scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=20)


@given(st.dictionaries(st.text(max_size=20), st.recursive(json_scalars, st.lists, max_leaves=10), max_size=6))
def test_valid_objects_pass_unchanged(value: dict[str, object]) -> None:
    """Every valid object is read as json.loads reads it."""
    assert parse_object(json.dumps(value).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_an_error(raw: bytes) -> None:
    """No input makes the parser fail in another way."""
    with contextlib.suppress(ApiError):
        assert isinstance(parse_object(raw), dict)


def test_plain_body_is_bounded() -> None:
    """A body above the bound is 413, however it is cut into pieces."""
    assert read([b"x" * 500, b"x" * 500]) == b"x" * 1000
    with pytest.raises(ApiError) as caught:
        read([b"x" * 500, b"x" * 501])
    assert caught.value.status == 413


def test_gzip_is_decoded_in_any_pieces() -> None:
    """Case C5: a gzip body is decoded."""
    packed = gzip.compress(b'{"model": "m"}' * 20)
    assert read([packed], "gzip") == b'{"model": "m"}' * 20
    assert read([packed[i : i + 1] for i in range(len(packed))], " GZip ") == b'{"model": "m"}' * 20


def test_gzip_bomb_is_bounded() -> None:
    """Case C5: a small body that unpacks to a large one is 413 before it is unpacked."""
    with pytest.raises(ApiError) as caught:
        read([gzip.compress(b"0" * 50_000_000)], "gzip", limit=100_000)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-5], lambda raw: b"no" + raw, lambda raw: raw + b"tail", lambda raw: b""]
)
def test_damaged_gzip(damage) -> None:
    """Case C5: a corrupt, cut or padded gzip body is 400."""
    with pytest.raises(ApiError) as caught:
        read([damage(gzip.compress(b'{"model": "m"}'))], "gzip")
    assert caught.value.status == 400


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "x" * 500])
def test_other_encodings(encoding: str) -> None:
    """Any other encoding is 415 and says what is accepted (RFC 9110 section 15.5.16)."""
    with pytest.raises(ApiError) as caught:
        read([b"{}"], encoding)
    assert caught.value.status == 415
    assert "gzip" in caught.value.headers["accept-encoding"]
