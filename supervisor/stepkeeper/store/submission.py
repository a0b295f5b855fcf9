"""`submission.json` of the run directory: how the newest job of a run was submitted.

`submit` and `resume` write it as soon as Slurm has taken the job: from then on the job's number finds the run.  Where
the user's own sbatch has submitted the job, its supervisor writes it when it starts.  `resume` submits by it.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stepkeeper.config.environment import TOLD
from stepkeeper.config.settings import VARIABLE_PREFIX
from stepkeeper.redaction import redact, redact_words
from stepkeeper.slurm.environment import KEPT
from stepkeeper.store import lines
from stepkeeper_trainer.formats.durable import write_atomically

NAME = "submission.json"
BYTES_MAX = 8 * 1024 * 1024  # Slurm's own bound on a batch script is 4 MiB
PROGRAM_VARIABLE = "STEPKEEPER"  # in our batch script: the program


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """How a job was submitted."""

    format: int = 1
    job: str  # as Slurm's commands name it: its number, or `ARRAY_TASK`
    at: float  # Unix seconds
    directory: str  # in which sbatch was called
    log: str = ""  # of the batch script, as Slurm tells it
    script: str = ""  # the batch script
    secret: bool = False  # script, options or arguments hold what looks like a secret: no copy of them was kept
    path: str = ""  # of the script; empty where sbatch read it from its standard input
    options: tuple[str, ...] = ()  # of sbatch, besides the script's directives
    arguments: tuple[str, ...] = ()  # of the script
    environment: dict[str, str] = msgspec.field(default_factory=dict)  # settings that were variables
    unknown: tuple[str, ...] = ()  # what Slurm did not show, in words

    @property
    def number(self) -> int:
        """The job's number, without the task of an array."""
        return int(self.job.partition("_")[0])


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a submission is repeated with: settings of Stepkeeper's and sbatch's, no secret."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith((VARIABLE_PREFIX, "SBATCH_")) or name == PROGRAM_VARIABLE)
        and not (name in TOLD or name.startswith(KEPT))
        and redact(f"{name}={value}") == f"{name}={value}"
    }


def without_secrets(submission: Submission) -> Submission:
    """Return a submission that may be written: what holds a secret is left out whole.

    The user's own script file may still be there; options and arguments stand nowhere else.
    """
    words = [*submission.options, *submission.arguments]
    if redact_words(words) != words:
        return msgspec.structs.replace(submission, script="", path="", options=(), arguments=(), secret=True)
    if redact(submission.script) != submission.script:
        return msgspec.structs.replace(submission, script="", secret=True)
    return submission


def write(run: Path, submission: Submission) -> None:
    """Write it; the group may read it where it may read the run directory.

    Raises:
        OSError: it was not written.
    """
    group = run.stat().st_mode & stat.S_IRGRP
    write_atomically(run / NAME, lines.encode(without_secrets(submission)), mode=0o600 | group)


def read(run: Path) -> Submission | None:
    """Return how the newest job of a run was submitted; None where that is not known, or is not ours to read.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    try:
        found = msgspec.json.decode(lines.read_small(run / NAME, BYTES_MAX), type=Submission)
    except (FileNotFoundError, PermissionError):
        return None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # of a newer version, or torn: it tells nothing
    return found if found.job.replace("_", "", 1).isdigit() else None
