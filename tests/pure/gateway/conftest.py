"""Asynchronous tests here run in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.virtual_time import VirtualTimeLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """asyncio on a loop whose clock jumps."""
    return ("asyncio", {"loop_factory": VirtualTimeLoop})
