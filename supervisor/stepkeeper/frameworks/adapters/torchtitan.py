"""torchtitan."""

from __future__ import annotations

import re

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import Contents, Framework, Resume, WorldChange, Writes
from stepkeeper.frameworks.script import Script

_NEEDED = ("train_state", "optimizer", "lr_scheduler", "dataloader")
_LOADER = ("dataloader.world_size", "dataloader.dp_rank_")  # of its own data loader
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optimizer|optim|param_groups|state)(?:\.|$)")


class Torchtitan(Framework):
    """`step-N/`, a DCP directory, in a folder whose newest one torchtitan takes, whole or not."""

    name = "torchtitan"
    title = "torchtitan"
    imports = ("torchtitan",)
    step_name = re.compile(r"step-(\d+)")
    folder = "checkpoint"
    commands = ("torchtitan.train", "torchtitan")
    step_line = r"step:\s{1,8}(\d+)\s+(?:\x1b\[\d+m)*loss:"
    how_to_save = "`checkpointer.save` in its loop, which `--attach` has save at a notice"

    target_options = ("--training.steps",)
    writes = Writes(("--dump_folder", "--job.dump_folder"), ("dump_folder",), default="outputs")

    finds = re.compile(r"step-\d+")

    def takes_resume(self, script: Script) -> bool:
        """Look for its own program: of a script with a loop of its own, nothing is known."""
        return any(word.endswith(("torchtitan.train", "torchtitan/train.py")) for word in script.words)

    def look(self, contents: Contents) -> None:
        """Require a whole DCP directory, or one of safetensors."""
        if ".metadata" not in contents.tree and "model.safetensors.index.json" in contents.tree:
            parts.add_indexed(contents, "model.safetensors.index.json")
            contents.not_resumable = "holds the model alone, as safetensors"
            return
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

    def resume(self, contents: Contents) -> Resume:
        """Name the step: without it the highest one with `.metadata` is taken."""
        return Resume(
            (f"--checkpoint.load_step={contents.step.number}",), "`load_step` of the configuration's [checkpoint]"
        )


def _has(keys: frozenset[str], name: str) -> bool:
    # optimizer states lie under `optimizer.` or, flattened, under `state.` and `param_groups.`
    if name == "optimizer":
        return any(_OPTIMIZER.search(key) for key in keys)
    return any(key == name or key.startswith(f"{name}.") for key in keys)


FRAMEWORK = Torchtitan()
