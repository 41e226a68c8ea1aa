"""The ``halo`` command as an operator sees it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app
from deployments.auth import load_keys

run = CliRunner()


@pytest.fixture
def config(root: Path, args: dict[str, object]) -> Path:
    """A correct cluster.yaml."""
    data = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [{"name": "halo", "import_path": "app.main:build_app", "args": {**args, "slo_scale": 4}}],
    }
    (root / "cluster.yaml").write_text(yaml.safe_dump(data))
    return root / "cluster.yaml"


def test_help_without_arguments() -> None:
    """`halo` alone shows what it can do."""
    result = run.invoke(app, [])
    assert "check" in result.output
    assert "keys" in result.output


def test_check_echoes_what_was_understood(config: Path) -> None:
    """A correct file exits with 0 and shows every promise in force, after scaling."""
    result = run.invoke(app, ["check", str(config)])
    table = result.output[result.output.index("──") :].splitlines()[1:]
    rows = [re.split(r" {2,}", line.strip()) for line in table if line.strip()]
    assert result.exit_code == 0
    assert result.output.startswith(f"OK {config}\n")
    assert rows == [
        ["strict", "strict", "4", "4s", "200ms", "bounded 250ms", "queue"],
        ["relaxed", "relaxed", "4", "8s", "800ms", "bounded 250ms", "shed"],
        ["base-model", "(base model)", "8s", "800ms", "bounded 250ms", "queue"],
    ]
    assert "1 on 127.0.0.1:8000, no API keys" in result.output


def test_check_lists_errors(config: Path) -> None:
    """A wrong file exits with 1 and shows one error a line; markup in values is not interpreted."""
    config.write_text(config.read_text().replace("ttft: 1s", "ttft: '[red]1'").replace("tbt: 50ms", "tbt: 50"))
    result = run.invoke(app, ["check", str(config)])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"{config}: 2 errors",
        "  line 15: applications[0].args.services[0].tbt = 50: has no unit; "
        "write 50ms if milliseconds are meant, 50s if seconds",
        "  line 16: applications[0].args.services[0].ttft = '[red]1': is not a duration; "
        "write a number and a unit, like 500ms, 0.5s or 2min",
    ]


def test_keys(tmp_path: Path) -> None:
    """A key is printed once, alone on standard output, opens what was asked for, and can be removed."""
    file = tmp_path / "keys.jsonl"
    added = run.invoke(app, ["keys", "add", "ward-3", "--services", "a, b", "--rate", "10", "--file", str(file)])
    key = added.stdout.strip()
    assert added.exit_code == 0
    assert key not in file.read_text()
    holder = load_keys(file).authenticate(f"Bearer {key}")
    assert holder is not None
    assert (holder.name, holder.services, holder.rate_per_s) == ("ward-3", frozenset({"a", "b"}), 10.0)
    again = run.invoke(app, ["keys", "add", "ward-3", "--file", str(file)])
    assert (again.exit_code, again.stdout) == (1, "")
    assert "there is a key named ward-3 already" in again.stderr
    assert "ward-3" in run.invoke(app, ["keys", "list", "--file", str(file)]).stdout
    assert run.invoke(app, ["keys", "remove", "ward-3", "--file", str(file)]).exit_code == 0
    assert run.invoke(app, ["keys", "remove", "ward-3", "--file", str(file)]).exit_code == 1
    assert load_keys(file).authenticate(f"Bearer {key}") is None


def test_starts_light() -> None:
    """The command imports neither vLLM nor torch, and Ray only when a file is checked."""
    script = "import sys, app.cli; print([name for name in ('torch', 'vllm', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
