"""Files and directories that are written whole or not at all, also when the machine stops in between."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_durably(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``content``: write beside it, fsync, rename, fsync the directory, which must exist.

    The file is readable for its owner only until it is whole, and then has ``mode``. Raises OSError and then leaves
    ``path`` as it was.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def place_directory_durably(draft: Path, target: Path) -> None:
    """Rename the flat directory ``draft`` to ``target`` when every file in it is on the disk.

    Both have to be in the same directory; ``target`` must not exist unless it is empty. Raises OSError.
    """
    for path in draft.iterdir():
        _sync(path)
    _sync(draft)
    draft.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
