"""What is wrong with a configuration: one :class:`Problem` per fault, all of them in one :class:`ConfigErrors`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import yaml

Path = tuple[str | int, ...]

_SECRET = re.compile(r"(passwords?|secrets?|token|api_keys?|private_keys?|credentials?)$", re.IGNORECASE)
_SHOWN_CHARACTERS = 80
_PLACES_SHOWN = 3


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""The value of a problem about something that is not there."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where it is, the value found there, what is wrong with it, and, where known, what to do.

    ``line`` counts from 1 and is None when the configuration did not come from a file.
    """

    path: Path
    message: str
    value: Any = ABSENT
    hint: str | None = None
    line: int | None = None

    @property
    def where(self) -> str:
        """The path as it is written in messages: ``applications[0].args.services[2].ttft``."""
        return path_text(self.path)

    @property
    def shown_value(self) -> str:
        """The bad value on one line, shortened; a secret is not shown, nor is a whole section."""
        if not isinstance(self.value, str | int | float | None):
            return ""
        if any(_is_secret(part) for part in self.path):
            return "(not shown)"
        # As YAML would write it: text that looks like a number is in quotes.
        text = yaml.safe_dump(self.value, width=math.inf, allow_unicode=True).removesuffix("...\n").strip()
        return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."

    def __str__(self) -> str:
        line = f"line {self.line}: " if self.line is not None else ""
        value = f" = {self.shown_value}:" if self.shown_value else ""
        hint = f". {self.hint}" if self.hint else ""
        return f"{line}{self.where or 'the file'}{value} {self.message}{hint}"


class ConfigErrors(ValueError):  # noqa: N818 - it holds several
    """A configuration that cannot be used, with everything that is wrong with it, in the file's order."""

    def __init__(self, problems: Iterable[Problem], source: str = "the configuration") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        # Both arguments go to the base class, so that the exception survives pickling between Ray processes.
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.source} has {count} error{'s' if count != 1 else ''}:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def path_text(path: Path) -> str:
    """``("a", 0, "b")`` as ``a[0].b``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def unknown_key(path: Path, value: object, valid: Iterable[str], places: Mapping[str, Sequence[str]]) -> Problem:
    """The problem for a key that its section does not have.

    ``places`` tells for every key of the format in which sections it is valid: a key in the wrong section is as common
    as a misspelled one.
    """
    key, names = str(path[-1]), sorted(valid)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    elsewhere = places.get(key)
    if elsewhere:
        hint = f"{key} is a key of {' and of '.join(elsewhere[:_PLACES_SHOWN])}"
    elif close:
        hint = f"Did you mean {close[0]}?"
    elif names:
        hint = f"The keys here are {', '.join(names)}"
    else:
        hint = "This section has no keys"
    return Problem(path, "is not a known key", value, hint)


def with_lines(problems: Iterable[Problem], lines: Mapping[Path, int]) -> list[Problem]:
    """The same problems with their lines, in the order of the file. What is absent gets the line of its section."""
    placed = []
    for problem in problems:
        known = (lines[problem.path[:n]] for n in range(len(problem.path), -1, -1) if problem.path[:n] in lines)
        placed.append(problem if problem.line is not None else replace(problem, line=next(known, None)))
    return sorted(placed, key=lambda problem: problem.line or 0)


def _is_secret(part: str | int) -> bool:
    return isinstance(part, str) and (part == "env_vars" or _SECRET.search(part) is not None)
