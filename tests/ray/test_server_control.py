"""The benchmarks' control of a server, with a real Ray and an application that needs no engine."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.server import ServerError, free_port, running_server

pytestmark = pytest.mark.timeout(420)


def write_config(path: Path, port: int, *, crash: bool = False) -> Path:
    path.write_text(
        f"http_options: {{host: 127.0.0.1, port: {port}}}\n"
        "applications:\n"
        "- name: greeting\n"
        "  import_path: tests.fakes.greeting_app:build\n"
        f"  args: {{crash: {str(crash).lower()}}}\n"
    )
    return path


def test_a_server_runs_for_the_block_and_not_longer(tmp_path: Path) -> None:
    """It answers inside, its processes and its port are gone after."""
    port = free_port()
    config = write_config(tmp_path / "cluster.yaml", port)
    with running_server(config, ("127.0.0.1", port), tmp_path / "log", start_timeout_s=150) as server:
        assert httpx.get(f"{server.url}/", trust_env=False).text == "good day"
        server.check()
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert family
    assert server.process.returncode == 0
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/", trust_env=False)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error carries the end of the log."""
    port = free_port()
    config = write_config(tmp_path / "cluster.yaml", port, crash=True)
    with (
        pytest.raises(ServerError, match="the greeting is lost"),
        running_server(config, ("127.0.0.1", port), tmp_path / "log", start_timeout_s=240),
    ):
        pytest.fail("the server should not have become ready")
