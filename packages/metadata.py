"""What the build says of the project besides pyproject.toml: the long description and the project's URLs.

The README's links are relative: on a package index they lead nowhere.  They become absolute where `repository` names
the public repository.  Without one the long description keeps their text only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = "README.md"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]*)\)")
FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


class CustomMetadataHook(MetadataHookInterface):
    """Adds `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what `dynamic` names."""
        repository = str(self.config["repository"]).rstrip("/")
        text = (Path(self.root) / README).read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": long_description(text, repository)}
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """Return the project's URLs: none without a repository."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
    }


def long_description(readme: str, repository: str) -> str:
    """Return the README with links that lead somewhere from any page."""

    def absolute(found: re.Match[str]) -> str:
        if ELSEWHERE.match(found["target"]):
            return found.group()
        if not repository:
            return "" if found["image"] else found["text"]
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({repository}/{kind}/HEAD/{found['target']})"

    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in FENCE.split(readme))
