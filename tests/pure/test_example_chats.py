"""The training and held-out chats of the demonstration services."""

import re
from itertools import chain
from typing import Any

import pytest
import yaml

from scripts.answer_formats import decisive_part, has_format
from scripts.compose_examples import EXAMPLES, SERVICES, SPLITS, compose, load, render

services = pytest.mark.parametrize("service", SERVICES)


def prompts(service: str, split: str) -> list[str]:
    return [chat["messages"][-2]["content"] for chat in load(service, split)]


@services
def test_committed_files_are_what_the_sources_compose(service: str) -> None:
    """The JSON lines are never edited by hand: composing them again gives the same bytes."""
    for split, chats in compose(service).items():
        assert (EXAMPLES / f"{service}.{split}.jsonl").read_text(encoding="utf-8") == render(chats)


@services
@pytest.mark.parametrize("split", SPLITS)
def test_every_line_is_a_chat_that_ends_with_the_answer(service: str, split: str) -> None:
    """Roles are an optional system message, one user message and one assistant message, none of them empty."""
    for number, chat in enumerate(load(service, split), 1):
        roles = [message["role"] for message in chat["messages"]]
        assert roles in (["user", "assistant"], ["system", "user", "assistant"]), f"line {number}"
        for message in chat["messages"]:
            assert message["content"] == message["content"].strip() != "", f"line {number}"
            assert not re.search(r"[{}]", message["content"]), f"line {number}: a placeholder was left"


@services
def test_there_is_enough_of_both_splits(service: str) -> None:
    """Every service has at least 150 chats to train on and 20 to be judged by."""
    assert len(load(service, "train")) >= 150
    assert len(load(service, "heldout")) >= 20


@services
def test_no_prompt_occurs_twice(service: str) -> None:
    """All prompts of a service differ, so no held-out prompt was trained on."""
    everything = list(chain.from_iterable(prompts(service, split) for split in SPLITS))
    assert len(set(everything)) == len(everything)


@services
def test_heldout_sentences_are_in_no_training_prompt(service: str) -> None:
    """A held-out prompt is not a training sentence in another frame, whatever values were drawn."""
    source = yaml.safe_load((EXAMPLES / "sources" / f"{service}.yaml").read_text(encoding="utf-8"))
    training = "\n".join(prompts(service, "train")).lower()
    for sentence in heldout_sentences(source):
        pattern = re.sub(r"\\{\w+\\}", r"\\S+", re.escape(sentence.lower()))
        assert not re.search(pattern, training), sentence


def heldout_sentences(source: dict[str, Any]) -> list[str]:
    groups = next(source[key] for key in ("cases", "topics", "patterns", "visits") if key in source)
    key = next(key for key in ("complaints", "statements", "patients") if key in groups[0])
    return [group[key][-1] for group in groups]


@services
@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_has_the_format_of_its_service_and_of_no_other(service: str, split: str) -> None:
    """The format check accepts the reference answers and tells the four services apart."""
    for chat in load(service, split):
        answer = chat["messages"][-1]["content"]
        assert [name for name in SERVICES if has_format(name, answer)] == [service]
        assert decisive_part(service, answer)


@pytest.mark.parametrize(
    ("service", "answer"),
    [
        ("intelligent-triage", "Department: Surgery\nReason: A lump.\nUrgency: maybe"),
        ("intelligent-triage", "Department: Surgery\nUrgency: low"),
        ("intelligent-triage", "Hello!\nDepartment: Surgery\nReason: A lump.\nUrgency: low"),
        ("pre-assessment", "1. Since when?\n3. Where?\n4. How often?"),
        ("pre-assessment", "1. Since when?\n2. Where?"),
        ("pre-assessment", "1. Since when?\n2. Where?\n3. Drink water."),
        ("analysis-assistant", "Findings: High CRP.\nConsider: \nNext step: Repeat it."),
        ("analysis-assistant", "Findings: High CRP.\nNext step: Repeat it."),
        ("record-generation", "S: Cough.\nO: Wheeze.\nP: X-ray.\nA: Bronchitis."),
        ("record-generation", ""),
    ],
)
def test_a_wrong_answer_is_not_accepted(service: str, answer: str) -> None:
    """Missing, empty, reordered or additional lines fail the format check."""
    assert not has_format(service, answer)
