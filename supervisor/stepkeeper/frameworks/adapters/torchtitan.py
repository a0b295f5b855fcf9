"""torchtitan."""

from __future__ import annotations

import re
from pathlib import Path

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import (
    Contents,
    Door,
    Framework,
    Resume,
    SaveDoor,
    Step,
    WorldChange,
    Writes,
    name_matches,
    named,
)
from stepkeeper.frameworks.script import Script
from stepkeeper.frameworks.tree import Tree

_STEP = re.compile(r"step-(\d+)")
_FOLDER = "checkpoint"
_NEEDED = ("train_state", "optimizer", "lr_scheduler", "dataloader")
_LOADER = ("dataloader.world_size", "dataloader.dp_rank_")  # of its own data loader
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optimizer|optim|param_groups|state)(?:\.|$)")


class Torchtitan(Framework):
    """`step-N/`, a DCP directory, in a folder whose newest one torchtitan takes, whole or not."""

    name = "torchtitan"
    title = "torchtitan"
    rule = "`.metadata`, every piece of every tensor in its file; resumable: it holds optimizer and `train_state`"
    imports = ("torchtitan",)
    commands = ("torchtitan.train", "torchtitan")
    step_line = r"step:\s{1,8}(\d+)\s+(?:\x1b\[\d+m)*loss:"
    save_door = SaveDoor(Door.CALL, "`checkpointer.save` in its loop, which `--attach` has save at a notice")

    target_options = ("--training.steps",)
    writes = Writes(("--dump_folder", "--job.dump_folder"), ("dump_folder",), default="outputs")

    finds = re.compile(r"step-\d+")

    def takes_resume(self, script: Script) -> bool:
        """Look for its own program: of a script with a loop of its own, nothing is known."""
        return any(word.endswith(("torchtitan.train", "torchtitan/train.py")) for word in script.words)

    def list_steps(self, root: Path) -> list[Step]:
        """Return `step-N`, also below `checkpoint/`."""
        below = root / _FOLDER
        return named(root, _STEP) + (named(below, _STEP) if below.is_dir() and not below.is_symlink() else [])

    def is_step(self, path: Path) -> bool:
        """Go by the name, which the framework fixes."""
        return name_matches(path, _STEP)

    def complete(self, step: Step, *, world_size: int | None) -> Contents:
        """Require a whole DCP directory, or one of safetensors."""
        contents = Contents(Tree(step.path), step.number, world_size)
        if ".metadata" not in contents.tree and "model.safetensors.index.json" in contents.tree:
            parts.add_indexed(contents, "model.safetensors.index.json")
            contents.not_resumable = "holds the model alone, as safetensors"
            return contents
        contents.keys = parts.add_dcp(contents)
        if any(key.startswith(_LOADER) for key in contents.keys):  # it refuses another data parallel size
            contents.world_change = WorldChange.NO
        if not contents.problems:
            missing = [name for name in _NEEDED[:2] if not _has(contents.keys, name)]
            if missing:
                contents.not_resumable = f"holds the model alone (last_save_model_only): no {' and no '.join(missing)}"
            for name in _NEEDED[2:]:
                if not _has(contents.keys, name):
                    contents.note(f"holds no state of {name}")
            contents.note("torchtitan saves no RNG state: dropout continues with other numbers")
        return contents

    def resume(self, step: Step, contents: Contents) -> Resume:  # noqa: ARG002
        """Name the step: without it the highest one with `.metadata` is taken."""
        return Resume((f"--checkpoint.load_step={step.number}",), "`load_step` of the configuration's [checkpoint]")


def _has(keys: frozenset[str], name: str) -> bool:
    # optimizer states lie under `optimizer.` or, flattened, under `state.` and `param_groups.`
    if name == "optimizer":
        return any(_OPTIMIZER.search(key) for key in keys)
    return any(key == name or key.startswith(f"{name}.") for key in keys)


FRAMEWORK = Torchtitan()
