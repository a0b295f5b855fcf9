"""What the pages have in common."""

from __future__ import annotations

import re

MADE = "<!-- Made by `python -m tests.pages` from the code.  Change it there. -->"

_PAGE = re.compile(r"\bdocs/(?P<name>[\w-]+)\.md\b")


def linked(text: str) -> str:
    """Make links of the pages that a help text names."""
    return _PAGE.sub(lambda found: f"[{found['name'].replace('-', ' ')}]({found['name']}.md)", text)


def table(header: str, rows: list[list[str]]) -> list[str]:
    head = header.split()
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
