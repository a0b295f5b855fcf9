"""What tests read of the pages: which there are, their blocks, and the commands in them."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        DOCS / "llms.txt",
        ROOT / "sbatch/README.md",
        ROOT / "systemd/README.md",
        *(ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"),
    ]
)
FENCED = re.compile(r"^(?P<fence>```+|~~~+)(?P<kind>\w*)\n(?P<body>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:\A|\n[ \t]*\n)((?:(?: {4}|\t).*(?:\n|\Z)|[ \t]*\n)+)")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.MULTILINE)
COMMAND = re.compile(r"^[+$]?\s*(?:exec )?(?:\S*/)?stepkeeper (?P<words>.*)$")


class Block(NamedTuple):
    """A block of code: the heading above it, `text` or another kind (a block that is indented has none), its lines."""

    heading: str
    kind: str
    body: str


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of code in their order."""
    text = page.read_text()
    found = [(each.start(), each["kind"], each["body"]) for each in FENCED.finditer(text)]
    blank = FENCED.sub(lambda each: re.sub(r"[^\n]", "#", each.group()), text)
    found += [(each.start(1), "", textwrap.dedent(each[1]).strip("\n") + "\n") for each in INDENTED.finditer(blank)]
    headings = [(each.start(), each[1]) for each in HEADING.finditer(blank)]
    return [
        Block(next((title for at, title in reversed(headings) if at < start), ""), kind, body)
        for start, kind, body in sorted(found)
    ]


def commands(page: Path) -> Iterator[str]:
    """Each line of a code block that calls the command."""
    text = page.read_text()
    blocks = [found["body"] for found in FENCED.finditer(text) if found["kind"] not in ("text", "python")]
    blocks += INDENTED.findall(FENCED.sub("\n\n", text))
    for block in blocks:
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if found := COMMAND.match(line.strip()):
                yield re.split(r"\s+#\s", found["words"], maxsplit=1)[0].strip()


def names_in(module: str) -> set[str]:
    """Return the names of a module of ours; of an engine, which imports its framework, those that its text defines."""
    if ".engines." not in module:
        return set(dir(importlib.import_module(module)))
    tree = ast.parse((ROOT / "trainer" / f"{module.replace('.', '/')}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
