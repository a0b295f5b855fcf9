"""A part of the state that is a module: by its own `state_dict` and `load_state_dict`, with hooks and extra state.

Names of parameters and buffers are those without what wraps a module.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from stepkeeper_trainer.errors import ResumeError, StateError
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.state.tree import (
    check_dense,
    check_types,
    is_plain,
    join,
    local,
    name_of,
    split,
    target_of,
    tensor_places,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` returns
_shape = attrgetter("shape")


class _Extra(NamedTuple):
    """What a module's state holds besides tensors, as it was saved."""

    skeleton: Any


class _Buffer(NamedTuple):
    """A buffer, and where it is."""

    module: torch.nn.Module
    attribute: str
    name: str  # in the state of the whole module
    buffer: torch.Tensor | None


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
        self._here: Mapping[str, Any] = {}  # its state as it is before a load
        self._flags: dict[str, bool] = {}  # which parameters were trained at the save; nothing where that is unknown
        self._then: dict[str, int] | None = None  # versions of its classes at the save
        self._loading: dict[str, Any] = {}  # what `load_state_dict` gets, by the module's own names
        self._replaced: dict[str, tuple[_Buffer, torch.Tensor]] = {}  # buffers, and what comes in their place
        self._names: set[str] | None = None  # of tensors that the script makes by itself, and those known since
        self._shapes: tuple[tuple[str, ...], list[torch.Size]] = ((), [])  # as they were last, with their names
        self._versions: tuple[tuple[str, ...], dict[str, int]] = ((), {})  # with the names of its tensors then
        self._trained: tuple[list[bool | None], str] = ([], "all")  # by value of the state, and how it is written

    @property
    def replicated(self) -> dict[str, int]:
        """Names whose values DistributedDataParallel keeps equal on the ranks of its group, and how many these are."""
        return {
            f"{self._prefix}{plain_name(f'{place}.{name}' if place else name)}": module.process_group.size()
            for place, module in self.module.named_modules()
            if isinstance(module, DistributedDataParallel)
            for name, _ in module.named_parameters()
            if plain_name(name) not in {plain_name(each) for each in module.parameters_to_ignore}
        }

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
        besides = {"trained": self._look_at_trained(keys, state), "versions": self._look_at_versions(names)}
        if all(map(is_plain, set(map(type, state.values())))) and not _has_extra(names):
            tensors.update(zip(keys, state.values(), strict=True))
            self._note_names(keys, tensors)
            return {"names": _digest(keys), "extra": {}, **besides}
        extra: dict[str, Any] = {}
        plain: list[str] = []
        for key, value in zip(keys, state.values(), strict=True):
            if is_plain(type(value)) and not key.endswith(EXTRA_STATE):
                tensors[key] = value
                plain.append(key)
            else:
                extra[key] = split(value, key, tensors)
        self._note_names(tuple(plain), tensors)
        return {"names": _digest(tuple(plain)), "extra": extra, **besides}

    def _look_at_trained(self, keys: tuple[str, ...], state: Mapping[str, Any]) -> str:
        """Return which parameters are trained: a script may freeze or unfreeze some in the course of training."""
        flags = [getattr(value, "requires_grad", None) for value in state.values()]
        if flags != self._trained[0]:
            self._trained = flags, _write_trained(_parameters_of(keys, state))
        return self._trained[1]

    def _look_at_versions(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the versions that classes of its modules declare: a class converts states of older ones at a load."""
        if self._versions[0] != names:
            kinds = set(map(type, self.module.modules()))
            found = {name_of(owner): vars(owner)["_version"] for kind in kinds if (owner := _versioned(kind))}
            self._versions = names, dict(sorted(found.items()))
        return self._versions[1]

    def _note_names(self, keys: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        """Warn of tensors that training has added: a new process of the script does not have them.

        Raises:
            StateError: at the first time, of what cannot be loaded.
        """
        if self._names is None:
            for key in keys:
                _check_loadable(key, tensors[key])
            self._names = {*keys, *(key for key, each in self._buffers().items() if each.buffer is None)}
        elif len(keys) > len(self._names) or not self._names.issuperset(keys):
            added = sorted(set(keys) - self._names)
            self._names.update(added)
            warn(
                "module_has_new_tensors",
                part=self.name,
                names=", ".join(added[:NAMED_MAX]),
                why="a resume will refuse this state: make them, or register_buffer(name, None), before resume()",
            )
        shapes = list(map(_shape, map(tensors.__getitem__, keys)))
        if self._shapes[0] == keys and self._shapes[1] != shapes:
            buffers = self._buffers()
            pairs = zip(keys, self._shapes[1], shapes, strict=True)
            if changed := [key for key, then, now in pairs if then != now and key not in buffers]:
                warn(
                    "module_has_new_shapes",
                    part=self.name,
                    names=", ".join(changed[:NAMED_MAX]),
                    why="a resume will refuse this state: make the module with its new shapes before resume()",
                )
        self._shapes = keys, shapes

    def _buffers(self) -> dict[str, _Buffer]:
        """Return all buffers by key, with those that are None until training fills them."""
        found = [
            _Buffer(module, name, f"{place}.{name}" if place else name, buffer)
            for place, module in self.module.named_modules()
            for name, buffer in vars(module)["_buffers"].items()  # `named_buffers` leaves out those that are None
        ]
        return {f"{self._prefix}{plain_name(each.name)}": each for each in found}

    def targets(self, skeleton: Any, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
        """Return tensors to load into: the module's own, and new ones for what its `state_dict` has converted.

        Raises:
            ResumeError: the checkpoint is of another module.
        """
        extra = (skeleton or {}).get("extra", {})
        check_types(extra)
        self._here = state = self.module.state_dict(keep_vars=True)
        keys = keys_of(self._prefix, tuple(state))
        trained, versions = ((skeleton or {}).get(key) for key in ("trained", "versions"))
        self._flags = _read_trained(trained, _parameters_of(keys, state)) if trained is not None else {}
        self._then = {name: int(version) for name, version in versions.items()} if versions is not None else None
        here = {key: value for key, value in zip(keys, state.values(), strict=True) if key not in extra}
        self._replaced = self._find_replaced(skeleton, here, saved)
        self._check_names(skeleton, {*here, *self._replaced}, saved)
        own = {id(each) for each in chain(self.module.parameters(), self.module.buffers())}
        found = {key: tensor for key, (_, tensor) in self._replaced.items()}
        self._loading = {buffer.name: tensor for buffer, tensor in self._replaced.values()}
        looked: dict[str, torch.Tensor] = {}
        for name, key, value in zip(state, keys, state.values(), strict=True):
            if key in extra:
                split(value, key, looked)
                self._loading[name] = _Extra(extra[key])
            elif key not in self._replaced:
                target = self._target(key, value, saved[key], in_place=id(value) in own)
                self._loading[name], found[key] = target, target.detach()
        for key in extra.keys() - set(keys):  # the module's state has it only once training has begun
            self._loading[key.removeprefix(self._prefix)] = _Extra(extra[key])
        for key, place in tensor_places(extra).items():
            found[key] = target_of(key, place, saved[key], like=looked.get(key))
        return found

    def _target(self, key: str, value: Any, entry: TensorStorageMetadata, *, in_place: bool) -> torch.Tensor:
        dtype = entry.properties.dtype
        if not isinstance(value, torch.Tensor):
            return torch.empty(entry.size, dtype=dtype)
        if entry.size not in (value.size(), local(value).size()):  # a private shard is saved by itself
            if self._shapes_itself(key):
                return torch.empty(entry.size, dtype=dtype, device=value.device)
            raise ResumeError(
                f"{key} has shape {list(value.size())}, in the checkpoint {list(entry.size)}: "
                "resume with the model's size of then"
            )
        if in_place and value.dtype != dtype:
            raise ResumeError(f"{key} is {value.dtype}, in the checkpoint {dtype}: resume with the types of then")
        in_place = in_place and not value.is_conj() and not value.is_neg()  # such a view's memory is not its content
        return value if in_place else torch.empty_like(value, dtype=dtype)

    def _shapes_itself(self, key: str) -> bool:
        """Whether the module that holds a tensor has a loading of its own, as observers of quantization do."""
        owner = key.removeprefix(self._prefix).rpartition(".")[0]
        return any(
            plain_name(place) == owner
            and type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # noqa: SLF001
            for place, module in self.module.named_modules()
        )

    def _find_replaced(
        self, skeleton: Any, here: Mapping[str, Any], saved: Mapping[str, TensorStorageMetadata]
    ) -> dict[str, tuple[_Buffer, torch.Tensor]]:
        """Return new tensors for buffers that training had made anew by then.

        These are None or empty in a new process, or of another type.
        """
        buffers = {k: each for k, each in self._buffers().items() if isinstance(saved.get(k), TensorStorageMetadata)}
        missing = {key for key, each in buffers.items() if each.buffer is None}
        if missing and (skeleton or {}).get("names") == _digest(tuple(here)):
            missing = set()  # another rank has made them
        device = next((each.device for each in chain(self.module.parameters(), self.module.buffers())), None)
        found: dict[str, tuple[_Buffer, torch.Tensor]] = {}
        for key, each in buffers.items():
            size, dtype, buffer = saved[key].size, saved[key].properties.dtype, each.buffer
            if buffer is None:
                made_anew, at = key in missing, device
            else:
                filled = not buffer.numel() and buffer.size() != size and not self._shapes_itself(key)
                made_anew = key in here and (filled or (buffer.size() == size and buffer.dtype != dtype))
                at = buffer.device
            if made_anew:
                found[key] = each, torch.empty(size, dtype=dtype, device=at)
        return found

    def apply(self, _skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what was saved, through the module's own `load_state_dict`: it copies nothing that is in place.

        Raises:
            ResumeError: the module refuses it.
        """
        state = OrderedDict(
            (name, join(value.skeleton, tensors) if isinstance(value, _Extra) else value)
            for name, value in self._loading.items()
        )
        here, self._here, self._loading = self._here, {}, {}
        vars(state)["_metadata"] = self._versions_then(here)  # where torch keeps it
        for buffer, tensor in self._replaced.values():
            setattr(buffer.module, buffer.attribute, tensor)
        self._replaced = {}
        self._take_trained(here)
        try:
            self._load(state, here)
        except RuntimeError as error:
            raise ResumeError(f"{self.name} refuses the checkpoint's state: {error}") from error

    def _load(self, state: dict[str, Any], here: Mapping[str, Any]) -> None:
        """Have the module load it; what a hook leaves out of each of its states, as frozen weights, may be missing."""
        known = set(map(plain_name, here))
        parameters = {plain_name(name) for name, _ in self.module.named_parameters(remove_duplicate=False)}
        own_way = type(self.module).load_state_dict is not torch.nn.Module.load_state_dict
        if parameters <= known or own_way:
            self.module.load_state_dict(state)
            return
        missing, unexpected = self.module.load_state_dict(state, strict=False)
        if wrong := sorted([*unexpected, *(name for name in missing if plain_name(name) in known)]):
            raise ResumeError(f"{self.name} refuses the checkpoint's state: missing or too many: {wrong[:NAMED_MAX]}")

    def _versions_then(self, state: Any) -> dict[str, Any]:
        """Return torch's notes on the modules with the versions that their classes had at the save.

        Step directories of before these were saved count as made by the classes at hand.
        """
        here: dict[str, Any] = {place: dict(noted) for place, noted in getattr(state, "_metadata", {}).items()}
        if self._then is not None:
            for place, module in self.module.named_modules(remove_duplicate=False):
                if place in here and (owner := _versioned(type(module))):
                    here[place]["version"] = self._then.get(name_of(owner), 1)
        return here

    def _take_trained(self, state: Mapping[str, Any]) -> None:
        """Freeze and unfreeze parameters as they were.

        Raises:
            ResumeError: DistributedDataParallel has taken note of the parameters as they are here.
        """
        parameters = _parameters_of(keys_of(self._prefix, tuple(state)), state)
        flags = self._flags
        changed = sorted(key for key, own in parameters.items() if key in flags and own.requires_grad != flags[key])
        if not changed:
            return
        if wrapped := [key for key in changed if flags[key] and key in self.replicated]:
            raise ResumeError(
                f"{wrapped[0]} was trained when it was saved, and is frozen here, so DistributedDataParallel leaves it "
                "out: call requires_grad_() before DistributedDataParallel wraps the module"
            )
        for key in changed:
            parameters[key].requires_grad_(flags[key])
        more = f" and {len(changed) - NAMED_MAX} more" if len(changed) > NAMED_MAX else ""
        warn(
            "requires_grad_restored",
            part=self.name,
            names=", ".join(changed[:NAMED_MAX]) + more,
            why="they were frozen or trained so at the save: to change that, call requires_grad_() after resume()",
        )

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


def _versioned(kind: type) -> type | None:
    """Return the class that declares the version of a module of this class, if one does."""
    owner = next((each for each in kind.__mro__ if "_version" in vars(each)), torch.nn.Module)
    return owner if owner is not torch.nn.Module else None


def _parameters_of(keys: tuple[str, ...], state: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    return {key: v for key, v in zip(keys, state.values(), strict=True) if isinstance(v, torch.nn.Parameter)}


def merge(skeletons: Sequence[Any]) -> Any:
    """Return one description for a rank of another world, from those of all ranks of then."""
    found = {key: {k: v for each in skeletons for k, v in each.get(key, {}).items()} for key in ("extra", "versions")}
    if any("versions" not in each for each in skeletons):
        del found["versions"]
    same = len({(each.get("names"), each.get("trained")) for each in skeletons}) == 1
    trained = {each.get("trained") for each in skeletons}
    return found | ({"trained": trained.pop()} if same or trained == {"all"} else {})


def _write_trained(parameters: Mapping[str, torch.nn.Parameter]) -> str:
    """Return which parameters are trained, as bits in the order of their names: a list would be megabytes."""
    bits = "".join("1" if parameters[key].requires_grad else "0" for key in sorted(parameters))
    return "all" if "0" not in bits else f"{len(bits)}:{int(bits, 2):x}"


def _read_trained(text: str, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, bool]:
    """Undo `_write_trained`; what is of another number of parameters says nothing."""
    keys = sorted(parameters)
    if text == "all":
        return dict.fromkeys(keys, True)
    count, bits = text.split(":")
    if int(count) != len(keys):
        return {key: parameters[key].requires_grad for key in keys}
    return {key: bit == "1" for key, bit in zip(keys, f"{int(bits, 16):0{len(keys)}b}", strict=True)}


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


@lru_cache(maxsize=16)
def _has_extra(names: tuple[str, ...]) -> bool:
    return any(name.endswith(EXTRA_STATE) for name in names)


def _check_loadable(key: str, value: Any) -> None:
    """Refuse what a new process of the script could not load.  Raises StateError."""
    if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
        raise StateError(f"{key} has no shape before the first call: call the module once before resume()")
    own = check_dense(key, value)
    if any(size > 1 and not step for size, step in zip(own.shape, own.stride(), strict=True)):
        raise StateError(f"{key} is expanded, so its elements share memory and cannot be loaded: clone() it")
