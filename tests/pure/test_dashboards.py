"""The committed dashboard is what the code builds, and asks only for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dashboards.build import TARGET, rendered

ROOT = Path(__file__).resolve().parents[2]
DECLARED = set(re.findall(r'"(halo_\w+)"', (ROOT / "deployments" / "metrics.py").read_text(encoding="utf-8")))
HISTOGRAMS = {name for name in DECLARED if name.endswith("_seconds")}


def queries() -> list[str]:
    """Every expression of every panel."""
    panels = json.loads(TARGET.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_committed_file_is_what_the_code_builds() -> None:
    """`make dashboards` after a change."""
    assert TARGET.read_text(encoding="utf-8") == rendered()


def test_every_metric_in_a_query_is_declared() -> None:
    """With Ray's prefix; histograms by their buckets."""
    asked = {name for query in queries() for name in re.findall(r"ray_(halo_\w+)", query)}
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= DECLARED
    assert {name for name in asked if name.endswith("_bucket")} == {
        f"{name}_bucket" for name in HISTOGRAMS if f"{name}_bucket" in asked
    }


def test_every_declared_metric_is_shown() -> None:
    """A metric that nobody can see is not worth its cost."""
    shown = {name.removesuffix("_bucket") for query in queries() for name in re.findall(r"ray_(halo_\w+)", query)}
    assert shown == DECLARED


def test_no_panel_divides_by_zero() -> None:
    """An idle service shows nothing rather than NaN."""
    for query in queries():
        if "/" in query:
            assert "> 0)" in query
