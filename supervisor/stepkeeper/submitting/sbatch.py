"""Handing a script to sbatch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

WITHIN_S = 60.0
SAID_CHARACTERS_MAX = 500


def check(script: str) -> None:
    """Have Slurm say whether it could run a script.

    Raises:
        StepkeeperError: it could not, with Slurm's own words.
    """
    _call("--test-only", script, None)


def submit(script: str, *, environment: Mapping[str, str] | None = None) -> int:
    """Submit a script from the working directory and return the job's id.

    Raises:
        StepkeeperError: Slurm refuses it, with its own words, or does not answer.
    """
    answer = _call("--parsable", script, environment)
    match = re.match(r"\d+", answer.strip())
    if match is None:
        raise StepkeeperError(f"sbatch answered {answer[:SAID_CHARACTERS_MAX]!r}: no job id", ExitCode.START_FAILED)
    return int(match.group())


def _call(option: str, script: str, environment: Mapping[str, str] | None) -> str:
    try:
        done = subprocess.run(
            ["sbatch", option],
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WITHIN_S,
            check=False,
            env=None if environment is None else dict(environment),
        )
    except subprocess.TimeoutExpired:
        raise StepkeeperError(
            f"sbatch {option} did not answer in {WITHIN_S:g} s; the job may be in the queue: see `squeue --me`",
            ExitCode.NO_SLURM,
        ) from None
    except OSError as error:
        raise StepkeeperError(f"sbatch: {error.strerror}; is Slurm installed here?", ExitCode.NO_SLURM) from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:SAID_CHARACTERS_MAX]
        raise StepkeeperError(
            f"Slurm refuses the job: {said or f'sbatch exit code {done.returncode}'}", ExitCode.START_FAILED
        )
    return done.stdout
