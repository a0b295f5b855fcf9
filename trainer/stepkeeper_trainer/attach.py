"""What a Keeper needs around it: its rank, process groups of its own, a run directory that can be written."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stepkeeper_trainer import connections
from stepkeeper_trainer.commit import Commits
from stepkeeper_trainer.environment import Environment, find_place
from stepkeeper_trainer.errors import KeeperError, RunDirectoryError, UsageError
from stepkeeper_trainer.formats.durable import make_directories
from stepkeeper_trainer.holding import next_epoch, refuse_holder
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    import os

    from stepkeeper_trainer.agreement import Agreement


def find_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        UsageError: it is one of several, and torch.distributed is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = find_place()
    if place is not None and place.world_size > 1:
        raise UsageError(
            f"this is rank {place.rank} of {place.world_size}, and torch.distributed is not initialised: "
            "call stepkeeper_trainer.start_distributed() first"
        )
    return 0, 1


CONNECT_WITHIN_S = 60.0  # ranks that are slow to come make no launch fail, however short a save may be


def new_group(within_s: float) -> Any | None:
    """Make a gloo group of all ranks; None without torch.distributed.  All ranks call it in one order."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    with connections.noted():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=max(within_s, CONNECT_WITHIN_S)))


def open_run_directory(
    run_dir: str | os.PathLike[str] | None, environment: Environment, agreement: Agreement, rank: int
) -> Commits:
    """Make, try and hold the run directory on rank 0; every rank hears what is wrong with it.

    Raises:
        RunDirectoryError: it cannot be made or written.
        SupersededError: a newer attempt holds it.
    """
    given = Path(run_dir) if run_dir else environment.run_directory
    path = given or agreement.share(default_run_directory(environment, sys.argv[0]))
    problem: KeeperError | None = None
    epoch = environment.epoch
    if rank == 0:
        try:
            if given is None:
                _make_default(path, environment.node)
            epoch = prepare(path, environment)
        except KeeperError as error:
            problem = error
    problem, epoch = agreement.share((problem, epoch))
    if problem is not None:
        raise problem
    return Commits(path, replace(environment, epoch=epoch))


def default_run_directory(environment: Environment, script: str) -> Path:
    """Return where a run goes that names no directory: below `runs`, by the script and the Slurm job.

    Two jobs never share one, and a requeued job keeps its own.
    """
    path = Path(script)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    name = stem if stem and not stem.startswith("-") else "run"
    return Path.cwd() / "runs" / (name if environment.epoch is None else f"{name}-{environment.epoch[0]}")


def _make_default(path: Path, node: str) -> None:
    """Make `runs`; two trainings of one script in one job would have one directory: the second is refused."""
    try:
        path.parent.mkdir(exist_ok=True)
        refuse_holder(path, node)
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename}: {error.strerror}; give Keeper(run_dir=...), or set STEPKEEPER_RUN_DIR"
        ) from error
    warn("run_directory_chosen", path=path, why="none was given by Keeper(run_dir=...) or STEPKEEPER_RUN_DIR")


def prepare(path: Path, environment: Environment) -> tuple[int, int] | None:
    """Make the directories, take the lease where no supervisor does, clear what the dead left; return the epoch.

    Raises:
        RunDirectoryError: it cannot be made or written, or another training holds it.
        SupersededError: a newer attempt holds it.
    """
    commits = Commits(path, environment)
    if not path.parent.is_dir():
        raise RunDirectoryError(f"{path.parent} is no directory: make it, or choose another run directory than {path}")
    try:
        make_directories(path, mode=0o700)
        make_directories(commits.checkpoints)
        for directory in (path, commits.checkpoints):
            with tempfile.TemporaryFile(dir=directory):
                pass  # can be written
        if environment.socket is None:
            if environment.epoch is None:
                commits = Commits(path, replace(environment, epoch=next_epoch(path, environment.node)))
            commits.take_lease()
        commits.clear_leftovers()
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or path}: cannot be written: {error.strerror}; mend it, or choose another run directory"
        ) from error
    return commits.environment.epoch
