"""What `halo serve` finds out before it starts anything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.launch import (
    ENVIRONMENT,
    RAY_SOCKET_SUFFIX,
    SOCKET_PATH_MAX_BYTES,
    LaunchError,
    check_free,
    environment,
    listen_addresses,
    main,
    make_run_directory,
)


def test_a_taken_port_is_named() -> None:
    """A port someone listens on is an error that names it, also when they listen on every address."""
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((host, 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(LaunchError, match=f"port {port}"):
                check_free("127.0.0.1", port)


def test_a_taken_port_shared_with_reuseport_is_still_taken() -> None:
    """A listener that allows sharing its port must not be joined."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken, pytest.raises(LaunchError):
        check_free("127.0.0.1", taken.getsockname()[1])


def test_a_free_port_and_an_unknown_host() -> None:
    """A free port passes; a host that is not ours does not."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    check_free("127.0.0.1", port)
    with pytest.raises(LaunchError, match=r"203\.0\.113\.7"):
        check_free("203.0.113.7", port)


@pytest.mark.parametrize(
    ("config", "addresses"),
    [
        ({}, [("127.0.0.1", 8000)]),
        ({"http_options": None}, [("127.0.0.1", 8000)]),
        ({"http_options": {"host": "0.0.0.0", "port": 8443}}, [("0.0.0.0", 8443)]),
        ({"proxy_location": "Disabled"}, []),
        ({"grpc_options": {"port": 9001}}, [("127.0.0.1", 8000)]),
        (
            {"grpc_options": {"port": 9001, "grpc_servicer_functions": ["a.b"]}},
            [("127.0.0.1", 8000), ("0.0.0.0", 9001)],
        ),
    ],
)
def test_the_ports_serve_listens_on(config: dict[str, object], addresses: list[tuple[str, int]]) -> None:
    """Serve's defaults apply, and gRPC counts only when it has servicers."""
    assert listen_addresses(config) == addresses


def test_busy_port_ends_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2, and no run directory was made."""
    runs = tmp_path / "r"
    runs.mkdir()
    monkeypatch.setenv("HALO_RUN_DIR", str(runs))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "cluster.yaml"
        config.write_text(f"http_options: {{port: {taken.getsockname()[1]}}}\napplications: []\n")
        assert main(config) == 2
    assert list(runs.iterdir()) == []


def test_run_directory_is_private_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its owner may look in, and Ray's longest socket fits, whatever TMPDIR is."""
    monkeypatch.delenv("HALO_RUN_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/" + "long name é/" * 8)
    directory = make_run_directory()
    try:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(f"{directory}{RAY_SOCKET_SUFFIX}")) <= SOCKET_PATH_MAX_BYTES
    finally:
        directory.rmdir()


def test_a_run_directory_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message gives the limit and the variable to set; bytes count, not characters."""
    long = tmp_path / ("é" * 45)
    long.mkdir()
    monkeypatch.setenv("HALO_RUN_DIR", str(long))
    with pytest.raises(LaunchError, match=r"107.*HALO_RUN_DIR"):
        make_run_directory()


def test_environment_is_quiet_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No usage reports, no foreign cluster, temporary files in the run directory, the operator's own values kept."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    result = environment(tmp_path)
    assert "RAY_ADDRESS" not in result
    assert result["RAY_USAGE_STATS_ENABLED"] == "0"
    assert result["VLLM_NO_USAGE_STATS"] == "1"
    assert result["HF_HUB_OFFLINE"] == "0"
    assert Path(result["TMPDIR"]).parent == tmp_path


def test_home_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and tokens then go to the run directory."""
    monkeypatch.setenv("HOME", "/proc")
    assert Path(environment(tmp_path)["HOME"]).parent == tmp_path


def test_end_descendants_reaches_orphans() -> None:
    """A grandchild in another session that ignores SIGTERM is ended too, once its parent is gone."""
    grandchild = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True,"
        " stdout=subprocess.PIPE,"
        " stderr=subprocess.DEVNULL); p.stdout.readline(); print(p.pid, flush=True)"
    )
    # In a process of its own: it becomes a subreaper and ends every descendant it has.
    script = f"""
import ctypes, subprocess, sys
import app.launch as launch
launch.KILL_GRACE_S = 1.0
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
pid = subprocess.run([sys.executable, "-c", {parent!r}, {grandchild!r}], capture_output=True, text=True, check=True)
print(int(pid.stdout), launch.end_descendants())
"""
    begun = time.monotonic()
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    pid, told = map(int, result.stdout.split())
    assert told == 1
    assert not Path(f"/proc/{pid}").exists()
    assert time.monotonic() - begun < 20
