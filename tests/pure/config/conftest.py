"""A project directory with a small model and two adapters, and the ``args`` that serve them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_adapter, write_model

ARGS: dict[str, Any] = {
    "model": "model",
    "base": {"name": "base-model", "ttft": "2s", "tbt": "200ms"},
    "services": [
        {"name": "strict", "adapter": "adapters/strict", "ttft": "1s", "tbt": "50ms"},
        {"name": "relaxed", "adapter": "adapters/relaxed", "ttft": "2s", "tbt": "0.2s", "overload": "shed"},
    ],
    "scheduler": {"policy": "halo-paper", "options": {"batch": 8}},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory that relative paths start from."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapters" / "strict")
    write_adapter(tmp_path / "adapters" / "relaxed")
    return tmp_path


@pytest.fixture
def args() -> dict[str, Any]:
    """A correct ``args`` section, to be changed by the test."""
    return deepcopy(ARGS)
