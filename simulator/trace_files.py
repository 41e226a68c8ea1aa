"""Read request traces: Azure LLM inference 2023, BurstGPT, and our own CSV.

A trace is read completely and strictly. A wrong header, a time that is not a number, negative or earlier than the row
before, or a length that is not a whole number of 1 or more ends the reading with file, line and reason: a workload that
was silently mended gives results about another workload. Byte order marks and Windows line ends are accepted.

BurstGPT alone has rows of failed requests, with 0 response tokens. They are dropped and counted, never taken for
requests that were answered at once (HPMLL/BurstGPT issue 11).
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from simulator.workload import WorkloadError

SHIPPED = Path(__file__).parent / "data" / "traces"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OWN_COLUMNS = ("at_s", "service", "prompt_tokens", "output_tokens")
TOKENS_MAX = 10_000_000
_FRACTION_DIGITS = 7


class TraceError(WorkloadError):
    """A trace that is refused; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace. ``at_us`` counts from the first request; ``service`` is empty where the trace has none."""

    at_us: int
    prompt_tokens: int
    output_tokens: int
    service: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and how many rows were dropped for which reason."""

    name: str
    rows: tuple[TraceRow, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first to the last arrival."""
        return (self.rows[-1].at_us - self.rows[0].at_us) / 1e6 if self.rows else 0.0

    def describe(self) -> str:
        """One line: requests, window, mean rate, peak rate over ten seconds, dropped rows."""
        rate = len(self.rows) / self.seconds if self.seconds else 0.0
        lost = "".join(f", {count} rows dropped: {reason}" for reason, count in self.dropped.items())
        peak = peak_rps([row.at_us for row in self.rows])
        return (
            f"{self.name}: {len(self.rows)} requests over {self.seconds:.0f} s, {rate:.2f}/s, peak {peak:.1f}/s{lost}"
        )


def peak_rps(at_us: list[int], window_us: int = 10_000_000) -> float:
    """The most requests in any window of ``window_us``, per second."""
    best, start = 0, 0
    for end, time_us in enumerate(at_us):
        while at_us[start] <= time_us - window_us:
            start += 1
        best = max(best, end - start + 1)
    return best / (window_us / 1e6)


def load_azure(path: Path | None = None, *, kind: str = "conv") -> Trace:
    """Read an Azure 2023 trace; without a path the shipped one of ``kind`` conv or code."""
    path = path or SHIPPED / f"azure-2023-{kind}.csv.gz"

    def row(values: Mapping[str, str], where: str) -> TraceRow:
        return TraceRow(
            _timestamp_us(values["TIMESTAMP"], where),
            _tokens(values, "ContextTokens", where),
            _tokens(values, "GeneratedTokens", where),
        )

    return _read(path, AZURE_COLUMNS, row)


def load_burstgpt(path: Path) -> Trace:
    """Read a BurstGPT trace (times in seconds)."""

    def row(values: Mapping[str, str], where: str) -> TraceRow | str:
        at_us = _seconds_us(values, "Timestamp", where)
        prompt = _tokens(values, "Request tokens", where, least=0)
        output = _tokens(values, "Response tokens", where, least=0)
        if not output:
            return "failed requests (0 response tokens)"
        if not prompt:
            raise TraceError(f"{where}: Request tokens is 0, but there are {output} response tokens")
        return TraceRow(at_us, prompt, output)

    return _read(path, BURSTGPT_COLUMNS, row)


def load_own(path: Path) -> Trace:
    """Read a CSV file with the columns at_s, service, prompt_tokens, output_tokens, sorted by time."""

    def row(values: Mapping[str, str], where: str) -> TraceRow:
        service = (values["service"] or "").strip()
        if not service:
            raise TraceError(f"{where}: service is empty")
        at_us = _seconds_us(values, "at_s", where)
        return TraceRow(
            at_us, _tokens(values, "prompt_tokens", where), _tokens(values, "output_tokens", where), service
        )

    return _read(path, OWN_COLUMNS, row)


def _read(path: Path, columns: tuple[str, ...], make: Callable[[Mapping[str, str], str], TraceRow | str]) -> Trace:
    rows: list[TraceRow] = []
    dropped: dict[str, int] = {}
    latest_us, first_us = 0, None
    for values, where in _lines(path, columns):
        made = make(values, where)
        if isinstance(made, str):
            dropped[made] = dropped.get(made, 0) + 1
            continue
        if rows and made.at_us < latest_us:
            raise TraceError(
                f"{where}: its time is {(latest_us - made.at_us) / 1e6:g} s before that of an earlier row; sort the "
                "file by time"
            )
        latest_us = made.at_us
        first_us = made.at_us if first_us is None else first_us
        rows.append(TraceRow(made.at_us - first_us, made.prompt_tokens, made.output_tokens, made.service))
    if not rows:
        raise TraceError(f"{path}: no requests")
    return Trace(path.name, tuple(rows), dropped)


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Mapping[str, str], str]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise TraceError(f"{path} line {line}: not UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    missing = [name for name in columns if name not in header]
    if missing:
        raise TraceError(f"{path} line 1: no column {', '.join(missing)}; it has {', '.join(header) or 'none'}")
    places = [header.index(name) for name in columns]
    for fields in reader:
        where = f"{path} line {reader.line_num}"
        if not fields:
            continue
        if fields == header:
            raise TraceError(f"{where}: the header again; files put together need it only once")
        if len(fields) != len(header):
            raise TraceError(f"{where}: {len(fields)} fields, the header has {len(header)}")
        yield {name: fields[place] for name, place in zip(columns, places, strict=True)}, where


def _timestamp_us(text: str, where: str) -> int:
    """Microseconds of a date and time with up to seven decimals."""
    whole, _, fraction = text.strip().partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        if moment.tzinfo is not None or len(fraction) > _FRACTION_DIGITS or (fraction and not fraction.isdecimal()):
            raise ValueError
    except ValueError:
        raise TraceError(f"{where}: TIMESTAMP is {text!r}, not a time as 2023-11-16 18:15:46.6805900") from None
    seconds = (moment - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001  # the trace has no time zone
    micros = int(fraction[:6].ljust(6, "0")) if fraction else 0
    if seconds < 0:
        raise TraceError(f"{where}: TIMESTAMP {text!r} lies before 2000")
    return int(seconds) * 1_000_000 + micros


def _seconds_us(values: Mapping[str, str], column: str, where: str) -> int:
    text = values[column]
    try:
        seconds = float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a number") from None
    if not 0 <= seconds < 1e12:
        raise TraceError(f"{where}: {column} is {text}, it has to be 0 or more and finite")
    return round(seconds * 1e6)


def _tokens(values: Mapping[str, str], column: str, where: str, *, least: int = 1) -> int:
    text = values[column]
    try:
        number = float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a number") from None
    if not least <= number <= TOKENS_MAX or number != int(number):
        raise TraceError(f"{where}: {column} is {text}, it has to be a whole number of {least} or more")
    return int(number)
