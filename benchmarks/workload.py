"""What a load run sends and when: arrivals, services, prompts and output lengths, all from one seed.

A workload is made completely before anything is sent, so that several servers can be given the very same one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Messages = tuple[Mapping[str, str], ...]

_WORDS = (  # noqa: SIM905 - forty lines otherwise
    "patient reports pain fever cough since days weeks morning evening left right arm leg chest back head mild severe "
    "blood pressure pulse normal raised lowered treatment advised review medication dose allergy history family visit"
).split()


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names the file and line, or the value."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: sent ``at_us`` microseconds after the start of the run, whatever happened to earlier ones."""

    at_us: int
    service: str
    messages: Messages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """One service's part of the load. ``share`` is relative to the other services' shares.

    ``prompts`` are drawn from with replacement; ``output_tokens`` is the closed range of response lengths.
    """

    service: str
    prompts: Sequence[Messages]
    share: float = 1.0
    output_tokens: tuple[int, int] = (24, 48)


def poisson_arrivals(rate: float, seconds: float, rng: np.random.Generator) -> list[int]:
    """Arrival times in microseconds of a Poisson process of ``rate`` per second over ``seconds``."""
    return gamma_arrivals(rate, 1.0, seconds, rng)


def gamma_arrivals(rate: float, cv: float, seconds: float, rng: np.random.Generator) -> list[int]:
    """Arrival times in microseconds with gamma-distributed gaps: mean 1 / ``rate``, coefficient of variation ``cv``.

    ``cv`` 1 is Poisson, more is burstier, 0 is even spacing.
    """
    if not (rate > 0 and seconds > 0 and cv >= 0):
        raise WorkloadError(f"rate {rate} and seconds {seconds} have to be above 0, cv {cv} not below 0")
    times: list[int] = []
    now = 0.0
    while True:
        now += 1.0 / rate if cv == 0 else float(rng.gamma(cv**-2, cv**2 / rate))
        if now >= seconds:
            return times
        times.append(round(now * 1e6))


def compose(arrivals_us: Sequence[int], loads: Sequence[ServiceLoad], rng: np.random.Generator) -> list[PlannedRequest]:
    """Give every arrival a service, a prompt and an output length."""
    if not loads:
        raise WorkloadError("no service to send to")
    shares = np.array([load.share for load in loads], dtype=float)
    if (shares < 0).any() or shares.sum() <= 0:
        raise WorkloadError(f"shares {shares.tolist()} have to be positive")
    chosen = rng.choice(len(loads), size=len(arrivals_us), p=shares / shares.sum())
    requests = []
    for at_us, index in zip(arrivals_us, chosen, strict=True):
        load = loads[int(index)]
        low, high = load.output_tokens
        messages = load.prompts[int(rng.integers(len(load.prompts)))]
        requests.append(PlannedRequest(at_us, load.service, messages, int(rng.integers(low, high + 1))))
    return requests


def example_prompts(path: Path) -> list[Messages]:
    """The prompts of a JSONL file in chat format, without the answers. WorkloadError names the bad line."""
    prompts: list[Messages] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            asked = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages)
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(f"{path} line {number}: not a chat example ({error})") from None
        prompts.append(asked[:-1] if asked and asked[-1]["role"] == "assistant" else asked)
    if not all(prompts) or not prompts:
        raise WorkloadError(f"{path}: an example without a prompt")
    return prompts


def generated_prompts(count: int, words: tuple[int, int], rng: np.random.Generator) -> list[Messages]:
    """``count`` prompts of made-up notes with a number of words in the closed range ``words``.

    With the default model's tokenizer a word is 1.0 to 1.3 tokens.
    """
    prompts: list[Messages] = []
    for _ in range(count):
        length = int(rng.integers(words[0], words[1] + 1))
        text = " ".join(rng.choice(_WORDS, size=length).tolist())
        prompts.append(({"role": "user", "content": text},))
    return prompts


def lengthened(prompts: Sequence[Messages], words: tuple[int, int], rng: np.random.Generator) -> list[Messages]:
    """``prompts``, each with a made-up history of ``words`` words in front of its last message."""
    histories = generated_prompts(len(prompts), words, rng)
    result: list[Messages] = []
    for messages, (history,) in zip(prompts, histories, strict=True):
        last = messages[-1]
        longer = {**last, "content": f"History: {history['content']}.\n{last['content']}"}
        result.append((*messages[:-1], longer))
    return result


TRACE_COLUMNS = ("at_s", "service", "prompt_words", "output_tokens")


def trace(path: Path, rng: np.random.Generator) -> list[PlannedRequest]:
    """Requests of a CSV file with the columns at_s, service, prompt_words, output_tokens, in any row order.

    WorkloadError names the file, the line and the value for anything that is not a time of at least 0 or a count of at
    least 1.
    """
    requests = []
    with path.open(encoding="utf-8-sig", newline="") as handle:
        rows = csv.DictReader(handle)
        missing = [name for name in TRACE_COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise WorkloadError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(rows.fieldnames or ['none'])}"
            )
        for row in rows:
            where = f"{path} line {rows.line_num}"
            at_s = _number(row, "at_s", where, lowest=0.0)
            words = int(_number(row, "prompt_words", where, lowest=1.0))
            tokens = int(_number(row, "output_tokens", where, lowest=1.0))
            if not row["service"]:
                raise WorkloadError(f"{where}: no service")
            (messages,) = generated_prompts(1, (words, words), rng)
            requests.append(PlannedRequest(round(at_s * 1e6), row["service"], messages, tokens))
    if not requests:
        raise WorkloadError(f"{path}: no requests")
    return sorted(requests, key=lambda request: request.at_us)


def _number(row: Mapping[str, str | None], column: str, where: str, *, lowest: float) -> float:
    text = row[column]
    try:
        value = float(text or "")
    except ValueError:
        raise WorkloadError(f"{where}: {column} is {text!r}, not a number") from None
    if not lowest <= value < float("inf"):
        raise WorkloadError(f"{where}: {column} is {text}, it has to be at least {lowest:g}")
    return value


def by_service(requests: Sequence[PlannedRequest]) -> Iterator[tuple[str, int]]:
    """Each service and how many requests it gets, in order of name."""
    names = [request.service for request in requests]
    for name in sorted(set(names)):
        yield name, names.count(name)
