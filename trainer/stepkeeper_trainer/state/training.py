"""The whole training state as one flat dict of tensors, and back: each rank gets back exactly what it had.

Parts give named tensors and a JSON skeleton; a skeleton is saved as a tensor too.  Ranks may hold different values
under one name (`keys`).  On another number of ranks everything is loaded that was sharded as a DTensor or equal
everywhere; what cannot be is named before anything is loaded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stepkeeper_trainer.errors import ResumeError, StateError, StepkeeperError, UsageError
from stepkeeper_trainer.formats.manifest import CONFIRMED, LEFT_OUT, MODULES
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.state import random_state
from stepkeeper_trainer.state.keys import (
    TREE_PREFIX,
    Private,
    Renaming,
    blob_of,
    names_of,
    names_then,
    pack,
    read_old,
    unpack,
)
from stepkeeper_trainer.state.module import ModulePart, merge, tied_names
from stepkeeper_trainer.state.optimizer import OptimizerPart
from stepkeeper_trainer.state.tree import (
    EACH_RANK,
    Stateful,
    StatefulPart,
    check_dense,
    from_blob,
    local,
    meshes_of,
    to_blob,
    with_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

HISTORY_STEPS = 50
NAMED_MAX = 5  # in one error message
DRIFT_MAX = 100  # names in a manifest
COUNTERS_KEY, HISTORY_KEY, VARIANTS_KEY = "keeper.json", "keeper.loss_history", "keeper.variants"
RESERVED = ("keeper", "ranks", "rng")  # begin the keys of what is not the script's
Part = ModulePart | OptimizerPart | StatefulPart


@dataclass(slots=True)
class Counters:
    """How far training is."""

    step: int = 0  # optimizer steps completed
    tokens: int = 0  # seen by all ranks together
    seed: int = 0
    # on rank 0: steps and their losses
    history: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    @property
    def last_loss(self) -> float | None:
        """The newest loss that is known: on rank 0 of the newest step, or of the one before."""
        return self.history[-1][1] if self.history else None


Looked = tuple[dict[str, torch.Tensor], Any]  # a module's tensors, and its skeleton


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """What is no tensor, before it is packed."""

    skeleton: Any


@dataclass(frozen=True, slots=True)
class Gathered:
    """The state at one moment: references to tensors, and a copy of the rest."""

    values: dict[str, Any]  # tensors and skeletons
    generators: dict[str, Any]
    others: list[torch.Tensor]  # those of the values that are no module's
    again: bool  # without a look at the modules


class TrainingState:
    """Everything that a resumed run needs to go on as if it had never stopped."""

    def __init__(
        self,
        state: Mapping[str, torch.nn.Module | torch.optim.Optimizer | Stateful],
        *,
        counters: Counters,
        rank: int,
        world_size: int = 1,
    ) -> None:
        """Take the parts by name.

        Raises:
            UsageError: a name or a value cannot be taken.
        """
        _check_names(state)
        self.counters, self.rank, self.world_size = counters, rank, world_size
        self.parts: dict[str, Part] = {name: self._part(name, value) for name, value in state.items()}
        self.modules_then: dict[str, Looked] = {}  # as `collect` has found them last
        self.private: Private = {}
        self.packed: list[Any] = []  # on rank 0: the private names of all ranks
        self.drifted: list[str] = []  # on rank 0: names that all ranks hold alike by their type, and do not
        self.confirmed: int | None = None  # the newest step at which all ranks computed the same bits twice
        self._saved: dict[str, Any] = {}  # skeletons of the checkpoint that is being loaded
        self._keys: dict[str, str] = {}  # of what is being loaded, by name
        self._rng: dict[str, str] = {}

    @property
    def modules(self) -> dict[str, ModulePart]:
        """The parts that are modules."""
        return {name: part for name, part in self.parts.items() if isinstance(part, ModulePart)}

    @property
    def optimizers(self) -> dict[str, OptimizerPart]:
        """The parts that are optimizers."""
        return {name: part for name, part in self.parts.items() if isinstance(part, OptimizerPart)}

    @property
    def others(self) -> dict[str, Stateful]:
        """What is neither a module nor an optimizer, by name."""
        return {name: part.value for name, part in self.parts.items() if isinstance(part, StatefulPart)}

    @property
    def main_module(self) -> torch.nn.Module | None:
        """The first module: the model, if there is one."""
        return next((part.module for part in self.modules.values()), None)

    @property
    def scaler_tensors(self) -> list[torch.Tensor]:
        """What gradient scalers keep on a GPU: it changes without an optimizer's step."""
        scalers = [part for part in self.others.values() if isinstance(part, torch.amp.GradScaler)]
        kept = [getattr(each, name, None) for each in scalers for name in ("_scale", "_growth_tracker")]
        return [each for each in kept if isinstance(each, torch.Tensor)]

    @property
    def sampler(self) -> Stateful | None:
        """What says which data comes next, for all ranks together; None where a loader of each rank does."""
        found = [value for value in self.others.values() if isinstance(value, GlobalSampler)]
        return found[0] if found else self.others.get("sampler")

    @property
    def parameter_keys(self) -> frozenset[str]:
        """The names under which parameters of modules are saved."""
        return frozenset(f"{part.name}.{name}" for part in self.modules.values() for name in part.parameters())

    @property
    def replicated(self) -> dict[str, int]:
        """Names whose values DistributedDataParallel keeps equal, and on how many ranks."""
        return {name: size for part in self.modules.values() for name, size in part.replicated.items()}

    def collect(self) -> dict[str, torch.Tensor]:
        """Return references to every tensor of the state: copy them before training goes on.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        return self.complete(self._gather({}))

    def gather_again(self) -> Gathered:
        """Return what `complete` makes the state of: cheap, without a look at the modules or a wait for a GPU.

        Modules' tensors are those that `collect` has found last.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        return self._gather(self.modules_then)

    def complete(self, gathered: Gathered) -> dict[str, torch.Tensor]:
        """Return the state as it was gathered, with the losses that have come since."""
        tensors = {
            name: to_blob(value.skeleton) if isinstance(value, _Skeleton) else value
            for name, value in gathered.values.items()
        }
        for name, part in self.others.items():
            if gathered.again and isinstance(part, torch.amp.GradScaler):
                tensors[f"{TREE_PREFIX}{name}"] = to_blob(StatefulPart(name, part).collect({}))
        if self.rank == 0:  # the others know neither the losses nor the other ranks
            tensors[HISTORY_KEY] = self._history()
            tensors[VARIANTS_KEY] = to_blob({"divided": self.packed, "drifted": self.drifted})
        if self.private:
            tensors = {self.private.get(n, n): local(t) if n in self.private else t for n, t in tensors.items()}
        for name, value in random_state.as_tensors(gathered.generators).items():
            tensors[f"{_rng_key(self.rank)}{name}"] = value
        return tensors

    def _gather(self, modules: Mapping[str, Looked]) -> Gathered:
        """Gather everything by the names that equal values have; modules are looked at where they are not given."""
        tensors: dict[str, Any] = {}
        looked: dict[str, Looked] = {}
        others: list[torch.Tensor] = []
        for name, part in self.parts.items():
            skeleton: Any = None
            own: dict[str, torch.Tensor] = {}
            if isinstance(part, ModulePart):
                looked[name] = modules[name] if modules else (own, self._ask(part, own))
                tensors.update(looked[name][0])
                skeleton = looked[name][1]
            elif not (modules and isinstance(getattr(part, "value", None), torch.amp.GradScaler)):
                skeleton = self._ask(part, own)
                if modules and isinstance(part, StatefulPart):  # arrays share their memory, and have no version counter
                    own = {n: t.clone() if t.device.type == "cpu" else t for n, t in own.items()}
                tensors.update(own)
                others += own.values()
            tensors[f"{TREE_PREFIX}{name}"] = _Skeleton(skeleton)
        if not modules:
            self.modules_then = looked
        counters = self.counters
        tensors[COUNTERS_KEY] = _Skeleton(
            {
                "step": counters.step,
                "tokens": counters.tokens,
                "seed": counters.seed,
                "world_size": self.world_size,
                "parts": list(self.parts),
            }
        )
        return Gathered(tensors, random_state.capture(), others, again=bool(modules))

    def _ask(self, part: Part, tensors: dict[str, torch.Tensor]) -> Any:
        """Have a part put its tensors into `tensors`, and return the rest.

        Raises:
            StateError: it cannot, or the script's own code raised something.
        """
        try:
            return part.collect(tensors)
        except StepkeeperError:
            raise
        except Exception as error:  # the script's code may raise anything
            raise StateError(f"{part.name}: its state_dict() raised {type(error).__name__}: {error}") from error

    def check(self) -> dict[str, torch.Tensor]:
        """Return the state as `collect` does, and refuse what cannot be saved: now, and not at the first save.

        Raises:
            StateError: which.
        """
        tensors = self.collect()
        for name, tensor in tensors.items():
            check_dense(name, tensor)
        return tensors

    def _history(self) -> torch.Tensor:
        rows = [(float(step), loss) for step, loss in self.counters.history]
        rows += [(math.nan, math.nan)] * (HISTORY_STEPS - len(rows))  # of one size, so that the plan stays
        return torch.tensor(rows, dtype=torch.float64)

    def divide(self, own: Private, every_rank: Sequence[Private]) -> None:
        """Save names of which ranks hold different values by other keys from now on; rank 0 knows of all ranks."""
        self.private = own
        if every_rank:
            self.packed = pack(every_rank)

    def early(self, names: Iterable[str]) -> frozenset[str]:
        """Return those that may change before the optimizer's next step: buffers, and whatever the script adds."""
        late = self.parameter_keys
        states = tuple(f"{name}.state." for name in self.optimizers)
        return frozenset(name for name in names if not name.startswith(states) and name not in late)

    def blobs(self, metadata: Metadata) -> dict[str, torch.Tensor]:
        """Return tensors for what says what a checkpoint holds: load these first, then `targets`."""
        saved = metadata.state_dict_metadata
        wanted = [
            name
            for name in saved
            if name in (COUNTERS_KEY, VARIANTS_KEY) or name.startswith(TREE_PREFIX) or _is_private_blob(name)
        ]
        if (legacy := blob_of(self.rank)) in saved:
            wanted.append(legacy)
        return {name: torch.empty(_tensor(name, saved).size, dtype=torch.uint8) for name in wanted}

    def targets(self, metadata: Metadata, blobs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors for all the rest that this rank needs of a checkpoint.

        Raises:
            ResumeError: the checkpoint is of another state, or of another number of ranks than can take it.
        """
        entries = metadata.state_dict_metadata
        saved = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        counters = self._own_counters(blobs)
        then = names_then(counters, self.parts)
        renaming = Renaming(then, self.optimizers)
        keys = self._find_keys(counters, blobs, then, renaming)
        if renaming:
            keys = {renaming.key(key): key for key in saved if renaming.key(key) != key} | keys
            for name, part in self.parts.items():
                if not isinstance(part, StatefulPart) and self._saved[name] is not None:
                    self._saved[name] = renaming.skeleton(self._saved[name], then[name])
        own = {name: saved[key] for name, key in keys.items() if key in saved}
        own = {name: entry for name, entry in saved.items() if name not in own} | own
        tensors: dict[str, torch.Tensor] = {}
        self._keys = {}
        # optimizers make groups anew that training had added, where the checkpoint says what was frozen then
        adds_groups = all("trained" in (self._saved.get(name) or {}) for name in self.modules)
        for name, part in sorted(self.parts.items(), key=lambda each: not isinstance(each[1], ModulePart)):
            if not isinstance(part, ModulePart):  # another model is told before other parts
                now = {was: name for name, was in then.items()}
                _check_parts(set(self.parts), {now.get(was, was) for was in counters.get("parts", then.values())})
            targets = self._targets_of(part, own, adds_groups=adds_groups)
            for each, target in targets.items():
                key = keys.get(each, each)
                self._keys[each] = key
                tensors[key] = local(target) if key != each else target
            self._saved[name] = (self._saved[name], targets)
        if HISTORY_KEY in saved:
            tensors[HISTORY_KEY] = torch.empty(saved[HISTORY_KEY].size, dtype=torch.float64)
        self._rng = {key: key.removeprefix(_rng_key(self.rank)) for key in saved if key.startswith(_rng_key(self.rank))}
        for key in self._rng:
            tensors[key] = torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
        self._counters = counters
        return tensors

    def _targets_of(
        self, part: Part, saved: Mapping[str, TensorStorageMetadata], *, adds_groups: bool
    ) -> dict[str, torch.Tensor]:
        skeleton = self._saved[part.name]
        try:
            if isinstance(part, OptimizerPart):
                return part.targets(skeleton, saved, adds_groups=adds_groups)
            return part.targets(skeleton, saved)
        except KeyError as error:
            raise ResumeError(f"{part.name} needs {error.args[0]}, which the checkpoint does not hold") from error

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what was loaded; the generators come last, and nothing may draw after them.  Raises ResumeError."""
        for name, part in self.parts.items():
            skeleton, targets = self._saved[name]
            part.apply(skeleton, targets)
        counters = self._counters
        self.counters.step, self.counters.tokens = counters["step"], counters["tokens"]
        self.counters.history.clear()
        history = tensors.get(HISTORY_KEY)
        for step, loss in history.tolist() if history is not None else ():
            if not math.isnan(step):
                self.counters.history.append((int(step), loss))
        self._saved, self._keys = {}, {}
        if self._rng:
            random_state.restore({name: tensors[key] for key, name in self._rng.items()})
        else:
            seed = random_state.derive(counters["seed"], counters["step"], self.rank)
            warn("rng_derived", rank=self.rank, seed=seed, why="the checkpoint was made by fewer ranks")

    def summary(self) -> dict[str, Any]:
        """Say what the state holds, for the manifest."""
        named = [name for name, part in self.parts.items() if not isinstance(part, OptimizerPart)]
        tied = {k: v for part in self.modules.values() for k, v in tied_names(part.module).items()}
        return {
            **dict.fromkeys(named, True),
            MODULES: list(self.modules),
            "optimizer": any(part.filled for part in self.optimizers.values()),
            "rng": True,
            "loss_history": True,
            **({"drift": self.drifted[:DRIFT_MAX]} if self.drifted else {}),
            **({"tied": tied} if tied else {}),
            **({CONFIRMED: self.confirmed} if self.confirmed is not None else {}),
            **({LEFT_OUT: left_out} if (left_out := self._left_out()) else {}),
        }

    def _part(self, name: str, value: Any) -> Part:
        if isinstance(value, torch.nn.Module):
            return ModulePart(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerPart(name, value, self._parameter_names)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return StatefulPart(name, value, self._meshes, rank=self.rank, world_size=self.world_size)
        raise UsageError(
            f"{name} is a {type(value).__name__}: give a module, an optimizer, or something with state_dict() and "
            "load_state_dict()"
        )

    def _parameter_names(self) -> tuple[dict[int, str], Mapping[str, Any]]:
        """Return the names of all modules' parameters: the first module's own, and others behind their part's name."""
        by_name = {
            (f"{part}.{name}" if number else name): value
            for number, (part, module) in enumerate(self.modules.items())
            for name, value in module.parameters().items()
        }
        return {id(value): name for name, value in reversed(by_name.items())}, by_name

    def _meshes(self) -> list[DeviceMesh]:
        """Return the meshes of all parameters."""
        _, named = self._parameter_names()
        groups = (group for part in self.optimizers.values() for group in part.optimizer.param_groups)
        return meshes_of(chain(named.values(), *(group["params"] for group in groups)))

    def _own_counters(self, blobs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the counters, with the parts that this rank had; on another number of ranks, with all ranks' parts."""
        counters: dict[str, Any] = from_blob(blobs[COUNTERS_KEY], name=COUNTERS_KEY)
        others = {name: blob for name, blob in blobs.items() if name.endswith(f".{COUNTERS_KEY}")}
        if not others:
            return counters
        if counters["world_size"] == self.world_size:
            packed = from_blob(blobs[VARIANTS_KEY], name=VARIANTS_KEY)["divided"]
            own: dict[str, Any] = _read_own(COUNTERS_KEY, unpack(packed, self.rank), blobs)
            return own
        parts = [part for name, blob in others.items() for part in from_blob(blob, name=name)["parts"]]
        return counters | {"parts": list(dict.fromkeys([*counters["parts"], *parts]))}

    def _find_keys(
        self,
        counters: Mapping[str, Any],
        blobs: Mapping[str, torch.Tensor],
        then_called: Mapping[str, str],
        renaming: Renaming,
    ) -> dict[str, str]:
        """Find the skeletons that count for this rank, and return the keys of its private values.

        Raises:
            ResumeError: this number of ranks cannot take the state.
        """
        if "parts" not in counters:
            found = read_old(counters, blobs, self.rank, self.world_size, then_called.values())
            self._saved = {name: found[was] for name, was in then_called.items()}
            return {}
        then = counters["world_size"]
        here = {name: f"{TREE_PREFIX}{was}" for name, was in then_called.items() if was in counters["parts"]}
        several = from_blob(blobs[VARIANTS_KEY], name=VARIANTS_KEY)
        packed = several["divided"]
        if then == self.world_size:
            keys = unpack(packed, self.rank)
            packed = [[owners, [renaming.key(name) for name in names]] for owners, names in packed]
            self.private = unpack(packed, self.rank)
            if self.rank == 0:
                self.packed, self.drifted = packed, [renaming.key(name) for name in several["drifted"]]
            for name, key in here.items():
                self._saved[name] = _read_own(key, keys, blobs)
            return keys | {renaming.key(name): key for name, key in keys.items()}
        divided = names_of(packed) - set(several["drifted"])
        self._check_other_world(then, frozenset(map(renaming.key, divided)))
        for name, key in here.items():
            part = self.parts[name]
            if isinstance(part, StatefulPart) and part.reshards:
                self._saved[name] = {EACH_RANK: _of_each_rank(key, then, packed, blobs)}
                continue
            trees = [from_blob(blob, name=at) for at, blob in blobs.items() if at == key or at.endswith(f".{key}")]
            if len(trees) > 1 and isinstance(part, OptimizerPart):
                self._saved[name] = part.merge(trees)
            elif len(trees) > 1 and isinstance(part, ModulePart):
                self._saved[name] = merge(trees)
            else:
                self._saved[name] = trees[0]
        return {}

    def _check_other_world(self, then: int, divided: frozenset[str]) -> None:
        """Refuse what only as many ranks as then can take; of replicas that drifted, the lowest rank's copy counts."""
        states = {name: part for name, part in self.parts.items() if isinstance(part, StatefulPart)}
        resharded = {name for name, part in states.items() if part.reshards}
        fixed = {name: part for name, part in states.items() if name not in resharded}
        mergeable = {f"{TREE_PREFIX}{name}" for name in self.parts if name not in fixed} | {COUNTERS_KEY}
        found = (name for name in divided - mergeable if name.partition(".")[0] not in resharded)
        wrong = sorted(name.removeprefix(TREE_PREFIX) for name in found)
        counted = sorted(name for name, part in fixed.items() if part.of_one_rank)
        if not wrong and not counted:
            return
        why = [f"ranks hold different values of {_shortened(wrong)}"] if wrong else []
        why += [f"{_shortened(counted)} counts what each rank has read"] if counted else []
        raise ResumeError(
            f"{self.world_size} ranks cannot resume what {then} saved: {'; '.join(why)}; resume on {then} ranks, or "
            "use what all ranks hold alike (GlobalSampler for data, DTensor for weights; `per_rank = False` if a "
            "position is one of the whole job), or give the object a `reshard`"
        )

    def _left_out(self) -> list[dict[str, int]]:
        """Return the data that this state has never seen: which samples, from where on, and before which step."""
        found = [value for value in self.others.values() if isinstance(value, GlobalSampler)]
        return [
            {"step": step, "epoch": epoch, "consumed": consumed, "samples": samples}
            for sampler in found
            for step, epoch, consumed, samples in sampler.skipped
        ]


def _check_names(state: Mapping[str, Any]) -> None:
    """Refuse names that would be others' in a step directory.  Raises UsageError."""
    for name in state:
        if (
            not isinstance(name, str)
            or not name
            or name in RESERVED
            or not name.isprintable()
            or set("./$") & set(name)
        ):
            raise UsageError(
                f"state={{{name!r}: ...}}: a name is text without `.`, `/` and `$`, and none of {', '.join(RESERVED)}"
            )


def _check_parts(here: set[str], saved: set[str]) -> None:
    if here == saved:
        return
    missing, extra = sorted(here - saved)[:3], sorted(saved - here)[:3]
    raise ResumeError(
        f"the checkpoint's parts are not this script's: it lacks {missing or 'none'} and has {extra or 'none'} "
        "besides; resume with the script and settings that it was made with"
    )


def _of_each_rank(key: str, ranks: int, packed: Sequence[Any], blobs: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return the skeletons that ranks saved under a key; a rank without that part has none."""
    return [
        with_keys(_read_own(key, keys, blobs), keys)
        for keys in (unpack(packed, rank) for rank in range(ranks))
        if key.removeprefix(TREE_PREFIX) in _read_own(COUNTERS_KEY, keys, blobs)["parts"]
    ]


def _read_own(name: str, keys: Private, blobs: Mapping[str, torch.Tensor]) -> Any:
    """Return the JSON that a rank saved under a name, with `keys` of its private names."""
    key = keys.get(name, name)
    return from_blob(blobs[key], name=key)


def _is_private_blob(name: str) -> bool:
    return name.startswith("ranks.rank_") and (f".{TREE_PREFIX}" in name or name.endswith(f".{COUNTERS_KEY}"))


def _shortened(names: Sequence[str]) -> str:
    """Return the first names of those that are no part of another one."""
    outer = [name for name in names if not name.startswith(tuple(f"{other}." for other in names))]
    return ", ".join(sorted(outer)[:NAMED_MAX])


def _tensor(name: str, saved: Mapping[str, Any]) -> TensorStorageMetadata:
    entry = saved[name]
    if not isinstance(entry, TensorStorageMetadata):
        raise ResumeError(f"{name} in the checkpoint is a pickle, which is never loaded: use Stepkeeper's own")
    return entry


def _rng_key(rank: int) -> str:
    return f"rng.rank_{rank:05d}."
