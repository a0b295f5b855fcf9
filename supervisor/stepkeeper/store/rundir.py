"""The run directory: where it is, and whether it can be used."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError

DEFAULT_PATTERN = "runs/%x-%j"
_FIELDS = {
    "j": "SLURM_JOB_ID",
    "A": "SLURM_ARRAY_JOB_ID",
    "a": "SLURM_ARRAY_TASK_ID",
    "x": "SLURM_JOB_NAME",
    "u": "USER",
}


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run.  The directory exists."""

    path: Path

    @property
    def typed(self) -> str:
        """Its path as a shell takes it."""
        return shlex.quote(str(self.path))

    @property
    def run_id(self) -> str:
        """A short name of the run that is the same on every node and in every attempt."""
        return xxhash.xxh3_64_hexdigest(str(self.path).encode())

    @property
    def journal(self) -> Path:
        """Events, decisions and effects, one a line."""
        return self.path / "journal.jsonl"

    @property
    def status(self) -> Path:
        """What `stepkeeper status` shows."""
        return self.path / "status.json"

    @property
    def checkpoints(self) -> Path:
        """The step directories."""
        return self.path / "checkpoints"

    def attempt_logs(self, attempt: int) -> Path:
        """Return where the logs of an attempt's launches lie, and its supervisor's own."""
        return self.path / "logs" / f"attempt-{attempt:03d}"

    def logs(self, attempt: int, launch: int) -> Path:
        """The ranks' output of one launch, a file per node."""
        return self.attempt_logs(attempt) / f"launch-{launch:03d}"


def expand(pattern: str, environment: Mapping[str, str]) -> Path:
    """Replace `%j %A %a %x %u` as sbatch does, and anchor below the submit directory.

    Raises:
        StepkeeperError: a field is not set here, or unknown.
    """

    def value(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter == "%":
            return "%"
        name = _FIELDS.get(letter)
        if name is None:
            known = ", ".join(f"%{known}" for known in _FIELDS)
            raise StepkeeperError(f"--run-dir {pattern}: %{letter} is not known; known are {known}", ExitCode.USAGE)
        found = environment.get(name)
        if letter == "A" and found is None:
            found = environment.get("SLURM_JOB_ID")
        if found is None:
            raise StepkeeperError(f"--run-dir {pattern}: %{letter} stands for {name}, which is not set", ExitCode.USAGE)
        return found.replace("/", "_")

    tasks = environment.get("SLURM_ARRAY_TASK_COUNT", "1")
    if tasks not in ("", "1") and not re.search("%[ja]", pattern.replace("%%", "")):
        raise StepkeeperError(
            f"--run-dir {pattern}: the {tasks} tasks of this array would share it; "
            "each is a run of its own: put %a into it, as in runs/%x-%A_%a",
            ExitCode.USAGE,
        )
    path = Path(os.path.expanduser(re.sub(r"%(.)", value, pattern)))
    anchor = environment.get("SLURM_SUBMIT_DIR") or os.getcwd()
    return Path(os.path.normpath(os.path.join(anchor, path)))


def prepare(path: Path, *, group_readable: bool, default: bool) -> RunDirectory:
    """Create what is missing of a run directory and check that it can be used.

    Args:
        path: absolute.
        group_readable: mode 0750 instead of 0700 for what is created.
        default: the user did not choose the place, so `runs/` may be created too.

    Raises:
        StepkeeperError: what is in the way, where, and what to do.
    """
    mode = 0o750 if group_readable else 0o700
    try:
        if default:
            path.parent.mkdir(mode=0o755, exist_ok=True)
        require_parent(path)
        _make(path, mode)
        _require_ours(path, path)
        for below in (path / "checkpoints", path / "logs"):
            _make(below, mode)
            _require_ours(below, path)
        for needed in (path, path / "checkpoints", path / "logs"):
            with tempfile.NamedTemporaryFile(prefix=".probe-", dir=needed):
                pass  # made and removed: it can be written
    except OSError as error:
        raise StepkeeperError(
            f"--run-dir {path}: cannot be written: {error.filename or path}: {error.strerror}; "
            "it must be on storage that every node of the job can write",
            ExitCode.RUN_DIRECTORY,
        ) from error
    return RunDirectory(path.resolve())


def require_ours(path: Path) -> None:
    """Refuse a run directory that is there and that a job would refuse; what is missing of it is no matter.

    Raises:
        OSError: it cannot be looked at.
        StepkeeperError: what is wrong with it.
    """
    for each in (path, path / "checkpoints", path / "logs"):
        if os.path.lexists(each):
            _require_ours(each, path)


def _require_ours(path: Path, run_directory: Path) -> None:
    """Refuse a directory in which somebody else could plant what the run goes by: a checkpoint, a setting, an ask.

    Raises:
        OSError: it cannot be looked at.
        StepkeeperError: what is wrong with it.
    """
    status = os.stat(path, follow_symlinks=False)
    where = f"--run-dir {run_directory}: {'' if path == run_directory else f'{path.name}/ '}"
    if not stat.S_ISDIR(status.st_mode):
        what = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a directory"
        raise StepkeeperError(f"{where}{what}; name the directory itself", ExitCode.RUN_DIRECTORY)
    if status.st_uid != os.getuid():
        raise StepkeeperError(
            f"{where}belongs to user id {status.st_uid}, not to you; choose another place", ExitCode.RUN_DIRECTORY
        )
    if status.st_mode & stat.S_IWOTH:
        raise StepkeeperError(
            f"{where}everybody may write it, so anybody could plant a checkpoint; chmod o-w it", ExitCode.RUN_DIRECTORY
        )
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        raise StepkeeperError(
            f"{where}its group may write it, so others could plant a checkpoint or settings; chmod g-w it "
            "(--group-readable lets them read)",
            ExitCode.RUN_DIRECTORY,
        )


def _is_own_group(gid: int) -> bool:
    """Tell whether a group is this user's alone, as many systems make one for each user (with umask 002)."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False  # not known on this node
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def require_parent(path: Path) -> None:
    """Refuse a place whose directory is not there: a mistyped one must not be made.

    Raises:
        StepkeeperError: which directory is missing, or lets everybody put another one in the place of the run's.
    """
    if not path.parent.is_dir():
        raise StepkeeperError(
            f"--run-dir {path}: its parent {path.parent} does not exist; create it, or choose another place",
            ExitCode.RUN_DIRECTORY,
        )
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StepkeeperError(
            f"--run-dir {path}: everybody may rename what is in {path.parent}, and put another run there; "
            "chmod o-w or +t that directory, or choose another place",
            ExitCode.RUN_DIRECTORY,
        )


def _make(path: Path, mode: int) -> None:
    """Create a directory with this very mode, whatever the umask; leave one that is there as it is.

    Raises:
        OSError: it could not be created.
    """
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        return  # of what kind, and whether it can be written, is looked at afterwards
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, mode)  # of what was made, whatever has its name by now
    finally:
        os.close(descriptor)
