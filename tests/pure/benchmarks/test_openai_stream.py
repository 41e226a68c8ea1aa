"""Reading server-sent events and counting tokens."""

from __future__ import annotations

import pytest

from benchmarks.openai_stream import MAX_EVENT_BYTES, EventSplitter, StreamError, TokenCounter

STREAM = b': ping\n\ndata: {"a": "\xc3\xa9"}\n\nid: 4\nevent: x\ndata:one\r\ndata: two\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_the_cuts_between_pieces_do_not_matter(size: int) -> None:
    """Comments, ids, CRLF, several data lines and split characters come out the same in pieces of any size."""
    splitter = EventSplitter()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in splitter.feed(piece)] == EVENTS


def test_an_endless_line_is_refused() -> None:
    """Memory stays bounded whatever the server sends."""
    with pytest.raises(StreamError):
        list(EventSplitter().feed(b"data: " + b"x" * MAX_EVENT_BYTES))


def test_tokens_by_running_usage() -> None:
    """Usage counts exactly: several tokens in one event, none in an event that only holds text back."""
    counter = TokenCounter()
    role = b'{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":{"completion_tokens":0}}'
    three = b'{"choices":[{"delta":{"content":"a b c"}}],"usage":{"completion_tokens":3}}'
    held = b'{"choices":[{"delta":{"content":""}}],"usage":{"completion_tokens":4}}'
    final = b'{"choices":[],"usage":{"completion_tokens":4}}'
    assert [counter.count(data) for data in (role, three, held, final, b"[DONE]")] == [0, 3, 1, 0, 0]
    assert counter.finished


def test_tokens_without_usage() -> None:
    """An event with text is a token, in chat and in completions; role and finish events are none."""
    counter = TokenCounter()
    events = [
        b'{"choices":[{"delta":{"role":"assistant"}}],"usage":null}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"text":"b"}]}',
        b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
    ]
    assert [counter.count(data) for data in events] == [0, 1, 1, 0]
    assert not counter.finished


@pytest.mark.parametrize(
    ("data", "message"),
    [(b'{"error":{"message":"gone"}}', "gone"), (b'{"error":"gone"}', "gone"), (b"{", "not JSON"), (b"[]", "object")],
)
def test_errors_in_the_stream(data: bytes, message: str) -> None:
    """An error event is a failure, never an empty answer."""
    with pytest.raises(StreamError, match=message):
        TokenCounter().count(data)
