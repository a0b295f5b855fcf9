"""What the pages have in common."""

from __future__ import annotations

MADE = "<!-- Made by `python -m tests.pages` from the code.  Change it there. -->"


def table(header: str, rows: list[list[str]]) -> list[str]:
    head = header.split()
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
