"""Sentences of the pages are short, and so are the cells of their tables: these are facts that one compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, named
from tests.docs.sentences import Cell, Sentence, cells, sentences

WORDS = 20
CELL_WORDS = 25
CELL_SENTENCES = 2
CELL_CHARACTERS = 180  # code is one word, however long
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "sbatch/README.md", "systemd/README.md")
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in OUTSIDE)]


def texts(page: str) -> list[str]:
    return [each.text for each in sentences(page)]


def long(page: str) -> list[Sentence]:
    return [each for each in sentences(page) if each.words > WORDS]


@pytest.mark.parametrize("page", named(PAGES))
def test_sentences_are_short(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    listed = [f"{name}:{each.line}: {each.words} words: {each.text}" for each in long(page.read_text())]
    assert not listed, f"sentences of more than {WORDS} words:\n" + "\n".join(listed)


def dense(page: str) -> list[Cell]:
    return [
        each
        for each in cells(page)
        if each.words > CELL_WORDS or each.sentences > CELL_SENTENCES or len(each.text) > CELL_CHARACTERS
    ]


@pytest.mark.parametrize("page", named(PAGES))
def test_cells_of_tables_are_short(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    listed = [f"{name}:{each.line}: {each.words} words: {each.text}" for each in dense(page.read_text())]
    assert not listed, "put paragraphs below the table, or make it a list:\n" + "\n".join(listed)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("One. Two? Three!\n", ["One.", "Two?", "Three!"]),
        ("Over two\nlines. And more.\n", ["Over two lines.", "And more."]),
        ("Frameworks, e.g. Lightning, i.e. Trainer vs. Fabric. Next.\n",
         ["Frameworks, e.g. Lightning, i.e. Trainer vs. Fabric.", "Next."]),
        ("GPUs, nodes etc. are lost. GPUs etc. Nodes.\n", ["GPUs, nodes etc. are lost.", "GPUs etc.", "Nodes."]),
        ("Slurm 22.05 waits 0.5 s. 40 steps follow.\n", ["Slurm 22.05 waits 0.5 s.", "40 steps follow."]),
        ("Call `a.b(c, d)`. `x` follows.\n", ["Call □.", "□ follows."]),
        ("(All of it.) **Bold.** Then.\n", ["(All of it.)", "**Bold.**", "Then."]),
        ("See [the page](a.md#b). ![A drawing. Of it](a.svg)\n", ["See the page."]),
        ("# A title\nText below\n\n## Another\n", ["A title", "Text below", "Another"]),
        ("Lead:\n- one\n  goes on\n- two\n\n  more of two\n1. three\n",
         ["Lead:", "one goes on", "two", "more of two", "three"]),
        ("Prose.\n\n    indented code is none. Really.\n\nAfter.\n", ["Prose.", "After."]),
        ("```python\nNo. Prose.\n```\nAfter.\n", ["After."]),
        ("| a. b. | c |\n|---|---|\n\nAfter.\n<!-- No. -->\n", ["After."]),
        ("> Quoted. Twice.\n", ["Quoted.", "Twice."]),
    ],
)  # fmt: skip
def test_a_page_is_split_into_its_sentences(page: str, found: list[str]) -> None:
    assert texts(page) == found


def test_words_are_counted_as_a_reader_counts_them() -> None:
    [found] = sentences("A well-known `srun -N 2 --mem 4` - and [its own page](a.md) -\n(`code`) wait, e.g. 0.5 s.\n")
    assert (found.line, found.words) == (1, 12)
    assert [each.line for each in sentences("One.\n\nTwo\nlines. Three\n\n```\nx\n```\n\n- Four\n")] == [1, 3, 4, 10]


def test_a_long_sentence_is_found() -> None:
    assert [each.words for each in long(f"{'word ' * 20}end. Short.\n\n{'word ' * 26}end.\n")] == [21, 27]
    assert long(f"{'word ' * 19}end.\n") == []


def test_a_table_is_split_into_its_cells() -> None:
    page = "Prose. | none\n\n| `a\\|b` | [two words](x.md) |\n|---|---|\n| One. Two. | |\n\n```\n| no | table |\n```\n"
    assert [(each.line, each.words, each.sentences, each.text) for each in cells(page) if each.text.strip("-")] == [
        (3, 1, 1, "a|b"), (3, 2, 1, "two words"), (5, 2, 2, "One. Two."),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["word " * (CELL_WORDS + 1), "One. Two. Three.", f"`{'x' * (CELL_CHARACTERS + 1)}`"])
def test_a_dense_cell_is_found(text: str) -> None:
    assert [each.line for each in dense(f"| a | b |\n|---|---|\n| short | {text} |\n")] == [3]
    assert dense(f"{text}\n\n| a |\n|---|\n| {'word ' * (CELL_WORDS - 1)}end. |\n") == []
