"""The state of one or several optimizers, by the names of the parameters.

Tensors of the state are told of by columns ("every parameter has an `exp_avg`") and not one by one: with
many parameters the description would else be most of what a save costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.errors import ResumeError, StateError, UsageError
from stepkeeper_trainer.tree import join, split

if TYPE_CHECKING:
    from collections.abc import Mapping

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ONE = "optimizer.state."
_SEVERAL = "optimizers."


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What an optimizer's state was like at the last save: mostly it is again, and making its names is skipped."""

    parameters: list[list[torch.Tensor]]  # of each group
    states: list[torch.Tensor]  # the parameters with a state, in its order
    keys: list[str]  # of their states, one after the other
    types: list[type]
    members: list[list[str]]
    names: list[list[str]]  # as they are saved, of each group
    columns: dict[str, Any]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, prefix: str, members: list[list[str]], columns: dict[str, Any]) -> _Recipe:
        """Take note of a state that consists of tensors only."""
        states, names = [], []
        for group, named in zip(optimizer.param_groups, members, strict=True):
            own = [(name, p) for name, p in zip(named, group["params"], strict=True) if p in optimizer.state]
            states += [parameter for _, parameter in own]
            names.append([f"{prefix}{name}.{key}" for name, p in own for key in optimizer.state[p]])
        dicts = [optimizer.state[parameter] for parameter in states]
        return _Recipe(
            parameters=[list(group["params"]) for group in optimizer.param_groups],
            states=states,
            keys=list(chain.from_iterable(dicts)),
            types=[type(value) for values in dicts for value in values.values()],
            members=members,
            names=names,
            columns=columns,
        )

    def find(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
        """Return the tensors of the state, in the order of the names; None where it is not as it was."""
        groups = [group["params"] for group in optimizer.param_groups]
        if len(groups) != len(self.parameters) or not all(map(_same, groups, self.parameters)):
            return None
        if not _same(list(optimizer.state), self.states):
            return None
        dicts = list(optimizer.state.values())
        if list(chain.from_iterable(dicts)) != self.keys:
            return None
        values = list(chain.from_iterable(map(dict.values, dicts)))
        return values if list(map(type, values)) == self.types else None


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class OptimizerStates:
    """One optimizer, or several by name; of the parameters of one model."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
    ) -> None:
        """Prepare.

        Raises:
            UsageError: a name has a dot, or there is no optimizer.
        """
        self._model = model
        self._single = isinstance(optimizer, torch.optim.Optimizer)
        self.all: dict[str, torch.optim.Optimizer] = (
            {"": optimizer} if isinstance(optimizer, torch.optim.Optimizer) else dict(optimizer)
        )
        bad = [name for name in self.all if "." in name or (not name and not self._single)]
        if bad or not self.all:
            raise UsageError(f"optimizers need names without dots, not {bad}")
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._recipes: dict[str, _Recipe] = {}

    @property
    def filled(self) -> bool:
        """Whether any has taken a step."""
        return any(bool(optimizer.state) for optimizer in self.all.values())

    def parameters(self, *, refresh: bool) -> Mapping[str, torch.nn.Parameter]:
        """Return the model's parameters by name; with `refresh` as they are now."""
        if refresh or not self._parameters:
            self._parameters = {plain_name(name): value for name, value in self._model.named_parameters()}
            self._names = {id(value): name for name, value in self._parameters.items()}
        return self._parameters

    def collect(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Put the tensors of the state into `tensors`, and return the rest.

        Raises:
            StateError: something cannot be saved.
            UsageError: an optimizer holds a parameter that is not the model's.
        """
        trees = {name: self._collect(name, optimizer, tensors) for name, optimizer in self.all.items()}
        return trees[""] if self._single else {"several": trees}

    def apply(self, saved: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `collect` returned.

        Raises:
            ResumeError: it does not fit.
        """
        trees = saved.get("several", {"": saved})
        if trees.keys() != self.all.keys():
            then, now = sorted(map(_called, trees)), sorted(map(_called, self.all))
            raise ResumeError(f"the checkpoint has the optimizers {then}, this script {now}: give the same names")
        for name, tree in trees.items():
            self._apply(self.all[name], self._prefix(name), tree, tensors)

    def parameter_of(self, key: str) -> str | None:
        """Return the parameter whose state a key of the checkpoint is; None for any other key."""
        if key.startswith(_ONE):
            rest = key.removeprefix(_ONE)
        elif key.startswith(_SEVERAL) and ".state." in key:
            rest = key.removeprefix(_SEVERAL).partition(".state.")[2]
        else:
            return None
        parameters = self.parameters(refresh=False)
        first = name = rest.rpartition(".")[0]
        while name and name not in parameters:  # a tensor in a list of the state has a longer name
            name = name.rpartition(".")[0]
        return name or first

    def _prefix(self, name: str) -> str:
        return _ONE if self._single else f"{_SEVERAL}{name}.state."

    def _collect(self, called: str, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> Any:
        prefix = self._prefix(called)
        group_prefix = prefix.removesuffix("state.") + "param_groups"
        recipe = self._recipes.get(called)
        values = recipe.find(optimizer) if recipe is not None else None
        if recipe is not None and values is not None:
            return self._collect_as_before(recipe, optimizer, values, group_prefix, tensors)
        columns: dict[str, list[str]] = {}
        rest: dict[str, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for group in optimizer.param_groups:
            members = [self._name(parameter) for parameter in group["params"]]
            count += len(members)
            for name, parameter in zip(members, group["params"], strict=True):
                values = optimizer.state.get(parameter)
                if values is None:
                    continue
                own = f"{prefix}{name}."
                sharded = type(parameter) is DTensor
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        if sharded and type(value) is not DTensor and value.numel() > 1:
                            raise StateError(
                                f"the optimizer's state {key!r} of {name} differs between ranks and is no DTensor: "
                                "it would be saved for one rank only"
                            )
                        columns.setdefault(key, []).append(name)
                        tensors[f"{own}{key}"] = value
                    else:
                        rest.setdefault(name, {})[key] = split(value, f"{own}{key}", tensors)
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**split(options, f"{group_prefix}.{len(groups)}", tensors), "params": members})
        dotted = [key for key in columns if "." in key]
        if dotted:
            raise StateError(f"the optimizer's state {dotted[0]!r} has a dot in its name")
        short = {key: True if len(names) == count else names for key, names in columns.items()}
        self._recipes.pop(called, None)
        if not rest:
            members_of = [group["params"] for group in groups]
            self._recipes[called] = _Recipe.of(optimizer, prefix, members_of, short)
        return {"columns": short, "rest": rest, "param_groups": groups}

    def _collect_as_before(
        self,
        recipe: _Recipe,
        optimizer: torch.optim.Optimizer,
        values: list[torch.Tensor],
        group_prefix: str,
        tensors: dict[str, torch.Tensor],
    ) -> Any:
        """Do what `_collect` does, where names and order are those of the last time."""
        groups: list[dict[str, Any]] = []
        at = 0
        for group, members, names in zip(optimizer.param_groups, recipe.members, recipe.names, strict=True):
            tensors.update(zip(names, values[at : at + len(names)], strict=True))
            at += len(names)
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**split(options, f"{group_prefix}.{len(groups)}", tensors), "params": members})
        return {"columns": recipe.columns, "rest": {}, "param_groups": groups}

    def _name(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None or self._parameters[name] is not parameter:
            self.parameters(refresh=True)
            name = self._names.get(id(parameter))
        if name is None:
            raise UsageError(
                "the optimizer holds a parameter that is not the model's: give Keeper the model that it was made from"
            )
        return name

    def _apply(
        self, optimizer: torch.optim.Optimizer, prefix: str, tree: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> None:
        parameters = self.parameters(refresh=True)
        groups = optimizer.param_groups
        if len(groups) != len(tree["param_groups"]):
            raise ResumeError(
                f"the optimizer has {len(groups)} parameter groups, the checkpoint {len(tree['param_groups'])}"
            )
        order: list[str] = []
        for group, saved in zip(groups, join(tree["param_groups"], tensors), strict=True):
            members = [parameters.get(name) for name in saved["params"]]
            if [id(p) for p in members] != [id(p) for p in group["params"]]:
                raise ResumeError("the optimizer's groups hold other parameters than the checkpoint's")
            group.update({key: value for key, value in saved.items() if key != "params"})
            order += saved["params"]
        state: dict[str, dict[str, Any]] = {}
        if "columns" in tree:
            for key, names in tree["columns"].items():
                for name in order if names is True else names:
                    state.setdefault(name, {})[key] = tensors[f"{prefix}{name}.{key}"]
            for name, values in tree["rest"].items():
                state.setdefault(name, {}).update(join(values, tensors))
        else:  # as the first version wrote it
            state = join(tree["state"], tensors)
        optimizer.state.clear()
        for name, values in state.items():
            optimizer.state[parameters[name]] = dict(values)


@lru_cache(maxsize=1 << 20)
def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, compile and checkpointing wrap around it.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _called(name: str) -> str:
    return name or "(the only one)"
