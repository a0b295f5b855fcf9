"""What an attempt notes at its start: by what settings and code it goes, and where its run is."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from stepkeeper.config import record
from stepkeeper.config.resolve import Config
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm import repeating
from stepkeeper.slurm.allocation import Allocation
from stepkeeper.slurm.client import SlurmError
from stepkeeper.store import code, known, submission
from stepkeeper.store.rundir import RunDirectory

Log = structlog.typing.FilteringBoundLogger


def note(config: Config, directory: RunDirectory, number: int, command: Sequence[str], log: Log) -> None:
    """Say and keep by what the attempt goes; storage that does not take it stops nothing.

    Raises:
        StepkeeperError: the code is not that of the attempt before, and the user wants no other (`--same-code`).
    """
    if changed := record.changes(config):
        log.info("configured", **{key.replace(".", "_"): value for key, value in changed.items()})
    try:
        record.write(directory.path, number, config)
    except OSError as error:
        log.warning("config_not_recorded", error=f"{error.filename}: {error.strerror}")
    try:
        known.remember(directory.path, os.environ)
    except OSError as error:  # a help for people, no more: a home may be read-only on compute nodes
        log.debug("run_not_noted", error=f"{error.filename}: {error.strerror}")
    _compare_code(directory, number, command, log, must_be_same=config.settings.same_code)


def note_submission(directory: RunDirectory, allocation: Allocation, words: Sequence[str], log: Log) -> None:
    """Keep how the job was submitted, for `stepkeeper resume`, on a thread: Slurm may be slow, and nothing waits.

    What `submit` or `resume` has kept already stays; so an attempt that was requeued asks Slurm nothing.
    """
    environment = dict(os.environ)

    def keep() -> None:
        try:
            known_already = submission.read(directory.path)
            if known_already is not None and known_already.job == allocation.slurm_name:
                return
            found = repeating.find_out(allocation.slurm_name, environment, words, len(allocation.nodes))
            submission.write(directory.path, found)
        except (SlurmError, OSError) as error:
            log.warning("submission_not_recorded", error=str(error))

    threading.Thread(target=keep, name="submission", daemon=True).start()


def _compare_code(
    directory: RunDirectory, number: int, command: Sequence[str], log: Log, *, must_be_same: bool
) -> None:
    now = code.look(command, Path.cwd())
    before = code.newest_before(directory.path, number)
    differences = code.differences(before, now) if before is not None else []
    if differences and must_be_same:
        raise StepkeeperError(
            f"the code is not that of the attempt before: {'; '.join(differences)}; bring it back, or go on with it "
            "by --no-same-code",
            ExitCode.CODE_CHANGED,
        )
    if differences:
        log.warning("code_changed", differences=differences, why="this attempt resumes by other code than the last one")
    try:
        code.write(directory.path, number, now)
    except OSError as error:
        log.warning("code_not_recorded", error=f"{error.filename}: {error.strerror}")
