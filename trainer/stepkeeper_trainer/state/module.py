"""A part of the state that is a module: by its own `state_dict` and `load_state_dict`, with hooks and extra state.

Names of parameters and buffers are those without what wraps a module.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from stepkeeper_trainer.errors import ResumeError, StateError
from stepkeeper_trainer.state.tree import is_plain, join, local, split, tensor_names

if TYPE_CHECKING:
    from collections.abc import Mapping


_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@lru_cache(maxsize=1 << 20)
def plain_name(name: str) -> str:
    """Return a parameter's name without what DDP, compile and activation checkpointing wrap around it.

    >>> plain_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@lru_cache(maxsize=16)
def plain_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return plain names; a name keeps its wrappers' words where another one would be called the same without.

    >>> plain_names(("module.head", "module.body")), plain_names(("module.head", "head"))
    (('head', 'body'), ('module.head', 'head'))
    """
    plain = [plain_name(name) for name in names]
    count = Counter(plain)
    return tuple(short if count[short] == 1 else name for name, short in zip(names, plain, strict=True))


@lru_cache(maxsize=16)
def keys_of(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys under which values of these names are saved."""
    return tuple(f"{prefix}{name}" for name in plain_names(names))


NAMED_MAX = 3  # names in one error message


class _Extra(NamedTuple):
    """What a module's state holds besides tensors, as it was saved."""

    skeleton: Any


class ModulePart:
    """Its tensors lie under `<name>.<fully qualified name>`."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        """Take a module; FSDP2, DDP, tensor parallel and compiled ones give their state as they are.

        Raises:
            StateError: it is sharded by FSDP1.  Its state is made by collectives of all ranks, each time it is asked
                for: a thread that saves between two steps cannot do that, nor can one that finds a rank missing.
        """
        if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
            raise StateError(
                f"{name} is sharded by FullyShardedDataParallel (FSDP1), whose state only collectives of all ranks "
                "give: shard it with torch.distributed.fsdp.fully_shard (FSDP2), or save by "
                "torch.distributed.checkpoint with StepkeeperWriter"
            )
        self.name, self.module = name, module
        self._prefix = f"{name}."
        self._loading: dict[str, Any] = {}  # what `load_state_dict` gets, by the module's own names

    @property
    def replicated(self) -> frozenset[str]:
        """Names whose values DistributedDataParallel keeps equal on all ranks."""
        return frozenset(
            f"{self._prefix}{plain_name(f'{place}.{name}' if place else name)}"
            for place, module in self.module.named_modules()
            if isinstance(module, DistributedDataParallel)
            for name, _ in module.named_parameters()
            if plain_name(name) not in {plain_name(each) for each in module.parameters_to_ignore}
        )

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return its parameters by plain name, as they are now."""
        named = dict(self.module.named_parameters())
        return dict(zip(plain_names(tuple(named)), named.values(), strict=True))

    def collect(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Put its tensors into `tensors`, and return the rest as JSON.

        Raises:
            StateError: an extra state is neither a tensor nor JSON.
        """
        state = self.module.state_dict(keep_vars=True)
        names = tuple(state)
        keys = keys_of(self._prefix, names)
        if all(map(is_plain, set(map(type, state.values())))):
            tensors.update(zip(keys, state.values(), strict=True))
            return {"names": _digest(keys), "extra": {}}
        extra: dict[str, Any] = {}
        plain: list[str] = []
        for key, value in zip(keys, state.values(), strict=True):
            if is_plain(type(value)):
                tensors[key] = value
                plain.append(key)
            else:
                extra[key] = split(value, key, tensors)
        return {"names": _digest(tuple(plain)), "extra": extra}

    def targets(self, skeleton: Any, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
        """Return tensors to load into: the module's own, and new ones for what its `state_dict` has converted.

        Raises:
            ResumeError: the checkpoint is of another module.
        """
        state = self.module.state_dict(keep_vars=True)
        keys = keys_of(self._prefix, tuple(state))
        own = {id(each) for each in chain(self.module.parameters(), self.module.buffers())}
        extra = (skeleton or {}).get("extra", {})
        is_extra = {key for key in keys if key in extra}
        here = {key for key, value in zip(keys, state.values(), strict=True) if is_plain(type(value))}
        self._check_names(skeleton, here - is_extra, saved)
        found: dict[str, torch.Tensor] = {}
        self._loading = {}
        for name, key, value in zip(state, keys, state.values(), strict=True):
            if key in is_extra:
                self._loading[name] = _Extra(extra[key])
                continue
            _check_shape(key, value, saved[key])
            target = value if id(value) in own else torch.empty_like(value, dtype=saved[key].properties.dtype)
            self._loading[name] = target
            found[key] = target.detach()
        for name in chain.from_iterable(map(tensor_names, extra.values())):
            found[name] = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        return found

    def apply(self, _skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what was saved, through the module's own `load_state_dict`: it copies nothing that is in place.

        Raises:
            ResumeError: the module refuses it.
        """
        state = {
            name: join(value.skeleton, tensors) if isinstance(value, _Extra) else value
            for name, value in self._loading.items()
        }
        self._loading = {}
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ResumeError(f"{self.name} refuses the checkpoint's state: {error}") from error

    def _check_names(self, skeleton: Any, here: set[str], saved: Mapping[str, TensorStorageMetadata]) -> None:
        missing = sorted(key for key in here if not isinstance(saved.get(key), TensorStorageMetadata))
        of_this_rank, called = (skeleton or {}).get("names"), (skeleton or {}).get("called", self.name)
        then = tuple(f"{called}.{key.removeprefix(self._prefix)}" for key in here)
        if not missing and (of_this_rank is None or of_this_rank == _digest(then)):
            return
        besides = sorted(key for key in saved if key.startswith(self._prefix) and key not in here)
        raise ResumeError(
            f"the checkpoint's tensors of {self.name} are not this script's: it lacks "
            f"{missing[:NAMED_MAX] or 'none'} and has {besides[:NAMED_MAX] or 'none'} besides; "
            "resume with the script and settings that it was made with"
        )


@lru_cache(maxsize=16)
def _digest(keys: tuple[str, ...]) -> str:
    """Return what stands for a set of names: a list of them in each save would be megabytes."""
    return hashlib.blake2b("\n".join(sorted(keys)).encode(), digest_size=16).hexdigest()


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Return further names of parameters that have several, each with the first name."""
    first: dict[torch.nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, plain_name(name))
        if known != plain_name(name):
            tied[plain_name(name)] = known
    return tied


def _check_shape(key: str, tensor: torch.Tensor, entry: TensorStorageMetadata) -> None:
    if entry.size not in (tensor.size(), local(tensor).size()):  # a private shard is saved by itself
        raise ResumeError(
            f"{key} has shape {list(tensor.size())}, in the checkpoint {list(entry.size)}: "
            "resume with the model's size of then"
        )
