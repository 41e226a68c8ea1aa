"""`halo serve` with a real Ray and an application that needs no engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(420)  # a start takes 5 s alone and more than a minute on a machine with other work

START_S = 150
STOP_S = 60


class Server:
    """One ``python -m app.launch`` and the directory everything it starts can be recognised by."""

    def __init__(self, folder: Path, *, crash: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.runs = Path(f"/tmp/ht-{self.port}")
        self.runs.mkdir()
        config = folder / f"cluster é {self.port}.yaml"
        config.write_text(
            f"http_options: {{host: 127.0.0.1, port: {self.port}}}\n"
            "applications:\n"
            "- name: greeting\n"
            "  import_path: tests.fakes.greeting_app:build\n"
            f"  args: {{crash: {str(crash).lower()}}}\n"
        )
        awkward = folder / ("a b é " + "x" * 84)
        awkward.mkdir(exist_ok=True)
        self.log = folder / f"log-{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.launch", str(config)],
            env={
                **os.environ,
                "HALO_RUN_DIR": str(self.runs),
                "TMPDIR": str(awkward),
                "RAY_ADDRESS": "127.0.0.1:1",
                "PYTHONPATH": str(Path.cwd()),
            },
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def get(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=10) as response:
            return str(response.read().decode())

    def processes(self) -> list[psutil.Process]:
        """Everything this server started that is still there."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HALO_RUN_DIR") == str(self.runs):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + STOP_S
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=10)
        subprocess.run(["rm", "-rf", str(self.runs)], check=True)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """A list whose members are ended after the test."""
    started: list[Server] = []
    yield started
    for server in started:
        server.close()


def test_two_servers_side_by_side_and_ctrl_c(servers: list[Server], tmp_path: Path) -> None:
    """Each has a cluster of its own; Ctrl-C ends one with everything it started and leaves the other alone.

    TMPDIR is long and has a space and a letter beyond ASCII; RAY_ADDRESS points to a cluster that is not there.
    """
    for _ in range(2):
        servers.append(Server(tmp_path))
        servers[-1].wait_for("greeting RUNNING")
    assert [server.get() for server in servers] == ["good day", "good day"]
    first, second = servers
    assert len(first.processes()) > 5
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(timeout=STOP_S) == 0, first.log.read_text()
    assert first.processes() == []
    assert list(first.runs.iterdir()) == []
    assert second.get() == "good day"
    second.process.kill()
    second.wait_until_gone()


def test_an_application_that_cannot_start_ends_the_server(servers: list[Server], tmp_path: Path) -> None:
    """The exit status is 1, the reason is printed, nothing stays but the logs it names."""
    server = Server(tmp_path, crash=True)
    servers.append(server)
    assert server.process.wait(timeout=240) == 1
    text = server.log.read_text()
    assert "the greeting is lost" in text
    assert f"the logs of this run are in {server.runs}" in text
    assert server.processes() == []
