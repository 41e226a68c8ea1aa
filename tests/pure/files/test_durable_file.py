"""What is written durably is there whole or not at all, and every write of the project goes that way."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from deployments.durable_file import place_directory_durably, write_durably

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("app", "deployments", "partition", "scheduling", "simulator", "vllm_plugin"),
    *("benchmarks", "scripts", "dashboards"),
)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was given to fsync, in order, by the name that it had at that moment."""
    names: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def test_text_and_bytes_replace_the_file(tmp_path: Path, synced: list[str]) -> None:
    """The draft is on the disk before it takes the name, and the name is on the disk afterwards; no draft stays."""
    path = tmp_path / "a.json"
    write_durably(path, "é")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == ("é".encode(), 0o600)
    write_durably(path, b"\xff", 0o644)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"\xff", 0o644)
    assert synced[0].startswith(".a.json.")
    assert synced[1::2] == [tmp_path.name] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full the old content stands and nothing is left beside it."""
    path = tmp_path / "a.json"
    write_durably(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_takes_its_name_when_its_files_are_on_the_disk(tmp_path: Path, synced: list[str]) -> None:
    """Every file, then the draft, then the directory that holds the name."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("a", "b"):
        (draft / name).write_text(name)
    place_directory_durably(draft, tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["a", "b"]
    assert not draft.exists()
    assert (sorted(synced[:2]), synced[2:]) == (["a", "b"], ["draft", tmp_path.name])


def test_nobody_else_calls_fsync() -> None:
    """There is one way to write durably; scripts/setup.py runs before anything is installed and writes only stamps."""
    callers = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if any(
            isinstance(node, ast.Attribute) and node.attr == "fsync"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert callers == ["deployments/durable_file.py"]
