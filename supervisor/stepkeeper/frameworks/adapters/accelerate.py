"""Accelerate's `save_state`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stepkeeper.frameworks import inert, parts
from stepkeeper.frameworks.adapters import deepspeed
from stepkeeper.frameworks.framework import Contents, Framework, Resume

_RANDOM = re.compile(r"random_states_(\d{1,6})\.pkl")
_ARCHIVE = re.compile(
    r"(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt"
)
_OTHER_MODEL = re.compile(r"(model|pytorch_model)_\d+\.(?:safetensors|bin)")
_AUTOMATIC = "checkpoints"  # below the project directory, with automatic names


class Accelerate(Framework):
    """`checkpoint_I/`, where I counts saves, not steps; it has no marker, and each rank writes its random state."""

    name = "accelerate"
    title = "Accelerate (save_state)"
    imports = ("accelerate",)
    step_name = re.compile(r"(?:checkpoint|step|epoch)_(\d+)")
    folder = _AUTOMATIC
    commands = ()  # `accelerate launch` starts any script
    how_to_save = "`accelerator.save_state` on all ranks, in the script; `--attach` repeats its call"

    resume_option = "--resume_from_checkpoint"
    target_options = ("--max_train_steps",)
    attach_takes = "accelerator.load_state()"
    finds = re.compile(r"\d")  # of all names, the one with the highest number

    def is_step(self, path: Path) -> bool:
        """Go by what it holds: the names are the script's own."""
        return path.is_dir() and any(map(_RANDOM.fullmatch, os.listdir(path)))

    def look(self, contents: Contents) -> None:
        """Require what `load_state` loads."""
        world_size = contents.world_size
        tree = contents.tree
        engine = "pytorch_model" in tree.directories and deepspeed.is_engine(tree, "pytorch_model")
        weights = parts.add_weights(contents, stems=("model", "pytorch_model"))
        for name in sorted(filter(_OTHER_MODEL.fullmatch, tree.files)):
            if name.endswith(".safetensors"):
                parts.add_safetensors(contents, name)
            else:
                parts.add_archive(contents, name)
        for directory in ("pytorch_model_fsdp_0", "optimizer_0"):
            if directory in tree.directories:
                parts.add_dcp(contents, directory)
                weights = weights or directory.startswith("pytorch")
        if engine:
            deepspeed.add_engine(contents, "pytorch_model", world_size)
        elif not weights:
            contents.problem("no weights: neither model.safetensors nor an index, pytorch_model.bin or FSDP shards")
        self._training(contents, world_size, engine=engine)
        neighbour = self.beside(contents.step)
        as_beside = [n for n in parts.names_beside(neighbour) if _ARCHIVE.fullmatch(n) or _OTHER_MODEL.fullmatch(n)]
        parts.require_as_beside(contents, neighbour, as_beside, tree.files)

    @staticmethod
    def _training(contents: Contents, world_size: int | None, *, engine: bool) -> None:
        tree = contents.tree
        archives = sorted(filter(_ARCHIVE.fullmatch, tree.files))
        for name in archives:
            parts.add_archive(contents, name)
            state = parts.read_pickle(contents, name)
            groups = inert.field_of(state, "param_groups") if name == "optimizer.bin" else None
            planned = isinstance(groups, list) and any(
                inert.field_of(each, "initial_lr") is not None for each in groups
            )
            if planned and "scheduler.bin" not in archives:
                contents.note(f"{name} is of an optimizer with a schedule, and scheduler.bin is not there")
        if not engine and "optimizer_0" not in tree.directories and "optimizer.bin" not in archives:
            contents.problem("no optimizer state: neither optimizer.bin nor optimizer_0/")
        ranks = {int(match[1]) for name in tree.files if (match := _RANDOM.fullmatch(name))}
        parts.require_ranks(
            contents, "random_states_R.pkl", ranks, world_size or contents.world_size or max(len(ranks), 1)
        )
        for rank in sorted(ranks):
            parts.add_archive(contents, f"random_states_{rank}.pkl")
        if world_size is None and contents.world_size == len(ranks):
            contents.note(f"says not how many ranks saved it: {len(ranks)} random states are there (--world-size N)")

    def resume(self, contents: Contents) -> Resume:
        """Name the directory: without a name the highest number is taken."""
        path = os.path.abspath(contents.step.path)
        return Resume(
            ("--resume_from_checkpoint", path), "accelerator.load_state(PATH); scripts of the examples take this"
        )


FRAMEWORK = Accelerate()
