"""Read a YAML file into plain values and remember the line of each of them.

The values are those of ``yaml.safe_load``, which is what Ray Serve reads the same file with. Stricter than that are:
keys written twice, keys that are not text, placeholders like ``${NAME}``, which nobody would replace, and a limit on
the size after aliases are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

from app.problems import ConfigErrors, Path, Problem

MAX_BYTES = 1024 * 1024
MAX_VALUES = 100_000

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
_MERGE_TAG = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(frozen=True, slots=True)
class YamlSource:
    """``data`` as read, ``lines`` of every path in it (from 1), and ``problems`` that did not prevent reading."""

    data: Any
    lines: Mapping[Path, int]
    problems: tuple[Problem, ...]


def read_yaml(raw: bytes, source: str) -> YamlSource:
    """Parse one YAML document. Raises :class:`ConfigErrors` when there is nothing to go on with."""
    if len(raw) > MAX_BYTES:
        raise ConfigErrors([Problem((), f"has {len(raw)} bytes; at most {MAX_BYTES} are read")], source)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigErrors([Problem((), "is not UTF-8 text", line=line)], source) from None
    try:
        # Only compose(): nodes carry their positions, and nothing is constructed yet.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigErrors([_syntax_problem(error, text)], source) from None
    except ReaderError as error:
        raise ConfigErrors([_character_problem(error, text)], source) from None
    except yaml.YAMLError as error:
        raise ConfigErrors([Problem((), f"is not YAML: {' '.join(str(error).split())}")], source) from None
    except RecursionError:
        raise ConfigErrors([Problem((), "is nested too deeply")], source) from None
    if node is None:
        raise ConfigErrors([Problem((), "is empty", line=1)], source)
    reader = _Reader()
    try:
        data = reader.value(node, ())
    except _TooLargeError:
        raise ConfigErrors(
            [Problem((), f"has more than {MAX_VALUES} values once aliases are expanded")], source
        ) from None
    return YamlSource(data, reader.lines, tuple(reader.problems))


def placeholders(data: object, path: Path = ()) -> Iterator[Problem]:
    """A problem for every text in ``data`` that still holds a placeholder."""
    if isinstance(data, str) and (match := _PLACEHOLDER.search(data)):
        message = f"holds the placeholder {match.group()}, which nothing replaces; write the value itself"
        yield Problem(path, message, data)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from placeholders(value, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from placeholders(value, (*path, index))


class _TooLargeError(Exception):
    """More values than :data:`MAX_VALUES`."""


@dataclass(slots=True)
class _Reader:
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _values: int = 0
    _scalars: Any = field(default_factory=lambda: yaml.SafeLoader(""))

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The plain value of ``node``; registers the lines of everything below ``path``."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise _TooLargeError
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._open:
            self.problems.append(Problem(path, "contains itself through an alias", line=node.start_mark.line + 1))
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
                message = f"has the tag {node.tag}; only plain values are read"
                self.problems.append(Problem(path, message, line=node.start_mark.line + 1))
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE_TAG:
                merged.extend(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node])
                continue
            key = self._key(key_node, path)
            if key in first_line:
                message = f"is written twice, first on line {first_line[key]}; keep one"
                self.problems.append(Problem((*path, key), message, line=line))
            first_line.setdefault(key, line)
            self.lines[(*path, key)] = line
            result[key] = self.value(value_node, (*path, key))
        for source in merged:
            # Keys written here win over merged ones, and earlier merges over later ones.
            for key, value in self._merge_source(source, path).items():
                result.setdefault(key, value)
        return result

    def _merge_source(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        written_here = dict(self.lines)
        value = self.value(node, path)
        self.lines.update(written_here)
        if isinstance(value, dict):
            return value
        self.problems.append(
            Problem(path, "merges (<<) something that is not a mapping", line=node.start_mark.line + 1)
        )
        return {}

    def _key(self, node: yaml.Node, path: Path) -> str:
        key = self._scalar(node, path) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        text = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        line = node.start_mark.line + 1
        message = "has to be text to be a key; put it in quotes"
        self.problems.append(Problem((*path, str(text)), message, line=line))
        return str(text)

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            reason = getattr(error, "problem", None) or str(error)
            self.problems.append(Problem(path, f"cannot be read: {reason}", line=node.start_mark.line + 1))
            return None


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    """The fault at the line where it was made, which is not always where the parser noticed it."""
    lines = text.splitlines()
    noticed = error.problem_mark.line + 1 if error.problem_mark else None
    began = error.context_mark.line + 1 if error.context_mark else None
    line = noticed or began
    # A key without a colon is noticed at the next token, something that is never closed at the end of the file.
    at_end = error.problem_mark is not None and error.problem_mark.index >= len(text.rstrip())
    if began is not None and (at_end or error.context == "while scanning a simple key"):
        line = began
    content = lines[line - 1] if line and line <= len(lines) else ""
    indent = content[: len(content) - len(content.lstrip())]
    if "\t" in indent:
        return Problem((), "is indented with a tab on this line; YAML takes only spaces", line=line)
    since = f", which starts on line {began}" if began not in (None, line) else ""
    where = f" ({error.context}{since})" if error.context else ""
    return Problem((), f"is not YAML: {error.problem}{where}", line=line)


def _character_problem(error: ReaderError, text: str) -> Problem:
    line = text.count("\n", 0, error.position) + 1
    return Problem((), f"holds the character U+{error.character:04X}, which YAML does not allow", line=line)
