"""Handing a script to sbatch."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError

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


# The batch script of a supervised training: golden tests hold it.

NOTICE_S = 120
NOTICE_MAX_S = 65535  # Slurm's own bound on --signal
SLURM_LATE_S = 60  # Slurm may signal a minute early or late
OURS = ("signal", "requeue", "no-requeue", "no-kill", "open-mode")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks for."""

    command: tuple[str, ...]
    program: tuple[str, ...]  # that starts `stepkeeper`
    options: tuple[str, ...] = ()  # of `stepkeeper run`
    nodes: str | None = "1"
    gpus_per_node: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    output: str = "%x-%j.log"
    sbatch: tuple[str, ...] = ()  # more options of sbatch, each with its dashes
    setup: tuple[str, ...] = ()  # lines of shell before the training, such as `module load cuda`
    save_s: float | None = None  # from the request of a save to durable, if it is known
    notice_s: int | None = None


def program() -> tuple[str, ...]:
    """Return the command of the environment that we run in: the job's PATH may have another."""
    beside = Path(sys.executable).with_name("stepkeeper")
    return (str(beside),) if beside.exists() else (sys.executable, "-m", "stepkeeper")


def notice_s(wanted: Wanted) -> int:
    """Return how long before the time limit the supervisor gets its signal: enough for two saves, if that is known."""
    if wanted.notice_s is not None:
        return wanted.notice_s
    if wanted.save_s is None:
        return NOTICE_S
    return min(NOTICE_MAX_S, max(NOTICE_S, round(2 * wanted.save_s + SLURM_LATE_S)))


def render(wanted: Wanted) -> str:
    """Return the script.

    Raises:
        StepkeeperError: an option of sbatch would undo what the supervisor stands on, or a line cannot stand in a
            directive.
    """
    directives = [
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("job-name", wanted.job_name),
        ("nodes", wanted.nodes),
        ("gpus-per-node", wanted.gpus_per_node),
        ("time", wanted.time),
        ("output", wanted.output),
    ]
    own = [f"--{name}={value}" for name, value in directives if value is not None]
    lines = [f"#SBATCH {option}" for option in [*own, *(_checked(option) for option in wanted.sbatch)]]
    start = shlex.join([*wanted.program, "run", *wanted.options, "--", *wanted.command])
    for line in lines:
        if "\n" in line:
            raise UsageError(f"an option of sbatch has a line break: {line!r}")
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# Slurm, and the supervisor, may put the job back into the queue.",
            "#SBATCH --requeue",
            "# A lost node does not end the job: the watchers on the others keep it running.",
            "#SBATCH --no-kill",
            "# Each attempt appends to the log of those before.",
            "#SBATCH --open-mode=append",
            "# The supervisor alone gets SIGUSR1 so many seconds before the time limit.",
            f"#SBATCH --signal=B:USR1@{notice_s(wanted)}",
            "set -eo pipefail",
            *wanted.setup,
            "trap '' USR1 TERM # until the supervisor handles them: by default they would end the job",
            "# `exec`: Slurm signals only the batch process, and that must be the supervisor",
            f"exec {start}",
            "",
        ]
    )


def _checked(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].split(" ")[0]
    if not option.startswith("-"):
        raise UsageError(f"--sbatch {option!r}: write the option with its dashes, --sbatch=--mem=0")
    if name in OURS:
        raise UsageError(
            f"--sbatch={option}: the supervisor stands on its own --{name}"
            + ("; say --notice-s" if name == "signal" else "")
        )
    return option
