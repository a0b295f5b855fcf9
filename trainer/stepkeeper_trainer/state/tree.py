"""Python state as tensors and JSON: nothing in a step directory needs unpickling of code.

A tree of dicts, lists, numbers and tensors is split into named tensors and a JSON skeleton that says where each
belongs.  Floats keep every bit; tuples (named ones too), sets, numbers of NumPy and keys that are no strings come back
as they were.

A part of the state that is anything with `state_dict` and `load_state_dict` (a scheduler, a loader, an average) is such
a tree.

Where a tensor of a tree was: on which kind of device, and how it was sharded; and tensors to load it into.

A module's tensors are there before a resume, and an optimizer's lie as their parameters do.  What a script makes in
training (an average that begins late) is there only once it is loaded: the checkpoint says where.
"""

from __future__ import annotations

import base64
import enum
import inspect
import io
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from stepkeeper_trainer.buffers import from_array, is_array, is_number, to_array, to_number, view_bytes
from stepkeeper_trainer.errors import DamagedError, ResumeError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh


PAD_BYTES = 4096  # and its doubles: a blob keeps its size while its content grows, so the save plan stays the same


Known = dict[Any, str]  # names of tensors, by where they lie in memory


def split(  # noqa: C901  # one branch a type
    value: Any, name: str, tensors: dict[str, torch.Tensor], known: Known | None = None
) -> Any:
    """Put the tensors of `value` into `tensors`, under names that begin with `name`; return the rest.

    What is one tensor under several names is told as such, where `known` is given, and is one again.

    >>> found: dict[str, torch.Tensor] = {}
    >>> split({"lr": 0.1, "betas": (0.9, 0.95)}, "group", found)
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.95]}}

    Raises:
        StateError: something is neither a tensor nor JSON.
    """
    if type(value) in _JSON:
        return value
    if is_number(value):
        number = value.item()
        return {"$number": value.dtype.name, "value": split(number, name, tensors)}
    match value:
        case enum.Flag():
            return {"$enum": name_of(type(value)), "value": value.value}
        case enum.Enum():
            return {"$enum": name_of(type(value)), "member": value.name}
        case int() | float() | str():
            return value
        case torch.Tensor():
            return _split_tensor(value, name, tensors, known)
        case list() | tuple() | deque() | set() | frozenset() if type(value) is not torch.Size:
            return _split_items(value, name, tensors, known)
        case dict():
            return _split_dict(value, name, tensors, known)
        case bytes() | bytearray() | complex() | io.BytesIO() | torch.Size() | torch.dtype() | torch.device():
            return _split_leaf(value)
    if is_array(value):
        name = _free(name, tensors)
        tensors[name] = from_array(value)
        return {"$ndarray": name}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and type(number := value.item()) in _JSON:
        return number  # of another library than torch and NumPy
    raise StateError(
        f"{name} is a {type(value).__name__}, which is neither a tensor nor JSON: "
        "leave it out of state_dict(), or turn it into numbers, text or tensors"
    )


def _split_items(value: Iterable[Any], name: str, tensors: dict[str, torch.Tensor], known: Known | None) -> Any:
    if isinstance(value, set | frozenset):  # in an order that is the same in each process
        kind = "set" if isinstance(value, set) else "frozenset"
        return {f"${kind}": sorted((split(item, name, tensors, known) for item in value), key=json.dumps)}
    items = [split(item, f"{name}.{i}", tensors, known) for i, item in enumerate(value)]
    match value:
        case tuple():
            return {"$tuple": items} | ({"$of": name_of(type(value))} if hasattr(value, "_fields") else {})
        case deque():
            return {"$deque": items, "maxlen": value.maxlen}
    return items


def _split_dict(value: dict[Any, Any], name: str, tensors: dict[str, torch.Tensor], known: Known | None) -> Any:
    kind = next((name for name, each in _DICTS.items() if type(value) is each), None)
    factory = value.default_factory if type(value) is defaultdict else None
    made_by = next((each for each, made in _FACTORIES.items() if made is factory), None)
    if kind is None and made_by is None and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: split(item, f"{name}.{key}", tensors, known) for key, item in value.items()}
    pairs = [
        [split(k, f"{name}.key", tensors, known), split(v, f"{name}.{k}", tensors, known)] for k, v in value.items()
    ]
    of = {"$of": kind} if kind is not None else {}
    return {"$items": pairs} | of | ({"$of": "defaultdict", "factory": made_by} if made_by is not None else {})


def join(skeleton: Any, tensors: Mapping[str, torch.Tensor], *, named: bool = True) -> Any:
    """Undo `split`; without `named`, named tuples are plain ones, and numbers of NumPy are Python's.

    Raises:
        ResumeError: something of NumPy was saved, and NumPy is not there; or the script has no such type.
    """
    return _join(skeleton, tensors, named=named)


def check_types(skeleton: Any) -> None:
    """Look for the types that a skeleton names.

    Raises:
        ResumeError: the script does not have one.
    """
    match skeleton:
        case {"$tuple": list(items), "$of": str(kind)}:
            _named(kind, items)
            check_types(items)
        case {"$enum": str(kind)}:
            _member(kind, skeleton)
        case {"$subclass": str(kind), **rest}:
            _subclass(kind)
            check_types(list(rest.values()))
        case dict():
            check_types(list(skeleton.values()))
        case list():
            for item in skeleton:
                check_types(item)


def _join(  # noqa: C901  # one branch a type
    skeleton: Any, tensors: Mapping[str, torch.Tensor], *, named: bool
) -> Any:
    match skeleton:
        case {"$tensor": str(), "same": str(name)} | {"$tensor": str(name)}:
            return tensors[name]
        case {"$ndarray": str(name)}:
            return _of_numpy(to_array, name, tensors[name])
        case {"$number": str(kind), "value": value}:
            number = _join(value, tensors, named=named)
            return _of_numpy(partial(to_number, kind), f"a {kind}", number) if named else number
        case {"$subclass": str(name), "inner": dict(), "context": _, "size": list(), "stride": list()}:
            return _join_subclass(name, skeleton, tensors)
        case {"$tuple": list(items)} | {"$deque": list(items)} | {"$set": list(items)} | {"$frozenset": list(items)}:
            return _join_items(skeleton, [_join(item, tensors, named=named) for item in items], named=named)
        case {"$items": list(items)}:
            pairs = {_join(k, tensors, named=named): _join(v, tensors, named=named) for k, v in items}
            if "factory" in skeleton:
                return defaultdict(_FACTORIES[skeleton["factory"]], pairs)
            return _DICTS[skeleton["$of"]](pairs) if "$of" in skeleton else pairs
        case {"$enum": str(kind)}:
            return _member(kind, skeleton)
        case dict():
            if len(skeleton) == 1 and (leaf := _LEAVES.get(next(iter(skeleton)))) is not None:
                return leaf(next(iter(skeleton.values())))
            return {key: _join(item, tensors, named=named) for key, item in skeleton.items()}
        case list():
            return [_join(item, tensors, named=named) for item in skeleton]
    return skeleton


def _join_items(skeleton: Mapping[str, Any], items: list[Any], *, named: bool) -> Any:
    if "$deque" in skeleton:
        return deque(items, skeleton["maxlen"])
    if "$tuple" not in skeleton:
        return set(items) if "$set" in skeleton else frozenset(items)
    return _named(skeleton["$of"], items) if named and "$of" in skeleton else tuple(items)


def is_plain(kind: type) -> bool:
    """Whether values of a type are tensors with memory of their own, or DTensors: quantized ones consist of several."""
    return issubclass(kind, torch.Tensor) and (not hasattr(kind, "__tensor_flatten__") or issubclass(kind, DTensor))


def check_dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor.

    Raises:
        StateError: its bytes are not all that it consists of.
    """
    own = local(tensor)
    if isinstance(tensor, DTensor) and any(isinstance(each, Partial) for each in tensor.placements):
        raise StateError(f"{name} is a DTensor with the placement Partial: redistribute it to Shard or Replicate")
    dense = own.layout is torch.strided and not (own.is_nested or own.is_quantized or own.is_meta)
    if not dense or own.dtype in _NOT_BYTES or not is_plain(type(own)):
        nested = "nested " if own.is_nested else ""
        what = f"{nested}{type(own).__name__}, {own.layout} of {own.dtype} on {own.device.type}"
        raise StateError(f"{name} is a {what}: only dense tensors of whole bytes can be saved")
    return own


_NOT_BYTES = frozenset(  # torch has no name or no kernel for their copies
    found
    for found in map(vars(torch).get, filter(re.compile(r"u?int[1-7]|bits?\w*").fullmatch, vars(torch)))
    if isinstance(found, torch.dtype)
)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a copy and without autograd."""
    return tensor._local_tensor if type(tensor) is DTensor else tensor  # noqa: SLF001  # pinned by a test


def _free(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a name that no tensor has yet: keys such as 1 and "1", or "a.b" and "a" with "b" in it, make one name."""
    free, number = name, 2
    while free in tensors:
        free, number = f"{name}#{number}", number + 1
    return free


def _split_leaf(value: Any) -> dict[str, Any]:
    """Return what JSON has no word for, as JSON."""
    match value:
        case bytes() | bytearray():
            return {f"${'bytes' if isinstance(value, bytes) else 'bytearray'}": base64.b64encode(value).decode()}
        case complex():
            return {"$complex": [value.real, value.imag]}
        case io.BytesIO():
            return {"$bytesio": base64.b64encode(value.getvalue()).decode()}
        case torch.Size():
            return {"$size": list(value)}
    return {f"${type(value).__name__}": str(value).removeprefix("torch.")}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ResumeError(f"the checkpoint names the type {name!r}, which torch {torch.__version__} does not have")
    return found


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda pair: complex(*pair),
    "$bytesio": lambda text: io.BytesIO(base64.b64decode(text)),
    "$size": torch.Size,
    "$dtype": _dtype,
    "$device": torch.device,
}


def _split_tensor(value: Any, name: str, tensors: dict[str, torch.Tensor], known: Known | None) -> Any:
    """Put a tensor into `tensors`, or those that a subclass consists of, by torch's own protocol for it."""
    kind = type(value)
    if value.is_nested or (is_plain(kind) and kind not in _TENSORS):
        check_dense(name, value)
        raise StateError(
            f"{name} is a {kind.__name__}, a subclass of torch.Tensor without __tensor_flatten__: its class and "
            "attributes would be lost; turn it into a torch.Tensor (as_subclass) in state_dict()"
        )
    if is_plain(kind):
        name = _free(name, tensors)
        tensors[name] = value.detach()
        device = {"device": value.device.type} if value.device.type != "cpu" else {}
        first = name if known is None else known.setdefault(memory_of(value) or name, name)
        same = {"same": first} if first != name else {}
        return (
            {"$tensor": name} | device | ({"sharded": placement_of(value)} if isinstance(value, DTensor) else {}) | same
        )
    attributes, context = value.__tensor_flatten__()
    return {
        "$subclass": name_of(kind),
        "inner": {key: split(getattr(value, key), f"{name}.{key}", tensors) for key in attributes},
        "context": split(context, f"{name}.context", tensors),
        "size": list(value.size()),
        "stride": list(value.stride()),
    }


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, getattr(torch.nn, "Buffer", torch.Tensor)})


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what is equal for two references to one tensor; None where it has no memory."""
    own = local(tensor)
    if own.layout is not torch.strided or not own.numel():
        return None
    return own.device, own.data_ptr(), own.dtype, own.size(), own.stride()


def _member(kind: str, which: Mapping[str, Any]) -> Any:
    found = _subclass(kind, enum.Enum)
    if "value" not in which and which.get("member") in found.__members__:
        return found.__members__[which["member"]]
    try:
        return found(which["value"])  # of a Flag: several members together have no name of their own
    except (KeyError, ValueError):
        member = which.get("member", which.get("value"))
        raise ResumeError(f"the checkpoint holds {kind}.{member}, which the script's class does not have") from None


_JSON = frozenset({type(None), bool, int, float, str})
_DICTS: dict[str, Callable[..., dict[Any, Any]]] = {"Counter": Counter, "OrderedDict": OrderedDict}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}


def _join_subclass(name: str, skeleton: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    inner = {key: join(item, tensors) for key, item in skeleton["inner"].items()}
    context = join(skeleton["context"], tensors)
    return _subclass(name).__tensor_unflatten__(inner, context, torch.Size(skeleton["size"]), tuple(skeleton["stride"]))


def name_of(kind: type) -> str:
    """Return what a checkpoint calls a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _named(name: str, items: list[Any]) -> Any:
    """Return a named tuple; no code of its class runs."""
    kind = _subclass(name, tuple)
    if len(getattr(kind, "_fields", ())) != len(items):
        raise ResumeError(f"the checkpoint holds a {name} of {len(items)} fields, and the script's has others")
    return tuple.__new__(kind, items)


def _subclass(name: str, of: type = torch.Tensor) -> Any:
    """Return the class of this name among those that the script has imported: nothing is imported for a checkpoint."""
    waiting: list[type] = [of]
    while waiting:
        kind = waiting.pop()
        if name_of(kind) == name:
            return kind
        waiting += type.__subclasses__(kind)
    raise ResumeError(f"the checkpoint holds a {name}, which the script has not imported: import it before resume()")


def _of_numpy(make: Callable[[Any], Any], name: str, value: Any) -> Any:
    try:
        return make(value)
    except ImportError as error:
        raise ResumeError(f"{name} was saved as a value of NumPy, and NumPy is not installed: install it") from error


def to_blob(skeleton: Any) -> torch.Tensor:
    """Return JSON as a uint8 tensor, padded with spaces."""
    data = json.dumps(skeleton, separators=(",", ":")).encode()
    room = PAD_BYTES
    while room < len(data):
        room *= 2
    data += b" " * (room - len(data))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def from_blob(blob: torch.Tensor, *, name: str) -> Any:
    """Read a tensor of `to_blob`.

    Raises:
        DamagedError: it is no JSON.
    """
    try:
        return json.loads(bytes(view_bytes(blob.contiguous())) or b"null")
    except ValueError as error:
        raise DamagedError(f"{name} in the checkpoint is not JSON: {error}") from error


class Stateful(Protocol):
    """What a scheduler, a sampler or anything else needs to be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take back what `state_dict` returned."""
        ...


@runtime_checkable
class Reshardable(Protocol):
    """A `Stateful` that another number of ranks can go on with, though each rank holds a state of its own."""

    def reshard(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return what `load_state_dict` of this rank is given.

        Args:
            states: of the ranks that have saved, in their order: what `state_dict` returned there.
            rank: of this process, now.
            world_size: number of ranks now.
        """
        ...


class StatefulPart:
    """Saved and loaded by its own two methods."""

    def __init__(
        self,
        name: str,
        value: Stateful,
        meshes: Callable[[], Iterable[DeviceMesh]] = tuple,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Take an object; `name` begins the names of its tensors, and `meshes` gives those of the script."""
        self.name, self.value = name, value
        self._meshes = meshes
        self._rank, self._world_size = rank, world_size

    @property
    def reshards(self) -> bool:
        """Whether it makes the state of each rank from those of another number of ranks.

        A streaming data set of Hugging Face has a method `reshard()` without arguments, which is another thing.
        """
        if not isinstance(self.value, Reshardable):
            return False
        try:
            inspect.signature(self.value.reshard).bind([], self._rank, self._world_size)
        except (TypeError, ValueError):
            return False
        return True

    @property
    def of_one_rank(self) -> bool:
        """Whether its state has a meaning on as many ranks only, also where it is equal on all of them.

        What yields data counts what its own rank has read: on more ranks the same count is another place in the data.
        `per_rank` says so of anything else, and `per_rank = False` that a position is one of the whole job.
        """
        said = getattr(self.value, "per_rank", None)
        return self._yields_data if said is None else bool(said)

    @property
    def _yields_data(self) -> bool:
        """Whether it is iterated over, as loaders, samplers, data sets and iterators are, and as a dict is not."""
        yields = isinstance(self.value, Iterable) or hasattr(self.value, "__next__")
        return yields and not isinstance(self.value, Container)

    def collect(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Put its tensors into `tensors`, and return the rest as JSON.

        Raises:
            StateError: something is neither a tensor nor JSON.
        """
        return split(self.value.state_dict(), self.name, tensors, {})

    def targets(self, skeleton: Any, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
        """Return tensors to load into, like those that it has now where they fit.

        An object without tensors, and a loader, is not asked for what it has: torchdata's begins its iterator then.
        """
        check_types(skeleton)
        places = tensor_places(skeleton)
        here: dict[str, torch.Tensor] = {}
        if places and not self._yields_data:
            split(self.value.state_dict(), self.name, here)
        return {
            name: target_of(name, place, saved[name], like=here.get(name), meshes=self._meshes())
            for name, place in places.items()
        }

    def apply(self, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what was saved.

        Raises:
            ResumeError: the object refuses it.
        """
        if isinstance(skeleton, dict) and EACH_RANK in skeleton:
            states = join(skeleton[EACH_RANK], tensors)
            state = self._call("reshard", states, self._rank, self._world_size)
        else:
            state = join(skeleton, tensors)
        self._call("load_state_dict", state)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the script's object; an error of it is named with the part, for all ranks."""
        try:
            return getattr(self.value, method)(*arguments)
        except ResumeError:
            raise
        except Exception as error:  # the script's code may raise anything
            raise ResumeError(
                f"{self.name}: {type(self.value).__name__}.{method} raised {type(error).__name__}: {error}"
            ) from error


EACH_RANK = "$ranks"  # a key of a skeleton: those of the ranks that saved a part, in their order


def with_keys(skeleton: Any, keys: Mapping[str, str]) -> Any:
    """Return a skeleton whose tensors are named as they lie in storage.

    Args:
        skeleton: of one rank.
        keys: of what this rank holds alone, by name; no tensor under such a key is sharded.

    >>> with_keys([{"$tensor": "a"}, {"$tensor": "b"}], {"b": "ranks.rank_00001.b"})
    [{'$tensor': 'a'}, {'$tensor': 'ranks.rank_00001.b'}]
    """
    match skeleton:
        case {"$tensor": str(name)}:
            own = {key: keys.get(skeleton[key], skeleton[key]) for key in ("$tensor", "same") if key in skeleton}
            rest = {key: value for key, value in skeleton.items() if key != "sharded" or name not in keys}
            return rest | own
        case {"$ndarray": str(name)}:
            return {"$ndarray": keys.get(name, name)}
        case dict():
            return {key: with_keys(item, keys) for key, item in skeleton.items()}
        case list():
            return [with_keys(item, keys) for item in skeleton]
    return skeleton


def tensor_places(skeleton: Any) -> dict[str, dict[str, Any]]:
    """Return the names of all tensors that a skeleton of `split` refers to, with what it says of their places."""
    match skeleton:
        case {"$tensor": str(name)}:
            return {name: skeleton} if "same" not in skeleton else {}
        case {"$ndarray": str(name)}:
            return {name: {}}
        case dict():
            return {name: place for item in skeleton.values() for name, place in tensor_places(item).items()}
        case list():
            return {name: place for item in skeleton for name, place in tensor_places(item).items()}
    return {}


def placement_of(tensor: DTensor) -> dict[str, Any]:
    """Return as JSON how a tensor is sharded; `target_of` makes one from it."""
    placements: list[Any] = []
    for each in tensor.placements:
        if type(each) is Shard:
            placements.append(["shard", each.dim])
        else:
            placements.append(["replicate"] if type(each) is Replicate else [type(each).__name__])
    return {"size": list(tensor.size()), "mesh": tensor.device_mesh.mesh.tolist(), "placements": placements}


_PLACEMENTS: dict[str, Callable[..., Any]] = {"shard": Shard, "replicate": Replicate}


def _sharded(placed: Mapping[str, Any], dtype: torch.dtype, meshes: Iterable[DeviceMesh]) -> torch.Tensor | None:
    """Return zeros that are sharded like this, over one of the meshes; None where it is not among them."""
    mesh = next((each for each in meshes if can_shard(placed, each)), None)
    if mesh is None:
        return None
    placements = [_PLACEMENTS[kind](*rest) for kind, *rest in placed["placements"]]
    return dtensor.zeros(*placed["size"], dtype=dtype, device_mesh=mesh, placements=placements)


def can_shard(placed: Mapping[str, Any], mesh: DeviceMesh) -> bool:
    """Whether a tensor that is sharded like this can be made over a mesh."""
    return mesh.mesh.tolist() == placed["mesh"] and all(kind in _PLACEMENTS for kind, *_ in placed["placements"])


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    """Return the meshes over which tensors are sharded."""
    return list({id(each.device_mesh): each.device_mesh for each in tensors if isinstance(each, DTensor)}.values())


def target_of(
    name: str,
    place: Mapping[str, Any],
    entry: TensorStorageMetadata,
    *,
    like: torch.Tensor | None,
    meshes: Iterable[DeviceMesh] = (),
) -> torch.Tensor:
    """Return a tensor to load a value of a tree into, on the device that it was on, and sharded as it was.

    Args:
        name: of the value.
        place: what `tensor_places` says of it.
        entry: what the checkpoint has of it.
        like: what the script has there now: another sharding is a resharding.
        meshes: those that the script has.

    Raises:
        ResumeError: it was sharded over a mesh that the script does not have.
    """
    dtype, sharded = entry.properties.dtype, place.get("sharded")
    if sharded is not None:
        if isinstance(like, DTensor) and list(like.size()) == sharded["size"]:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        made = _sharded(sharded, dtype, meshes)
        if made is None:
            raise ResumeError(
                f"{name} is sharded over the ranks {sharded['mesh']} in the checkpoint, and the script has neither the "
                "tensor nor a parameter on that mesh: make the tensor before resume()"
            )
        return made
    if like is not None and like.size() == entry.size:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    device = place.get("device", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        device = "cpu"
    return torch.empty(entry.size, dtype=dtype, device=device)
