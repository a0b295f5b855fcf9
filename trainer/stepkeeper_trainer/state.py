"""The whole training state as one flat dict of tensors, and back, on any world size.

Collecting never touches what it collects: torch's own `get_state_dict` takes a fake optimizer step before
the first real one, which shifts AdamW; here an optimizer without state is saved as one without state.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from stepkeeper_trainer import random_state
from stepkeeper_trainer.errors import ResumeError, StateError
from stepkeeper_trainer.formats.manifest import LEFT_OUT
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.optimizers import OptimizerStates, plain_name
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.staging import local
from stepkeeper_trainer.tree import from_blob, join, split, to_blob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["HISTORY_STEPS", "Counters", "Stateful", "TrainingState", "of_one_rank", "plain_name", "tied_names"]

HISTORY_STEPS = 50
_JSON_KEY, _HISTORY_KEY = "keeper.json", "keeper.loss_history"


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
    optimizers: OptimizerStates
    others: Mapping[str, Stateful]  # scheduler, sampler, whatever the script adds
    counters: Counters
    rank: int
    world_size: int = 1
    save_replicas: bool = False  # copies of one tensor on several ranks are all saved

    def collect(self) -> dict[str, torch.Tensor]:
        """Return references to every tensor of the state: copy them before training goes on.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        tensors = self._model_tensors(keep_vars=True)
        optimizer = self.optimizers.collect(tensors)
        if self.save_replicas and self.rank:
            copies = {f"{_replica_key(self.rank)}{name}": value for name, value in tensors.items() if _copied(value)}
            tensors |= {name: local(value) for name, value in copies.items()}
        shared, own = self._parts_by_kind()
        others = {name: split(part.state_dict(), f"others.{name}", tensors) for name, part in shared.items()}
        counters = self.counters
        tensors[_JSON_KEY] = to_blob(
            {
                "step": counters.step,
                "tokens": counters.tokens,
                "seed": counters.seed,
                "world_size": self.world_size,
                "optimizer": optimizer,
                "others": others,
                "per_rank": sorted(own),
            }
        )
        if own:
            prefix = _rank_key(self.rank)
            trees = {name: split(part.state_dict(), f"{prefix}{name}", tensors) for name, part in own.items()}
            tensors[f"{prefix}json"] = to_blob(trees)
        if self.rank == 0:  # the others do not know the losses
            rows = [(float(step), loss) for step, loss in counters.history]
            rows += [(math.nan, math.nan)] * (HISTORY_STEPS - len(rows))  # of one size, so that the plan stays
            tensors[_HISTORY_KEY] = torch.tensor(rows, dtype=torch.float64)
        for name, value in random_state.collect().items():
            tensors[f"{_rng_key(self.rank)}{name}"] = value
        return tensors

    def early(self, names: Iterable[str]) -> frozenset[str]:
        """Return those that may change before the optimizer's next step: buffers, and whatever the script adds."""
        parameters = self.optimizers.parameters(refresh=False)
        return frozenset(
            name
            for name in names
            if not name.startswith(("optimizer.", "optimizers.")) and name.removeprefix("model.") not in parameters
        )

    def template(self, metadata: Metadata) -> dict[str, torch.Tensor]:
        """Return tensors for what a checkpoint holds: the model's own, and new ones for the rest.

        Raises:
            ResumeError: the checkpoint is of another model or optimizer.
        """
        tensors = self._model_tensors(keep_vars=False)
        saved = metadata.state_dict_metadata
        _check_same(tensors, {key for key in saved if key.startswith("model.")})
        for key, tensor in tensors.items():
            _check_shape(key, tensor, saved[key])
        parameters = self.optimizers.parameters(refresh=True)
        others: dict[str, torch.Tensor] = {}
        for name, part in self._parts_by_kind()[0].items():
            split(part.state_dict(), f"others.{name}", others)
        for key, entry in saved.items():
            if key in tensors or _of_another_rank(key, self.rank) or key.startswith("replica."):
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise ResumeError(f"{key} in the checkpoint is a pickle, which is never loaded: use Stepkeeper's own")
            like = others.get(key)
            if (name_ := self.optimizers.parameter_of(key)) is not None:
                tensors[key] = _optimizer_tensor(key, name_, entry, parameters)
            elif like is not None and like.size() == entry.size:
                tensors[key] = torch.zeros_like(like, dtype=entry.properties.dtype, requires_grad=False)
            else:
                tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return tensors

    def apply(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a loaded template; the generators come last, and nothing may draw after them.

        Raises:
            ResumeError: a part does not fit.
        """
        saved = from_blob(tensors[_JSON_KEY], name=_JSON_KEY)
        self.optimizers.apply(saved["optimizer"], tensors)
        shared, own = self._parts_by_kind()
        _check_names("parts", set(self.others), {*saved["others"], *saved.get("per_rank", [])})
        for name, part in shared.items():
            part.load_state_dict(join(saved["others"][name], tensors))
        self._apply_own(own, saved, tensors)
        self.counters.step, self.counters.tokens = saved["step"], saved["tokens"]
        self.counters.history.clear()
        for step, loss in tensors[_HISTORY_KEY].tolist():
            if not math.isnan(step):
                self.counters.history.append((int(step), loss))
        prefix = _rng_key(self.rank)
        rng = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if rng:
            random_state.restore(rng)
        else:
            seed = random_state.derive(saved["seed"], saved["step"], self.rank)
            warn("rng_derived", rank=self.rank, seed=seed, why="the checkpoint was made by fewer ranks")

    def parts(self) -> dict[str, Any]:
        """Say what the state holds, for the manifest."""
        return {
            "model": True,
            "optimizer": self.optimizers.filled,
            "rng": True,
            "loss_history": True,
            **({"tied": tied} if (tied := tied_names(self.model)) else {}),
            **({LEFT_OUT: left_out} if (left_out := self._left_out()) else {}),
        } | dict.fromkeys(self.others, True)

    def _left_out(self) -> list[dict[str, int]]:
        """Return the data that this state has never seen: which samples, from where on, and before which step."""
        sampler = self.others.get("sampler")
        skipped = sampler.skipped if isinstance(sampler, GlobalSampler) else []
        return [
            {"step": step, "epoch": epoch, "consumed": consumed, "samples": samples}
            for step, epoch, consumed, samples in skipped
        ]

    def _parts_by_kind(self) -> tuple[dict[str, Stateful], dict[str, Stateful]]:
        """Return the parts that are the same on all ranks, and those of which each rank has its own."""
        own = {name: part for name, part in self.others.items() if of_one_rank(part)}
        return {name: part for name, part in self.others.items() if name not in own}, own

    def _apply_own(self, own: dict[str, Stateful], saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if not own:
            return
        then = saved.get("world_size")
        if then != self.world_size:
            raise ResumeError(
                f"{', '.join(sorted(own))}: each rank has its own position in the data there, so {self.world_size} "
                f"ranks cannot go on where {then} were: resume on {then}, or use GlobalSampler, "
                "whose position is that of the whole job"
            )
        prefix = _rank_key(self.rank)
        trees = from_blob(tensors[f"{prefix}json"], name=f"{prefix}json")
        for name, part in own.items():
            part.load_state_dict(join(trees[name], tensors))

    def _model_tensors(self, *, keep_vars: bool) -> dict[str, torch.Tensor]:
        state = self.model.state_dict(keep_vars=keep_vars)
        for kind in set(map(type, state.values())):
            if not issubclass(kind, torch.Tensor):
                name = next(name for name, value in state.items() if type(value) is kind)
                raise StateError(f"{name} of the model is no tensor: leave it out of the model's state_dict()")
        return dict(zip(_model_keys(tuple(state)), state.values(), strict=True))


@lru_cache(maxsize=4)
def _model_keys(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.{plain_name(name)}" for name in names)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return further names of parameters that have several, each with the first name."""
    first: dict[torch.nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, plain_name(name))
        if known != plain_name(name):
            tied[plain_name(name)] = known
    return tied


def of_one_rank(part: Stateful) -> bool:
    """Whether each rank has its own state of this part: torchdata's loader, or one that says `per_rank = True`."""
    return bool(getattr(part, "per_rank", False)) or type(part).__module__.startswith("torchdata.stateful_dataloader")


def _rng_key(rank: int) -> str:
    return f"rng.rank_{rank:05d}."


def _rank_key(rank: int) -> str:
    return f"ranks.rank_{rank:05d}."


def _replica_key(rank: int) -> str:
    return f"replica.rank_{rank:05d}."


def _of_another_rank(key: str, rank: int) -> bool:
    return key.startswith(("rng.", "ranks.")) and not key.startswith((_rng_key(rank), _rank_key(rank)))


def _copied(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold the same."""
    return not isinstance(tensor, DTensor) or any(placement.is_replicate() for placement in tensor.placements)


def _optimizer_tensor(
    key: str, name: str, entry: TensorStorageMetadata, parameters: Mapping[str, torch.nn.Parameter]
) -> torch.Tensor:
    """Make an empty tensor as the optimizer would: sharded as its parameter, or a number of its own."""
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
