"""A run directory -> its timeline.  All I/O for it is here."""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepkeeper.config import resolve
from stepkeeper.run_analytics import history, model, timeline
from stepkeeper.run_analytics.model import Incident, Key, Rows, micro
from stepkeeper.run_analytics.nodes import Nodes
from stepkeeper.run_analytics.timeline import OnDisk, Timeline
from stepkeeper.run_store import journal, lease, lines, submission
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.plain import open_plain
from stepkeeper_trainer.formats.verify import Cache, look_again

LINES_BACK_MAX = 1_500  # of the journal, for a quick look
LOOK_AGAIN_S = 300.0  # at the files of a step directory that has not changed


def see(run: RunDirectory, *, now: float | None = None) -> Timeline:
    """Read everything that a run has written.  What is missing says nothing; what is torn is passed over.

    Args:
        run: the run directory.
        now: Unix seconds, to distinguish a silent run from a running one; the clock's by default.

    Raises:
        OSError: a file is there and cannot be read.
    """
    return Reader(run).see(now=now)


def rows(run: RunDirectory, newest: int | None = None) -> dict[Key, Rows]:
    """Return the completed steps by launch, oldest first: all, or so many of the newest.

    Raises:
        OSError: they are there and cannot be read.
    """
    table = model.RowTable()
    try:
        with open_plain(run.metrics, within=run.path) as file:
            found = lines.forwards(file)
            if newest is not None:
                found = reversed(list(itertools.islice(lines.backwards(file), newest)))
            for line in found:
                table.take(line)
    except FileNotFoundError:
        pass  # no step was completed yet
    return table.rows


class Reader:
    """Reads a run again and again.  Of journal and metrics, each look takes what they got since the look before."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._journal = lines.Growing(run.journal)
        self._metrics = lines.Growing(run.metrics)
        self._builder = history.HistoryBuilder()
        self._table = model.RowTable()
        self._looked_at: dict[str, _LookedAt] = {}
        self.nodes = Nodes()

    def see(self, *, now: float | None = None) -> Timeline:
        """Return the timeline up to now.

        Raises:
            OSError: a file is there and cannot be read.
        """
        with self._journal.look() as (another, found):
            if another:
                self._builder, self.nodes = history.HistoryBuilder(), Nodes()
            for line in found:
                if (record := journal.decode(line)) is not None:
                    self._builder.take(record)
                    self.nodes.take(record)
        with self._metrics.look() as (another, found):
            if another:
                self._table = model.RowTable()
            for line in found:
                self._table.take(line)
        said = self._builder.history()
        _add_rescues(self._run, said)
        checkpoints = self._run.checkpoints
        disk = on_disk(checkpoints, self._looked_at)
        for name, path in said.elsewhere.items():
            if (there := look_elsewhere(Path(path))) is not None:
                disk.setdefault(name, there)
        status = status_file.known(self._run.status)  # one that is none says nothing; the journal counts
        return timeline.build(
            said,
            self._table.rows,
            timeline.checkpoints(said, lineages.read(checkpoints), disk),
            updated_at=micro(status_file.heard_at(status)) if status is not None else None,
            now=micro(time.time() if now is None else now),
        )


class _LookedAt(NamedTuple):
    """A step directory, as it was when its files were looked at."""

    inode: int
    changed_ns: int
    until: float  # of the monotonic clock: then they are looked at again
    found: OnDisk


def on_disk(checkpoints_directory: Path, known: dict[str, _LookedAt] | None = None) -> dict[str, OnDisk]:
    """Look at the step directories, by name: names and sizes of files, and what is known of their bytes.

    Args:
        checkpoints_directory: where they are.
        known: what earlier looks found; it is kept up to date.  A directory of it whose entries have not changed is
            looked at again after minutes only: of one with the files of 512 ranks, a look takes 512 calls.

    Raises:
        OSError: they cannot be listed.
    """
    known = {} if known is None else known
    cache = Cache(checkpoints_directory)
    found: dict[str, _LookedAt] = {}
    for entry in steps.entries(checkpoints_directory):
        before = known.get(entry.name)
        at = time.monotonic()
        status = entry.stat(follow_symlinks=False)
        same = before is not None and (before.inode, before.changed_ns) == (status.st_ino, status.st_mtime_ns)
        if before is None or not same or at >= before.until:
            path = checkpoints_directory / entry.name
            opened, _ = look(steps.open_step(path, within=checkpoints_directory), cache)
            before = _LookedAt(status.st_ino, status.st_mtime_ns, at + LOOK_AGAIN_S, opened)
        found[entry.name] = before
    known.clear()
    known.update(found)
    return {name: each.found for name, each in found.items()}


def look(entry: steps.StepDirectory, cache: Cache) -> tuple[OnDisk, tuple[str, ...]]:
    """Look at one step directory; return it with all that is wrong with it."""
    problems: tuple[str, ...]
    problems, verified = (entry.problem or "no manifest",), False
    if entry.manifest is not None:
        problems, verified = look_again(entry.path, cache)
    found = OnDisk(
        step=entry.step,
        save_id=entry.manifest.save_id if entry.manifest is not None else "",
        problem=problems[0] if problems else "",
        verified=verified,
        changed_at=_changed_at(entry.path),
    )
    return found, problems


def look_elsewhere(path: Path) -> OnDisk | None:
    """Look at the checkpoint of a framework, a directory or a file: only whether it is there, and since when."""
    try:
        changed_at = os.stat(path).st_mtime
    except OSError:
        return None
    return OnDisk(step=0, changed_at=max(changed_at, _changed_at(path)))


def condition_of(directory: Path, run: RunDirectory) -> str:
    """Return one of the three words for a checkpoint of a run, by a look at it and the end of the journal.

    One that is not there any more is `gone`.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    in_run = directory.parent == run.checkpoints
    there = look_elsewhere(directory)
    if there is None or (in_run and not directory.is_dir()):
        return "gone"
    newest = journal.read_lines(run.journal, newest_first=True)
    records = [line.record for line in itertools.islice(newest, LINES_BACK_MAX) if line.record is not None]
    if in_run:
        there, _ = look(steps.open_step(directory), Cache(directory.parent))
    problem, verified = timeline.judged(directory.name, history.read_history(reversed(records)), there)
    return timeline.condition(problem, verified=verified)


def _changed_at(directory: Path) -> float:
    """Return when a file of a step directory was written last; not its ctime, which a link to it changes too."""
    try:
        with os.scandir(directory) as entries:
            return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)
    except OSError:
        return 0.0  # what is wrong there is reported as its problem


def _add_rescues(run: RunDirectory, said: history.History) -> None:
    """Say of attempts that ended without a final record who requeued them."""
    attempts = {(attempt.job_id, attempt.restart_count): attempt for attempt in said.attempts}
    for rescue in lease.read_rescues(run.path):
        attempt = attempts.get((rescue.job_id, rescue.restart_count))
        if attempt is None or attempt.said_end:
            continue
        decided = f"requeued by the watcher on {rescue.node}"
        launch = attempt.launches[-1] if attempt.launches else None
        if launch is not None:
            launch.decided = decided  # whatever was decided before, nobody was left to do it
        said.incidents.found.append(
            Incident(
                at=micro(rescue.at),
                attempt=attempt.number,
                launch=launch.number if launch is not None else None,
                kind="supervisor lost",
                what="it was killed, or its node was lost",
                decided=decided,
                node=rescue.node,
            )
        )
    said.incidents.found.sort(key=lambda each: each.at)


# With what each attempt was started: its command line, code and settings, from the records in `attempts/`.

COMMIT_CHARACTERS = 12


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What was the same for one or more attempts in a row."""

    first: int  # attempt
    last: int
    command: tuple[str, ...] = ()
    commit: str = ""
    changed: bool = False  # besides the commit, what is not committed ran too
    directory: str = ""  # of the git working tree
    unknown: str = ""  # why git did not say
    scripts: dict[str, str] = {}  # files of the command line, with their digests
    stepkeeper: str = ""  # its version
    settings: dict[str, str] = {}  # those that are not the defaults

    @property
    def command_line(self) -> str:
        """The command as one types it."""
        return shlex.join(self.command)

    @property
    def code(self) -> str:
        """Say in words which code ran."""
        if self.commit:
            changed = ", with changes that are not committed" if self.changed else ""
            return f"commit {self.commit[:COMMIT_CHARACTERS]}{changed}, in {self.directory}"
        named = ", ".join(f"{path} (xxh3 {digest[:COMMIT_CHARACTERS]})" for path, digest in self.scripts.items())
        return named or "not known" + (f": {self.unknown}" if self.unknown else "")


def read(run: RunDirectory, attempts: Iterable[int]) -> list[Started]:
    """Return what is recorded, oldest first; attempts that were started alike stand together."""
    found: list[Started] = []
    digest = ""
    for attempt in sorted(set(attempts)):
        ran, by = submission.read_code(run.path, attempt), resolve.read_record(run.path, attempt)
        if ran is None and not by.stepkeeper:
            continue
        ran = ran or submission.Code()
        one = Started(
            first=attempt,
            last=attempt,
            command=ran.command,
            commit=ran.commit,
            changed=bool(ran.changes_xxh3),
            directory=ran.directory,
            unknown=ran.unknown,
            scripts=ran.scripts,
            stepkeeper=by.stepkeeper,
            settings=by.chosen(),
        )
        if (
            found
            and digest == ran.changes_xxh3
            and msgspec.structs.replace(found[-1], first=attempt, last=attempt) == one
        ):
            found[-1] = msgspec.structs.replace(found[-1], last=attempt)
        else:
            found.append(one)
        digest = ran.changes_xxh3
    return found
