"""A part of the state that is an optimizer: by its own `load_state_dict`, with parameters called by their names.

The description tells of tensors by columns ("every parameter has an `exp_avg`") and not one by one: with many
parameters it would else be most of what a save costs.  Collecting never touches the optimizer: torch's own
`get_optimizer_state_dict` takes a fake step before the first real one, which shifts AdamW.

An optimizer with a `state_dict` of its own, or with hooks on it, is asked for that.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.errors import ResumeError, StateError
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.state.tree import (
    can_shard,
    check_types,
    is_plain,
    join,
    local,
    memory_of,
    meshes_of,
    split,
    target_of,
    tensor_places,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh

Names = dict[int, str]  # of parameters, by id


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What the state was like at the last save: mostly it is again, and making its names is skipped."""

    parameters: list[list[torch.Tensor]]  # of each group
    states: list[torch.Tensor]  # the parameters with a state, in its order
    keys: list[str]  # of their states, one after the other
    types: list[type]
    members: list[list[str]]
    names: list[str]  # as they are saved, one after the other
    columns: dict[str, Any]
    plain: list[str]

    @staticmethod
    def of(
        groups: list[dict[str, Any]],
        state: Mapping[torch.Tensor, dict[str, Any]],
        prefix: str,
        members: list[list[str]],
        skeleton: Mapping[str, Any],
    ) -> _Recipe:
        """Take note of a state that consists of tensors only."""
        states: list[torch.Tensor] = []
        names: list[str] = []
        for group, named in zip(groups, members, strict=True):
            own = [(name, p) for name, p in zip(named, group["params"], strict=True) if p in state]
            states += [parameter for _, parameter in own]
            names += [f"{prefix}{name}.{key}" for name, p in own for key in state[p]]
        dicts = [state[parameter] for parameter in states]
        return _Recipe(
            parameters=[list(group["params"]) for group in groups],
            states=states,
            keys=list(chain.from_iterable(dicts)),
            types=[type(value) for values in dicts for value in values.values()],
            members=members,
            names=names,
            columns=skeleton["columns"],
            plain=skeleton["plain"],
        )

    def find(
        self, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> list[torch.Tensor] | None:
        """Return the tensors of the state, in the order of the names; None where it is not as it was."""
        members = [group["params"] for group in groups]
        if len(members) != len(self.parameters) or not all(map(_same, members, self.parameters)):
            return None
        if not _same(list(state), self.states):
            return None
        dicts = list(state.values())
        if list(chain.from_iterable(dicts)) != self.keys:
            return None
        values = list(chain.from_iterable(map(dict.values, dicts)))
        return values if list(map(type, values)) == self.types else None


@dataclass(frozen=True, slots=True)
class _Given:
    """What an optimizer's state is, as its `state_dict` gives it."""

    states: Mapping[str, Mapping[Any, Any]]  # of each parameter that has one, by name
    groups: Sequence[Mapping[str, Any]]
    shared: Mapping[Any, Any]  # states under keys that are no parameters
    more: Mapping[Any, Any]  # besides `state` and `param_groups`


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_zero1(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether it is torch's ZeRO-1, whose module compiles eight optimizers when it is imported (0.3 s)."""
    module = sys.modules.get("torch.distributed.optim")  # a script that has one has imported it
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class OptimizerPart:
    """Its tensors lie under `<name>.state.<parameter>.<key>`, as flattened optimizers of torch's own checkpoints do."""

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, names: Callable[[], tuple[Names, Mapping[str, Any]]]
    ) -> None:
        """Take an optimizer; `names` gives the names of the modules' parameters by id, and the parameters by name."""
        self.name, self.optimizer = name, optimizer
        self._find_names = names
        self._names: Names = {}
        self.filled = False  # it had a state when it was looked at last
        self._groups = 0  # that it had at the last look
        self._added: list[dict[str, torch.nn.Parameter]] = []  # groups that training had added, by name of parameter
        self._recipe: _Recipe | None = None

    @property
    def _is_torchs(self) -> bool:
        """Whether its state is what torch's own `state_dict` gives; ZeRO-1's is so on each rank."""
        optimizer = self.optimizer
        if _is_zero1(optimizer):
            return True
        hooks = (
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_state_dict_post_hooks",
            "_optimizer_load_state_dict_pre_hooks",
        )
        own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer)
        return not own and not any(vars(optimizer).get(each) for each in hooks)

    def _ask(self, members: list[list[str]]) -> _Given | None:
        """Return its state; None where its `state_dict` has a layout of its own."""
        if self._is_torchs:
            state = self._state
            states = {name: state[parameter] for name, parameter in self._each(members) if parameter in state}
            shared = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
            return _Given(states, self.optimizer.param_groups, shared, {})
        match self.optimizer.state_dict():
            case {"state": dict(state), "param_groups": list(groups), **more}:
                places = [group.get("params") for group in groups]
                numbers = list(chain.from_iterable(places)) if all(isinstance(each, list) for each in places) else []
                if list(map(len, places)) == list(map(len, members)) and all(isinstance(n, int) for n in numbers):
                    names = dict(zip(numbers, chain.from_iterable(members), strict=True))
                    states = {names[key]: value for key, value in state.items() if key in names}
                    shared = {key: value for key, value in state.items() if key not in names}
                    return _Given(states, groups, shared, more)
        return None

    def _each(self, members: list[list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters with their names."""
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return zip(chain.from_iterable(members), parameters, strict=True)

    @property
    def _state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Return what it keeps for each parameter on this rank: ZeRO-1 keeps it for some parameters only."""
        if _is_zero1(self.optimizer):
            local_states: Mapping[torch.Tensor, dict[str, Any]] = self.optimizer.optim.state  # type: ignore[attr-defined]
            return local_states
        return self.optimizer.state

    def collect(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Put its tensors into `tensors`, and return the rest as JSON.  Raises StateError."""
        optimizer, state = self.optimizer, self._state
        self._note_groups()
        self.filled = bool(state)
        if self._recipe is not None and self._is_torchs:
            values = self._recipe.find(optimizer.param_groups, state)
            if values is not None:
                return self._collect_as_before(self._recipe, values, tensors)
        self._recipe = None
        members = self._members()
        outside = self._put_outside(members, tensors)
        given = self._ask(members)
        if given is None:
            return self._collect_whole(members, outside, tensors)
        self.filled = bool(given.states or given.shared)
        found = self._collect_states(given, members, tensors) | {"outside": outside}
        if not any(found[key] for key in ("rest", "outside", "shared", "more")) and self._is_torchs:
            self._recipe = _Recipe.of(optimizer.param_groups, state, f"{self.name}.state.", members, found)
        return found

    def _note_groups(self) -> None:
        """Warn of groups that training has removed: a new process of the script has them again."""
        count = len(self.optimizer.param_groups)
        if count < self._groups:
            why = "a resume will refuse this state: remove them before resume(), too"
            warn("optimizer_has_fewer_groups", part=self.name, groups=count, before=self._groups, why=why)
        self._groups = count

    def _collect_states(
        self, given: _Given, members: list[list[str]], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        columns: dict[str, list[str]] = {}
        rest: dict[str, Any] = {}
        plain: set[str] = set()  # states that are plain tensors where the parameter is a DTensor
        known: dict[Any, str] = {}  # one tensor may be the state of several parameters
        for name, parameter in self._each(members):
            own = f"{self.name}.state.{name}"
            others: dict[Any, Any] = {}
            for key, value in given.states.get(name, {}).items():
                full = f"{own}.{key}"
                if (
                    isinstance(key, str)
                    and "." not in key
                    and is_plain(type(value))
                    and _is_sharded_alike(value, parameter)
                    and known.setdefault(memory_of(value) or full, full) == full
                ):
                    columns.setdefault(key, []).append(name)
                    tensors[full] = value
                    if type(parameter) is DTensor and type(value) is not DTensor:
                        plain.add(key)
                else:
                    others[key] = value
            if others:
                rest[name] = split(others, own, tensors, known)
        count = sum(map(len, members))
        besides = split({"shared": given.shared, "more": given.more}, self.name, tensors, known)
        self._check_meshes([rest, besides])
        return {
            "columns": {key: True if len(names) == count else names for key, names in columns.items()},
            "plain": sorted(plain),
            "rest": rest,
            "param_groups": [
                self._options(options, number, named, tensors)
                for number, (options, named) in enumerate(zip(given.groups, members, strict=True))
            ],
            **besides,
        }

    def _collect_whole(self, members: list[list[str]], outside: list[str], tensors: dict[str, torch.Tensor]) -> Any:
        """Save what its `state_dict` gives as it is: it needs the same order of parameters."""
        state = self.optimizer.state_dict()
        self.filled = bool(state.get("state"))
        whole = split(state, f"{self.name}.whole", tensors, {})
        self._check_meshes(whole)
        groups = [{"params": named} for named in members]
        return {"columns": {}, "plain": [], "rest": {}, "param_groups": groups, "outside": outside, "whole": whole}

    def _check_meshes(self, skeleton: Any) -> None:
        """Refuse what a resume could not make.

        Raises:
            StateError: a state is sharded in another way than its parameter, over a mesh of no parameter.
        """
        for name, place in tensor_places(skeleton).items():
            if "sharded" in place and not any(can_shard(place["sharded"], each) for each in self._meshes()):
                raise StateError(
                    f"{name} is sharded over the ranks {place['sharded']['mesh']}, and no parameter is: a resume could "
                    "not make it; shard the parameters over the same DeviceMesh"
                )

    def _meshes(self) -> list[DeviceMesh]:
        """Return the meshes of all parameters."""
        _, named = self._find_names()
        parameters = chain(named.values(), *(group["params"] for group in self.optimizer.param_groups))
        return meshes_of(parameters)

    def _collect_as_before(
        self, recipe: _Recipe, values: list[torch.Tensor], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Do what `collect` does, where names and order are those of the last time."""
        tensors.update(zip(recipe.names, values, strict=True))
        groups = [
            self._options(group, number, members, tensors)
            for number, (group, members) in enumerate(zip(self.optimizer.param_groups, recipe.members, strict=True))
        ]
        found = {"columns": recipe.columns, "plain": recipe.plain, "rest": {}, "param_groups": groups}
        return found | {"shared": {}, "more": {}, "outside": []}

    def _options(
        self, group: Mapping[str, Any], number: int, members: list[str], tensors: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key != "params"}
        return {**split(options, f"{self.name}.param_groups.{number}", tensors), "params": members}

    def _members(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        groups = self.optimizer.param_groups
        if any(id(parameter) not in self._names for group in groups for parameter in group["params"]):
            self._names, _ = self._find_names()
        return [
            [self._names.get(id(parameter)) or f"param_{number}_{place}" for place, parameter in enumerate(g["params"])]
            for number, g in enumerate(groups)
        ]

    def _put_outside(self, members: list[list[str]], tensors: dict[str, torch.Tensor]) -> list[str]:
        """Put parameters of no module into `tensors`; return their names."""
        found: list[str] = []
        for named, group in zip(members, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(named, group["params"], strict=True):
                if id(parameter) not in self._names:
                    tensors[f"{self.name}.params.{name}"] = parameter
                    found.append(name)
        return found

    def targets(
        self, skeleton: Any, saved: Mapping[str, TensorStorageMetadata], *, adds_groups: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return tensors to load into: sharded as their parameters are, or as the optimizer will move them.

        With `adds_groups` groups that training had added are made anew.

        Raises:
            ResumeError: the checkpoint is of another optimizer or other parameters.
        """
        self._names, named = self._find_names()
        members = self._members()
        more = skeleton["param_groups"][len(members) :]
        self._added = self._find_added(more, members, named) if adds_groups else []
        members += [list(group) for group in self._added]
        self._check_groups(skeleton["param_groups"], members, merged=skeleton.get("merged", False))
        besides = [skeleton.get(key) for key in ("shared", "more", "whole")]
        check_types([skeleton["rest"], skeleton["param_groups"], besides])
        own = {
            name: parameter
            for named, group in zip(members, self.optimizer.param_groups, strict=False)
            for name, parameter in zip(named, group["params"], strict=True)
        }
        own |= {name: parameter for group in self._added for name, parameter in group.items()}
        found: dict[str, torch.Tensor] = {}
        for name in skeleton.get("outside", ()):
            found[f"{self.name}.params.{name}"] = own[name].detach()
        for key, names in skeleton["columns"].items():
            plain = key in skeleton.get("plain", ())
            for name in own if names is True else names:
                if name in own:
                    full = f"{self.name}.state.{name}.{key}"
                    found[full] = _target(own[name], saved[full], plain=plain)
        meshes = self._meshes()
        for name, values in skeleton["rest"].items():
            if name in own:
                for full, place in tensor_places(values).items():
                    if "sharded" in place:
                        found[full] = target_of(full, place, saved[full], like=None, meshes=meshes)
                    else:
                        found[full] = _target(own[name], saved[full], plain=False)
        for full, place in tensor_places([skeleton["param_groups"], besides]).items():
            found[full] = target_of(full, place, saved[full], like=None, meshes=meshes)
        return found

    def _find_added(
        self, groups: Sequence[Mapping[str, Any]], members: list[list[str]], named: Mapping[str, Any]
    ) -> list[dict[str, torch.nn.Parameter]]:
        """Return the parameters of groups that the script adds in the course of training, where all can be found."""
        known, wanted = set(chain.from_iterable(members)), [name for group in groups for name in group["params"]]
        if not known.isdisjoint(wanted) or not set(wanted) <= named.keys():
            return []
        return [{name: named[name] for name in group["params"]} for group in groups]

    def apply(self, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what was saved, through the optimizer's own `load_state_dict`.

        torch's casts states to their parameters' types: those that were saved with another type keep it.

        Raises:
            ResumeError: the optimizer refuses it.
        """
        self._add_groups(skeleton["param_groups"], tensors)
        members = self._members()
        if "whole" in skeleton:
            self._load(join(skeleton["whole"], tensors))
            return
        numbers = {name: number for number, name in enumerate(chain.from_iterable(members))}
        state: dict[int, dict[str, Any]] = {}
        for key, names in skeleton["columns"].items():
            for name in numbers if names is True else names:
                if name in numbers:
                    state.setdefault(numbers[name], {})[key] = tensors[f"{self.name}.state.{name}.{key}"]
        for name, values in skeleton["rest"].items():
            if name in numbers:
                state.setdefault(numbers[name], {}).update(join(values, tensors))
        groups = [
            {**join(group, tensors), "params": _Consecutive(numbers[name] for name in named)}
            for group, named in zip(skeleton["param_groups"], members, strict=True)
        ]
        shared, more = (join(skeleton.get(key, {}), tensors) for key in ("shared", "more"))
        torchs = self._is_torchs
        given = {k: {key: _shield(value) if torchs else value for key, value in v.items()} for k, v in state.items()}
        self._load({"state": given | shared, "param_groups": groups, **more})
        parameters = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        kept = None if torchs else self.optimizer.state_dict()["state"]
        for number, values in state.items():
            here = self._state.get(parameters[number], {}) if kept is None else kept.get(number, {})
            for key, value in values.items():
                if key in here:
                    here[key] = _of_its_type(here[key], value)

    def _add_groups(self, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the groups anew that training had added, with their options.  Raises ResumeError."""
        added, self._added = self._added, []
        for group, then in zip(added, saved[len(saved) - len(added) :], strict=True):
            try:
                self.optimizer.add_param_group({**join(then, tensors), "params": list(group.values())})
            except Exception as error:  # the optimizer's own code may raise anything
                raise ResumeError(
                    f"{self.name} refuses a parameter group that training had added: {type(error).__name__}: {error}"
                ) from error
            why = "training had added it by the save"
            warn("param_group_restored", part=self.name, parameters=len(group), why=why)

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self.optimizer.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ResumeError(f"{self.name} refuses the checkpoint's state: {error}") from error

    def merge(self, skeletons: Sequence[Any]) -> Any:
        """Return one description for a rank of another world, from those of all ranks of then.

        Raises:
            ResumeError: the ranks' groups had other options: nothing says which of them hold here.
        """
        besides = [{key: each.get(key) or {} for key in ("shared", "more", "whole")} for each in skeletons]
        if besides[0]["whole"] or any(each != besides[0] for each in besides):
            raise ResumeError(f"{self.name}: ranks held other states of it: resume on as many ranks as then")
        groups = [[dict(group) for group in skeleton["param_groups"]] for skeleton in skeletons]
        merged = [dict(group) for group in groups[0]]
        for other in groups[1:]:
            options = [[_without(g, "params") for g in some] for some in (merged, other)]
            if options[0] != options[1]:
                raise ResumeError(
                    f"{self.name}: its groups had other options on other ranks: resume on as many ranks as then"
                )
            for group, more in zip(merged, other, strict=True):
                there = set(group["params"])
                group["params"] = [*group["params"], *(name for name in more["params"] if name not in there)]
        columns: dict[str, list[str]] = {}
        rest: dict[str, Any] = {}
        for skeleton, own in zip(skeletons, groups, strict=True):
            everyone = [name for group in own for name in group["params"]]
            for key, names in skeleton["columns"].items():
                known = columns.setdefault(key, [])
                before = set(known)
                known += [name for name in (everyone if names is True else names) if name not in before]
            rest |= skeleton["rest"]
        outside, plain = ([n for s in skeletons for n in s.get(key, ())] for key in ("outside", "plain"))
        found = {"columns": columns, "plain": plain, "rest": rest, "param_groups": merged, "outside": outside}
        return found | {key: besides[0][key] for key in ("shared", "more")} | {"merged": True}

    def _check_groups(self, saved: Sequence[Mapping[str, Any]], members: list[list[str]], *, merged: bool) -> None:
        """Refuse other groups than those of the checkpoint; merged ones may hold parameters of other ranks.

        Raises:
            ResumeError: which.
        """
        if len(saved) != len(members):
            raise ResumeError(f"{self.name} has {len(members)} parameter groups, the checkpoint {len(saved)}")
        for then, now in zip(saved, members, strict=True):
            added, lacking = set(now).difference(then["params"]), set(then["params"]).difference(now)
            if added or (lacking and not merged):
                verb, name, where = ("holds", min(added), "not in") if added else ("lacks", min(lacking), "in")
                raise ResumeError(
                    f"{self.name} {verb} {name}, which is {where} that parameter group of the checkpoint: "
                    "resume with the script and settings that it was made with"
                )


class _Consecutive(list[int]):
    """Numbers one after the other: torch looks up each state in the list of its group, which takes minutes of many."""

    def __contains__(self, number: object) -> bool:
        return bool(self) and isinstance(number, int) and self[0] <= number <= self[-1]


def _without(group: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}


def _target(parameter: torch.Tensor, entry: TensorStorageMetadata, *, plain: bool) -> torch.Tensor:
    """Make an empty tensor as the optimizer would: sharded as its parameter, or a number, which it moves itself."""
    dtype = entry.properties.dtype
    if entry.size in (parameter.size(), local(parameter).size()) and not (plain and type(parameter) is DTensor):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = "cpu" if math.prod(entry.size) == 1 else parameter.device
    return torch.zeros(entry.size, dtype=dtype, device=device)


def _is_sharded_alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether `_target` makes a tensor like this one from its parameter."""
    if not isinstance(value, DTensor):
        return True
    return (
        isinstance(parameter, DTensor)
        and value.size() == parameter.size()
        and value.placements == parameter.placements
        and value.device_mesh == parameter.device_mesh
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Shielded:
    """A value that torch's `load_state_dict` would make anew, wrongly: `str` of a generator, a tuple without names."""

    value: Any


def _shield(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | torch.Tensor():
            return value
        case dict():
            return {key: _shield(item) for key, item in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(_shield, value))
    return _Shielded(value)


def _of_its_type(here: Any, saved: Any) -> Any:
    """Return what the optimizer has taken over, with the types of what was saved."""
    if isinstance(here, _Shielded):
        return here.value
    if isinstance(saved, str):
        return saved
    if isinstance(saved, torch.Tensor) and isinstance(here, torch.Tensor):
        return here if here.dtype == saved.dtype and type(here) is type(saved) else saved.to(here.device)
    if isinstance(saved, (list, tuple)) and isinstance(here, (list, tuple)) and len(saved) == len(here):
        return type(saved)(_of_its_type(one, other) for one, other in zip(here, saved, strict=True))
    if isinstance(saved, dict) and isinstance(here, dict):
        return {key: _of_its_type(here[key], value) if key in here else value for key, value in saved.items()}
    return here
