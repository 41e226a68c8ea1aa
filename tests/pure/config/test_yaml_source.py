"""Reading YAML: the values of safe_load, the lines of everything, and what safe_load lets pass."""

from __future__ import annotations

import pytest
import yaml

from app.problems import ConfigErrors
from app.yaml_source import MAX_VALUES, placeholders, read_yaml


def problems(text: str) -> list[str]:
    source = read_yaml(text.encode(), "file")
    return [str(problem) for problem in (*source.problems, *placeholders(source.data))]


def refusal(raw: bytes) -> str:
    with pytest.raises(ConfigErrors) as caught:
        read_yaml(raw, "file")
    (problem,) = caught.value.problems
    return str(problem)


VALUES = """
text: a
numbers: [1, 2.5, 0x10, 1e3, .inf]
nothing: null
switch: off
base: &base {ttft: 2s, tbt: 1s}
more:
  - <<: *base
    tbt: 3s
  - *base
"""


def test_values_are_those_of_safe_load() -> None:
    """Ray reads the same file with safe_load: both have to see the same values, merges and aliases included."""
    source = read_yaml(VALUES.encode(), "file")
    assert source.data == yaml.safe_load(VALUES)
    assert source.problems == ()


def test_lines() -> None:
    """Every key and list item has the line it is written on; a merged key that of its origin."""
    lines = read_yaml(VALUES.encode(), "file").lines
    assert (lines[("text",)], lines[("numbers", 2)], lines[("more", 0, "tbt")], lines[("more", 0, "ttft")]) == (
        2,
        3,
        9,
        6,
    )


def test_byte_order_mark_and_windows_lines() -> None:
    """An editor on Windows changes neither values nor line numbers."""
    source = read_yaml(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "file")
    assert (source.data, source.lines[("b",)]) == ({"a": 1, "b": 2}, 2)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "line 1: the file is empty"),
        (b"# only a comment\n", "line 1: the file is empty"),
        (b"a:\n\tb: 1\n", "line 2: the file is indented with a tab on this line; YAML takes only spaces"),
        (b"a: [1\nb: 2\n", "line 2: the file is not YAML: expected ',' or ']', but got ':'"),
        (b"a: 1\nb: \xe9\n", "line 2: the file is not UTF-8 text"),
        (b"a: 1\n---\nb: 2\n", "line 2: the file is not YAML: but found another document"),
        (b"a: *missing\n", "line 1: the file is not YAML: found undefined alias 'missing'"),
        (b"[" * 5000, "the file is nested too deeply"),
        (b"#" * (1024 * 1024 + 1), "the file has 1048577 bytes; at most 1048576 are read"),
    ],
    ids=["empty", "comment", "tab", "syntax", "latin-1", "two documents", "alias", "deep", "large"],
)
def test_unreadable(raw: bytes, expected: str) -> None:
    """A file that holds no values is refused with the line where reading stopped."""
    assert refusal(raw).startswith(expected)


COLON = "the file is not YAML: could not find expected ':' (while scanning a simple key)"
QUOTE = "the file is not YAML: found unexpected end of stream (while scanning a quoted scalar)"
SECTION = "the file is not YAML: expected <block end>, but found '<block mapping start>' (while parsing a block"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb 2\n\n\n# x\n\nc: 2\n", f"line 2: {COLON}"),
        ("a: 1\nb\n", f"line 2: {COLON}"),
        ("a: |\n x\n  y\nb 2\nc: 3\n", f"line 4: {COLON}"),
        ("a:\n  b: 'x\n\n\n  c: 1\n", f"line 2: {QUOTE}"),
        ("a: {b: 1\n\n\n", "line 1: the file is not YAML: expected ',' or '}', but got '<stream end>'"),
        ("a: [x,\n  y,\n  z\nb: 1\n", "line 4: the file is not YAML: expected ',' or ']', but got ':' "
         "(while parsing a flow sequence, which starts on line 1)"),
        ("a:\n  - b: 1\n   c: 2\n", f"line 3: {SECTION} collection, which starts on line 2)"),
        ("a:\n  b: 1\n c: 2\n", f"line 3: {SECTION} mapping, which starts on line 1)"),
        ("a: b: c\n", "line 1: the file is not YAML: mapping values are not allowed here"),
        ("a: 1\nb: x\x07\n", "line 2: the file holds the character U+0007, which YAML does not allow"),
    ],
)  # fmt: skip
def test_faults_are_where_they_were_made(text: str, expected: str) -> None:
    """Not where the parser noticed them: a missing colon is noticed at the next key, an open quote at the end."""
    assert refusal(text.encode()).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ["line 4: b.c is written twice, first on line 3; keep one"]),
        ("a: 1\non: 2\n", ["line 2: on has to be text to be a key; put it in quotes"]),
        ("1: 2\n", ["line 1: 1 has to be text to be a key; put it in quotes"]),
        ("a: &x\n  b: *x\n", ["line 1: a.b contains itself through an alias"]),
        ("a: !!python/object:os.system {}\n", [
            "line 1: a has the tag tag:yaml.org,2002:python/object:os.system; only plain values are read"
        ]),
        ("a: !!python/name:os.system ''\n", [
            "line 1: a cannot be read: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'"
        ]),
        ("a: 2020-13-45\n", ["line 1: a cannot be read: month must be in 1..12"]),
        ("a:\n  b: [x, 'k-${UNSET}']\n", [
            "a.b[1] = k-${UNSET}: holds the placeholder ${UNSET}, which nothing replaces; write the value itself"
        ]),
    ],
)  # fmt: skip
def test_problems_that_do_not_stop_reading(text: str, expected: list[str]) -> None:
    """Faults of single keys and values are collected; the rest of the file is still read."""
    assert problems(text) == expected


def test_aliases_cannot_blow_up() -> None:
    """A small file that expands to a huge value is refused by count, not by memory."""
    text = "a: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 8):
        text += f"b{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
    assert refusal(text.encode()) == f"the file has more than {MAX_VALUES} values once aliases are expanded"
