"""Which CMD a warm standby can stand in for.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?t?")
_PLAIN = re.compile(r"-[uBOEsPIq]+")  # options of an interpreter without a word of their own
_WITH_WORD = ("-X", "-W")


def prefix(command: Sequence[str]) -> list[str] | None:
    """Return the words of `python [OPTIONS] script.py ...` or `python [OPTIONS] -m MODULE ...` before script or -m.

    None for everything else: what a shell, a container or `uv run` does before Python starts is not for us to repeat.

    >>> prefix(["/env/bin/python3", "-u", "-X", "dev", "train.py", "--steps", "9"])
    ['/env/bin/python3', '-u', '-X', 'dev']
    >>> prefix(["python", "-m", "train"])
    ['python']
    >>> prefix(["uv", "run", "train.py"]), prefix(["python", "-c", "1"]), prefix(["python", "train"])
    (None, None, None)
    """
    if not command or not _PYTHON.fullmatch(PurePosixPath(command[0]).name):
        return None
    place = 1
    while place < len(command):
        word = command[place]
        if word == "-m":
            return [*command[:place]] if place + 1 < len(command) else None
        if word in _WITH_WORD:
            place += 2
        elif _PLAIN.fullmatch(word) or word.startswith(_WITH_WORD):
            place += 1
        else:
            return [*command[:place]] if word.endswith(".py") and not word.startswith("-") else None
    return None
