"""`python -m tests.pages`: write the pages into `docs/`."""

from __future__ import annotations

from pathlib import Path

from tests.pages import pages

DOCS = Path(__file__).parents[2] / "docs"

if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
