"""How adapter_config.json names modules of the base model: by a list of endings, or by a regular expression.

The rules are PEFT's (``peft.tuners.tuners_utils.check_target_module_exists``, ``peft.utils.get_pattern_key``). Patterns
run with a time limit, because one from a file can take for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import regex

MATCH_TIMEOUT_S = 0.2
PATTERN_CHARACTERS = 1000
SHOWN_CHARACTERS = 80
NAMES_SHOWN = 3


class PatternError(ValueError):
    """Something that is no pattern, or one that takes too long; the message goes on after the pattern."""


class Pattern:
    """A regular expression that a whole module name has to match, or with ``ending`` its end after a dot."""

    def __init__(self, written: str, *, ending: bool = False) -> None:
        if len(written) > PATTERN_CHARACTERS:
            raise PatternError(f"is longer than {PATTERN_CHARACTERS} characters")
        try:
            regex.compile(written)
            self._compiled = regex.compile(rf"(?:.*\.)?(?:{written})" if ending else written)
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise PatternError(f"is not a pattern: {error}") from None

    def matches(self, module: str) -> bool:
        """Whether ``module`` matches. Raises :class:`PatternError` when that takes too long."""
        try:
            return self._compiled.fullmatch(module, timeout=MATCH_TIMEOUT_S) is not None
        except TimeoutError:
            raise PatternError(f"takes more than {MATCH_TIMEOUT_S:g} s to match {module}; write it simpler") from None


def endings(module: str) -> Iterator[str]:
    """``a.b.c``, ``b.c`` and ``c`` for ``a.b.c``: what a list may call the module."""
    while True:
        yield module
        _, dot, module = module.partition(".")
        if not dot:
            return


def shown(value: object) -> str:
    """A value from a file as it is written in messages: on one line, cut when it is long."""
    try:
        text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    except ValueError:  # Python does not write integers of thousands of digits.
        text = "a very large number"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    rest = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(shown(name) for name in listed[:NAMES_SHOWN]) + rest
