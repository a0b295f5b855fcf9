"""DeepSpeed ZeRO 0 to 3, with pipelines and experts, and Universal Checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stepkeeper.frameworks import inert, parts
from stepkeeper.frameworks.framework import (
    POINTER_BYTES_MAX,
    Contents,
    Framework,
    Resume,
    Step,
    WorldChange,
)
from stepkeeper.frameworks.tree import ReadError, Tree

_TAG = re.compile(r"global_step(\d{1,18})(?:_universal)?")
_MODEL = re.compile(r"mp_rank_(\d{2,6})_model_states\.pt")
_MODEL3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})-(?:model_(\d{2,6})-)?model_states\.pt")  # the middle: with tensor parallel ranks
_OF_LAYER = re.compile(r"(\d{1,6})\.")  # how names of a pipeline's parameters begin
_EXPERT = re.compile(r"(?:layer_(-?\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_EXPERT_PARALLEL = re.compile(r"ep_size_(\d{1,6})")
_TENSOR_PARALLEL = ("checkpoint_parallel_dimensions", "tp_degree")
_STATES = re.compile(r".*_(?:model|optim)_states\.pt|layer_.*\.pt")
_UNIVERSAL, _LATEST = "zero", "latest"
_STAGE3 = 3
_WORLD_MAX = 1_000_000
_States = Mapping[int, Any]  # of each model parallel rank
_Names = Iterable[str]
_Place = TypeVar("_Place", bound=tuple[int, ...])


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
    imports = ("deepspeed",)
    commands = ("deepspeed",)
    step_line = r"\bstep=(\d+), skipped="
    has_resume_arguments = False
    target_options = ("--max_steps", "--max_train_steps", "--train_iters")
    attach_takes = "engine.load_checkpoint(DIR)"
    how_to_save = "`engine.save_checkpoint` on all ranks, in the script; `--attach` repeats its call"
    world_change = WorldChange.NO  # ZeRO refuses another data parallel size
    converted_words = ("load_universal", "universal_checkpoint", "universal-checkpoint")
    converted_option = "--universal-checkpoint"

    def number_of(self, name: str) -> int | None:
        """Go by the usual tags: others are the script's own."""
        found = _TAG.fullmatch(name)
        return int(found[1]) if found else None

    def is_step(self, path: Path) -> bool:
        """Go by what it holds."""
        try:
            names = os.listdir(path) if path.is_dir() else []
        except PermissionError:
            return False
        return any(map(_STATES.fullmatch, names)) or (_UNIVERSAL in names and path.name.endswith("_universal"))

    def look(self, contents: Contents) -> None:
        """Require the file of every rank."""
        world_size = contents.world_size
        if _UNIVERSAL in contents.tree.directories:
            _add_universal(contents)
        else:
            pipeline = any(map(_LAYER.fullmatch, contents.tree.files))
            neighbour = self.beside(contents.step) if pipeline else None
            add_engine(contents, "", world_size, as_beside=parts.names_beside(neighbour))

    def pointers(self, step: Step) -> Mapping[Path, bytes]:
        """Return `latest`, or `latest_universal`: each holds the tag."""
        name = "latest_universal" if (step.path / _UNIVERSAL).is_dir() else _LATEST
        return {step.path.parent / name: os.fsencode(step.path.name)}

    def resume(self, contents: Contents) -> Resume:
        """Name the tag: `latest` may name one that is torn."""
        tag = contents.step.path.name
        if _UNIVERSAL in contents.tree.directories:
            return Resume((), f'`{{"checkpoint": {{"load_universal": true}}}}` and load_checkpoint(DIR, tag={tag!r})')
        return Resume((), f"engine.load_checkpoint(DIR, tag={tag!r}); without a tag it reads DIR/latest")


def is_engine(tree: Tree, directory: str) -> bool:
    """Tell whether a directory holds states of DeepSpeed."""
    return any(map(_STATES.fullmatch, tree.below(directory)))


def require_latest(contents: Contents, tag: str) -> None:
    """Require that `latest` names a directory of the checkpoint: a framework around DeepSpeed loads what it names."""
    if not parts.add_plain(contents, _LATEST):
        return
    try:
        said = contents.tree.read(_LATEST, POINTER_BYTES_MAX).strip()
    except ReadError as error:
        contents.problem(str(error))
        return
    if said != os.fsencode(tag):
        contents.problem(f"{_LATEST}: does not name {tag}, which is what there is to load")


def add_engine(contents: Contents, directory: str, world_size: int | None, *, as_beside: _Names = ()) -> None:
    """Add the states of an engine in a directory, and require those of every rank.

    Args:
        contents: of the checkpoint.
        directory: in it; empty: the checkpoint itself.
        world_size: where it is known.
        as_beside: names in the checkpoint beside this one: it has the same layers.
    """
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
    model = facts.model_parallel or max((int(m[1]) for name in names if (m := _MODEL.fullmatch(name))), default=0) + 1
    assumed = (world_size or 0) // model or max((rank for rank, _ in optim), default=0) + 1
    data = facts.data_parallel or assumed
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
    states = {place: _state_of(contents, below, names, place) for place in range(model)}
    _require_layers(contents, below, names, states, as_beside)
    _require_experts(contents, below, names, states)
    _require_expert_optimizers(contents, below, names)


def _state_of(contents: Contents, below: str, names: _Names, place: int) -> Any:
    """Return the state of a model parallel rank; None where its file is not there, which is a problem already."""
    found = sorted(
        name
        for name in names
        if ((m := _MODEL.fullmatch(name)) and int(m[1]) == place)
        or ((m := _MODEL3.fullmatch(name)) and int(m[2]) == place)
    )
    return parts.read_pickle(contents, below + found[0]) if found else None


def _require_layers(contents: Contents, below: str, names: Iterable[str], states: _States, as_beside: _Names) -> None:
    """Require the layers of a pipeline: those whose parameters a stage names, and those of the checkpoint beside."""
    layers = {(int(m[1]), int(m[2] or 0)) for name in names if (m := _LAYER.fullmatch(name))}
    there_before = {(int(m[1]), int(m[2] or 0)) for name in as_beside if (m := _LAYER.fullmatch(name))}
    if not layers and not there_before and not any(map(_has_layers_apart, states.values())):
        return
    contents.world_size, contents.world_change = None, WorldChange.NO  # of a pipeline's stages, nothing says it
    known = {int(found[1]) for state in states.values() for name in _named(state) if (found := _OF_LAYER.match(name))}
    rows = known | {layer for layer, _ in (*layers, *there_before)}
    tensor = max((inert.whole_number(state, *_TENSOR_PARALLEL) or 0 for state in states.values()), default=0)
    if tensor * len(rows) > _WORLD_MAX:
        contents.problem(f"{below}: says {tensor} tensor parallel ranks, which no job has")
        return
    places = range(max([tensor, *(place + 1 for _, place in (*layers, *there_before))]))
    _require(contents, f"{below}layer_L-model_M-model_states.pt", [(row, p) for row in rows for p in places], layers)
    if not known and not there_before:
        contents.note(f"{below}: without ZeRO nothing in a first checkpoint says which layers its pipeline has")


def _has_layers_apart(state: Any) -> bool:
    """Tell whether a state is that of a pipeline's stage, which holds no module."""
    fields = inert.plain(state)
    return isinstance(fields, dict) and "module" in fields and fields["module"] is None


def _named(state: Any) -> Iterable[str]:
    """Return the names of parameters and buffers that a stage says it has."""
    shapes = inert.field_of(state, "param_shapes")
    groups = [*(shapes if isinstance(shapes, list) else ()), inert.field_of(state, "frozen_param_shapes")]
    for group in map(inert.plain, groups):
        yield from (name for name in group if isinstance(name, str)) if isinstance(group, dict) else ()
    buffers = inert.field_of(state, "buffer_names")
    yield from (name for name in buffers if isinstance(name, str)) if isinstance(buffers, list) else ()


def _require_experts(contents: Contents, below: str, names: Iterable[str], states: _States) -> None:
    """Require each expert of each layer: `num_experts` has one number a layer, in the order of their files."""
    experts = {(int(m[1] or -1), int(m[2]), int(m[3])) for name in names if (m := _EXPERT.fullmatch(name))}
    wanted: set[tuple[int, int, int]] = set()
    for place, state in states.items():
        counts = inert.field_of(state, "num_experts")
        if not isinstance(counts, list) or _has_no_files(state):
            continue
        if sum(count for count in counts if type(count) is int) > _WORLD_MAX:
            contents.problem(f"{below}: says more than {_WORLD_MAX} experts, which no model has")
            return
        wanted.update(
            (layer, expert, place)
            for layer, count in enumerate(counts)
            if type(count) is int
            for expert in range(count)
        )
    if experts and not wanted:  # of a release that says no number for each layer
        count = max(expert for _, expert, _ in experts) + 1
        wanted = {(layer, expert, place) for layer, _, place in experts for expert in range(count)}
    _require(contents, f"{below}layer_L_expert_E_mp_rank_M_model_states.pt", sorted(wanted), experts)


def _has_no_files(state: Any) -> bool:
    """Tell whether the experts are in the shards of ZeRO 3, as AutoEP has them."""
    layers = inert.field_of(state, "ds_autoep_layers")
    first = layers[0] if isinstance(layers, list) and layers else None
    return inert.field_of(first, "checkpoint_format") not in (None, "per_expert_files")


def _require_expert_optimizers(contents: Contents, below: str, names: Iterable[str]) -> None:
    """Require the optimizer's state of each expert parallel rank: its groups are named by how many there are."""
    found = {(int(m[1]), int(m[2])): name for name in names if (m := _EXPERT_OPTIM.fullmatch(name))}
    if not found:
        return
    count = max(rank for rank, _ in found) + 1
    state = parts.read_pickle(contents, below + found[min(found)])
    for path in (("optimizer", "param_groups"), ("optimizer", "optimizer_state_dict", "param_groups")):
        groups = inert.field_of(state, *path)
        for group in groups if isinstance(groups, list) else ():
            named = _EXPERT_PARALLEL.fullmatch(str(inert.field_of(group, "name")))
            count = max(count, int(named[1]) if named else 0)
    wanted = [(rank, place) for rank in range(count) for place in sorted({place for _, place in found})]
    _require(contents, f"{below}expp_rank_R_mp_rank_M_optim_states.pt", wanted, set(found))


def _require(contents: Contents, what: str, wanted: Iterable[_Place], found: set[_Place]) -> None:
    wanted = list(wanted)
    missing = [each for each in wanted if each not in found]
    if missing:
        shown = parts.some(map(str, missing))
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
    _add_parameters(contents, wanted)


def _add_parameters(contents: Contents, wanted: set[str]) -> None:
    """Add the states of each parameter: `fp32.pt`, and those that any other parameter with these has."""
    tree = contents.tree
    there = {name.split("/")[1] for name in tree.files if name.startswith(f"{_UNIVERSAL}/") and name.count("/") == 2}  # noqa: PLR2004
    states: dict[str, frozenset[str]] = {}
    for name in sorted(wanted | there):
        if "/" in name or name in {"", ".", ".."}:
            contents.problem(f"a parameter is called {name[:80]!r}, which is no name of a directory")
            continue
        folder = f"{_UNIVERSAL}/{name}"
        if f"{folder}/fp32.pt" not in tree:
            contents.problem(f"{folder}/fp32.pt: {tree.why_missing(f'{folder}/fp32.pt')}")
        states[name] = frozenset(tree.below(folder))
        for file in states[name]:
            parts.add_archive(contents, f"{folder}/{file}")
    kinds = set(states.values())
    for name, found in states.items():  # DeepSpeed loads the states that are there, and begins the others anew
        if more := [kind - found for kind in kinds if found < kind]:
            lacking = ", ".join(sorted(frozenset.union(*more)))
            contents.problem(f"{_UNIVERSAL}/{name[:80]}: lacks {lacking}, which other parameters have")


FRAMEWORK = DeepSpeed()
