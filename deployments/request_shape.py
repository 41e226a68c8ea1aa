"""Bounds on the shape of a request, checked before anything expensive looks at it.

vLLM's request models try every variant of a message for every element of a list and keep an error for each. A body of
a few megabytes with a million wrong messages costs them tens of gigabytes and stops the replica for half a minute. So
long lists are looked at here first, element by element, and the first wrong one ends the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from deployments.openai_errors import ApiError

MESSAGES_MAX = 10_000
PROMPTS_MAX = 10_000
PROMPT_TOKENS_MAX = 2_000_000
VALUES_MAX = 20_000
"""Values (numbers, texts, containers) in all other fields together. A bias on every token is refused."""

CHOICES_MAX = 128
"""OpenAI's limit. One request for a thousand choices would keep everybody else out of its replica."""

GRAMMAR_FIELDS = ("response_format", "structured_outputs")
GRAMMAR_VALUES_MAX = 2_000
GRAMMAR_CHARS_MAX = 65_536
"""Grammars are compiled one after the other, in time and memory that grow faster than they do."""


def check_shape(body: Mapping[str, Any]) -> None:
    """ApiError 400 for a body whose size or structure no valid request has."""
    if "messages" in body:
        _check_messages(body["messages"])
    if "prompt" in body:
        _check_prompt(body["prompt"])
    choices = body.get("n")
    if isinstance(choices, int) and choices > CHOICES_MAX:
        raise _refused(f"n is {choices}; at most {CHOICES_MAX} choices are accepted.", "n")
    for name in GRAMMAR_FIELDS:
        if name in body:
            _check_grammar(name, body[name])
    rest = sum(_count(value, VALUES_MAX) for name, value in body.items() if name not in ("messages", "prompt"))
    if rest > VALUES_MAX:
        raise _refused(f"The request has more than {VALUES_MAX} values beside its messages or prompt.", None)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise _refused("messages must be an array.", "messages")
    if len(messages) > MESSAGES_MAX:
        raise _refused(f"messages has {len(messages)} entries; at most {MESSAGES_MAX} are accepted.", "messages")
    values = 0
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, dict):
            raise _refused(f"{where} must be an object.", where)
        if not isinstance(message.get("role"), str):
            raise _refused(f"{where}.role must be a string.", f"{where}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise _refused(f"{where}.content must be a string, an array of parts or null.", f"{where}.content")
        for part_position, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict | str):
                part_where = f"{where}.content[{part_position}]"
                raise _refused(f"{part_where} must be an object.", part_where)
        values += _count(message, 5 * MESSAGES_MAX)
        if values > 5 * MESSAGES_MAX:
            raise _refused(f"messages has more than {5 * MESSAGES_MAX} values.", "messages")


def _check_prompt(prompt: Any) -> None:
    """Text, token ids, or a list of either; one kind throughout."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise _refused("prompt must be a string or an array.", "prompt")
    if _all_of(int, prompt):
        _check_token_count(len(prompt))
        return
    if len(prompt) > PROMPTS_MAX:
        raise _refused(f"prompt has {len(prompt)} entries; at most {PROMPTS_MAX} are accepted.", "prompt")
    if _all_of(str, prompt):
        return
    if not _all_of(list, prompt) or not all(_all_of(int, ids) for ids in prompt):
        raise _refused("prompt must be a string, token ids, or an array of strings or of token ids.", "prompt")
    _check_token_count(sum(map(len, prompt)))


def _check_grammar(name: str, grammar: Any) -> None:
    if _count(grammar, GRAMMAR_VALUES_MAX) > GRAMMAR_VALUES_MAX:
        raise _refused(f"{name} has more than {GRAMMAR_VALUES_MAX} values.", name)
    if len(json.dumps(grammar)) > GRAMMAR_CHARS_MAX:
        raise _refused(f"{name} is longer than {GRAMMAR_CHARS_MAX} characters.", name)


def _all_of(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _check_token_count(count: int) -> None:
    if count > PROMPT_TOKENS_MAX:
        raise _refused(f"prompt has {count} token ids; at most {PROMPT_TOKENS_MAX} are accepted.", "prompt")


def _count(value: Any, limit: int) -> int:
    """How many values ``value`` holds, itself included; counting stops soon after ``limit``."""
    count, open_values = 0, [value]
    while open_values and count <= limit:
        current = open_values.pop()
        count += 1
        if isinstance(current, dict):
            open_values.extend(current.values())
        elif isinstance(current, list):
            open_values.extend(current)
    return count


def _refused(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
