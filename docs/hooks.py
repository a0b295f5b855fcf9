# ruff: noqa: INP001 - mkdocs loads this file by its path
"""What `mkdocs build` does besides: the site's pages are the repository's files, as they are read there.

A link out of `docs/` leads to the page that the site has of that file, or becomes plain text.  Drawings become part of
their page, in its colours and with a narrow layout for telephones.  Lists and tables that repository hosts read are
written as Python-Markdown reads them, and a diagram of arrows as a table.
A page that would load something from elsewhere ends the build.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# files outside of `docs/` that are pages of the site, and where they stand there
OUTSIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "sbatch/README.md": "project/sbatch.md",
    "systemd/README.md": "project/systemd.md",
}
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:|^#|^$")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]*)\)")
CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?<!`)(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)", re.DOTALL | re.MULTILINE
)
ITEM = re.compile(r"^(?:[-*]|\d+\.) +")
INDENT = 4  # what Python-Markdown wants before the further lines of an item
ARROW = re.compile(r"^ *(?P<from>\w+) --> (?P<to>\w+): (?P<why>.+)$", re.MULTILINE)
OPTION = re.compile(r"<code>(?=-[^<]{1,19}</code>)")  # short enough for a telephone
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|alternate|prev|next)\b)[^>]*\bhref=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of `docs/`."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the site's own pages, and draw the drawings."""
    place = page.file.src_uri
    source = next((path for path, at in OUTSIDE.items() if at == place), f"docs/{place}")
    return "".join(
        _code(part) if is_code else LINK.sub(lambda found: _led(found, source, place), part)
        for part, is_code in _parts(_indented(markdown))
    )


def on_page_content(html: str, **_: Any) -> str:
    """Mark options, which site.css keeps on one line: a browser would break `--spares 1` behind its hyphens."""
    return OPTION.sub('<code class="option">', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse what a browser would have to fetch from another server."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri}: the page would load something from elsewhere: {found.group()}...")
    return output


def on_post_build(config: Any) -> None:
    """Lay each page's source beside it: `llms.txt` names these."""
    for path in (ROOT / "docs").rglob("*.md"):
        shutil.copyfile(path, Path(config["site_dir"]) / path.relative_to(ROOT / "docs"))


def _indented(markdown: str) -> str:
    lines: list[str] = []
    offset, in_fence, is_loose = 0, False, False
    for line in markdown.split("\n"):
        if line.startswith("```"):
            in_fence, offset = not in_fence, 0
        elif not in_fence and (item := ITEM.match(line)):
            if offset and is_loose and lines[-1]:
                lines.append("")
            offset, is_loose = len(item.group()), False
        elif not line:
            is_loose = True
        elif not line.startswith(" " * offset):
            offset = 0
        is_further = bool(offset and line.startswith(" " * offset))
        lines.append(" " * INDENT + line[offset:] if is_further else line)
    return "\n".join(lines)


def _code(part: str) -> str:
    if part.startswith("```mermaid"):  # a browser would fetch what draws it from elsewhere
        rows = "".join(f"| {each['from']} → {each['to']} | {each['why']} |\n" for each in ARROW.finditer(part))
        return f"| arrow | events |\n|---|---|\n{rows}"
    return part if part.startswith(("```", "~~~")) else part.replace("\\|", "|")  # hosts want it escaped in tables


def _parts(markdown: str) -> list[tuple[str, bool]]:
    parts, at = [], 0
    for found in CODE.finditer(markdown):
        parts += [(markdown[at : found.start()], False), (found.group(), True)]
        at = found.end()
    return [*parts, (markdown[at:], False)]


def _led(found: re.Match[str], source: str, place: str) -> str:
    target, _, anchor = found["target"].partition("#")
    if ELSEWHERE.search(found["target"]):
        return found.group()
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if found["image"] and file.endswith(".svg"):
        return f'<div class="drawing" role="img" aria-label="{found["text"]}">{_drawn(file)}</div>'
    at = OUTSIDE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
    if file == "README.md":
        at = "index.md"
    if at:
        to = posixpath.relpath(at, posixpath.dirname(place) or ".")
        return f"{found['image']}[{found['text']}]({to}{'#' + anchor if anchor else ''})"
    if (ROOT / file).exists():
        return found["text"]  # a file of the repository that is no page
    return found.group()  # the strict build names it


def _drawn(file: str) -> str:
    """Return a drawing in both layouts, NAME.svg and NAME-narrow.svg; site.css shows the one that fits the window."""
    layouts = {"wide": ROOT / file, "narrow": ROOT / file.replace(".svg", "-narrow.svg")}
    drawn = []
    for layout, path in layouts.items():
        if not path.exists():
            raise PluginError(f"{file}: a telephone needs its second layout {path.name}, 360 wide")
        drawing = re.sub(r"<\?xml.*?\?>|<style.*?</style>|\n\s*", " ", path.read_text(), flags=re.DOTALL).strip()
        drawn.append(drawing.replace("<svg ", f'<svg class="{layout}" ', 1))
    return "".join(drawn)
