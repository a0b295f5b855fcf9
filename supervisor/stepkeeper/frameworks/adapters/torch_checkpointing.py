"""The package torch_checkpointing."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import Contents, Framework, Resume, WorldChange

_ITEM = re.compile(r"(.+)_(\d{1,6})\.(?:pt|safetensors)")
_TEMPORARY = "tmp_"
_METADATA = "metadata.pkl"


class TorchCheckpointing(Framework):
    """A directory that is renamed from `tmp_NAME` when all ranks have written: `ITEM_RANK.pt`."""

    name = "torch-checkpointing"
    title = "torch_checkpointing"
    imports = ("torch_checkpointing",)
    commands = ()
    has_resume_arguments = False
    how_to_save = "the script calls `manager.save`"
    world_change = WorldChange.NO  # each rank reads its own file

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        try:
            names = os.listdir(path) if path.is_dir() else []
        except PermissionError:
            return False
        return any(map(_ITEM.fullmatch, names)) and not any(name.endswith(".distcp") for name in names)

    def look(self, contents: Contents) -> None:
        """Require the file of each item of each rank."""
        world_size = contents.world_size
        if contents.step.path.name.startswith(_TEMPORARY):
            contents.problem("its name is that of a save that did not end")
        items: dict[str, set[int]] = {}
        for name in sorted(contents.tree.files):
            if found := _ITEM.fullmatch(name):
                items.setdefault(found[1], set()).add(int(found[2]))
                if name.endswith(".safetensors"):
                    parts.add_safetensors(contents, name)
                else:
                    parts.add_archive(contents, name)
                    parts.read_pickle(contents, name)
        known = world_size or max((rank for ranks in items.values() for rank in ranks), default=0) + 1
        for item, ranks in items.items():
            parts.require_ranks(contents, f"{item}_R.pt", ranks, known)
        if not items:
            contents.problem("holds no file of an item")
        if _METADATA in contents.tree:
            parts.add_archive(contents, _METADATA)
        if not any("optim" in item for item in items):
            contents.note("no item in it is called optimizer: perhaps it holds the model alone")

    def resume(self, contents: Contents) -> Resume:  # noqa: ARG002
        """Name nothing: the package has no command line and does not look for the newest."""
        return Resume((), "manager.load(PATH, into=...) in the script")


FRAMEWORK = TorchCheckpointing()
