"""The process that owns the Ray cluster of one ``halo serve``; started by ``app.launch``, not by hand.

It starts a local Ray with its own temporary directory, then runs Serve's own ``serve run`` on it and says when the
applications answer. It ends with status 1 when an application cannot be deployed.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import ray
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import run as serve_run

from app.launch import ROOT, listen_addresses

# Tokens do not go through Ray's object store, so a small one is enough; Ray accepts no less than 75 MB.
OBJECT_STORE_BYTES = 160 * 1024 * 1024
PROGRESS_EVERY_S = 15.0
# Asking costs the driver and Serve's controller CPU time, on two cores the engine's.
LOOK_EVERY_S = 0.5
LOOK_WHEN_RUNNING_S = 5.0


def start_ray(run_directory: Path) -> None:
    """Start a cluster of our own; never join one that is there."""
    shared_memory = Path("/dev/shm")  # noqa: S108
    roomy = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 2 * OBJECT_STORE_BYTES
    context = ray.init(
        address="local",
        namespace="serve",
        object_store_memory=OBJECT_STORE_BYTES,
        dashboard_host="127.0.0.1",
        # A directory below, because Ray opens its own to everybody.
        _temp_dir=str(run_directory / "ray"),
        _plasma_directory=None if roomy else str(run_directory),
    )
    print(f"halo serve: Ray dashboard http://{context.dashboard_url}, logs in {run_directory}", flush=True)


class Announcer(threading.Thread):
    """Follows the applications' status: says when they run, ends the process when one cannot be deployed.

    It must have ended before Ray is shut down: Serve's client would start a new cluster to ask.
    """

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        super().__init__(name="announcer", daemon=True)
        self.failed = False
        self.stopping = threading.Event()
        self._addresses = addresses
        self._begun = time.monotonic()
        self._told = ""
        self._running = False
        self._told_at = self._begun

    def run(self) -> None:
        while not self.stopping.wait(LOOK_WHEN_RUNNING_S if self._running else LOOK_EVERY_S):
            try:
                applications = serve.status().applications
            except Exception:  # noqa: S112 - Serve is still starting; the main thread reports what fails
                continue
            failed = {n: a for n, a in applications.items() if a.status is ApplicationStatus.DEPLOY_FAILED}
            if failed:
                for name, application in failed.items():
                    print(f"halo serve: {name} cannot be deployed\n{application.message}", file=sys.stderr, flush=True)
                self.failed = True
                signal.raise_signal(signal.SIGINT)
                return
            self._tell({name: application.status for name, application in sorted(applications.items())})

    def _tell(self, states: dict[str, ApplicationStatus]) -> None:
        now = time.monotonic()
        running = bool(states) and all(state is ApplicationStatus.RUNNING for state in states.values())
        if not states or (running and not all(map(_answers, self._addresses))):
            return
        self._running = running
        text = ", ".join(f"{name} {state.value}" for name, state in states.items())
        if text == self._told and (running or now - self._told_at < PROGRESS_EVERY_S):
            return
        self._told, self._told_at = text, now
        where = "".join(f", http://{host}:{port}/v1; Ctrl-C ends it" for host, port in self._addresses[:1] if running)
        print(f"halo serve: {text} after {now - self._begun:.0f} s{where}", flush=True)


def _answers(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=2):
            return True
    except OSError:
        return False


def main(config_path: Path, run_directory: Path) -> int:
    config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    start_ray(run_directory)
    announcer = Announcer(listen_addresses(config))

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        announcer.stopping.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    announcer.start()
    try:
        # `serve run` turns an interrupt into a clean Serve shutdown and ends with SystemExit.
        serve_run.main([str(config_path), "--app-dir", str(ROOT)], standalone_mode=False)
    except SystemExit as ended:
        if ended.code:
            return 1
    finally:
        announcer.stopping.set()
        announcer.join()
        ray.shutdown()
    return 1 if announcer.failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
