"""The whole training state as one flat dict of tensors, and back, on any world size.

Collecting never touches what it collects: torch's own `get_state_dict` takes a fake optimizer step before
the first real one, which shifts AdamW; here an optimizer without state is saved as one without state.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from stepkeeper_trainer import random_state
from stepkeeper_trainer.errors import ResumeError, StateError, UsageError
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.tree import from_blob, join, split, to_blob

if TYPE_CHECKING:
    from collections.abc import Mapping

HISTORY_STEPS = 50
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_JSON_KEY, _HISTORY_KEY = "keeper.json", "keeper.loss_history"
_OPTIMIZER_STATE = "optimizer.state."


class Stateful(Protocol):
    """What a scheduler, a sampler or anything else needs to be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take back what `state_dict` returned."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Everything that a resumed run needs to go on as if it had never stopped."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    others: Mapping[str, Stateful]  # scheduler, sampler, whatever the script adds
    counters: Counters
    rank: int

    def collect(self) -> dict[str, torch.Tensor]:
        """Return references to every tensor of the state: copy them before training goes on.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        tensors = self._model_tensors()
        optimizer = split(self._optimizer_tree(), "optimizer", tensors)
        others = {name: split(part.state_dict(), f"others.{name}", tensors) for name, part in self.others.items()}
        counters = self.counters
        tensors[_JSON_KEY] = to_blob(
            {
                "step": counters.step,
                "tokens": counters.tokens,
                "seed": counters.seed,
                "optimizer": optimizer,
                "others": others,
            }
        )
        if self.rank == 0:  # the others do not know the losses
            rows = [(float(step), loss) for step, loss in counters.history]
            rows += [(math.nan, math.nan)] * (HISTORY_STEPS - len(rows))  # of one size, so that the plan stays
            tensors[_HISTORY_KEY] = torch.tensor(rows, dtype=torch.float64)
        for name, value in random_state.collect().items():
            tensors[f"{_rng_key(self.rank)}{name}"] = value
        return tensors

    def template(self, metadata: Metadata) -> dict[str, torch.Tensor]:
        """Return tensors for what a checkpoint holds: the model's own, and new ones for the rest.

        Raises:
            ResumeError: the checkpoint is of another model or optimizer.
        """
        tensors = self._model_tensors()
        saved = metadata.state_dict_metadata
        _check_same(tensors, {key for key in saved if key.startswith("model.")})
        for key, tensor in tensors.items():
            _check_shape(key, tensor, saved[key])
        parameters = self._parameters()
        for key, entry in saved.items():
            other_rank = key.startswith("rng.") and not key.startswith(_rng_key(self.rank))
            if key in tensors or other_rank:
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise ResumeError(f"{key} in the checkpoint is a pickle, which is never loaded: use Stepkeeper's own")
            if key.startswith(_OPTIMIZER_STATE):
                tensors[key] = _optimizer_tensor(key, entry, parameters)
            else:
                tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return tensors

    def apply(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a loaded template; the generators come last, and nothing may draw after them.

        Raises:
            ResumeError: a part does not fit.
        """
        saved = from_blob(tensors[_JSON_KEY], name=_JSON_KEY)
        self._apply_optimizer(join(saved["optimizer"], tensors))
        _check_names("parts", set(self.others), set(saved["others"]))
        for name, part in self.others.items():
            part.load_state_dict(join(saved["others"][name], tensors))
        self.counters.step, self.counters.tokens = saved["step"], saved["tokens"]
        self.counters.history.clear()
        for step, loss in tensors[_HISTORY_KEY].tolist():
            if not math.isnan(step):
                self.counters.history.append((int(step), loss))
        prefix = _rng_key(self.rank)
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if own:
            random_state.restore(own)
        else:
            seed = random_state.derive(saved["seed"], saved["step"], self.rank)
            warn("rng_derived", rank=self.rank, seed=seed, why="the checkpoint was made by fewer ranks")

    def parts(self) -> dict[str, Any]:
        """Say what the state holds, for the manifest."""
        return {
            "model": True,
            "optimizer": bool(self.optimizer.state),
            "rng": True,
            "loss_history": True,
        } | dict.fromkeys(self.others, True)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self.model.state_dict().items():
            split(value, f"model.{plain_name(name)}", tensors)
            if not isinstance(value, torch.Tensor):
                raise StateError(f"{name} of the model is no tensor: leave it out of the model's state_dict()")
        return tensors

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {plain_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _optimizer_tree(self) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            try:
                members = [names[id(parameter)] for parameter in group["params"]]
            except KeyError:
                raise UsageError(
                    "the optimizer holds a parameter that is not the model's: "
                    "give Keeper the model that it was made from"
                ) from None
            for name, parameter in zip(members, group["params"], strict=True):
                if parameter in self.optimizer.state:
                    state[name] = _checked_state(name, parameter, self.optimizer.state[parameter])
            groups.append({**group, "params": members})
        return {"state": state, "param_groups": groups}

    def _apply_optimizer(self, tree: dict[str, Any]) -> None:
        parameters = self._parameters()
        groups = self.optimizer.param_groups
        if len(groups) != len(tree["param_groups"]):
            raise ResumeError(
                f"the optimizer has {len(groups)} parameter groups, the checkpoint {len(tree['param_groups'])}"
            )
        for group, saved in zip(groups, tree["param_groups"], strict=True):
            members = [parameters[name] for name in saved["params"]]
            if [id(p) for p in members] != [id(p) for p in group["params"]]:
                raise ResumeError("the optimizer's groups hold other parameters than the checkpoint's")
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.optimizer.state.clear()
        for name, values in tree["state"].items():
            self.optimizer.state[parameters[name]] = dict(values)


def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, compile and checkpointing wrap around it.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _rng_key(rank: int) -> str:
    return f"rng.rank_{rank:05d}."


def _checked_state(name: str, parameter: torch.Tensor, values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if "." in str(key):
            raise StateError(f"the optimizer's state {key!r} of {name} has a dot in its name")
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1
        if plain and isinstance(parameter, DTensor):
            raise StateError(
                f"the optimizer's state {key!r} of {name} differs between ranks and is no DTensor: "
                "it would be saved for one rank only"
            )
    return values


def _optimizer_tensor(
    key: str, entry: TensorStorageMetadata, parameters: dict[str, torch.nn.Parameter]
) -> torch.Tensor:
    """Make an empty tensor as the optimizer would: sharded as its parameter, or a number of its own."""
    name = key.removeprefix(_OPTIMIZER_STATE).rpartition(".")[0]
    parameter = parameters.get(name)
    if parameter is None:
        raise ResumeError(f"the checkpoint has {key}, and the model has no {name}: is it the same model?")
    if entry.size == parameter.size():
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    # A fused or capturable optimizer keeps its step count beside the parameter; torch's own rule on loading.
    device = "cpu" if math.prod(entry.size) == 1 else parameter.device
    return torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)


def _check_same(model: Mapping[str, Any], saved: set[str]) -> None:
    _check_names("model tensors", set(model), saved)


def _check_names(what: str, here: set[str], saved: set[str]) -> None:
    if here == saved:
        return
    missing, extra = sorted(here - saved)[:3], sorted(saved - here)[:3]
    raise ResumeError(
        f"the checkpoint's {what} are not this script's: "
        f"it lacks {missing or 'none'} and has {extra or 'none'} besides; "
        "resume with the script and settings it was made with"
    )


def _check_shape(key: str, tensor: torch.Tensor, entry: Any) -> None:
    if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.size():
        size = list(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
        raise ResumeError(
            f"{key} has shape {list(tensor.size())}, in the checkpoint {size}: resume with the model's size of then"
        )
