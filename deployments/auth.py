"""API keys: a file of hashed keys, and the table that a gateway looks them up in.

A key is 256 random bits, so that a plain SHA-256 of it is enough: there is nothing to guess that a salt or a slow hash
would protect. The table maps digests to holders. The time of a lookup depends on the digest of what a client sent, not
on how much of a real key it got right, and nobody can choose inputs by their digest: a comparison in constant time
would hide nothing more.

The file has one JSON object a line, ``{"name", "sha256", "services", "rate_per_s"}``. ``services`` is a list of names,
or ``["*"]`` for all; ``rate_per_s`` is a number of requests per second, or null for no limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.durable_file import write_durably
from deployments.regular_file import FileRefusedError, check_regular, read_regular

ALL_SERVICES = "*"
KEY_PREFIX = "halo-"
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_HEADER_CHARACTERS = 1024

_FIELDS = ("name", "sha256", "services", "rate_per_s")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class KeysError(ValueError):
    """A key file that cannot be used. ``faults`` holds a sentence for everything wrong with it, never a key."""

    def __init__(self, path: Path, faults: Iterable[str]) -> None:
        self.path = path
        self.faults = tuple(faults)
        super().__init__(path, self.faults)

    def __str__(self) -> str:
        return f"key file {self.path}: {'; '.join(self.faults)}"


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who a key belongs to and what it opens. ``services`` is None for all; ``rate_per_s`` is None for no limit."""

    name: str
    services: frozenset[str] | None
    rate_per_s: float | None = None

    def may_use(self, service: str) -> bool:
        """Whether the key opens ``service``; the base model counts as one, by its name."""
        return self.services is None or service in self.services


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Holders by the SHA-256 of their key, in lower-case hexadecimal digits."""

    holders: Mapping[str, KeyHolder]

    @classmethod
    def load(cls, path: Path) -> KeyTable:
        """The table of a key file, see :func:`load_keys`."""
        return load_keys(path)

    def authenticate(self, header: str | None) -> KeyHolder | None:
        """The holder of the key in an ``Authorization`` header, None for anything else than a key in the table."""
        if header is None or len(header) > MAX_HEADER_CHARACTERS:
            return None
        scheme, _, key = header.strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            return None
        return self.holders.get(digest_of(key))


def digest_of(key: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load_keys(path: Path) -> KeyTable:
    """Read a key file. Raises :class:`KeysError` with everything that is wrong with it."""
    return KeyTable({entry["sha256"]: _holder(entry) for entry in _read(path)})


def add_key(path: Path, name: str, services: Iterable[str] | None, rate_per_s: float | None = None) -> str:
    """Add a key to the file, made if need be, and return it: the only time that it is seen.

    Raises :class:`KeysError` when the name is taken, a value is unusable or the file is damaged, OSError when it
    cannot be written.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    listed = [ALL_SERVICES] if services is None else sorted(set(services))
    entry = {"name": name, "sha256": digest_of(key), "services": listed, "rate_per_s": rate_per_s}
    faults = _faults(entry)
    if faults:
        raise KeysError(path, faults)
    with _exclusive(path):
        entries = _read(path) if path.exists() else []
        if any(other["name"] == name for other in entries):
            raise KeysError(path, [f"there is a key named {name} already; remove it first"])
        _write(path, [*entries, entry])
    return key


def remove_key(path: Path, name: str) -> bool:
    """Remove the key called ``name``; False when there is none. Raises as :func:`add_key`."""
    with _exclusive(path):
        entries = _read(path)
        kept = [entry for entry in entries if entry["name"] != name]
        if len(kept) == len(entries):
            return False
        _write(path, kept)
    return True


def list_keys(path: Path) -> list[KeyHolder]:
    """The holders in the file's order. Raises :class:`KeysError`."""
    return [_holder(entry) for entry in _read(path)]


def _holder(entry: Mapping[str, Any]) -> KeyHolder:
    services = None if ALL_SERVICES in entry["services"] else frozenset(entry["services"])
    return KeyHolder(entry["name"], services, entry["rate_per_s"])


def _read(path: Path) -> list[dict[str, Any]]:
    text = _text(path)
    entries: list[dict[str, Any]] = []
    faults: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            faults.append(f"line {number} is not JSON; `halo keys add` writes this file")
            continue
        wrong = _faults(entry) if isinstance(entry, dict) else ["is not an object"]
        faults.extend(f"line {number} {fault}" for fault in wrong)
        if wrong:
            continue
        for field in ("name", "sha256"):
            first = seen.setdefault((field, entry[field]), number)
            if first != number:
                faults.append(f"line {number} has the same {field} as line {first}")
        entries.append(entry)
    if faults:
        raise KeysError(path, faults)
    return entries


def _text(path: Path) -> str:
    try:
        if check_regular(path).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeysError(path, ["can be written by others than its owner, who could add keys; run chmod 600"])
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise KeysError(path, ["there is no such file; `halo keys add` makes it"]) from None
    except UnicodeDecodeError:
        raise KeysError(path, ["is not UTF-8 text"]) from None
    except OSError as error:
        raise KeysError(path, [f"cannot be read: {error.strerror}"]) from None
    except FileRefusedError as error:
        raise KeysError(path, [str(error)]) from None


def _faults(entry: Mapping[str, Any]) -> list[str]:
    """What is wrong with one entry. A value that might be a key is never repeated."""
    faults = [f"has the unknown field {field}" for field in entry if field not in _FIELDS]
    faults += [f"lacks {field}" for field in _FIELDS if field not in entry]
    if faults:
        return faults
    name, digest, services, rate = (entry[field] for field in _FIELDS)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append("has an unusable name: letters, digits and . _ @ - are allowed, at most 64")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        faults.append("has a sha256 that is not 64 hexadecimal digits; keys themselves are never stored")
    if not isinstance(services, list) or not services or not all(isinstance(item, str) and item for item in services):
        faults.append(f'has services that are not a list of names, or ["{ALL_SERVICES}"] for all')
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (number and math.isfinite(rate) and rate > 0):
        faults.append("has a rate_per_s that is neither a number above zero nor null")
    return faults


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Two commands that change the file at once wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    write_durably(path, "".join(json.dumps(entry) + "\n" for entry in entries))
