"""ARCHITECTURE.md is one page, every path on it exists, and no package is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
PACKAGES = (ROOT / "supervisor/stepkeeper", ROOT / "trainer/stepkeeper_trainer")
LINES_MAX, WORDS_MAX = 70, 900
NAMED = re.compile(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|toml|md))`")
DESIGN = (PAGE, ROOT / "CONTRIBUTING.md", ROOT / "docs/design-rules.md", ROOT / "docs/design-decisions.md")
OF_A_RUN = {"checkpoints/"}  # it is in a run directory


def exists(name: str) -> bool:
    return any(
        (base / name).exists() for base in (ROOT, *PACKAGES, PACKAGES[0] / "supervisor", PACKAGES[0] / "node_agent")
    )


def test_it_is_one_page() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    assert len(text.split()) <= WORDS_MAX


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    named = set(NAMED.findall(page.read_text())) - OF_A_RUN
    assert len(named) >= 5
    assert not [name for name in sorted(named) if not exists(name)]


def test_a_path_that_is_gone_is_found() -> None:
    assert NAMED.findall("see `core/gone.py`, `gone/` and `.metadata`") == ["core/gone.py", "gone/"]
    assert not exists("core/gone.py")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_package_is_left_out(package: Path) -> None:
    named = set(NAMED.findall(PAGE.read_text()))
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert len(there) > 5
    assert not there - named
