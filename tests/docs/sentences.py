"""The sentences of a page, each with its line and its number of words; and the cells of its tables.

Sentences are of prose only: no code blocks, tables, comments, images or addresses of links.  A heading, a list item
and a paragraph each end a sentence.  Code in a line is one word, as is a link that shows only code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

FENCE = re.compile(r"^[ \t]*(?P<fence>```+|~~~+).*?(?:^[ \t]*(?P=fence)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(r"!\[(?:[^\[\]]|\[[^\[\]]*\])*\]\([^()\s]*(?: \"[^\"]*\")?\)")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()\s]*(?:\([^()\s]*\))?[^()\s]*(?: \"[^\"]*\")?\)")
CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
AUTOLINK = re.compile(r"<(?:https?|mailto):[^>]*>")
TAG = re.compile(r"</?[a-z][^<>]*>")
ITEM = re.compile(r"^(?P<indent>[ \t]*)(?:[-*+]|\d+[.)])[ \t]+(?=\S)")
HEADING = re.compile(r"^#{1,6}[ \t]")
TABLE = re.compile(r"^[ \t]*\|")
BAR = re.compile(r"(?<!\\)\|")  # between cells
MARKER = re.compile(r"^[ \t]*(?:!!!|\?\?\?\+?|:::|-{3,}|\*{3,}|={3,})(?:[ \t]|$).*")  # admonitions, rules, mkdocstrings
QUOTE = re.compile(r"^[ \t]*>[ \t]?")

SPAN = "\N{WHITE SQUARE}"  # stands for code in a line
# none of these ends a sentence, whatever comes next
ABBREVIATIONS = ("e.g.", "i.e.", "vs.", "cf.", "approx.", "ca.", "resp.", "incl.", "Fig.", "Sec.", "No.", "Dr.", "St.")
# these may end one: the next word decides
OPEN_ENDED = ("etc.", "a.m.", "p.m.", "al.", "Inc.", "U.S.", "...", "…")
OPENING, CLOSING = "\"'([*_", "\"')]*_"
END = re.compile(r"""[.?!…]+["')\]*_]*(?=\s+(?P<next>["'(\[*_]*\S))""")
WORD = re.compile(rf"\S*[\w{SPAN}]\S*")


class Sentence(NamedTuple):
    """A sentence, the line that it begins on, and its number of words."""

    line: int
    words: int
    text: str


class Cell(NamedTuple):
    """A cell of a table: its line, its numbers of words and sentences, and the text that is shown."""

    line: int
    words: int
    sentences: int
    text: str


def cells(page: str) -> list[Cell]:
    """Return the cells of all tables of a Markdown page in their order."""
    found = []
    for number, line in enumerate(COMMENT.sub(_blank, FENCE.sub(_blank, page)).split("\n"), 1):
        if TABLE.match(line):
            for cell in BAR.split(line.strip())[1:-1]:
                plain = _plain(cell).strip()
                shown = LINK.sub(r"\1", IMAGE.sub("", cell)).replace("`", "").replace("\\|", "|")
                found.append(Cell(number, len(WORD.findall(plain)), len([*_ends(plain)]) + 1, " ".join(shown.split())))
    return found


def sentences(page: str) -> list[Sentence]:
    """Return the sentences of a Markdown page in their order."""
    found = []
    for line, text in _blocks(page):
        at = 0
        for end in [*_ends(text), len(text)]:
            part = text[at:end]
            if words := WORD.findall(part):
                start = at + len(part) - len(part.lstrip())
                found.append(Sentence(line + text.count("\n", 0, start), len(words), " ".join(part.split())))
            at = end
    return found


def _blank(found: re.Match[str]) -> str:
    """Keep the lines, so that those below keep their numbers."""
    return "\n" * found.group().count("\n")


def _span(found: re.Match[str]) -> str:
    return SPAN + _blank(found)


def _plain(page: str) -> str:
    """Return the page without code, comments, images and addresses, line for line."""
    text = COMMENT.sub(_blank, FENCE.sub(_blank, page))
    text = CODE.sub(_span, text)
    text = IMAGE.sub(_blank, text)
    text = LINK.sub(lambda found: found[1] + "\n" * (found.group().count("\n") - found[1].count("\n")), text)
    return TAG.sub(_blank, AUTOLINK.sub(_span, text))


def _blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items and headings with the number of their first line."""
    block: list[str] = []
    begin = 1
    depth = 0  # where the text of the list item begins; 0 outside of a list
    is_after_blank = True
    for number, raw in enumerate([*_plain(page).split("\n"), ""], 1):
        line = QUOTE.sub("", raw)
        indent = len(line) - len(line.lstrip())
        item = ITEM.match(line)
        if depth and line.strip() and is_after_blank and not item and indent < 2:
            depth = 0
        is_code = not block and is_after_blank and indent >= depth + 4 and not (item and depth)
        is_alone = bool(HEADING.match(line) or TABLE.match(line) or MARKER.match(line))
        if block and (not line.strip() or item or is_alone or TABLE.match(block[0])):
            yield begin, "\n".join(block)
            block = []
        if item and not is_code:
            depth = len(item.group())
        if HEADING.match(line):
            depth = 0
            yield number, line.lstrip("#")
        elif line.strip() and not is_alone and not is_code:
            begin = begin if block else number
            block.append(line[len(item.group()) :] if item else line)
        is_after_blank = not line.strip() or (is_code and bool(line.strip()))


def _ends(text: str) -> Iterator[int]:
    """Yield where sentences of a block end, the last one apart."""
    for found in END.finditer(text):
        before = re.split(r"[\s(\"']", text[: found.end()].rstrip(CLOSING))[-1]
        is_lower = found["next"].lstrip(OPENING)[:1].islower()
        if before not in ABBREVIATIONS and not (is_lower and before.endswith(OPEN_ENDED)):
            yield found.end()
