"""Which CMD a warm standby can stand in for, and the command line of the standbys' Slurm step.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from stepkeeper.slurm.argv import Geometry

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


def argv(nodes: Sequence[str], geometry: Geometry, program: Sequence[str]) -> list[str]:
    """Return the srun line of the standbys: the shape of the training step, for each becomes one of its ranks.

    Its cgroup must be that of a training step: CPUs, memory and GPUs.  The rest is as for the watchers.
    """
    cpus = [f"--cpus-per-task={geometry.cpus_per_task}"] if geometry.cpus_per_task else []
    if geometry.overcommit:
        cpus = ["--overcommit"]
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * geometry.tasks_per_node}",
        f"--ntasks-per-node={geometry.tasks_per_node}",
        f"--nodelist={','.join(nodes)}",
        *cpus,
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=all",
        "--job-name=stepkeeper-standby",
        *program,
    ]
