"""The pages tell the truth about names: files, links and make targets that they mention are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = (
    "app",
    "deployments",
    "vllm_plugin",
    "scheduling",
    "partition",
    "simulator",
    "benchmarks",
    "scripts",
    "tests",
    "docs",
    "examples",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_exist(page: Path) -> None:
    """A path in backquotes that starts in one of our folders, and every relative link."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(SOURCES)})/[\w./-]*)`", text)
    linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in linked if link and not (page.parent / link).exists()]
    assert missing == []


def test_make_targets_exist() -> None:
    """Every `make something` of a page is a target."""
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert target in targets or (target.startswith("bench-") and "bench-%" in targets), (page, target)


def test_the_readme_begins_with_the_two_commands() -> None:
    """`make serve` and `make test` are the first code block."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert [line.split("#")[0].strip() for line in block[1].splitlines()] == ["make serve", "make test"]
