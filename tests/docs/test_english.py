"""Sentences of the pages are short: at most 20 words, and the few longer ones that are left only become fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, named
from tests.docs.sentences import Sentence, sentences

WORDS, WORDS_MAX = 20, 25
# what is left, by page: sentences of more than 20 words, and of more than 25.  Lower a number with each one mended.
CEILINGS: dict[str, tuple[int, int]] = {
    "docs/benchmarks-checkpoint.md": (38, 29),
    "docs/benchmarks-recovery.md": (19, 11),
    "docs/benchmarks-shared.md": (3, 3),
    "docs/benchmarks.md": (3, 0),
    "docs/cadence.md": (1, 0),
    "docs/cli.md": (11, 6),
    "docs/configuration.md": (5, 2),
    "docs/events.md": (4, 1),
    "docs/frameworks-recovery.md": (5, 2),
    "docs/frameworks.md": (14, 6),
    "docs/guides/huggingface.md": (1, 0),
    "docs/guides/launch-lines.md": (3, 0),
    "docs/guides/lightning.md": (1, 0),
    "docs/guides/nfs-home.md": (1, 0),
    "docs/guides/own-handlers.md": (3, 0),
    "docs/guides/sites.md": (1, 0),
    "docs/guides/uv.md": (1, 0),
    "docs/log.md": (3, 1),
    "docs/metrics.md": (3, 2),
    "docs/node-agent.md": (4, 1),
    "docs/report.md": (1, 0),
    "docs/retention.md": (1, 0),
    "docs/slow-training.md": (2, 0),
    "docs/state-machine.md": (2, 0),
    "docs/state.md": (6, 3),
    "docs/tiers.md": (2, 0),
    "docs/trainer-api.md": (2, 0),
    "docs/verdicts.md": (24, 15),
    "SECURITY.md": (1, 0),
}
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]


def texts(page: str) -> list[str]:
    return [each.text for each in sentences(page)]


def counts(found: list[Sentence]) -> tuple[int, int]:
    return sum(each.words > WORDS for each in found), sum(each.words > WORDS_MAX for each in found)


@pytest.mark.parametrize("page", named(PAGES))
def test_sentences_are_short(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    long = [each for each in sentences(page.read_text()) if each.words > WORDS]
    listed = "".join(f"\n{name}:{each.line}: {each.words} words: {each.text}" for each in long)
    allowed, allowed_max = CEILINGS.get(name, (0, 0))
    found, found_max = counts(long)
    assert found <= allowed, f"{found} sentences have more than {WORDS} words, {allowed} may:{listed}"
    assert found_max <= allowed_max, (
        f"{found_max} sentences have more than {WORDS_MAX} words, {allowed_max} may:{listed}"
    )
    assert (found, found_max) == (allowed, allowed_max), f"set CEILINGS[{name!r}] to {found, found_max}"


def test_every_ceiling_is_of_a_page() -> None:
    assert set(CEILINGS) <= {str(page.relative_to(ROOT)) for page in PAGES}


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
    assert counts(sentences(f"{'word ' * 20}end.\n\n{'word ' * 26}end.\n")) == (2, 1)
    assert counts(sentences(f"{'word ' * 19}end.\n")) == (0, 0)
