"""Read small files that an operator names: regular ones only, and not beyond a size.

Opening a pipe waits for a writer, a device may never end, and a huge file takes the memory. Symbolic links are
followed: model directories of hub caches consist of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileRefusedError(ValueError):
    """A file that is not read; the message goes on after the file's name."""


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most ``max_bytes``. Raises :class:`FileRefusedError` and OSError."""
    check_regular(path)
    # Another file may have taken the name since: opened like this, a pipe does not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _refuse_others(os.fstat(descriptor).st_mode)
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise FileRefusedError(f"is larger than {max_bytes} bytes, the most that is read of it")
    return raw


def check_regular(path: Path) -> os.stat_result:
    """The file's status, without opening it. Raises :class:`FileRefusedError` and OSError."""
    try:
        status = path.stat()
    except OSError:
        raise
    except ValueError:
        raise FileRefusedError("is not a path: it holds a null character") from None
    _refuse_others(status.st_mode)
    return status


def _refuse_others(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileRefusedError(f"is not a regular file but {kind}; put the file itself there, or a link to it")
