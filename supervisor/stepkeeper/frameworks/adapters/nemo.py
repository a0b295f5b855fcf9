"""NeMo 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepkeeper.frameworks.adapters import megatron
from stepkeeper.frameworks.framework import Contents, Framework, Resume, Writes

_UNFINISHED = "-unfinished"
_NUMBER = re.compile(r"(?:^|[-_])step=(\d{1,18})")


class Nemo(Framework):
    """`NAME--...-step=N.../{weights,context}`, with a sibling `...-unfinished` while it is written or removed."""

    name = "nemo"
    title = "NeMo 2"
    imports = ("nemo.lightning", "nemo.collections", "nemo", "nemo_run")
    folder = "checkpoints"
    commands = ("nemo",)
    has_resume_arguments = False
    how_to_save = "its PreemptionCallback saves on SIGTERM at the end of a batch"

    writes = Writes((), ("log_dir", "explicit_log_dir"))

    finds = re.compile(r"(?:end|last)$")  # by AutoResume

    def number_of(self, name: str) -> int | None:
        """Go by `step=N`."""
        found = _NUMBER.search(name)
        return int(found[1]) if found else None

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        return (path / "weights").is_dir() and ((path / "context").is_dir() or self.number_of(path.name) is not None)

    def look(self, contents: Contents) -> None:
        """Require weights and context, and no marker."""
        path = contents.step.path
        marker = f"{path.name}{_UNFINISHED}"
        if os.path.lexists(path.parent / marker):
            contents.problem(f"{marker} is there: its save or its removal did not end")
        megatron.add_torch_dist(contents, "weights", or_dcp=True)
        if not contents.tree.below("context"):
            contents.problem("context/: missing or empty")

    def resume(self, contents: Contents) -> Resume:
        """Name the directory for AutoResume."""
        path = os.path.abspath(contents.step.path)
        return Resume((), f"AutoResume(resume_from_path={path!r}, resume_if_exists=True)")


FRAMEWORK = Nemo()
