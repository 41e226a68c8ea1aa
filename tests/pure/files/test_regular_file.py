"""Pipes, devices, directories and huge files are refused, wherever an operator may name a file; nothing waits."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import ConfigErrors, load_cluster
from deployments.adapters import AdapterError, check_adapter
from deployments.auth import KeysError, add_key, load_keys
from deployments.base_model import BaseModelFacts, ModelError, read_model_facts
from deployments.partition_job import ModelShapeError, model_groups
from deployments.regular_file import FileRefusedError, check_regular, read_regular
from tests.fakes.checkpoints import write_adapter, write_model

pytestmark = pytest.mark.timeout(20)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    # A socket's path may have 107 bytes; pytest's directories are longer.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a device": _device,
    "a directory": _directory,
    "a socket": _socket,
}


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(
        (FileRefusedError, ConfigErrors, AdapterError, KeysError, ModelError, ModelShapeError)
    ) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Each is named for what it is, by reading and by looking alone."""
    path = tmp_path / "f"
    KINDS[kind](path)
    expected = f"is not a regular file but {kind}; put the file itself there, or a link to it"
    assert refused(lambda: read_regular(path, 10)) == expected
    assert refused(lambda: check_regular(path)) == expected


def test_what_is_read(tmp_path: Path) -> None:
    """A file up to the limit, also behind a link; one byte more is refused, and a path that is none."""
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_bytes(b"x" * 10)
    link.symlink_to(path)
    assert read_regular(link, 10) == b"x" * 10
    assert refused(lambda: read_regular(path, 9)) == "is larger than 9 bytes, the most that is read of it"
    assert refused(lambda: read_regular(Path("a\0b"), 9)) == "is not a path: it holds a null character"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 9)


def test_a_pipe_that_takes_the_name_in_between_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before opening may be out of date."""
    path = tmp_path / "f"
    path.write_text("x")
    status = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda self, **_: status)
    assert refused(lambda: read_regular(path, 10)).startswith("is not a regular file but a pipe")


PLACES: dict[str, Callable[[Path], str]] = {
    "cluster.yaml": lambda root: refused(lambda: load_cluster(root / "cluster.yaml")),
    "model/config.json": lambda root: refused(lambda: read_model_facts(root / "model")),
    "model/model.safetensors": lambda root: refused(lambda: read_model_facts(root / "model")),
    "adapter/adapter_config.json": lambda root: refused(
        lambda: check_adapter(root / "adapter", BaseModelFacts("model"), 16)
    ),
    "adapter/adapter_model.safetensors": lambda root: refused(
        lambda: check_adapter(root / "adapter", BaseModelFacts("model"), 16)
    ),
    "keys.jsonl": lambda root: refused(lambda: load_keys(root / "keys.jsonl")),
}


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory"])
@pytest.mark.parametrize("place", PLACES)
def test_every_file_an_operator_names(tmp_path: Path, place: str, kind: str) -> None:
    """Whatever file of a deployment is no regular one, the check ends at once and says so."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter")
    (tmp_path / place).unlink(missing_ok=True)
    KINDS[kind](tmp_path / place)
    assert f"is not a regular file but {kind}" in PLACES[place](tmp_path)


def test_adding_a_key_to_a_pipe(tmp_path: Path) -> None:
    """The commands that change the key file read it the same way."""
    os.mkfifo(tmp_path / "keys.jsonl")
    assert "is not a regular file but a pipe" in refused(lambda: add_key(tmp_path / "keys.jsonl", "ward", None))


def test_the_partition_reads_the_model_the_same_way(tmp_path: Path) -> None:
    """`halo partition` and the search at an engine's start look at the model's config.json too."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "is not a regular file but a device" in refused(lambda: model_groups(tmp_path, 1))


@pytest.mark.parametrize(
    ("place", "limit"),
    [("cluster.yaml", 1 << 20), ("model/config.json", 16 << 20), ("adapter/adapter_config.json", 16 << 20)],
)
def test_huge_configurations(tmp_path: Path, place: str, limit: int) -> None:
    """A terabyte of configuration is refused without being read into memory."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter")
    with (tmp_path / place).open("w") as file:
        file.write(json.dumps({}))
        file.truncate(1 << 40)
    assert f"is larger than {limit} bytes" in PLACES[place](tmp_path)
