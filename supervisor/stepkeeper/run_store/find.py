"""Finding a run: by its directory, by its job id, or by where one stands."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import NotFoundError, StepkeeperError
from stepkeeper.run_store import lines, submission
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lease
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.lineage import LINEAGE_NAME
from stepkeeper_trainer.formats.manifest import parse_step_name, step_name
from stepkeeper_trainer.formats.plain import open_plain, trusts

# Which jobs have worked on a run: of a chain of jobs, status and lease name the newest one only, the journal all.

_JOB_ID = re.compile(rb'\{"v":[0-9]+,"job_id":([0-9]+),')
LOOKED_AT = 100  # lines at either end, of which some may be torn


def worked_on(run: Path, job_id: int) -> bool:
    """Tell whether a run's journal names a job as one of its own; one that cannot be read names none.

    Slurm's numbers grow until they begin anew, so the ends of a journal are enough for nearly every run; only that of
    a chain which may hold the number is read whole.
    """
    try:
        with open_plain(RunDirectory(run).journal, within=run) as file:
            newest = _first(itertools.islice(lines.backwards(file), LOOKED_AT))
            file.seek(0)
            oldest = _first(itertools.islice(lines.forwards(file), LOOKED_AT))
            if oldest is None or newest is None or (oldest <= newest and not oldest <= job_id <= newest):
                return False
            if job_id in (oldest, newest):
                return True
            file.seek(0)
            return any(_job_of(line) == job_id for line in lines.forwards(file))
    except OSError:
        return False


def _first(some: Iterable[bytes]) -> int | None:
    return next((job for line in some if (job := _job_of(line)) is not None), None)


def _job_of(line: bytes) -> int | None:
    match = _JOB_ID.match(line)
    return int(match.group(1)) if match else None


RUNS_NAME = "runs"
JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")  # Slurm counts in 32 bits; `ARRAY_TASK` is one task's name
_DIRECTORIES = ("checkpoints", "logs", "attempts")
_PARTS = ("status.json", "journal.jsonl", lease.LEASE_NAME, "checkpoints", submission.NAME)


def find(wanted: str | None, environment: Mapping[str, str]) -> RunDirectory:
    """Return the run that is meant.

    Args:
        wanted: a run directory or a job id; None for the run here: the working directory, else
            `STEPKEEPER_RUN_DIR`, else the newest one below `runs/`.
        environment: where `STEPKEEPER_RUN_DIR` may stand.

    Raises:
        StepkeeperError: there is none; it says where was looked.
        OSError: a directory cannot be read.
    """
    if wanted is None:
        return _safe(_here(environment))
    path = Path(wanted)
    if path.is_dir():
        return _safe(_at(path))
    if JOB.fullmatch(wanted):
        return _safe(_of_job(wanted, environment))
    what = "not a directory" if path.exists() else "no such directory, and no job id"
    raise NotFoundError(f"{wanted}: {what}; RUN is a run directory or the number of a job")


def is_job(wanted: str) -> bool:
    """Tell whether RUN is the number of a job, and no directory of that name."""
    return JOB.fullmatch(wanted) is not None and not Path(wanted).is_dir()


def _safe(run: RunDirectory) -> RunDirectory:
    """Refuse a run whose parts lead elsewhere, or are a stranger's: a reader, root too, goes by what is in them.

    Raises:
        StepkeeperError: which part, and why.
        OSError: it cannot be looked at.
    """
    owner = os.stat(run.path).st_uid
    for name in _DIRECTORIES:
        path = run.path / name
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            _require_own_link(path, found)
        if not trusts(owner, found.st_uid):
            raise StepkeeperError(
                f"{path}: belongs to user id {found.st_uid}, and the run to {owner}: somebody may have planted it",
                ExitCode.RUN_DIRECTORY,
            )
    return run


def every(environment: Mapping[str, str]) -> list[RunDirectory]:
    """Return all runs that can be found: below `runs/`, and those that this account has started; the newest first.

    Raises:
        OSError: `runs/` cannot be read.
    """
    found = {resolved(path) for path in (*_runs_below(), *registered(environment)) if is_run(path)}
    return [RunDirectory(path) for path in sorted(found, key=_changed_at, reverse=True)]


def is_here(environment: Mapping[str, str]) -> bool:
    """Tell whether one stands in a run directory, or STEPKEEPER_RUN_DIR names one."""
    named = environment.get("STEPKEEPER_RUN_DIR", "")
    return is_run(Path()) or bool(named and "%" not in named and is_run(Path(named)))


def checkpoints(wanted: str, environment: Mapping[str, str]) -> Path:
    """Return the `checkpoints/` directory that is meant: itself, a run directory's, or a job's.

    Raises:
        StepkeeperError: there is none.
        OSError: a directory cannot be read.
    """
    path = Path(wanted)
    if path.is_dir() and not is_run(path):
        names = os.listdir(path)
        if path.name == "checkpoints" or LINEAGE_NAME in names or any(map(_is_step, names)):
            return _followed(path)
        raise NotFoundError(
            f"{wanted}: neither a run directory nor one with step directories; name a run directory or its checkpoints/"
        )
    return resolved(find(wanted, environment).checkpoints)


def step_directory(wanted: str) -> Path:
    """Return the step directory that is meant; it may be missing.

    Raises:
        StepkeeperError: it is no directory, or a link in a run leads to it that is not ours.
    """
    path = Path(wanted)
    if not path.is_dir():
        what = "not a directory" if os.path.lexists(path) else "no such directory"
        raise NotFoundError(f"{wanted}: {what}; name a step directory, such as RUN/checkpoints/{step_name(100)}")
    return _followed(path)


def resolved(path: Path) -> Path:
    """Return a path without links; one that leads nowhere stays."""
    return Path(os.path.realpath(path))


def _followed(path: Path) -> Path:
    """Return what a path leads to.  A writer of the run could have planted a link in it, so only ours are followed.

    Raises:
        StepkeeperError: which link is somebody else's.
    """
    for each in (path, path.parent):
        if (each.name == "checkpoints" or _is_step(each.name)) and each.is_symlink():
            _require_own_link(each, os.lstat(each))
    return resolved(path)


def _require_own_link(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise StepkeeperError(
            f"{path}: is a symbolic link of user id {found.st_uid}, which is not followed; name what it leads to",
            ExitCode.RUN_DIRECTORY,
        )


def _is_step(name: str) -> bool:
    return parse_step_name(name) is not None


def is_run(path: Path) -> bool:
    """Tell whether a directory has a part of a run."""
    return any((path / part).exists() for part in _PARTS)


def _at(path: Path) -> RunDirectory:
    if not is_run(path):
        raise NotFoundError(f"{path}: not a run directory: it has none of {', '.join(_PARTS)}")
    return RunDirectory(resolved(path))


def _here(environment: Mapping[str, str]) -> RunDirectory:
    if is_run(Path()):
        return RunDirectory(Path.cwd())
    named = environment.get("STEPKEEPER_RUN_DIR", "")
    if named and "%" not in named and is_run(Path(named)):
        return RunDirectory(resolved(Path(named)))
    if runs := [run for run in _runs_below() if is_run(run)]:
        return RunDirectory(resolved(max(runs, key=_changed_at)))
    searched = ["the working directory", f"{RUNS_NAME}/ in it"]
    if named:
        searched.insert(1, f"STEPKEEPER_RUN_DIR ({named})")
    raise NotFoundError(f"no run found; searched {', '.join(searched)}; name a run directory or a job id")


def _of_job(job: str, environment: Mapping[str, str]) -> RunDirectory:
    """Return the run that a job works on: one that says so itself outweighs one that is named after it."""
    below = _runs_below()
    named = environment.get("STEPKEEPER_RUN_DIR", "")
    meant = _expanded(named, job)
    candidates = [*meant, *below, *registered(environment)]
    saying = [run for run in candidates if job in _jobs(run)]
    if not saying and job.isdigit():
        saying = [run for run in candidates if worked_on(run, int(job))]
    called = [run for run in candidates if run.name.endswith(f"-{job}") and is_run(run)]
    if found := saying or called or [run for run in meant if is_run(run)]:
        return RunDirectory(resolved(max(found, key=_changed_at)))
    searched = [
        f"{RUNS_NAME}/*-{job}",
        f"the job ids in {RUNS_NAME}/*/status.json and journal.jsonl ({len(below)} runs)",
        "the runs that this account has started",
    ]
    if named:
        searched.insert(0, f"STEPKEEPER_RUN_DIR ({named})")
    raise NotFoundError(
        f"job {job}: no run directory found below {Path.cwd()}; searched {', '.join(searched)}; "
        f"go to the submit directory, or name the run directory; `squeue -j {job}` shows whether it waits in the queue"
    )


def _expanded(named: str, job: str) -> list[Path]:
    """Return what STEPKEEPER_RUN_DIR can stand for; of its fields, only those of the job's name are known here."""
    if not named:
        return []
    array, _, task = job.partition("_")
    path = Path(named.replace("%A", array).replace(*(("%a", task) if task else ("%j", job))))
    return [path] if "%" not in str(path) and path.is_dir() else []


def _runs_below() -> list[Path]:
    try:
        with os.scandir(RUNS_NAME) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_at(run: Path) -> float:
    times = [0.0]
    for part in _PARTS:
        try:
            times.append((run / part).stat().st_mtime)
        except OSError:
            continue  # not every run has every part
    return max(times)


def _jobs(run: Path) -> set[str]:
    """Return the jobs that a run names as its own; what cannot be read names none."""
    jobs: set[str] = set()
    try:
        status = status_file.read(run / "status.json")
        held = lease.read(run)
        submitted = submission.read(run)
    except (OSError, msgspec.MsgspecError, lease.LeaseError):
        return jobs
    if status is not None:
        jobs |= {str(status.job_id), status.slurm_name or str(status.job_id)}
    if held is not None:
        jobs.add(str(held.job_id))
    if submitted is not None:
        jobs.add(submitted.job)
    return jobs


# Where this user's runs are, so that a job id finds its run from anywhere: one small file a run, below the home.
#
# A help for people, and nothing depends on it: a home that cannot be written costs the help, never a run.

REGISTERED_MAX = 200
PATH_BYTES_MAX = 4096


def registry(environment: Mapping[str, str]) -> Path | None:
    """Return the directory of these files; None where this user has no home."""
    state = environment.get("XDG_STATE_HOME", "")
    home = environment.get("HOME", "")
    if os.path.isabs(state):
        return Path(state, "stepkeeper", "runs")
    return Path(home, ".local", "state", "stepkeeper", "runs") if os.path.isabs(home) else None


def remember(run: Path, environment: Mapping[str, str]) -> None:
    """Note a run directory, and forget those that are gone or too many.

    Raises:
        OSError: the home cannot be written.
    """
    directory = registry(environment)
    if directory is None:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(run)).hexdigest()[:16]
    write_atomically(directory / name, os.fsencode(run))
    for file in _newest_first(directory)[REGISTERED_MAX:]:
        file.unlink(missing_ok=True)


def registered(environment: Mapping[str, str]) -> list[Path]:
    """Return the run directories that are still there, the newest first."""
    directory = registry(environment)
    if directory is None:
        return []
    try:
        files = _newest_first(directory)
    except OSError:
        return []  # nothing was ever noted, or the home is away
    found = []
    for file in files[:REGISTERED_MAX]:
        try:
            path = Path(os.fsdecode(file.read_bytes()[:PATH_BYTES_MAX]))
            if path.is_absolute() and path.is_dir():
                found.append(path)
        except (OSError, ValueError):
            continue  # removed meanwhile, or not a path
    return found


def _newest_first(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        files = [(entry.stat().st_mtime, entry.path) for entry in entries if not entry.name.startswith(".")]
    return [Path(path) for _, path in sorted(files, reverse=True)]
