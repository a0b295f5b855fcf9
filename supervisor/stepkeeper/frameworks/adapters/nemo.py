"""NeMo 2."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepkeeper.frameworks.adapters import megatron
from stepkeeper.frameworks.framework import Contents, Door, Framework, Resume, SaveDoor, Step, Writes, by_content
from stepkeeper.frameworks.tree import Tree

_UNFINISHED = "-unfinished"
_NUMBER = re.compile(r"(?:^|[-_])step=(\d{1,18})")


class Nemo(Framework):
    """`NAME--...-step=N.../{weights,context}`, with a sibling `...-unfinished` while it is written or removed."""

    name = "nemo"
    title = "NeMo 2"
    rule = "no sibling `-unfinished`; `weights/` whole as Megatron torch_dist or DCP; `context/` with its files"
    imports = ("nemo.lightning", "nemo.collections", "nemo", "nemo_run")
    commands = ("nemo",)
    has_resume_arguments = False
    save_door = SaveDoor(Door.CALLBACK, "its PreemptionCallback saves on SIGTERM at the end of a batch")

    writes = Writes((), ("log_dir", "explicit_log_dir"))

    finds = re.compile(r"(?:end|last)$")  # by AutoResume

    def list_steps(self, root: Path) -> list[Step]:
        """Return the directories with `weights/`, also below `checkpoints/`."""
        found = []
        for place in (root, root / "checkpoints"):
            if place == root or (place.is_dir() and not place.is_symlink()):
                found += by_content(place, self.is_step, _number)
        return found

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        return (path / "weights").is_dir() and ((path / "context").is_dir() or _number(path.name) is not None)

    def complete(self, step: Step, *, world_size: int | None) -> Contents:
        """Require weights and context, and no marker."""
        contents = Contents(Tree(step.path), step.number, world_size)
        marker = f"{step.path.name}{_UNFINISHED}"
        if os.path.lexists(step.path.parent / marker):
            contents.problem(f"{marker} is there: its save or its removal did not end")
        megatron.add_torch_dist(contents, "weights", or_dcp=True)
        if not contents.tree.below("context"):
            contents.problem("context/: missing or empty")
        return contents

    def resume(self, step: Step, contents: Contents) -> Resume:  # noqa: ARG002
        """Name the directory for AutoResume."""
        return Resume((), f"AutoResume(resume_from_path={os.path.abspath(step.path)!r}, resume_if_exists=True)")


def _number(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


FRAMEWORK = Nemo()
