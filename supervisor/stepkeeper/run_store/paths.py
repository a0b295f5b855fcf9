"""The run directory: where it is, and whether it can be used."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import xxhash

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.alone import Shared, is_replaceable, why_not_alone

DEFAULT_PATTERN = "runs/%x-%j"
_FIELDS = {
    "j": "SLURM_JOB_ID",
    "A": "SLURM_ARRAY_JOB_ID",
    "a": "SLURM_ARRAY_TASK_ID",
    "x": "SLURM_JOB_NAME",
    "u": "USER",
}
_REMEDIES = {
    Shared.NO_DIRECTORY: "name the directory itself",
    Shared.OWNER: "choose another place",
    Shared.EVERYBODY: "chmod o-w it, or anybody could plant a checkpoint",
    Shared.GROUP: "chmod g-w it, or others could plant a checkpoint or settings (--group-readable lets them read)",
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
    def metrics(self) -> Path:
        """The completed steps, one a line."""
        return self.path / "metrics.csv"

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


def expand_pattern(pattern: str, environment: Mapping[str, str]) -> Path:
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
            raise UsageError(f"--run-dir {pattern}: %{letter} is not known; known are {known}")
        found = environment.get(name)
        if letter == "A" and found is None:
            found = environment.get("SLURM_JOB_ID")
        if found is None:
            raise UsageError(f"--run-dir {pattern}: %{letter} stands for {name}, which is not set")
        return found.replace("/", "_")

    tasks = environment.get("SLURM_ARRAY_TASK_COUNT", "1")
    if tasks not in ("", "1") and not re.search("%[ja]", pattern.replace("%%", "")):
        raise UsageError(
            f"--run-dir {pattern}: the {tasks} tasks of this array would share it; "
            "each is a run of its own: put %a into it, as in runs/%x-%A_%a"
        )
    path = Path(os.path.expanduser(re.sub(r"%(.)", value, pattern)))
    anchor = environment.get("SLURM_SUBMIT_DIR") or os.getcwd()
    return Path(os.path.normpath(os.path.join(anchor, path)))


def prepare_run_directory(path: Path, *, group_readable: bool, default: bool) -> RunDirectory:
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
    found = why_not_alone(path, readers=True)
    if found is not None:
        where = f"--run-dir {run_directory}: {'' if path == run_directory else f'{path.name}/ '}"
        raise StepkeeperError(f"{where}{found.text}; {_REMEDIES[found.kind]}", ExitCode.RUN_DIRECTORY)


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
    if is_replaceable(path.parent, of_project=True):
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


# `--group-readable`: the group may read every file of the run directory, of any program of ours and any umask.
#
# Ranks, Slurm and the supervisor make files there, under the user's umask, which must stay: the training writes
# elsewhere too.  So what is in the run directory is looked through now and then, and gets the permission.  Links are
# not followed.

EVERY_S = 15.0
LAST_WITHIN_S = 2.0  # the nodes are about to be given back
_IN_FLIGHT = ".tmp-"
_STEP = "step_"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def share_with_group(directory: Path) -> int:
    """Let the group read a directory and all that is below it and ours; return how many permissions were given.

    A step directory that the group can read is not looked through again: its files were shared before it was.

    Raises:
        OSError: the directory cannot be read; what vanishes meanwhile is no error.
    """
    descriptor = os.open(directory, _FLAGS)
    try:
        return _below(descriptor) + _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _below(descriptor: int) -> int:
    given = 0
    for name in os.listdir(descriptor):
        if name.startswith(_IN_FLIGHT):
            continue  # renamed when it is complete
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # replaced or removed meanwhile
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                if not (name.startswith(_STEP) and _shared(found)):
                    given += _directory(descriptor, name)
            elif stat.S_ISREG(found.st_mode) and not _shared(found):
                given += _file(descriptor, name)
    return given


def _directory(parent: int, name: str) -> int:
    descriptor = os.open(name, _FLAGS, dir_fd=parent)
    try:
        return _below(descriptor) + _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _file(parent: int, name: str) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return 0  # a link or something else by now, or not ours to read
    try:
        return _allow(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _needed(found: os.stat_result) -> int:
    return 0o050 if stat.S_ISDIR(found.st_mode) else 0o040


def _shared(found: os.stat_result) -> bool:
    needed = _needed(found)
    return found.st_mode & needed == needed


def _allow(descriptor: int, found: os.stat_result) -> int:
    if _shared(found) or found.st_uid != os.getuid():
        return 0
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode) | _needed(found))
    return 1


@contextlib.contextmanager
def kept(directory: Path, *, wanted: bool, every_s: float = EVERY_S) -> Iterator[None]:
    """Share a run directory while the block runs, and a last time after it; do nothing where it is not wanted."""
    if not wanted:
        yield
        return
    ending = threading.Event()

    def work() -> None:
        last = False
        while not last:
            last = ending.wait(every_s)
            with contextlib.suppress(OSError):  # storage that is away: the next pass, or the next attempt's, finds it
                share_with_group(directory)

    thread = threading.Thread(target=work, name="sharing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(LAST_WITHIN_S)


# The ranks' logs of a run: those of failed launches and of the newest ones are kept.

FAILED_NAME = "failed"
ERRORS_NAME = "errors"  # directory: torch's error files, one a rank
STACKS_NAME = collectives.STACKS_DIRECTORY  # of ranks that stood still
KEPT_MAX = 20  # launches whose logs stay whether they failed or not
SUPERVISOR_NAME = "supervisor.jsonl"


def open_supervisors(attempt: Path) -> TextIO:
    """Open the supervisor's own lines of an attempt, as JSON: for programs, and where Slurm empties the job's log.

    Args:
        attempt: the directory of its logs.

    Raises:
        OSError: it cannot be written, or is a symbolic link.
    """
    attempt.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(attempt / SUPERVISOR_NAME, flags, 0o666), "a", encoding="utf-8", errors="replace")


def mark_failed(logs: Path, why: str) -> None:
    """Keep the logs of a launch for good.  Raises OSError."""
    (logs / FAILED_NAME).write_text(why + "\n", encoding="utf-8")


def prune_logs(logs: Path) -> None:
    """Remove the logs of launches that ended as intended, but for the newest ones.

    Raises:
        OSError: something could not be listed or removed.
    """
    launches = sorted(logs.glob("attempt-*/launch-*"), key=lambda path: (path.parent.name, path.name))
    for launch in launches[: max(0, len(launches) - KEPT_MAX)]:
        if not launch.is_symlink() and not (launch / FAILED_NAME).exists():
            shutil.rmtree(launch)
            if not any(launch.parent.iterdir()):
                launch.parent.rmdir()
