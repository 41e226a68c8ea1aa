"""Serve one cluster.yaml on this machine, on a Ray cluster of its own, until told to stop: ``halo serve``.

The supervisor here never imports Ray. It checks what would fail late or silently (a taken port, a socket path that is
too long), starts ``app.serve_driver`` in its own session, passes Ctrl-C on to it and ends whatever is left afterwards:
as the kernel's child subreaper it is handed every orphaned descendant, whatever session or group that is in.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
SOCKET_PATH_MAX_BYTES = 107
# What Ray appends to its temporary directory for its longest socket, with a 7-digit process id.
RAY_SOCKET_SUFFIX = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 9000
STOP_GRACE_S = 60.0
KILL_GRACE_S = 5.0

# Set unless the operator has set them. Usage reports and hub look-ups are off; the reasons for the rest are in
# docs/architecture.md.
ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_headers.middlewares",
    "PYTHONUNBUFFERED": "1",
}
# Anything here could make the server join a cluster that is not its own.
FOREIGN = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_NAMESPACE", "RAY_API_SERVER_ADDRESS")


class LaunchError(Exception):
    """The server cannot start here; the message says why and what to do."""


def listen_addresses(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Host and port pairs that Serve will listen on for ``config``, a whole cluster.yaml as read."""
    addresses = []
    http = config.get("http_options") or {}
    if config.get("proxy_location") != "Disabled":
        addresses.append((str(http.get("host") or "127.0.0.1"), int(http.get("port") or DEFAULT_HTTP_PORT)))
    grpc = config.get("grpc_options") or {}
    if grpc.get("grpc_servicer_functions"):
        addresses.append(("0.0.0.0", int(grpc.get("port") or DEFAULT_GRPC_PORT)))  # noqa: S104 - Serve's own choice
    return addresses


def check_free(host: str, port: int) -> None:
    """Raise :class:`LaunchError` unless ``host:port`` can be listened on.

    Serve itself would share a taken port with whoever has it (SO_REUSEPORT) and look healthy.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            f"End what uses the port (`ss -ltnp 'sport = :{port}'` shows it) or change http_options.port."
        ) from error


def make_run_directory() -> Path:
    """A new private directory, short enough for Ray's sockets, for everything this run writes besides models."""
    chosen = os.environ.get("HALO_RUN_DIR")
    places = [chosen] if chosen else ["/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()]  # noqa: S108
    refused = []
    for place in filter(None, places):
        if not _can_write(Path(place)):
            refused.append(f"{place} is not writable")
            continue
        length = len(os.fsencode(f"{place}/halo-12345678{RAY_SOCKET_SUFFIX}"))
        if length > SOCKET_PATH_MAX_BYTES:
            refused.append(f"{place} makes socket paths of {length} bytes, the system allows {SOCKET_PATH_MAX_BYTES}")
            continue
        return Path(tempfile.mkdtemp(prefix="halo-", dir=place))
    raise LaunchError(f"no directory for Ray's sockets: {'; '.join(refused)}. Name a short one in HALO_RUN_DIR.")


def environment(run_directory: Path) -> dict[str, str]:
    """The server's environment: the caller's, kept away from other clusters, with a home it can write to."""
    result = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    for name, value in ENVIRONMENT.items():
        result.setdefault(name, value)
    scratch = run_directory / "tmp"
    scratch.mkdir()
    result["TMPDIR"] = result["RAY_TMPDIR"] = str(scratch)
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), result.get("PYTHONPATH"))))
    if not _can_write(Path.home()):
        home = run_directory / "home"
        home.mkdir(mode=0o700)
        result["HOME"] = str(home)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a user id without an account, as in a container
        result["USER"] = "halo"
    return result


def _can_write(directory: Path) -> bool:
    """Found out by writing: permission bits say nothing about root or a read-only file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


class Supervisor:
    """Runs one driver process and leaves nothing behind."""

    def __init__(self, command: list[str], directory: Path, run_directory: Path) -> None:
        self._command = command
        self._directory = directory
        self._run_directory = run_directory
        self._stop_asked = 0
        self._stop_begun = 0.0
        self._forced = False

    def run(self) -> int:
        """Run until the driver ends; return 0 when it was asked to and needed no force, 1 otherwise."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        driver = subprocess.Popen(
            self._command,
            cwd=self._directory,
            env=environment(self._run_directory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # PR_SET_PDEATHSIG: should the supervisor be killed outright, the driver still shuts down.
            preexec_fn=lambda: libc.prctl(1, signal.SIGINT, 0, 0, 0),  # noqa: PLW1509 - no threads here
        )
        try:
            self._wait(driver)
        finally:
            left = end_descendants()
        if left:
            print(f"halo serve: ended {left} processes that did not end by themselves", file=sys.stderr)
        return 0 if self._stop_asked and not self._forced else 1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked += 1

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        told = 0
        while driver.poll() is None:
            time.sleep(0.1)
            if self._stop_asked > told:
                told = self._stop_asked
                if told == 1:
                    print("halo serve: stopping (once more to stop at once)", file=sys.stderr, flush=True)
                    self._stop_begun = time.monotonic()
                    driver.send_signal(signal.SIGINT)
                else:
                    self._force(driver)
            elif told and time.monotonic() - self._stop_begun > STOP_GRACE_S:
                print(f"halo serve: not stopped after {STOP_GRACE_S:.0f} s, ending it", file=sys.stderr, flush=True)
                self._force(driver)

    def _force(self, driver: subprocess.Popen[bytes]) -> None:
        self._forced = True
        driver.kill()
        driver.wait()


def end_descendants() -> int:
    """Terminate, then kill, every descendant of this process; return how many had to be told."""
    told: set[int] = set()
    for sign, grace_s in ((signal.SIGTERM, KILL_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
        deadline = time.monotonic() + grace_s
        # Killing one process can hand over new orphans, so look again until there are none.
        while time.monotonic() < deadline:
            living = list(_living_descendants())
            if not living:
                return len(told)
            for process in living:
                if process.pid not in told or sign == signal.SIGKILL:
                    told.add(process.pid)
                    try:
                        process.send_signal(sign)
                    except psutil.NoSuchProcess:
                        continue
            time.sleep(0.1)
    return len(told)


def _living_descendants() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def serve(config_path: Path) -> int:
    """Serve ``config_path`` in the foreground until told to stop.

    Returns 0 after an orderly stop, 1 when the server ended by itself or could not be deployed. Raises
    :class:`LaunchError` for what is known to fail before anything starts.
    """
    config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    for host, port in listen_addresses(config):
        check_free(host, port)
    run_directory = make_run_directory()
    config_path = config_path.resolve()
    command = [sys.executable, "-m", "app.serve_driver", str(config_path), str(run_directory)]
    # Ray's workers inherit the working directory, and relative paths in a cluster.yaml start where the file is.
    status = Supervisor(command, config_path.parent, run_directory).run()
    if status == 0:
        shutil.rmtree(run_directory, ignore_errors=True)
    else:
        print(f"halo serve: the logs of this run are in {run_directory}", file=sys.stderr)
    return status


def main(config_path: Path) -> int:
    """As :func:`serve`, with a :class:`LaunchError` printed and turned into status 2."""
    try:
        return serve(config_path)
    except LaunchError as error:
        print(f"halo serve: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
