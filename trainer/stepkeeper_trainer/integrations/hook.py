"""Attaches to a framework when a script imports it.  Standard library only: the training's Python may lack all else.

`site/sitecustomize.py` loads this file at the start of each Python of a training with `--attach`.  It then waits for
one of `MODULES`.  Where it cannot attach it says why, once, and the training goes on as without it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    Spec = importlib.machinery.ModuleSpec

VARIABLE = "STEPKEEPER_ATTACH"  # off, auto, or a name below
ATTACHED_VARIABLE = "STEPKEEPER_ATTACHED"  # pid of the rank: what it starts is none
PACKAGES_VARIABLE = "STEPKEEPER_ATTACH_PACKAGES"  # PYTHON:DIRECTORY:..., of the supervisor's own installation
CHECKPOINT_VARIABLE = "STEPKEEPER_ATTACH_CHECKPOINT"  # FRAMEWORK:PATH, which the supervisor chose for this launch
LENT = ("stepkeeper_trainer", "msgspec", "xxhash")  # and nothing else of it
_HOME = "stepkeeper_trainer.integrations"


class Target(NamedTuple):
    """A framework: its name for us, its distributions, and the versions that this release knows."""

    name: str
    distributions: tuple[str, ...]
    since: tuple[int, ...]
    before: tuple[int, ...]


_HUGGINGFACE = Target("huggingface", ("transformers",), (4, 46), (6,))
_LIGHTNING = Target("lightning", ("lightning", "pytorch-lightning"), (2, 3), (3,))
_DEEPSPEED = Target("deepspeed", ("deepspeed",), (0, 19), (0, 20))
_TORCHTITAN = Target("torchtitan", ("torchtitan",), (0, 3), (0, 4))
_ACCELERATE = Target("accelerate", ("accelerate",), (1, 5), (2,))

MODULES = {
    "transformers.trainer": _HUGGINGFACE,
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
    "deepspeed.runtime.engine": _DEEPSPEED,
    "torchtitan.components.checkpoint": _TORCHTITAN,
    "torchtitan.components.validate": _TORCHTITAN,
    "accelerate.accelerator": _ACCELERATE,
}
"""By the module whose import is waited for."""

NAMES = tuple(dict.fromkeys(target.name for target in MODULES.values()))


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process may be a rank: it is not started or forked by one that has attached."""
    return environ.get(ATTACHED_VARIABLE, "") in ("", str(os.getpid()))


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Wait for the modules that the setting names; those that are imported already count too."""
    wanted = environ.get(VARIABLE, "off")
    targets = {name: target for name, target in MODULES.items() if wanted in ("auto", target.name)}
    if not targets or not is_rank(environ):
        return
    for name in [name for name in targets if name in sys.modules]:
        _attach(sys.modules[name], targets.pop(name))
    sys.meta_path.insert(0, _Waiting(targets))


class _Waiting:
    """Finds nothing itself: it has each awaited module call back when its import is complete."""

    def __init__(self, targets: dict[str, Target]) -> None:
        self._targets = targets

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Spec | None:
        """Return what the other finders find."""
        wanted = self._targets.pop(fullname, None)
        if wanted is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: Spec | None = find(fullname, path, target) if finder is not self and find is not None else None
            if spec is not None:
                _call_back(spec.loader, wanted)
                return spec
        return None


def _call_back(loader: Any, target: Target) -> None:
    """Have the loader, which is this module's own, attach after it has run the module."""
    run: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
    if run is None:
        return

    def run_and_attach(module: ModuleType) -> None:
        run(module)
        _attach(module, target)

    with contextlib.suppress(AttributeError):  # a loader of a kind that takes no attribute: not attached
        loader.exec_module = run_and_attach


def _attach(module: ModuleType, target: Target) -> None:
    """Never raises: the script imports its framework as ever."""
    known = target.distributions[0]
    try:
        if not is_rank():
            return
        known, version = _version(target)
        if not target.since <= numbers(version) < target.before:
            since, before = (".".join(map(str, each)) for each in (target.since, target.before))
            _refuse(known, f"this release knows {target.distributions[0]} from {since} to before {before} only")
            return
        _lend_packages()
        importlib.import_module(f"{_HOME}.{target.name}").install(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without us
        said = (str(error).strip().splitlines() or [""])[0]
        _refuse(known, f"{type(error).__name__}: {said}")


def _refuse(framework: str, why: str) -> None:
    """Say it, but where a framework that uses this one is attached to: then this one does not matter."""
    if not os.environ.get(ATTACHED_VARIABLE):
        report(framework, why)


def _version(target: Target) -> tuple[str, str]:
    """Return `NAME VERSION` and the version.  Raises PackageNotFoundError."""
    import importlib.metadata  # noqa: PLC0415 - most Pythons of a training never need it

    for name in target.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return f"{name} {version}", version
    raise importlib.metadata.PackageNotFoundError(target.distributions[0])


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> numbers("5.23.0"), numbers("0.16.1+cpu"), numbers("4.46.0.dev0"), numbers("nightly")
    ((5, 23, 0), (0, 16, 1), (4, 46, 0), ())
    """
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


class _Lender:
    """Finds a few packages in the supervisor's installation, where the training's environment has none."""

    def __init__(self, directories: list[str]) -> None:
        self._directories = directories

    def find_spec(self, fullname: str, _: Sequence[str] | None, target: ModuleType | None = None) -> Spec | None:
        """Asked last of all finders, and answers for the packages of `LENT` only."""
        if fullname not in LENT:
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, self._directories, target)


def _lend_packages() -> None:
    """Let this Python use ours, if it is of the version that ours were built for."""
    python, *directories = os.environ.get(PACKAGES_VARIABLE, "").split(":")
    if directories and python == sys.implementation.cache_tag:
        sys.meta_path.append(_Lender(directories))


def report(framework: str, why: str, environ: Mapping[str, str] = os.environ) -> None:
    """Say on rank 0 that nothing is attached: in its log, and to the supervisor.  Never raises."""
    import json  # noqa: PLC0415 - as above
    import socket  # noqa: PLC0415 - as above

    rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
    if rank != "0":
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"stepkeeper: not attached to {framework}: {why}\n")
        sys.stderr.flush()
    address = environ.get("STEPKEEPER_SOCKET", "").replace("%N", environ.get("SLURMD_NODENAME", ""))
    if not address:
        return
    message = {
        "type": "hello",
        "launch": f"{environ.get('STEPKEEPER_ATTEMPT', '')}.{environ.get('STEPKEEPER_LAUNCH', '')}",
        "rank": 0,
        "world_size": 0,
        "pid": os.getpid(),
        "version": "",
        "framework": framework[:100],
        "unable": why[:200],
    }
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # noqa: FBT003  # the method takes no keyword
        sock.sendto(json.dumps(message).encode(), "\0" + address[1:] if address.startswith("@") else address)
