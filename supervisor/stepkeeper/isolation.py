"""Keeping a user's own modules out of our processes."""

from __future__ import annotations

import os
import sys


def flags() -> list[str]:
    """Return the interpreter's options for a process of ours.

    `-E` ignores PYTHONPATH and its kin, `-P` keeps the working directory off the module path, and `-s`
    the user's site directory, unless that is where we are installed.
    """
    import site  # noqa: PLC0415 - 5 ms that only these callers need

    home = site.getusersitepackages()
    ours_is_there = os.path.abspath(__file__).startswith(home + os.sep)
    return ["-E", "-P"] if ours_is_there else ["-I"]


def isolate(module: str) -> None:
    """Start this program anew without the user's Python environment, if it has one.  Same pid."""
    if sys.flags.ignore_environment:
        return
    has_own = any(name in os.environ for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"))
    if not has_own and os.path.realpath(sys.path[0] or ".") != os.getcwd():  # `-m` searches there first
        return
    os.execv(sys.executable, [sys.executable, *flags(), "-m", module, *sys.argv[1:]])  # noqa: S606
