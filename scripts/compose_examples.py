"""Compose the chat examples of the four demonstration services from hand-written sentences.

Reads ``examples/services/sources/<service>.yaml`` and writes ``<service>.train.jsonl`` and
``<service>.heldout.jsonl`` beside that folder, one ``{"messages": [...]}`` per line. The same sources always give
the same bytes. Held-out prompts use sentences, and where there are values also numbers, that no training prompt has.

Run with ``python -m scripts.compose_examples``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.durable_file import write_durably

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "services"
SERVICES = ("intelligent-triage", "pre-assessment", "analysis-assistant", "record-generation")
SPLITS = ("train", "heldout")

Source = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """One exchange; ``heldout`` examples are never trained on."""

    user: str
    assistant: str
    heldout: bool


def triage(source: Source, rng: random.Random) -> Iterator[Example]:
    """Complaint -> department, reason, urgency. The urgency comes last because it follows from the reason."""
    for case in source["cases"]:
        answer = f"Department: {case['department']}\nReason: {case['reason']}\nUrgency: {case['urgency']}"
        ages = case.get("ages", source["ages"])
        for frame, complaint, heldout in _framed(source["frames"], case["complaints"], 2, rng):
            yield Example(frame.format(complaint=complaint, age=rng.randint(*ages)), answer, heldout)


def intake(source: Source, rng: random.Random) -> Iterator[Example]:
    """Statement -> three questions on its topic and two of the general ones, numbered."""
    for topic in source["topics"]:
        questions = [*topic["questions"], *rng.sample(source["general"], 2)]
        for frame, statement, heldout in _framed(source["frames"], topic["statements"], 2, rng):
            answer = "\n".join(f"{number}. {question}" for number, question in enumerate(questions, 1))
            yield Example(frame.format(statement=statement, age=rng.randint(19, 84)), answer, heldout)


def analysis(source: Source, rng: random.Random) -> Iterator[Example]:
    """Findings and laboratory values -> findings, what to consider, next step."""
    for pattern in source["patterns"]:
        for frame, patient, heldout in _framed(source["frames"], pattern["patients"], 4, rng):
            drawn = _draw(pattern["ranges"], rng)
            values = pattern["values"].format(**drawn)
            user = frame.format(patient=patient, patient_lower=patient[0].lower() + patient[1:], values=values)
            findings = pattern["findings"].format(**drawn)
            answer = f"Findings: {findings}\nConsider: {pattern['consider']}\nNext step: {pattern['next_step']}"
            yield Example(user, answer, heldout)


def record(source: Source, rng: random.Random) -> Iterator[Example]:
    """Notes of a visit -> SOAP note."""
    for visit in source["visits"]:
        for frame, patient, heldout in _framed(source["frames"], visit["patients"], 4, rng):
            drawn = _draw(visit["ranges"], rng)
            said = {key: visit[key].format(**drawn) for key in ("exam", "opinion", "advice", "s", "o", "a", "p")}
            user = frame.format(patient=patient.format(**drawn), **said)
            answer = f"S: {said['s']}\nO: {said['o']}\nA: {said['a']}\nP: {said['p']}"
            yield Example(user, answer, heldout)


COMPOSERS: dict[str, Callable[[Source, random.Random], Iterator[Example]]] = {
    "intelligent-triage": triage,
    "pre-assessment": intake,
    "analysis-assistant": analysis,
    "record-generation": record,
}


def compose(service: str) -> dict[str, list[dict[str, Any]]]:
    """The chats of ``service`` by split. Every sixth training chat begins with the service's system message."""
    source = yaml.safe_load((EXAMPLES / "sources" / f"{service}.yaml").read_text(encoding="utf-8"))
    rng = random.Random(service)  # noqa: S311
    chats: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for example in COMPOSERS[service](source, rng):
        if example.user in seen:
            continue
        seen.add(example.user)
        split = chats["heldout" if example.heldout else "train"]
        messages = [{"role": "user", "content": example.user}, {"role": "assistant", "content": example.assistant}]
        if not example.heldout and len(split) % 6 == 5:
            messages.insert(0, {"role": "system", "content": source["system"]})
        split.append({"messages": messages})
    rng.shuffle(chats["train"])
    return chats


def load(service: str, split: str) -> list[dict[str, Any]]:
    """The committed chats of one split, in file order."""
    lines = _file(service, split).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def render(chats: list[dict[str, Any]]) -> str:
    """JSON lines, one chat each."""
    return "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)


def _framed(
    frames: list[str], sentences: list[str], per_sentence: int, rng: random.Random
) -> Iterator[tuple[str, str, bool]]:
    """Each sentence in ``per_sentence`` different frames; the last sentence once, held out."""
    for sentence in sentences[:-1]:
        for frame in rng.sample(frames, per_sentence):
            yield frame, sentence, False
    yield rng.choice(frames), sentences[-1], True


def _draw(ranges: Mapping[str, list[float]], rng: random.Random) -> dict[str, str]:
    """One value per name, with as many decimals as its range has."""
    drawn = {}
    for name, (low, high) in ranges.items():
        decimals = max(len(str(bound).partition(".")[2]) for bound in (low, high))
        step = 10**decimals
        drawn[name] = f"{rng.randint(round(low * step), round(high * step)) / step:.{decimals}f}"
    return drawn


def _file(service: str, split: str) -> Path:
    return EXAMPLES / f"{service}.{split}.jsonl"


def main() -> None:
    """Write both splits of every service."""
    for service in SERVICES:
        for split, chats in compose(service).items():
            path = _file(service, split)
            write_durably(path, render(chats), 0o644)
            print(f"{path.relative_to(EXAMPLES.parents[1])}: {len(chats)} chats")


if __name__ == "__main__":
    main()
