"""Initial weights: a run that has no step of its own begins with the weights of another program.

From a directory of plain `torch.distributed.checkpoint` (torchtitan's, for one), or from safetensors files.  Modules
are filled, each rank's own shards, and optimizers where it is asked for, by their tensors under DCP's names; options
such as the learning rate stay those of the script, schedule and data begin anew.  Nothing of these files is unpickled
into code.  A directory with a manifest of ours is verified; others have no digests, and the log says so.
"""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stepkeeper_trainer.errors import DamagedError, ResumeError, StepkeeperError
from stepkeeper_trainer.formats import safetensors
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.formats.metadata import (
    METADATA_BYTES_MAX,
    METADATA_NAME,
    Contents,
    MetadataError,
    check_coverage,
    parse_of,
)
from stepkeeper_trainer.formats.plain import read_plain
from stepkeeper_trainer.load.reader import ALONE, CheckedReader, describe, load, root_cause
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.state import plain_name, tied_names
from stepkeeper_trainer.state.training import COUNTERS_KEY
from stepkeeper_trainer.state.tree import is_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from stepkeeper_trainer.coordinate.agreement import Agreement
    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.load.worker import Limits
    from stepkeeper_trainer.state import TrainingState
    from stepkeeper_trainer.state.module import ModulePart
    from stepkeeper_trainer.state.optimizer import OptimizerPart


NAMES_SHOWN = 5


def some(names: list[str]) -> str:
    """Return the first of many names as text."""
    shown = ", ".join(names[:NAMES_SHOWN]) or "nothing"
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def find_tensors(source: Path) -> dict[str, tuple[Path, safetensors.Slot]]:
    """Return where each tensor is; headers are checked before any byte is used.  Raises DamagedError."""
    slots: dict[str, tuple[Path, safetensors.Slot]] = {}
    try:
        for path in safetensors.find_files(source):
            for name, slot in safetensors.read_header(path)[0].items():
                if name in slots:
                    raise DamagedError(f"{source}: {name} is in {slots[name][0].name} and in {path.name}")
                slots[name] = (path, slot)
    except safetensors.SafetensorsError as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise DamagedError(f"{error.filename or source}: cannot be read: {error.strerror}") from error
    return slots


@torch.no_grad()
def _fill(path: Path, tensors: list[tuple[safetensors.Slot, torch.Tensor]]) -> None:
    """Copy tensors out of one file, which is mapped: only the pages of this rank's part are read."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        for slot, tensor in tensors:
            _copy(tensor_of(mapped, slot), tensor)


def tensor_of(mapped: mmap.mmap, slot: safetensors.Slot) -> torch.Tensor:
    """Return a tensor of a mapped file: of the file's own memory where it is aligned there."""
    dtype = getattr(torch, slot.dtype)
    if slot.end == slot.begin:
        return torch.empty(slot.shape, dtype=dtype)
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=slot.end - slot.begin, offset=slot.begin)
    if slot.begin % dtype.itemsize:  # other writers do not align
        data = data.clone()
    return data.view(dtype).view(slot.shape)


def _copy(whole: torch.Tensor, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    local = tensor.to_local()
    if all(type(placement) in {Shard, Replicate} for placement in tensor.placements):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))])
    else:  # sharded twice along one dimension: torch knows how
        placed = distribute_tensor(whole.to(local.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
        local.copy_(placed.to_local())


@dataclass(slots=True)
class Moments:
    """What a checkpoint holds of an optimizer."""

    part: OptimizerPart
    skeleton: dict[str, Any]
    targets: dict[str, torch.Tensor] = field(default_factory=dict)  # by our names
    homes: dict[str, str] = field(default_factory=dict)  # our names to those of the checkpoint
    missing: list[str] = field(default_factory=list)  # parameters without a state

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each stored tensor goes to."""
        return {home: self.targets[name] for name, home in self.homes.items()}

    def apply(self) -> None:
        """Give the optimizer what was loaded.  Raises ResumeError."""
        self.part.apply(self.skeleton, self.targets)


def match_moments(part: OptimizerPart, stored: Mapping[str, Any]) -> Moments:
    """Find the states of an optimizer among stored tensors.

    Raises:
        ResumeError: there are none, or several places hold as many.
    """
    groups = part.collect({})["param_groups"]
    parameters = [name for group in groups for name in group["params"]]
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    prefix = _find_optimizer_prefix(part.name, parameters, tensors)
    known = set(parameters)
    own: dict[str, TensorStorageMetadata] = {}
    columns: dict[str, list[str]] = {}
    homes: dict[str, str] = {}
    for home, entry in tensors.items():
        parameter, _, key = home.removeprefix(prefix).rpartition(".")
        if home.startswith(prefix) and parameter in known:
            name = f"{part.name}.state.{parameter}.{key}"
            own[name], homes[name] = entry, home
            columns.setdefault(key, []).append(parameter)
    skeleton = {"columns": columns, "rest": {}, "param_groups": groups, "outside": []}
    found = Moments(part, skeleton, part.targets(skeleton, own), homes)
    trained = [n for g, m in zip(groups, part.optimizer.param_groups, strict=True) for n in _trained(g, m)]
    filled = {name for names in columns.values() for name in names}
    found.missing = [f"{part.name}.state.{name}" for name in trained if name not in filled]
    return found


def _trained(group: Mapping[str, Any], members: Mapping[str, Any]) -> list[str]:
    return [n for n, p in zip(group["params"], members["params"], strict=True) if p.requires_grad]


def _find_optimizer_prefix(part: str, parameters: Sequence[str], stored: Mapping[str, Any]) -> str:
    """Return what stands before the names of parameters in the optimizer's states."""
    count: Counter[str] = Counter()
    known = set(parameters)
    for name in stored:
        before, mark, rest = f".{name}".partition(".state.")
        if mark and rest.rpartition(".")[0] in known:
            count[f"{before}{mark}"[1:]] += 1
    most = max(count.values(), default=0)
    best = sorted(prefix for prefix, number in count.items() if number == most)
    if f"{part}.state." in best:
        return f"{part}.state."
    if len(best) != 1:
        found = f"in several places: {best}" if best else "nowhere"
        raise ResumeError(f"the initial weights hold states of {part} {found}; leave out with_optimizer")
    return best[0]


PROBED = 32  # names of a module by which its place in a checkpoint is found


def is_initial(source: Path) -> bool:
    """Whether a path is to be taken for initial weights, and not for a step of a training run of ours."""
    if not source.is_dir():
        return source.is_file()
    if (source / MANIFEST_NAME).exists():
        return False
    names = (METADATA_NAME, safetensors.SINGLE_NAME, safetensors.INDEX_NAME)
    return any((source / name).exists() for name in names)


def is_training_step(contents: Contents) -> bool:
    """Whether a step directory holds the state of a training run of ours: else it has tensors of its writer's own."""
    return COUNTERS_KEY in contents.tensors


def load_initial(
    source: Path,
    state: TrainingState,
    agreement: Agreement,
    *,
    strict: bool,
    with_optimizer: bool = False,
    limits: Limits | None = None,
    manifest: Manifest | None = None,
) -> None:
    """Fill the modules of a state from `source`, on all ranks together.

    With `strict` each tensor of the modules must be there, and no other one of theirs.  With a `manifest` every byte is
    verified.

    Raises:
        ResumeError: it is not there, or of another model.
        DamagedError: something of it is missing or damaged.
    """
    found = _open(source, manifest)
    shapes = found.shapes
    parts = [_match(part, shapes) for part in state.modules.values()]
    moments = found.moments(state) if with_optimizer else []
    _check(source, parts, moments, strict=strict, tell=state.rank == 0)
    filled: list[_Part | Moments] = [*parts, *moments]
    wanted = {home: tensor for part in filled for home, tensor in part.tensors.items()}
    found.read(wanted, agreement, limits)
    for part in filled:
        part.apply()
    if state.rank == 0:
        say("initial_weights", source=source, tensors=len(wanted), verified=manifest is not None)
        if manifest is None:
            warn(
                "initial_weights_unverified", source=source, why="it has no digests: only its completeness was checked"
            )


# What is there ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Files:
    """Safetensors files."""

    source: Path
    slots: Mapping[str, tuple[Path, safetensors.Slot]]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: slot.shape for name, (_, slot) in self.slots.items()}

    def moments(self, _state: TrainingState) -> list[Moments]:
        raise ResumeError(f"{self.source}: safetensors hold no state of an optimizer: leave out with_optimizer")

    def read(self, wanted: Mapping[str, torch.Tensor], agreement: Agreement, _limits: Limits | None) -> None:
        problem: StepkeeperError | None = None
        by_file: dict[Path, list[tuple[safetensors.Slot, torch.Tensor]]] = {}
        for home, tensor in wanted.items():
            path, slot = self.slots[home]
            by_file.setdefault(path, []).append((slot, tensor))
        try:
            for path, tensors in sorted(by_file.items()):
                _fill(path, tensors)
        except OSError as error:
            problem = DamagedError(f"{error.filename or self.source}: cannot be read: {error.strerror}")
        agreement.raise_together(problem)


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory of plain DCP."""

    source: Path
    contents: Contents
    manifest: Manifest | None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.size for name, tensor in self.contents.tensors.items()}

    def moments(self, state: TrainingState) -> list[Moments]:
        stored = describe(self.contents).state_dict_metadata
        return [match_moments(part, stored) for part in state.optimizers.values()]

    def read(self, wanted: Mapping[str, torch.Tensor], agreement: Agreement, limits: Limits | None) -> None:
        tensors = dict(wanted)
        if self.manifest is not None:
            load(CheckedReader(self.source, self.manifest), tensors, agreement.idle_group, limits=limits)
            return
        for name in tensors:
            if any(
                piece.extent is not None and piece.extent.transformed for piece in self.contents.tensors[name].pieces
            ):
                raise ResumeError(f"{self.source}: {name} is stored compressed: load it with a reader that knows how")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = _PlainReader(self.source, self.contents)
        damage: DamagedError | None = None
        try:  # each rank by itself: it has read `.metadata` already
            state_dict_loader.load(tensors, storage_reader=reader, planner=planner, **ALONE)
        except CheckpointException as error:
            damage = DamagedError(f"{self.source}: {root_cause(error)}")
            damage.__cause__ = error
        agreement.raise_together(damage)


class _PlainReader(FileSystemReader):
    """Stock DCP's reader of tensors, with `.metadata` parsed as data."""

    def __init__(self, directory: Path, contents: Contents) -> None:
        super().__init__(directory)
        self._contents = contents

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        stored = {
            MetadataIndex(name, torch.Size(piece.offsets)): _StorageInfo(
                piece.extent.file, piece.extent.start, piece.extent.length
            )
            for name, tensor in self._contents.tensors.items()
            for piece in tensor.pieces
            if piece.extent is not None
        }
        return replace(describe(self._contents), storage_data=stored)


def _open(source: Path, manifest: Manifest | None) -> _Files | _Directory:
    try:
        if manifest is not None:
            return _Directory(source, CheckedReader(source, manifest).contents, manifest)
        if (source / METADATA_NAME).exists():
            return _Directory(source, _read_contents(source), None)
    except OSError as error:
        raise DamagedError(f"{error.filename or source}: cannot be read: {error.strerror}") from error
    return _Files(source, find_tensors(source))


def _read_contents(source: Path) -> Contents:
    """Read what a directory of plain DCP says that it holds.  Raises ResumeError, DamagedError, OSError."""
    try:
        contents = parse_of(source, read_plain(source / METADATA_NAME, METADATA_BYTES_MAX, within=source))
    except MetadataError as error:
        raise DamagedError(f"{source / METADATA_NAME}: {error}") from error
    if is_training_step(contents):
        raise ResumeError(
            f"{source}: a step of a training run whose {MANIFEST_NAME} is missing: it was never committed"
        )
    sizes = {path.name: path.stat().st_size for path in source.iterdir() if path.is_file()}
    if problems := check_coverage(contents, sizes):
        raise DamagedError(f"{source}: {'; '.join(problems[:3])}")
    return contents


# Whose it is ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A module, and where its tensors are."""

    part: ModulePart
    prefix: str
    homes: dict[str, str]  # by the module's own plain names
    values: dict[str, tuple[str, torch.Tensor]]  # by plain name: the name of `state_dict`, and the tensor
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each stored tensor goes to."""
        return {home: self.values[name][1].detach() for name, home in self.homes.items()}

    def apply(self) -> None:
        """Give a module what was loaded, through its own `load_state_dict`: it may convert.  Raises ResumeError."""
        try:
            state = self.part.module.state_dict(keep_vars=True)  # with torch's notes on the modules' versions
            loaded = {self.values[name][0]: self.values[name][1] for name in self.homes}
            for name in state.keys() - loaded.keys():
                del state[name]
            state.update(loaded)  # which may be converted copies: asked again, a module makes others
            self.part.module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise ResumeError(f"{self.part.name} refuses the initial weights: {error}") from error


def _match(part: ModulePart, shapes: Mapping[str, tuple[int, ...]]) -> _Part:
    """Find the tensors of a module among stored ones.

    Raises:
        ResumeError: several places hold as much of it.
    """
    state = part.module.state_dict(keep_vars=True)
    values = {plain_name(name): (name, value) for name, value in state.items() if is_plain(type(value))}
    prefix = _find_prefix(part.name, values, shapes)
    homes = {name: f"{prefix}{name}" for name in values if f"{prefix}{name}" in shapes}
    tied = tied_names(part.module)
    filled = {tied.get(name, name) for name in homes}
    first = {name.partition(".")[0] for name in values}  # without a prefix, other parts' names are beside it
    known = set(homes.values())
    return _Part(
        part,
        prefix,
        homes,
        values,
        missing=sorted(
            f"{part.name}.{name}" for name in values.keys() - homes.keys() if tied.get(name, name) not in filled
        ),
        unexpected=sorted(
            name
            for name in shapes
            if name not in known and name.startswith(prefix) and (prefix or name.partition(".")[0] in first)
        ),
        misshapen=[
            f"{home} has shape {list(shapes[home])}, the model's {list(values[name][1].shape)}"
            for name, home in homes.items()
            if shapes[home] != tuple(values[name][1].shape)
        ],
    )


def _find_prefix(part: str, wanted: Collection[str], stored: Collection[str]) -> str:
    """Return what stands before a module's names in a checkpoint, by which most of them are there.

    Raises:
        ResumeError: several places hold as much of it.
    """
    probes = sorted(wanted, key=lambda name: (-name.count("."), name))[:PROBED]
    counts = Counter(
        name.removesuffix(probe)
        for probe in probes
        for name in stored
        if name.endswith(probe) and name.removesuffix(probe)[-1:] in {"", "."}
    )
    covers = {prefix: sum(f"{prefix}{name}" in stored for name in wanted) for prefix in counts}
    most = max(covers.values(), default=0)
    best = [prefix for prefix, count in covers.items() if count == most]
    for preferred in (f"{part}.", ""):
        if preferred in best:
            return preferred
    named = [prefix for prefix in best if prefix.endswith(f".{part}.")] or best
    if len(named) > 1:
        raise ResumeError(f"{part} may be any of {sorted(named)} in the initial weights: keep one of them there")
    return named[0] if named else f"{part}."


def _check(source: Path, parts: list[_Part], moments: list[Moments], *, strict: bool, tell: bool) -> None:
    """Refuse another model's weights; not `strict`, say what is not loaded.  Raises ResumeError."""
    filled: list[_Part | Moments] = [*parts, *moments]
    missing = [name for part in filled for name in part.missing]
    owned = {home for part in filled for home in part.homes.values()}
    unexpected = sorted({name for part in parts for name in part.unexpected} - owned)
    if misshapen := [text for part in parts for text in part.misshapen]:
        raise ResumeError(f"{source}: {'; '.join(misshapen[:NAMES_SHOWN])}: these weights are of another model")
    if not any(part.homes for part in parts):
        raise ResumeError(f"{source}: none of its tensors is the model's: it lacks {some(missing)}")
    if not missing and not unexpected:
        return
    if strict:
        raise ResumeError(
            f"{source}: of another model: it lacks {some(missing)}; the model lacks {some(unexpected)}; "
            "with strict=False what is there is loaded, and the rest is listed"
        )
    if tell:
        why = "these tensors keep the values that the script gave them, or are not used (strict=False)"
        warn("initial_weights_differ", missing=missing, unexpected=unexpected, why=why)
