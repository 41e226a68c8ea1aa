"""Start the real server for a benchmark or a test, and end it with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL_LINES = 40
PROGRESS_EVERY_S = 15.0


class ServerError(RuntimeError):
    """The server did not start or ended by itself; the message carries the end of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers at ``url``. ``start_s`` is how long it took; ``log`` holds all it printed."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float

    def check(self) -> None:
        """Raise :class:`ServerError` when the server has ended."""
        if self.process.poll() is not None:
            raise ServerError(f"the server ended with status {self.process.returncode}\n{tail(self.log)}")


@contextlib.contextmanager
def running_server(
    config: Path,
    address: tuple[str, int],
    log: Path,
    *,
    start_timeout_s: float = 300.0,
    stop_timeout_s: float = 90.0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[RunningServer]:
    """``halo serve config`` until the block ends; it listens on ``address`` and prints to ``log``.

    Raises :class:`ServerError` when no engine is ready (``/readyz``) within ``start_timeout_s``.
    """
    url = f"http://{address[0]}:{address[1]}"
    begun = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.launch", str(config)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, url, log, begun + start_timeout_s, say)
        yield RunningServer(url, process, log, time.monotonic() - begun)
    finally:
        stop(process, stop_timeout_s)


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Ask the server to stop as Ctrl-C does; insist after ``timeout_s``."""
    for sign, wait_s in ((signal.SIGINT, timeout_s), (signal.SIGINT, 15.0), (signal.SIGKILL, 15.0)):
        if process.poll() is not None:
            return
        process.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, deadline: float, say: Callable[[str], None]
) -> None:
    next_word = time.monotonic() + PROGRESS_EVERY_S
    begun = time.monotonic()
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                raise ServerError(f"the server ended with status {process.returncode} while starting\n{tail(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/readyz").status_code == httpx.codes.OK:
                    return
            now = time.monotonic()
            if now > deadline:
                raise ServerError(f"the server was not ready in time ({url}/readyz)\n{tail(log)}")
            if now > next_word:
                next_word = now + PROGRESS_EVERY_S
                say(f"starting, {now - begun:.0f} s so far")
            time.sleep(0.25)
