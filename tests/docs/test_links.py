"""Pages lead somewhere: links, anchors, the site's navigation; the command line takes the commands on them."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from stepkeeper.cli.main import parser
from tests.docs.pages import DOCS, FENCED, HEADING, PAGES, ROOT, commands, named, names_in

SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*)\)")
ANCHOR = re.compile(r'^<a id="([a-z0-9-]+)"></a>$', re.MULTILINE)  # of a heading that has another name now
OF_RELEASE_0_1 = {"CHANGELOG.md"}  # its older entries name what there was


def prose(page: Path) -> str:
    """The page without its code."""
    text = FENCED.sub("\n", page.read_text())
    return SPAN.sub(lambda found: "code" if "](" in found.group() else found.group(), text)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as repository hosts and the site make them, and those that a page sets."""
    found: dict[str, int] = {}
    text = FENCED.sub("\n", page.read_text())
    slugs = set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        slugs.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return slugs


@pytest.mark.parametrize("page", named(PAGES))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    nowhere = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or not file.is_relative_to(ROOT):
            nowhere.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            nowhere.append(f"{target} (anchors there: {', '.join(sorted(anchors(file)))})")
    assert not nowhere


def test_anchors_are_made_as_repository_hosts_make_them() -> None:
    frameworks = anchors(DOCS / "frameworks.md")
    assert "saves-on-notice---attach" in frameworks
    assert "what-it-does-not-know" in frameworks


def test_every_page_is_in_the_navigation_and_the_navigation_names_pages() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", site.split("\nnav:\n")[1], re.MULTILINE)
    assert len(listed) == len(set(listed))
    outside = dict(re.findall(r'"(\S+\.md)": "(project/\S+\.md)"', (DOCS / "hooks.py").read_text()))
    assert outside
    for source in outside:
        assert (ROOT / source).exists(), source
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(listed) == pages | set(outside.values())


every_command = functools.cache(parser)


def refused(words: str) -> str:
    """What the command line has against a line, if anything."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            _, unknown = every_command().parse_known_args(shlex.split(words))
    except SystemExit as ended:
        return said.getvalue() if ended.code else ""
    return f"unknown: {unknown}" if unknown else ""


def test_the_check_of_commands_finds_what_is_wrong() -> None:
    assert refused("submit -N2 --gpus-per-node 8 -- python train.py --steps 3") == ""
    assert refused("submit --nodez 2 -- python train.py")
    assert refused("stat RUN")
    assert refused("status RUN --jason")
    assert len(list(commands(DOCS / "quickstart.md"))) >= 5


@pytest.mark.parametrize("page", named([page for page in PAGES if page.name not in OF_RELEASE_0_1]))
def test_the_command_line_takes_every_command_of_the_page(page: Path) -> None:
    wrong = {words: why for words in commands(page) if (why := refused(words))}
    assert not wrong


@pytest.mark.parametrize("page", named(PAGES))
def test_code_on_the_page_is_code_and_names_what_there_is(page: Path) -> None:
    for found in FENCED.finditer(page.read_text()):
        if found["kind"] == "python":
            for node in ast.walk(ast.parse(found["body"])):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stepkeeper"):
                    assert {name.name for name in node.names} <= names_in(str(node.module)), found["body"]
        elif found["kind"] in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=found["body"], text=True, check=True, timeout=60)
