"""Plain torch.distributed.checkpoint: FSDP1, FSDP2 and whatever else calls `dcp.save`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import Contents, Framework, Resume

_FILE = re.compile(r"__\d{1,9}_\d{1,9}\.distcp|\.metadata|__\d{1,9}\.metadata")
_OWN = re.compile(r"__\d{1,9}\.metadata")
_OPTIMIZER = re.compile(r"optim|(?:^|\.)(?:state|param_groups)\.")


class PlainDcp(Framework):
    """Any directory with `.distcp` files; its name is the script's own, and its last number counts as the step."""

    name = "dcp"
    title = "torch.distributed.checkpoint (FSDP1, FSDP2)"
    imports = ("torch.distributed.checkpoint",)
    commands = ()
    has_resume_arguments = False
    how_to_save = "the script calls `dcp.save` or `dcp.async_save`: nothing outside of it can"

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        try:
            return path.is_dir() and any(map(_FILE.fullmatch, os.listdir(path)))
        except PermissionError:
            return False

    def look(self, contents: Contents) -> None:
        """Require a whole DCP directory."""
        own = [name for name in contents.tree.files if _OWN.fullmatch(name)]
        if own and ".metadata" not in contents.tree:
            contents.problem(
                f"{parts.some(sorted(own))}: each rank has metadata of its own (use_collectives=False), and no file "
                "says how many ranks there were: not supported"
            )
            return
        contents.keys = parts.add_dcp(contents)
        if not contents.problems and not any(map(_OPTIMIZER.search, contents.keys)):
            contents.note("no name in it is one of an optimizer: perhaps it holds the model alone")

    def resume(self, contents: Contents) -> Resume:  # noqa: ARG002
        """Name nothing: how a script takes it is its own affair."""
        return Resume((), "dcp.load(..., checkpoint_id=PATH) in the script")


FRAMEWORK = PlainDcp()
