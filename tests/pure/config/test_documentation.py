"""docs/configuration.md describes the keys that there are."""

from __future__ import annotations

import re
from pathlib import Path

from app.args_schema import AppArgs
from app.schema_walk import sections_by_key
from scheduling.registry import POLICIES

TEXT = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_every_key_is_described() -> None:
    """No key of ``args`` and no option of a policy is missing, and no table describes one that does not exist."""
    keys = set(sections_by_key(AppArgs))
    described = set(re.findall(r"`([a-z_]+)[`.]", TEXT))
    assert keys - described - {"options", "policy", "keys_file"} == set()
    in_tables = {name for line in TEXT.splitlines() for name in re.findall(r"^\| `([a-z_]+)[`.]", line)}
    options = {option for entry in POLICIES.values() for option in entry.options}
    assert in_tables - keys == options
