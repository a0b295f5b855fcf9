"""`submission.json` of the run directory: how the newest job of a run was submitted.

`submit` and `resume` write it as soon as Slurm has taken the job: from then on the job's number finds the run.  Where
the user's own sbatch has submitted the job, its supervisor writes it when it starts.  `resume` submits by it.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from stepkeeper.config.resolve import PASSED_ON
from stepkeeper.config.settings import VARIABLE_PREFIX
from stepkeeper.redaction import redact, redact_words
from stepkeeper.run_store import lines
from stepkeeper.slurm.launch import KEPT
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import open_plain, read_plain

NAME = "submission.json"
BYTES_MAX = 8 * 1024 * 1024  # Slurm's own bound on a batch script is 4 MiB
PROGRAM_VARIABLE = "STEPKEEPER"  # in our batch script: the program


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """How a job was submitted."""

    format: int = 1
    job: str  # as Slurm's commands name it: its number, or `ARRAY_TASK`
    at: float  # Unix seconds
    directory: str  # in which sbatch was called
    log: str = ""  # of the batch script, as Slurm shows it
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
        and not (name in PASSED_ON or name.startswith(KEPT))
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
        data = read_plain(run / NAME, BYTES_MAX, within=run)
    except (FileNotFoundError, PermissionError):
        return None
    found = lines.parsed(msgspec.json.Decoder(Submission), data)
    return found if found is not None and found.job.replace("_", "", 1).isdigit() else None


# `attempts/attempt-000/code.json`: what an attempt ran, so that a resume by other code is seen.
#
# A requeued job runs what stands on the disk then: a colleague's edit, or one's own, changes a run half-way.

CODE_NAME = "code.json"
FORMAT = 1
GIT_WITHIN_S = 10.0
UNTRACKED_MAX = 1000
FILE_BYTES_MAX = 16 * 1024 * 1024
_BLOCK = 1 << 20


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What a command runs, as far as it is known; empty where it is not."""

    format: int = FORMAT
    command: tuple[str, ...] = ()  # CMD, without secrets
    directory: str = ""  # of the git working tree
    commit: str = ""
    changes_xxh3: str = ""  # of what is not committed, new Python files included; empty where there is nothing
    scripts: dict[str, str] = {}  # files of the command line, with their digests
    unknown: str = ""  # why git did not say


def look_at_code(command: Sequence[str], directory: Path) -> Code:
    """Return what a command runs that starts in `directory`.  Never raises for what a disk or git does."""
    scripts = {
        word: digest for word in command if word.endswith((".py", ".sh")) and (digest := _digest(directory, word))
    }
    shown = tuple(redact_words(command))
    first = next(iter(scripts), "")
    beside = (directory / first).parent if first else directory
    try:
        top = _git(beside, "rev-parse", "--show-toplevel").strip()
        commit = _git(beside, "rev-parse", "HEAD").strip()
        changes = xxhash.xxh3_128()
        diff = _git(Path(top), "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--binary")
        changes.update(diff.encode(errors="surrogateescape"))
        new = list(_untracked(Path(top)))
        for name, digest in new:
            changes.update(f"{name}\0{digest}\0".encode(errors="surrogateescape"))
    except (OSError, subprocess.SubprocessError) as error:
        return Code(command=shown, scripts=scripts, unknown=_why(error))
    changed = changes.hexdigest() if diff or new else ""
    return Code(command=shown, directory=top, commit=commit, changes_xxh3=changed, scripts=scripts)


def code_differences(before: Code, now: Code) -> list[str]:
    """Return in words what is not the same; nothing where one of them is not known."""
    found = []
    if before.commit and now.commit and before.commit != now.commit:
        found.append(f"commit {before.commit[:12]} became {now.commit[:12]}")
    elif before.commit and now.commit and before.changes_xxh3 != now.changes_xxh3:
        found.append(f"uncommitted changes in {now.directory} are not the same")
    for script, digest in now.scripts.items():
        if before.scripts.get(script, digest) != digest:
            found.append(f"{script} has changed")
    return found


def write_code(run_directory: Path, attempt: int, code: Code) -> None:
    """Keep it beside the attempt's configuration, whose directory is there.

    Raises:
        OSError: it was not written.
    """
    path = _path(run_directory, attempt)
    write_atomically(path, msgspec.json.format(lines.encode(code), indent=1) + b"\n")


def newest_code_before(run_directory: Path, attempt: int) -> Code | None:
    """Return what the newest earlier attempt ran of which it is known."""
    found = (read_code(run_directory, number) for number in range(attempt - 1, -1, -1))
    return next((each for each in found if each is not None), None)


def read_code(run_directory: Path, attempt: int) -> Code | None:
    """Return what an attempt ran; None where it never got so far, or a newer version wrote the record."""
    try:
        data = read_plain(_path(run_directory, attempt), within=run_directory)
    except OSError:
        return None
    return lines.parsed(msgspec.json.Decoder(Code), data)


def _path(run_directory: Path, attempt: int) -> Path:
    return run_directory / "attempts" / f"attempt-{attempt:03d}" / CODE_NAME


def _digest(directory: Path, word: str) -> str:
    digest = xxhash.xxh3_128()
    try:
        with open_plain(directory / word) as file:
            left = FILE_BYTES_MAX
            while left > 0 and (block := file.read(min(_BLOCK, left))):
                digest.update(block)
                left -= len(block)
    except OSError:
        return ""  # not a file of this node: an option that looks like one, or a path inside a container
    return digest.hexdigest()


def _untracked(top: Path) -> Iterator[tuple[str, str]]:
    names = _git(top, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py").split("\0")
    for name in names[:UNTRACKED_MAX]:
        if name:
            yield name, _digest(top, name)


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=directory,
        capture_output=True,
        timeout=GIT_WITHIN_S,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        start_new_session=True,
    )
    return done.stdout.decode(errors="surrogateescape")


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip().splitlines()
        fatal = [line for line in said if line.startswith("fatal: ")]  # advice may follow
        return (fatal or said)[-1][:200] if said else f"git: exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not answer in {GIT_WITHIN_S:g} s"
    return f"git: {error}"
