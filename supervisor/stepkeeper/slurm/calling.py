"""Running one of Slurm's commands with a time limit: for every client on top of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence

from stepkeeper.slurm.client import SlurmError

SAID_CHARACTERS_MAX = 300
AWAY = ("unable to contact", "connection refused", "timed out")  # how most commands say that nobody answered


def call(
    argv: Sequence[str],
    within_s: float,
    *,
    what: str,
    delays: Collection[str] = AWAY,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    instead_of_ours: bool = False,
) -> str:
    """Return what a command prints; times are Unix seconds.

    Args:
        argv: its words.
        within_s: its time limit.
        what: how errors name it.
        delays: words in its complaint, lower case, that mean that the controller did not answer.
        environment: on top of our own.
        directory: where it runs; ours by default.
        instead_of_ours: `environment` is all it gets.

    Raises:
        SlurmError: it could not be run, was refused, or did not answer in time.
    """
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            stdin=subprocess.DEVNULL,
            env={
                **({} if instead_of_ours else os.environ),
                **(environment or {}),
                "SLURM_TIME_FORMAT": "%s",
                "LC_ALL": "C",
            },
            check=False,
            cwd=directory,
            start_new_session=True,  # a signal to our process group must not end a call half-way
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{what}: no answer in {within_s:g} s", unreachable=True) from None
    except OSError as error:
        raise SlurmError(f"{what}: {error.strerror}; are Slurm's commands on PATH?") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:SAID_CHARACTERS_MAX]
        unreachable = any(word in said.lower() for word in delays)
        raise SlurmError(f"{what}: {said or f'exit code {done.returncode}'}", unreachable=unreachable)
    return done.stdout
