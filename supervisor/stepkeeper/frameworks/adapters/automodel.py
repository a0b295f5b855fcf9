"""NeMo Automodel."""

from __future__ import annotations

import os
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

_STEP = re.compile(r"epoch_\d{1,9}_step_(\d{1,18})")
_SHARD = re.compile(r"shard-(\d{1,6})-model-\d{1,6}-of-\d{1,6}\.safetensors")
_RANK = re.compile(r"(rng|dataloader)/\1_dp_rank_(\d{1,6})\.pt")
_INCOMPLETE = re.compile(r"\.?(?:incomplete|INCOMPLETE|_incomplete|\.incomplete)")


class Automodel(Framework):
    """`epoch_E_step_N/{model,optim,rng,dataloader}`; the link `LATEST` is a hint and no marker."""

    name = "automodel"
    title = "NeMo Automodel"
    rule = (
        "no marker of an incomplete save; `model/` and `optim/` whole; RNG and loader state of each data parallel rank"
    )
    imports = ("nemo_automodel",)
    commands = ("automodel",)
    save_door = SaveDoor(Door.SIGNAL, "its own handler of SIGTERM saves at the end of a step")

    writes = Writes(("--checkpoint.checkpoint_dir",), ("checkpoint_dir",), default="checkpoints")

    finds = re.compile(r"step_\d+$")  # where its link `LATEST` leads nowhere

    def takes_resume(self, script: Script) -> bool:
        """Look for its program, or for options of the same kind in the command."""
        return any(word.rpartition("/")[2] == "automodel" or word.startswith("--checkpoint.") for word in script.words)

    def list_steps(self, root: Path) -> list[Step]:
        """Return `epoch_E_step_N`."""
        return named(root, _STEP)

    def is_step(self, path: Path) -> bool:
        """Go by the name, which the framework fixes."""
        return name_matches(path, _STEP)

    def complete(self, step: Step, *, world_size: int | None) -> Contents:
        """Require what a resume loads."""
        contents = Contents(Tree(step.path), step.number, world_size)
        tree = contents.tree
        for name in filter(_INCOMPLETE.fullmatch, (*tree.files, *tree.directories)):
            contents.problem(f"{name} is there: the save did not end")
        self._model(contents)
        if tree.below("optim"):
            parts.add_dcp(contents, "optim")
        else:
            contents.problem("optim/: missing or empty")
        ranks: dict[str, set[int]] = {}
        for name in tree.files:
            if found := _RANK.fullmatch(name):
                ranks.setdefault(found[1], set()).add(int(found[2]))
                parts.add_archive(contents, name)
        for kind, found_ranks in ranks.items():
            parts.require_ranks(contents, f"{kind}/{kind}_dp_rank_R.pt", found_ranks, world_size)
        if ranks:
            contents.world_change = WorldChange.NO  # each rank reads its own file
        if len({frozenset(each) for each in ranks.values()}) > 1:
            contents.problem("rng/ and dataloader/ are not of the same ranks")
        if "step_scheduler.pt" in tree:
            parts.add_archive(contents, "step_scheduler.pt")
        return contents

    @staticmethod
    def _model(contents: Contents) -> None:
        names = contents.tree.below("model")
        shards = {int(found[1]): name for name in names if (found := _SHARD.fullmatch(name))}
        if ".metadata" in names or any(name.endswith(".distcp") for name in names):
            parts.add_dcp(contents, "model")
        elif shards:
            for name in shards.values():
                parts.add_safetensors(contents, f"model/{name}")
            missing = sorted(set(range(1, max(shards) + 1)).difference(shards))
            if missing:
                contents.problem(f"model/: shard {parts.some(map(str, missing))} of {max(shards)} is missing")
            contents.note("model/: sharded safetensors say not how many shards there are: the last ones may be missing")
        elif not parts.add_weights(contents, directory="model", stems=("model", "adapter_model")):
            contents.problem("model/: neither DCP nor safetensors")

    def resume(self, step: Step, contents: Contents) -> Resume:  # noqa: ARG002
        """Name the directory."""
        return Resume((f"--checkpoint.restore_from={os.path.abspath(step.path)}",), "`restore_from` of [checkpoint]")


FRAMEWORK = Automodel()
