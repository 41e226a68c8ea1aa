"""Read a streamed OpenAI response cheaply: server-sent events out of raw bytes, and the tokens in each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 1024 * 1024


class StreamError(Exception):
    """The stream broke the protocol or carried an error event."""


class EventSplitter:
    """Cuts bytes, in whatever pieces they come, into the data of server-sent events.

    Comments and fields other than ``data`` are skipped, lines may end in LF or CRLF (WHATWG HTML, section 9.2).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of every event that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data = b"\n".join(self._data)
                self._data.clear()
                yield data


@dataclass(slots=True)
class TokenCounter:
    """Counts the tokens of one response, event by event.

    With running usage in each event (vLLM's ``continuous_usage_stats``) the count is exact; otherwise an event with
    text counts as one token.
    """

    total: int = 0
    finished: bool = False

    def count(self, data: bytes) -> int:
        """Return the number of tokens in an event's ``data``. StreamError for an error event."""
        if data == b"[DONE]":
            self.finished = True
            return 0
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event that is not JSON: {error}") from None
        if not isinstance(event, dict):
            raise StreamError("an event that is not a JSON object")
        if "error" in event:
            raise StreamError(_message(event["error"]))
        before = self.total
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.total = max(self.total, int(usage.get("completion_tokens") or 0))
        elif any(_has_text(choice) for choice in event.get("choices") or ()):
            self.total += 1
        return self.total - before


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)
