"""The checkpoint that the supervisor chose, for a script whose own call names none.  Only under `--attach`.

A script that names one, or says that it wants none, is left to it.  So is one that asks for checkpoints of another
directory.  Each training of a process is a new one, but for the first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from stepkeeper_trainer.integrations import hook
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
_used: set[str] = set()


def checkpoint(framework: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the checkpoint of a framework that was chosen; empty: none was, or this process has used it.

    Args:
        framework: whose call names none.
        environ: of this rank.
    """
    name, _, path = environ.get(hook.CHECKPOINT_VARIABLE, "").partition(":")
    return path if name == framework and hook.is_rank(environ) and framework not in _used else ""


def is_in(path: str, directory: object) -> bool:
    """Tell whether a checkpoint is one of those in a directory."""
    try:
        return bool(path) and os.path.realpath(os.path.dirname(path)) == os.path.realpath(os.fspath(directory))  # type: ignore[call-overload]
    except TypeError:
        return False  # an object store's, or nothing that is a path


def guarded(find: Callable[[], T], otherwise: T) -> T:
    """Return what is found for a call; an error of ours leaves the call to the script."""
    try:
        return find()
    except Exception as error:  # noqa: BLE001 - whatever it is, the training begins as without us
        warn("chosen_not_used", why=f"{type(error).__name__}: {error}")
        return otherwise


def use(framework: str, path: str) -> str:
    """Say that a call resumes from the checkpoint, and use it this once."""
    _used.add(framework)
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        warn("resumes_from_chosen", framework=framework, checkpoint=path, why="the script's own call names none")
    return path
