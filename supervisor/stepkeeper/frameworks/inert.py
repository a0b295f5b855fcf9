"""A pickle read as data: no name in it is imported, nothing is called, and nothing it holds is hashed but plain keys.

A machine with a stack and a memo, whose work and memory grow with the bytes of the pickle alone: what a pickle
does with tuples that hold each other, or with a hash of them, does not happen here.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PICKLE_BYTES_MAX = 32 * 1024 * 1024
KEY_MAX = 2**40  # larger numbers as keys could be made to collide
OLD_NUMBER = 0x1950A86A20F9469CFC6C
"""The number with which files of `torch.save` before version 1.6 begin."""
COPIES_MAX = 500_000
"""Items that are copied out of lists: a few bytes of a pickle could ask for the same long list again and again."""


class InertError(ValueError):
    """The pickle is torn, or too large to be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A class or function that a pickle names; it was not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What calling a name would have made."""

    of: Any
    arguments: Any
    state: Any = None


@dataclass(slots=True)
class Read:
    """The value of a pickle, and the names that were refused."""

    value: Any = None
    refused: list[Named] = field(default_factory=list)  # no part of a plain state
    hostile: list[Named] = field(default_factory=list)  # of these, what runs programs or code


_PLAIN = {
    "builtins": {
        "set", "frozenset", "dict", "list", "tuple", "int", "float", "complex", "str", "bytes", "bytearray", "bool",
        "slice", "range", "object", "NoneType", "getattr",
    },
    "collections": {"OrderedDict", "defaultdict", "Counter", "deque"},
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "datetime": {"datetime", "timedelta", "date"},
    "copyreg": {"_reconstructor"},
    "_codecs": {"encode"},
    "functools": {"partial"},
}  # fmt: skip
_PLAIN["__builtin__"] = _PLAIN["builtins"]
_HOSTILE_MODULES = frozenset(
    (
        "os", "posix", "nt", "subprocess", "sys", "builtins", "__builtin__", "importlib", "runpy", "shutil", "socket",
        "ctypes", "pty", "webbrowser", "code", "codeop", "pdb", "bdb", "timeit", "cProfile", "profile", "trace", "imp",
        "marshal", "pickle", "_pickle", "commands", "popen2", "asyncio", "pip", "multiprocessing", "threading",
        "linecache", "inspect", "types", "pkgutil", "urllib", "http", "ftplib", "smtplib", "platform", "signal",
    )
)  # fmt: skip
_HOSTILE_NAMES = frozenset(
    (
        "eval",
        "exec",
        "compile",
        "system",
        "popen",
        "Popen",
        "__import__",
        "open",
        "runstring",
        "load",
        "_load_global_deps",
    )
)


def read(data: bytes) -> Read:
    """Read a pickle.

    Raises:
        InertError: it is torn, or too large.
    """
    if len(data) > PICKLE_BYTES_MAX:
        raise InertError(f"its pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX}: not read")
    machine = _Machine()
    try:
        return machine.run(pickletools.genops(data))
    except InertError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InertError(f"its pickle is torn or damaged: {type(error).__name__}: {str(error)[:120]}") from error


def read_old(data: bytes) -> Read:
    """Read the state in a file of `torch.save` before version 1.6, or in a plain pickle.

    Args:
        data: how the file begins; the tensors' bytes may be left out.

    Raises:
        InertError: it is torn, or too large.
    """
    stream = io.BytesIO(data)
    found = _next(stream)
    if found.value == OLD_NUMBER:
        for _ in range(2):  # the protocol, and how large numbers are
            _next(stream)
        found = _next(stream)
        _next(stream)  # the tensors' names: torn where they are missing
    return found


def _next(stream: io.BytesIO) -> Read:
    try:
        return _Machine().run(pickletools.genops(stream))
    except InertError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InertError(f"its pickle is torn or damaged: {type(error).__name__}: {str(error)[:120]}") from error


def field_of(value: Any, *path: str) -> Any:
    """Return what stands at a path of keys or attributes; None where there is nothing.

    >>> field_of({"a": Made(Named("argparse", "Namespace"), (), {"b": 3})}, "a", "b")
    3
    """
    for name in path:
        value = plain(value)
        value = value.get(name) if isinstance(value, dict) else None
    return plain(value)


def plain(value: Any) -> Any:
    """Return a made value as what it stands for, where that is a dictionary or a tuple; else the value itself."""
    if isinstance(value, Made):
        if isinstance(value.state, dict):
            return value.state
        if str(value.of) == "torch.Size" and isinstance(value.arguments, tuple) and value.arguments:
            return value.arguments[0]
    return value


def whole_number(value: Any, *path: str) -> int | None:
    """Return the number at a path; None where there is none, or a truth value."""
    found = field_of(value, *path)
    return found if type(found) is int and 0 <= found < KEY_MAX else None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under marks
        self.memo: dict[int, Any] = {}
        self.found = Read()
        self.seen: set[tuple[str, str]] = set()
        self.copies_left = COPIES_MAX

    def run(self, operations: Iterator[tuple[Any, Any, Any]]) -> Read:
        for opcode, argument, _ in operations:
            name = opcode.name
            if name == "STOP":
                self.found.value = self.stack.pop()
                return self.found
            if name in _PUSHES:
                self.stack.append(argument)
            else:
                _ACTS[name](self, argument)
        raise InertError("its pickle is torn: it has no end")

    def name(self, module: Any, name: Any) -> Named:
        if type(module) is not str or type(name) is not str:
            raise InertError("its pickle names what is no text")
        named = Named(module[:200], name[:200])
        if (named.module, named.name) not in self.seen and not _is_plain(named):
            self.seen.add((named.module, named.name))
            self.found.refused.append(named)
            if _is_hostile(named):
                self.found.hostile.append(named)
        return named

    def marked(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def call(self, of: Any, arguments: Any) -> Any:
        name = str(of) if isinstance(of, Named) else ""
        if name in {"collections.OrderedDict", "builtins.dict", "collections.defaultdict"}:
            made: dict[Any, Any] = {}
            if isinstance(arguments, tuple) and arguments and isinstance(arguments[-1], list):
                self.copies_left -= len(arguments[-1])
                if self.copies_left < 0:
                    raise InertError("its pickle copies the same items again and again: not read")
                pairs = [pair for pair in arguments[-1] if isinstance(pair, list | tuple) and len(pair) == 2]  # noqa: PLR2004
                for key, value in pairs:
                    _set(made, key, value)
            return made
        return Made(of, arguments)


def _is_plain(named: Named) -> bool:
    if named.name in _PLAIN.get(named.module, ()):
        return True
    top = named.module.partition(".")[0]
    if top == "torch":
        last = named.name
        return (
            last.startswith("_rebuild")
            or last.endswith("Storage")
            or last in {"Size", "device", "dtype", "layout", "_get_layout", "Parameter", "Tensor", "storage", "DTensor"}
            or (named.module == "torch" and last.islower() and last.isidentifier() and last not in _HOSTILE_NAMES)
            or named.module.startswith(("torch.distributed.checkpoint.", "torch.distributed.tensor."))
        )
    if top == "numpy":
        return (
            named.name in {"ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"} or "dtype" in named.name.lower()
        )
    return False


def _is_hostile(named: Named) -> bool:
    parts = {*named.module.split("."), *named.name.split(".")}
    top = named.module.partition(".")[0]
    return top in _HOSTILE_MODULES or bool(parts & _HOSTILE_NAMES) or bool({"os", "subprocess", "sys"} & parts)


def _set(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, dict):
        if type(key) is str or key is None or type(key) is bool or (type(key) is int and -KEY_MAX < key < KEY_MAX):
            target[key] = value
    elif not isinstance(target, Made):
        raise InertError("its pickle puts an item into what is no dictionary")


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Made):
        raise InertError("its pickle appends to what is no list")


def _set_items(machine: _Machine, _: Any) -> None:
    items = machine.marked()
    for key, value in zip(items[::2], items[1::2], strict=True):
        _set(machine.stack[-1], key, value)


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine.stack[-1], key, value)


def _appends(machine: _Machine, _: Any) -> None:
    items = machine.marked()
    _extend(machine.stack[-1], items)


def _append(machine: _Machine, _: Any) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _mark(machine: _Machine, _: Any) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine, _: Any) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.marked()


def _pop_mark(machine: _Machine, _: Any) -> None:
    machine.marked()


def _from_marked(make: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], None]:
    def act(machine: _Machine, _: Any) -> None:
        items = machine.marked()
        machine.stack.append(make(items))

    return act


def _pairs(items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        _set(made, key, value)
    return made


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    def act(machine: _Machine, _: Any) -> None:
        if len(machine.stack) < count:
            raise InertError("its pickle is damaged: a tuple lacks items")
        at = len(machine.stack) - count
        machine.stack[at:] = [tuple(machine.stack[at:])]

    return act


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def _global(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(machine.name(module, name))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.name(module, name))


def _instance(machine: _Machine, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    arguments = tuple(machine.marked())
    machine.stack.append(machine.call(machine.name(module, name), arguments))


def _object(machine: _Machine, _: Any) -> None:
    of, *arguments = machine.marked()
    machine.stack.append(machine.call(of, tuple(arguments)))


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, of = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(of, arguments))


def _new_with_names(machine: _Machine, _: Any) -> None:
    names, arguments, of = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Made(of, (arguments, names)))


def _build(machine: _Machine, _: Any) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Made):
        target.state = state


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[int(argument)] = machine.stack[-1]


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _get(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _extension(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.name("copyreg", f"extension {argument}"))


_PUSHES = frozenset(
    (
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
        "BINUNICODE8", "FLOAT", "BINFLOAT",
    )
)  # fmt: skip
_ACTS: dict[str, Callable[[_Machine, Any], None]] = {
    **{name: lambda _machine, _argument: None for name in ("PROTO", "FRAME", "READONLY_BUFFER")},
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_TUPLE": _constant(tuple),
    "EMPTY_LIST": _constant(list),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_SET": _constant(lambda: Made(Named("builtins", "set"), ())),
    "NEXT_BUFFER": _constant(lambda: None),
    "TUPLE": _from_marked(tuple),
    "LIST": _from_marked(list),
    "DICT": _from_marked(_pairs),
    "FROZENSET": _from_marked(lambda items: Made(Named("builtins", "frozenset"), (items,))),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "INST": _instance,
    "OBJ": _object,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_names,
    "BUILD": _build,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "APPEND": _append,
    "APPENDS": _appends,
    "ADDITEMS": _appends,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _memoize,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "PERSID": lambda machine, argument: machine.stack.append(Made("storage", argument)),
    "BINPERSID": lambda machine, _: machine.stack.append(Made("storage", machine.stack.pop())),
    "EXT1": _extension,
    "EXT2": _extension,
    "EXT4": _extension,
}
