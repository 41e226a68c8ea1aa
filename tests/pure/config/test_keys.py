"""The key file and the table it is read into."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import stat
from pathlib import Path
from typing import Any

import pytest

from deployments.auth import KeyHolder, KeysError, KeyTable, add_key, load_keys

DIGEST = hashlib.sha256(b"secret").hexdigest()
ENTRY: dict[str, Any] = {"name": "ward", "sha256": DIGEST, "services": ["a"], "rate_per_s": None}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(KeysError) as caught:
        load_keys(path)
    return list(caught.value.faults)


def test_a_key_opens_what_it_was_made_for(tmp_path: Path) -> None:
    """The key that was returned authenticates; nothing of it is in the file, which only its owner can read."""
    path = tmp_path / "new" / "keys.jsonl"
    key = add_key(path, "ward-3", ["b", "a", "b"], 2.5)
    everything = add_key(path, "admin", None)
    table = load_keys(path)
    assert table.authenticate(f"Bearer {key}") == KeyHolder("ward-3", frozenset({"a", "b"}), 2.5)
    assert table.authenticate(f"bearer  {everything} ") == KeyHolder("admin", None, None)
    assert key.removeprefix("halo-") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({key, everything, add_key(path, "third", None)}) == 3


def test_services_of_a_key() -> None:
    """A holder may use the services named, or all."""
    assert KeyHolder("x", frozenset({"a"})).may_use("a")
    assert not KeyHolder("x", frozenset({"a"})).may_use("b")
    assert KeyHolder("x", None).may_use("anything")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "secret",
        "Bearer",
        "Bearer ",
        "Basic secret",
        "Bearer Secret",
        "Bearer secret secret",
        f"Bearer {DIGEST}",
        "Bearer ${UNSET}",
        "Bearer \udce9",
        "Bearer " + "s" * 2000,
    ],
)
def test_nobody_else_is_let_in(header: str | None) -> None:
    """Only the key itself, as a bearer token, authenticates: not its hash, not a placeholder, no malformed header."""
    assert KeyTable({DIGEST: KeyHolder("ward", None)}).authenticate(header) is None
    assert KeyTable({DIGEST: KeyHolder("ward", None)}).authenticate("Bearer secret") is not None


WRONG: list[tuple[Any, str]] = [
    (
        {**ENTRY, "sha256": "${UNSET}"},
        "has a sha256 that is not 64 hexadecimal digits; keys themselves are never stored",
    ),
    (
        {**ENTRY, "sha256": DIGEST.upper()},
        "has a sha256 that is not 64 hexadecimal digits; keys themselves are never stored",
    ),
    ({**ENTRY, "services": []}, 'has services that are not a list of names, or ["*"] for all'),
    ({**ENTRY, "services": "a"}, 'has services that are not a list of names, or ["*"] for all'),
    ({**ENTRY, "rate_per_s": 0}, "has a rate_per_s that is neither a number above zero nor null"),
    ({**ENTRY, "rate_per_s": float("nan")}, "has a rate_per_s that is neither a number above zero nor null"),
    ({**ENTRY, "rate_per_s": True}, "has a rate_per_s that is neither a number above zero nor null"),
    ({**ENTRY, "name": "a b"}, "has an unusable name: letters, digits and . _ @ - are allowed, at most 64"),
    ({**ENTRY, "key": "secret"}, "has the unknown field key"),
    ({"name": "ward"}, "lacks sha256"),
    ([], "is not an object"),
    ("text", "is not an object"),
]


@pytest.mark.parametrize(("entry", "expected"), WRONG, ids=[str(entry) for entry, _ in WRONG])
def test_wrong_entries(tmp_path: Path, entry: Any, expected: str) -> None:
    """An entry that could let in the wrong client is refused with its line, and never shown."""
    found = faults(write(tmp_path / "keys", json.dumps(ENTRY), "", json.dumps(entry)))
    assert found[0] == f"line 3 {expected}"
    assert not any("secret" in fault for fault in found)


def test_everything_at_once(tmp_path: Path) -> None:
    """Damaged lines and repeated entries are all named."""
    path = write(tmp_path / "keys", json.dumps(ENTRY), "{", json.dumps(ENTRY))
    assert faults(path) == [
        "line 2 is not JSON; `halo keys add` writes this file",
        "line 3 has the same name as line 1",
        "line 3 has the same sha256 as line 1",
    ]


def test_files_that_cannot_be_trusted(tmp_path: Path) -> None:
    """A file that others can write, or that is no file, is not a key file."""
    path = write(tmp_path / "keys", json.dumps(ENTRY))
    path.chmod(0o620)
    assert faults(path) == ["can be written by others than its owner, who could add keys; run chmod 600"]
    assert faults(tmp_path / "none") == ["there is no such file; `halo keys add` makes it"]
    assert faults(tmp_path) == ["is not a regular file but a directory; put the file itself there, or a link to it"]
    path.write_bytes(b"\xff")
    path.chmod(0o600)
    assert faults(path) == ["is not UTF-8 text"]


def test_a_damaged_file_is_left_alone(tmp_path: Path) -> None:
    """Adding to a file that cannot be read in full would lose keys, so nothing is written."""
    path = write(tmp_path / "keys", "{")
    with pytest.raises(KeysError, match="line 1 is not JSON"):
        add_key(path, "ward", None)
    assert path.read_text() == "{\n"


def _add(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        add_key(path, f"holder-{number}", None)


def test_two_commands_at_once(tmp_path: Path) -> None:
    """Keys added at the same moment are all kept."""
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "keys"
    workers = [context.Process(target=_add, args=(path, first)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(load_keys(path).holders) == 20
