"""NeMo Automodel."""

from __future__ import annotations

import os
import re

from stepkeeper.frameworks import parts
from stepkeeper.frameworks.framework import (
    Contents,
    Framework,
    Resume,
    Step,
    WorldChange,
    Writes,
)
from stepkeeper.frameworks.script import Script

_SHARD = re.compile(r"shard-(\d{1,6})-model-\d{1,6}-of-\d{1,6}\.safetensors")
_RANK = re.compile(r"(rng|dataloader)/\1_(dp|global)_rank_(\d{1,6})\.pt")
_KINDS = ("rng", "dataloader")
_INCOMPLETE = re.compile(r"\.?(?:incomplete|INCOMPLETE|_incomplete|\.incomplete)")


class Automodel(Framework):
    """`epoch_E_step_N/{model,optim,rng,dataloader}`; the link `LATEST` is a hint and no marker."""

    name = "automodel"
    title = "NeMo Automodel"
    imports = ("nemo_automodel",)
    step_name = re.compile(r"epoch_\d{1,9}_step_(\d{1,18})")
    commands = ("automodel",)
    how_to_save = "its own handler of SIGTERM saves at the end of a step"

    answers_notice = True
    writes = Writes(("--checkpoint.checkpoint_dir",), ("checkpoint_dir",), default="checkpoints")

    finds = re.compile(r"step_\d+$")  # where its link `LATEST` leads nowhere

    def takes_resume(self, script: Script) -> bool:
        """Look for its program, or for options of the same kind in the command."""
        return any(word.rpartition("/")[2] == "automodel" or word.startswith("--checkpoint.") for word in script.words)

    def look(self, contents: Contents) -> None:
        """Require what a resume loads."""
        world_size = contents.world_size
        tree = contents.tree
        for name in filter(_INCOMPLETE.fullmatch, (*tree.files, *tree.directories)):
            contents.problem(f"{name} is there: the save did not end")
        neighbour = self.beside(contents.step)
        self._model(contents, neighbour)
        if tree.below("optim"):
            parts.add_dcp(contents, "optim")
        else:
            contents.problem("optim/: missing or empty")
        as_beside = parts.names_beside(neighbour)
        self._ranks(contents, world_size, as_beside, neighbour)
        self._whole_objects(contents, as_beside, neighbour)

    @staticmethod
    def _ranks(contents: Contents, world_size: int | None, as_beside: frozenset[str], neighbour: Step | None) -> None:
        """Require the files of each rank: `global` ranks are all, `dp` ranks the data parallel ones."""
        ranks: dict[tuple[str, str], set[int]] = {}
        for name in contents.tree.files:
            if found := _RANK.fullmatch(name):
                ranks.setdefault((found[1], found[2]), set()).add(int(found[3]))
                parts.add_archive(contents, name)
        for (kind, of), found_ranks in ranks.items():
            everyone = of == "global"
            what = f"{kind}/{kind}_{of}_rank_R.pt"
            parts.require_ranks(contents, what, found_ranks, world_size if everyone else None)
            if world_size is not None and not everyone and world_size % (max(found_ranks) + 1):
                contents.problem(f"{what}: {max(found_ranks) + 1} data parallel ranks do not divide {world_size} ranks")
            if not everyone:
                there_before = (f"{kind}/{each}" for each in parts.names_beside(neighbour, kind) if "_dp_" in each)
                parts.require_as_beside(contents, neighbour, there_before, contents.tree.files)
        if ranks:
            contents.world_change = WorldChange.NO  # each rank reads its own file
        data_parallel = [each for (_, of), each in ranks.items() if of == "dp"]
        if len({frozenset(each) for each in data_parallel}) > 1:
            contents.problem("rng/ and dataloader/ are not of the same ranks")
        kinds = {kind for kind, _ in ranks}
        for kind in _KINDS:
            if kind not in kinds and (neighbour is None or kind in as_beside):
                contents.problem(f"{kind}/: missing or empty, and a recipe loads it")

    @staticmethod
    def _whole_objects(contents: Contents, as_beside: frozenset[str], neighbour: Step | None) -> None:
        """Add what rank 0 saves of each other object of a recipe, by its name."""
        found = sorted(name for name in contents.tree.below("") if name.endswith(".pt"))
        for name in found:
            parts.add_archive(contents, name)
        parts.require_as_beside(contents, neighbour, (name for name in as_beside if name.endswith(".pt")), found)

    @staticmethod
    def _model(contents: Contents, neighbour: Step | None) -> None:
        names = contents.tree.below("model")
        shards = sorted(filter(_SHARD.fullmatch, names))
        as_beside = parts.names_beside(neighbour, "model")
        if ".metadata" in names or any(name.endswith(".distcp") for name in names):
            parts.add_dcp(contents, "model")
        elif shards:
            for name in shards:
                parts.add_safetensors(contents, f"model/{name}")
            ranks = {int(found[1]) for name in shards if (found := _SHARD.fullmatch(name))}
            missing = sorted(set(range(1, max(ranks) + 1)) - ranks)
            if missing:
                contents.problem(f"model/: shard {parts.some(map(str, missing))} of {max(ranks)} is missing")
            parts.require_as_beside(contents, neighbour, filter(_SHARD.fullmatch, as_beside), shards)
            if neighbour is None:
                contents.note("model/: nothing in a first checkpoint says how many shards of safetensors there are")
        elif not parts.add_weights(contents, directory="model", stems=("model", "adapter_model")):
            contents.problem("model/: neither DCP nor safetensors")

    def resume(self, contents: Contents) -> Resume:
        """Name the directory."""
        return Resume(
            (f"--checkpoint.restore_from={os.path.abspath(contents.step.path)}",), "`restore_from` of [checkpoint]"
        )


FRAMEWORK = Automodel()
