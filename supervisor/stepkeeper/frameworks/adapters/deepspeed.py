"""DeepSpeed ZeRO 0 to 3, with pipelines and experts, and Universal Checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepkeeper.frameworks import inert, parts
from stepkeeper.frameworks.framework import (
    Contents,
    Door,
    Framework,
    Resume,
    SaveDoor,
    Step,
    WorldChange,
    by_content,
)
from stepkeeper.frameworks.tree import Tree

_TAG = re.compile(r"global_step(\d{1,18})(?:_universal)?")
_MODEL = re.compile(r"mp_rank_(\d{2,6})_model_states\.pt")
_MODEL3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})-model_(\d{2,6})-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(-?\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_STATES = re.compile(r".*_(?:model|optim)_states\.pt|layer_.*\.pt")
_UNIVERSAL = "zero"
_STAGE3 = 3
_WORLD_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the state of a rank says of the whole job."""

    number: int | None
    data_parallel: int | None
    model_parallel: int | None
    stage: int | None


class DeepSpeed(Framework):
    """`global_stepN/`; `latest` is written before the last barrier, so it is a hint and no marker."""

    name = "deepspeed"
    title = "DeepSpeed ZeRO 0-3 and Universal Checkpoint"
    rule = (
        "the files of every data and model parallel rank, as parallel dimensions and ZeRO stage in the model's "
        "state say; universal: `fp32.pt` of every parameter and `zero/optimizer_state.pt`, no `tmp/`"
    )
    imports = ("deepspeed",)
    commands = ("deepspeed",)
    step_line = r"\bstep=(\d+), skipped="
    has_resume_arguments = False
    save_door = SaveDoor(Door.CALL, "`engine.save_checkpoint` on all ranks, in the script")
    world_change = WorldChange.NO  # ZeRO refuses another data parallel size
    converted_words = ("load_universal", "universal_checkpoint", "universal-checkpoint")
    converted_option = "--universal-checkpoint"

    def list_steps(self, root: Path) -> list[Step]:
        """Return the directories that hold states of DeepSpeed; the tag is the script's own."""
        return by_content(root, self.is_step, _number)

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        try:
            names = os.listdir(path) if path.is_dir() else []
        except PermissionError:
            return False
        return any(map(_STATES.fullmatch, names)) or (_UNIVERSAL in names and path.name.endswith("_universal"))

    def complete(self, step: Step, *, world_size: int | None) -> Contents:
        """Require the file of every rank."""
        contents = Contents(Tree(step.path), step.number, world_size)
        if _UNIVERSAL in contents.tree.directories:
            _add_universal(contents)
        else:
            add_engine(contents, "", world_size)
        return contents

    def pointers(self, step: Step) -> Mapping[Path, bytes]:
        """Return `latest`, or `latest_universal`: each holds the tag."""
        name = "latest_universal" if (step.path / _UNIVERSAL).is_dir() else "latest"
        return {step.path.parent / name: os.fsencode(step.path.name)}

    def resume(self, step: Step, contents: Contents) -> Resume:
        """Name the tag: `latest` may name one that is torn."""
        tag = step.path.name
        if _UNIVERSAL in contents.tree.directories:
            return Resume((), f'`{{"checkpoint": {{"load_universal": true}}}}` and load_checkpoint(DIR, tag={tag!r})')
        return Resume((), f"engine.load_checkpoint(DIR, tag={tag!r}); without a tag it reads DIR/latest")


def is_engine(tree: Tree, directory: str) -> bool:
    """Tell whether a directory holds states of DeepSpeed."""
    return any(map(_STATES.fullmatch, tree.below(directory)))


def add_engine(contents: Contents, directory: str, world_size: int | None) -> None:
    """Add the states of an engine in a directory, and require those of every rank."""
    below = f"{directory}/" if directory else ""
    names = contents.tree.below(directory)
    for name in sorted(filter(_STATES.fullmatch, names)):
        parts.add_archive(contents, below + name)
    main = next(iter(sorted(filter(_MODEL.fullmatch, names))), None)
    main = main or next(iter(sorted(filter(_MODEL3.fullmatch, names))), None)
    if main is None:
        contents.problem(f"{below}mp_rank_00_model_states.pt: missing: the parallel dimensions are not known")
        return
    state = parts.read_pickle(contents, below + main)
    facts = _facts(state)
    _check_dimensions(contents, below + main, state)
    if contents.number is None:
        contents.number = facts.number
    if facts.number is not None and not directory and contents.number != facts.number:
        contents.problem(f"{main}: is of step {facts.number}")
    optim = {(int(m[1]), int(m[2])) for name in names if (m := _OPTIM.fullmatch(name))}
    data = facts.data_parallel or world_size or max((rank for rank, _ in optim), default=0) + 1
    model = facts.model_parallel or max((int(m[1]) for name in names if (m := _MODEL.fullmatch(name))), default=0) + 1
    if data * model > _WORLD_MAX:
        contents.problem(f"{main}: says {data} times {model} ranks, which no job has")
        return
    if facts.data_parallel is None:
        contents.note(f"{main}: does not say how many ranks saved it: {data} are assumed")
    contents.world_size = data * model
    stage = facts.stage if facts.stage is not None else (1 if optim else 0)
    contents.world_change = WorldChange.NO if stage or optim else WorldChange.YES
    wanted = [(rank, place) for rank in range(data) for place in range(model)]
    if stage:
        _require(contents, f"{below}zero_pp_rank_R_mp_rank_M_optim_states.pt", wanted, optim)
    if stage >= _STAGE3:
        found = {(int(m[1]), int(m[2])) for name in names if (m := _MODEL3.fullmatch(name))}
        _require(contents, f"{below}zero_pp_rank_R_mp_rank_M_model_states.pt", wanted, found)
    else:
        found = {(0, int(m[1])) for name in names if (m := _MODEL.fullmatch(name))}
        _require(contents, f"{below}mp_rank_M_model_states.pt", [(0, place) for place in range(model)], found)
    _pipeline_and_experts(contents, below, list(names))


def _pipeline_and_experts(contents: Contents, below: str, names: list[str]) -> None:
    layers = {(int(m[1]), int(m[2])) for name in names if (m := _LAYER.fullmatch(name))}
    if layers:
        contents.world_size, contents.world_change = None, WorldChange.NO  # of a pipeline's stages, nothing says it
        places = range(max(place for _, place in layers) + 1)
        rows = sorted({layer for layer, _ in layers})
        _require(
            contents, f"{below}layer_L-model_M-model_states.pt", [(row, p) for row in rows for p in places], layers
        )
    experts = {(int(m[1] or -1), int(m[2])) for name in names if (m := _EXPERT.fullmatch(name))}
    if experts:
        count = max(expert for _, expert in experts) + 1
        rows = sorted({layer for layer, _ in experts})
        _require(
            contents, f"{below}layer_L_expert_E_...", [(row, each) for row in rows for each in range(count)], experts
        )
    optim = {int(m[1]) for name in names if (m := _EXPERT_OPTIM.fullmatch(name))}
    if optim:
        _require(
            contents, f"{below}expp_rank_R_...", [(r, 0) for r in range(max(optim) + 1)], {(rank, 0) for rank in optim}
        )


def _require(contents: Contents, what: str, wanted: Iterable[tuple[int, int]], found: set[tuple[int, int]]) -> None:
    wanted = list(wanted)
    missing = [each for each in wanted if each not in found]
    if missing:
        shown = parts.some(f"({a}, {b})" for a, b in missing)
        contents.problem(f"{what}: {len(missing)} of {len(wanted)} are missing: {shown}")
    extra = len(found.difference(wanted))
    if extra:
        contents.note(f"{what}: {extra} more than this job had ranks: left from a save before it")


def _check_dimensions(contents: Contents, name: str, state: Any) -> None:
    for key in ("dp_world_size", "mp_world_size"):
        if inert.field_of(state, key) is not None and not inert.whole_number(state, key):
            contents.problem(f"{name}: {key} is no number of ranks")


def _facts(state: Any) -> _Facts:
    config = inert.field_of(state, "ds_config")
    return _Facts(
        number=inert.whole_number(state, "global_steps"),
        data_parallel=inert.whole_number(state, "dp_world_size") or None,
        model_parallel=inert.whole_number(state, "mp_world_size") or None,
        stage=inert.whole_number(config, "zero_optimization", "stage") if isinstance(config, dict) else None,
    )


def _add_universal(contents: Contents) -> None:
    tree = contents.tree
    contents.world_change, contents.converted = WorldChange.YES, True
    if "tmp" in tree.directories:
        contents.problem("tmp/ is there: the conversion to universal did not end")
    parts.add_archive(contents, f"{_UNIVERSAL}/optimizer_state.pt")
    models = sorted(filter(_MODEL.fullmatch, tree.below("")))
    if not models:
        contents.problem("mp_rank_00_model_states.pt: missing: the parameters are not known")
    wanted: set[str] = set()
    for name in models:
        if parts.add_archive(contents, name):
            state = parts.read_pickle(contents, name)
            facts = _facts(state)
            contents.number = contents.number if contents.number is not None else facts.number
            shapes = inert.field_of(state, "param_shapes")
            for group in shapes if isinstance(shapes, list) else []:
                wanted.update(key for key in inert.plain(group) if isinstance(key, str)) if isinstance(
                    group, dict
                ) else None
    there = {name.split("/")[1] for name in tree.files if name.startswith(f"{_UNIVERSAL}/") and name.count("/") == 2}  # noqa: PLR2004
    for name in sorted(wanted | there):
        if "/" in name or name in {"", ".", ".."}:
            contents.problem(f"a parameter is called {name[:80]!r}, which is no name of a directory")
            continue
        folder = f"{_UNIVERSAL}/{name}"
        if f"{folder}/fp32.pt" not in tree:
            contents.problem(f"{folder}/fp32.pt: {tree.why_missing(f'{folder}/fp32.pt')}")
        for file in tree.below(folder):
            parts.add_archive(contents, f"{folder}/{file}")


def _number(name: str) -> int | None:
    found = _TAG.fullmatch(name)
    return int(found[1]) if found else None


FRAMEWORK = DeepSpeed()
