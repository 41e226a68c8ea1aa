"""Partition tables on disk: one file per key, whole or not at all, and one search at a time for each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from deployments.durable_file import write_durably
from deployments.regular_file import FileRefusedError, read_regular
from partition.table import TEXT_MAX, PartitionTable, TableKey, TableRefusedError, from_text, to_text

POLL_S = 0.5


def default_cache() -> Path:
    """``HALO_CACHE_DIR``, or halo in the user's cache directory."""
    root = os.environ.get("HALO_CACHE_DIR")
    if root:
        return Path(root) / "partition"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "halo" / "partition"


def table_path(directory: Path, key: TableKey) -> Path:
    """The file for ``key``."""
    return directory / f"{key.digest}.json"


def load_table(directory: Path, key: TableKey) -> PartitionTable | None:
    """The stored table, or None where there is none. Raises `TableRefusedError` with the reason."""
    path = table_path(directory, key)
    try:
        return from_text(read_regular(path, TEXT_MAX).decode("utf-8"), key)
    except FileNotFoundError:
        return None
    except FileRefusedError as error:
        raise TableRefusedError(f"it {error}") from None
    except UnicodeDecodeError:
        raise TableRefusedError("it is no text") from None
    except OSError as error:
        raise TableRefusedError(f"it cannot be read: {error}") from None


def store_table(directory: Path, table: PartitionTable) -> Path:
    """Write the table durably and return its path. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = table_path(directory, table.key)
    write_durably(path, to_text(table))
    return path


@contextlib.contextmanager
def only_searcher(directory: Path, key: TableKey, timeout_s: float) -> Iterator[None]:
    """Hold the lock of ``key``: replicas on one machine, or on a shared directory, search once and share the result.

    The lock goes with its process, however that ends. Raises TimeoutError when another holds it for ``timeout_s``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{key.digest}.lock").open("w") as lock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another replica has been searching for {timeout_s:g} s") from None
                time.sleep(POLL_S)
        yield
