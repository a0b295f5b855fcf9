"""The checkpoints of the script's own framework: choosing one, its resume arguments, and the end of the training.

Another process reads them (`stepkeeper.frameworks.asking`).  Where that fails, the log says so, and the script starts
as its command says: no checkpoint of anybody's ends the supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.frameworks import converting
from stepkeeper.frameworks.asking import Answer, Newest, Question, Repair, Seen
from stepkeeper.frameworks.choosing import Launched
from stepkeeper.frameworks.following import Following
from stepkeeper.frameworks.framework import WorldChange
from stepkeeper.isolation import flags
from stepkeeper.log import Log
from stepkeeper.run_store import lease
from stepkeeper.run_store.lines import parsed
from stepkeeper.slurm.launch import without_python
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper_trainer.formats.durable import append_line
from stepkeeper_trainer.formats.lease import Lease, LeaseError
from stepkeeper_trainer.formats.plain import open_descriptor

LOOK_EVERY_S = 0.25
END_WITHIN_S = 30.0
REPAIR_WITHIN_S = 120.0  # what was verified just now is not read again
READ_WITHIN_S = 1200.0  # two of them end well before the choice counts as late
REAP_WITHIN_S = 5.0
PROBLEM_CHARACTERS_MAX = 500
NAMED_MAX = 5
_ASKING, _CONVERTING = "stepkeeper.frameworks.asking", "stepkeeper.frameworks.converting"
_DEPTHS = (True, False)  # of a choice: whether bytes are read
_NEXT = {
    True: "the newest checkpoint that is whole by its names and sizes counts",
    False: "the script starts as its command says",
}  # where a reading of one depth fails
_SAME_WORLD = "resumes from a checkpoint on as many ranks as saved it: start as many, or name an older checkpoint"
_WORLD_CHANGED = {
    "deepspeed": "DeepSpeed resumes from a ZeRO checkpoint on as many ranks as saved it: start as many, or set "
    "--attach auto, by which it is converted; where it is not (pipelines, tensor parallel ranks, experts), convert it "
    "(`stepkeeper checkpoints export --to universal`) and have the script load the Universal Checkpoint",
}


class End(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoints show of the end of a launch."""

    finished: bool = False
    step: int | None = None  # of the newest whole checkpoint
    target: int | None = None  # the last step, where exit code 0 before it is no end
    unproven: bool = False  # exit code 0 alone is no end, and nothing shows one


class ForeignError(Exception):
    """The checkpoints could not be judged."""


class ForeignCheckpoints:
    """The checkpoints of one attempt's script."""

    def __init__(
        self,
        following: Following,
        environment: Mapping[str, str],
        *,
        run_directory: Path,
        bytes_per_s: float | None,
        inbox: Inbox,
        log: Log,
        repairs: Lease | None = None,
        command: Sequence[str] = (),
        attached: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            following: the framework, and where its checkpoints are.
            environment: of the supervisor.
            run_directory: where it is noted what checkpoints do not say.
            bytes_per_s: of a verification, at most; None: no limit.
            inbox: where events go.
            log: of the supervisor.
            repairs: by which the framework's pointer files may be rewritten; None: they are left alone.
            command: CMD, which shows the Python of the training.
            attached: the ranks attach to the framework, and load what was chosen.
        """
        self._following = following
        self._environment = without_python(environment)
        self._run_directory = run_directory
        self._repairs = repairs
        self._command = command
        self._loads_converted = attached or following.converted
        self._python: str | None = None  # with the framework's own tool for conversions; empty: there is none
        self._bytes_per_s = bytes_per_s
        self._inbox = inbox
        self._log = log
        self._lock = threading.Lock()
        self._chosen: dict[str, Newest] = {}  # by directory
        self._target: int | None = None  # of the last choice
        self._left_out: tuple[Seen, ...] | None = None  # since training went back; None: not read yet
        self._passed: tuple[Seen, ...] | None = ()  # by the last choice; None: it read nothing

    # --- called by the loop -----------------------------------------------------------------------

    def has_chosen(self, directory: str | None) -> bool:
        """Tell whether a checkpoint is one of these."""
        with self._lock:
            return directory in self._chosen

    def arguments(self, directory: str | None) -> tuple[str, ...] | None:
        """Return the resume arguments of a checkpoint; None where it is none of these."""
        with self._lock:
            newest = self._chosen.get(directory or "")
        return None if newest is None else self._following.arguments(newest)

    def say_world(self, directory: str | None, ranks: int) -> None:
        """Warn where a checkpoint cannot be resumed on so many ranks."""
        with self._lock:
            newest = self._chosen.get(directory or "")
        if newest is None or newest.world_change is not WorldChange.NO or newest.ranks in (None, ranks):
            return
        if self._python and converting.convertible(Path(newest.directory)):
            return  # `convert` says what it does
        self._log.warning(
            "framework_world_changed",
            checkpoint=newest.directory,
            saved_by=newest.ranks,
            ranks=ranks,
            why=_WORLD_CHANGED.get(self._following.framework, f"{self._following.title} {_SAME_WORLD}"),
        )

    def roll_back(self, effect: do.RollBack) -> None:
        """Leave out what is not older than a step, as long as it is not written anew; `RolledBack` comes."""

        def failed(error: str) -> on.RolledBack:
            return on.RolledBack(at=self._inbox.clock.now(), launch=effect.launch, error=error)

        def act() -> on.RolledBack:
            answer = self._ask(self._question(below_step=effect.below_step))
            if answer.newest is None:
                title = self._following.title
                return failed(f"no verified checkpoint of {title} is older than step {effect.below_step}")
            self._leave_out(answer.left_out)
            with self._lock:
                self._passed = answer.passed_seen
            found = self._remember(answer.newest)
            return on.RolledBack(
                at=self._inbox.clock.now(), launch=effect.launch, directory=found.directory, step=found.step
            )

        self._inbox.ask(Part.ROLL_BACK, act, failed, expected=(ForeignError,))

    # --- called on other threads ------------------------------------------------------------------

    def note_launch(self, attempt: int, launch: int, ranks: int | None) -> None:
        """Note how many ranks a launch has that begins: most frameworks do not write that into a checkpoint."""
        self._note(WORLDS_NAME, World(at=time.time(), attempt=attempt, launch=launch, ranks=ranks))

    def convert(self, directory: str | None, ranks: int | None, is_old: Callable[[], bool]) -> str | None:
        """Return the checkpoint that a launch of so many ranks resumes from: a conversion, where it needs one.

        Raises:
            ForeignError: it needs one, and there is none.
        """
        with self._lock:
            newest = self._chosen.get(directory or "")
        if newest is None or ranks is None or ranks == newest.ranks or not self._converts(newest):
            return directory
        wanted = converting.Conversion(source=newest.directory, python=self._python or "")
        began = time.monotonic()
        try:
            data = self._call(_CONVERTING, msgspec.json.encode(wanted), is_old=is_old, within_s=READ_WITHIN_S)
        except ForeignError as error:
            why = f"{newest.directory} cannot be converted for {ranks} ranks: {error}"
            self._log.error("checkpoint_not_converted", checkpoint=newest.directory, ranks=ranks, error=str(error))
            raise ForeignError(why) from error
        made = msgspec.json.decode(data, type=converting.Converted)
        self._log.info(
            "checkpoint_converted",
            checkpoint=newest.directory,
            saved_by=newest.ranks,
            ranks=ranks,
            resumes_from=made.directory,
            made="now" if made.made else "by an earlier launch",
            seconds=round(time.monotonic() - began, 1),
        )
        with self._lock:
            self._chosen[made.directory] = msgspec.structs.replace(
                newest, directory=made.directory, converted=True, world_change=WorldChange.YES
            )
        return made.directory

    def _converts(self, newest: Newest) -> bool:
        """Tell whether a checkpoint that only as many ranks as saved it can resume is converted for others."""
        if newest.world_change is not WorldChange.NO or newest.ranks is None:
            return False
        return converting.convertible(Path(newest.directory)) and self._can_convert()

    def _can_convert(self) -> bool:
        """Tell whether the ranks load conversions, and their Python has the tool that makes them."""
        if not self._loads_converted or self._following.framework != converting.FRAMEWORK:
            return False
        if self._python is None:
            python = converting.python_of(self._command, self._environment)
            self._python = python if converting.has_tool(python, self._environment) else ""
        return bool(self._python)

    def repair(self, directory: str | None, is_old: Callable[[], bool]) -> None:
        """Have the framework's pointer files name the checkpoint that a launch resumes from.

        All processes of the launch before are gone, and so none writes there.  Whatever fails: the launch begins.
        """
        if self._repairs is None or directory is None or not self.has_chosen(directory):
            return
        question = msgspec.structs.replace(self._question(), repair=Repair(directory=directory))
        try:
            if lease.superseded(self._run_directory, self._repairs) is not None:
                return  # another attempt has the run: its files are not ours
            pointed = self._ask(question, is_old=is_old, within_s=REPAIR_WITHIN_S).pointed
        except (ForeignError, OSError, LeaseError) as error:
            self._log.warning("pointers_not_repaired", directory=str(self._following.directory), error=str(error))
            return
        for each in pointed:
            if each.error:
                self._log.warning(
                    "pointer_not_repaired", file=each.file, named=each.named, names=each.names, error=each.error
                )
            else:
                self._log.info("pointer_repaired", file=each.file, named=each.named, names=each.names)

    def choose(self, is_old: Callable[[], bool]) -> on.CheckpointChosen:
        """Return the newest verified checkpoint; where reading them fails, the newest whole one; else none."""
        began = time.monotonic()
        failed: list[on.Skipped] = []
        for deep in _DEPTHS:
            try:
                answer = self._ask(self._question(deep=deep), is_old=is_old, within_s=READ_WITHIN_S)
                if answer.newest is None and self._forget_left_out():  # better than the beginning
                    answer = self._ask(self._question(deep=deep), is_old=is_old, within_s=READ_WITHIN_S)
                break
            except ForeignError as error:
                problem = f"{'verification' if deep else 'judging'} failed: {error}"[:PROBLEM_CHARACTERS_MAX]
                failed.append(on.Skipped(directory=str(self._following.directory), problem=problem))
                if not is_old():
                    self._log.warning(
                        "framework_checkpoints_not_read",
                        directory=str(self._following.directory),
                        error=problem,
                        instead=_NEXT[deep],
                    )
        else:
            answer = Answer()
        with self._lock:
            self._passed = answer.passed_seen if len(failed) < len(_DEPTHS) else None
        newest = None if answer.newest is None else self._remember(answer.newest)
        passed = [
            on.Skipped(directory=each.name, problem=each.problem[:PROBLEM_CHARACTERS_MAX]) for each in answer.passed
        ]
        return on.CheckpointChosen(
            at=self._inbox.clock.now(),
            directory=newest.directory if newest is not None else None,
            step=newest.step if newest is not None else None,
            skipped=(*failed, *passed),
            bytes_read=newest.bytes_read if newest is not None else 0,
            seconds=time.monotonic() - began,
            same_world=(newest or self._following).world_change is WorldChange.NO
            and not (self._can_convert() if newest is None else self._converts(newest)),
        )

    def end(self, code: int, *, resumed_from: str | None) -> End:
        """Return whether a launch that ended has reached the last step of its training.

        Args:
            code: of srun.
            resumed_from: a checkpoint that it has not written itself says nothing, nor does one that the choice
                passed over and that has not changed since.
        """
        following = self._following
        with self._lock:
            passed = self._passed
        question = self._question(deep=False)
        question = msgspec.structs.replace(question, by_name=True, left_out=(*question.left_out, *(passed or ())))
        try:
            answer = self._ask(question, within_s=END_WITHIN_S)
        except ForeignError as error:
            self._log.warning("framework_checkpoints_not_read", directory=str(following.directory), error=str(error))
            if code or not following.ends_at_target:
                return End()
            ends_at = self._known_target()
            return End(target=ends_at, unproven=ends_at is None)
        newest = answer.newest
        step = newest.step if newest is not None else None
        target = following.target or (newest.target if newest is not None else None)
        wrote = newest is not None and newest.directory != resumed_from and passed is not None
        reached = following.target is None or (step is not None and step >= following.target)
        known = following.target is not None or (newest is not None and newest.finished)
        if newest is not None and known and wrote and reached:
            if code:
                self.say_failed_later(step, code)
            return End(finished=True, step=step)
        last = self._last_of_model(answer)
        if last is not None and passed is not None:
            if code:
                self.say_failed_later(last, code)
            return End(finished=True, step=last)
        if not code and target is None and step is None:
            return End(unproven=following.ends_at_target)
        if code or target is None or (step or 0) >= target:
            return End(step=step)
        if following.ends_at_target:
            return End(step=step, target=target)
        self._log.warning("ended_before_target", step=step, target=target)
        return End(step=step)

    def say_failed_later(self, step: int | None, code: int) -> None:
        """Warn that training has finished, and the script has failed since."""
        self._log.warning("failed_after_last_step", step=step, code=code)

    def _last_of_model(self, answer: Answer) -> int | None:
        """Return the last step, where its checkpoint is whole and holds the model alone: nobody resumes from it."""
        target = self._following.target
        steps = [each.step for each in answer.passed if each.whole and each.step is not None]
        return max((step for step in steps if target is not None and step >= target), default=None)

    def _known_target(self) -> int | None:
        with self._lock:
            return self._following.target or self._target

    def _remember(self, newest: Newest) -> Newest:
        with self._lock:
            self._target = newest.target
            self._chosen[newest.directory] = newest
        return newest

    def _question(self, *, deep: bool = True, below_step: int | None = None) -> Question:
        return Question(
            framework=self._following.framework,
            root=str(self._following.directory),
            patterns=self._following.patterns,
            deep=deep,
            bytes_per_s=self._bytes_per_s,
            below_step=below_step,
            left_out=self._all_left_out(),
            converted=self._following.converted,
            launched=self._launched(),
        )

    def _launched(self) -> tuple[Launched, ...]:
        worlds = self._read(WORLDS_NAME, World) or ()
        return tuple(Launched(at=each.at, ranks=each.ranks) for each in sorted(worlds, key=lambda world: world.at))

    def _all_left_out(self) -> tuple[Seen, ...]:
        with self._lock:
            left_out = self._left_out
        if left_out is None:  # the loop does not wait for the storage
            left_out = self._read(LEFT_OUT_NAME, Seen)
            with self._lock:
                self._left_out = left_out  # None: it is read again, when the storage answers
        return left_out or ()

    def _leave_out(self, more: tuple[Seen, ...]) -> None:
        """Leave out further checkpoints, in later attempts too."""
        before = self._all_left_out()
        new = tuple(each for each in more if each not in before)
        with self._lock:
            self._left_out = before + new
        for each in new:
            self._note(LEFT_OUT_NAME, each)

    def _forget_left_out(self) -> bool:
        """Let those that are left out count again in this attempt; False: there are none."""
        left_out = self._all_left_out()
        if not left_out:
            return False
        names = [each.directory for each in left_out[:NAMED_MAX]]
        self._log.warning("left_out_used_again", checkpoints=names, why="no older checkpoint is whole")
        with self._lock:
            self._left_out = ()
        return True

    def _note(self, name: str, line: msgspec.Struct) -> None:
        try:
            append_line(self._run_directory / name, msgspec.json.encode(line))
        except OSError as error:
            self._log.warning("note_not_written", file=name, error=f"{error.filename}: {error.strerror}")

    def _read(self, name: str, kind: type[Line]) -> tuple[Line, ...] | None:
        try:
            return read_lines(self._run_directory, name, kind)
        except OSError as error:
            self._log.warning("notes_not_read", file=name, error=f"{error.filename}: {error.strerror}")
            return None

    def _ask(
        self, question: Question, *, is_old: Callable[[], bool] = lambda: False, within_s: float | None = None
    ) -> Answer:
        """Have another process answer.

        Raises:
            ForeignError: it failed, took too long, or nobody wants the answer any more.
        """
        out = self._call(_ASKING, msgspec.json.encode(question), is_old=is_old, within_s=within_s)
        try:
            return msgspec.json.decode(out, type=Answer)
        except msgspec.MsgspecError as error:
            raise ForeignError(f"its answer cannot be read: {error}") from error

    def _call(self, module: str, document: bytes, *, is_old: Callable[[], bool], within_s: float | None) -> bytes:
        """Return what a process of ours answers to a document; with it ends what it has started.

        Raises:
            ForeignError: it failed, took too long, or nobody wants the answer any more.
        """
        argv = [sys.executable, *flags(), "-m", module]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment, start_new_session=True
            )
        except OSError as error:
            raise ForeignError(f"{error.filename}: {error.strerror}") from error
        until = None if within_s is None else time.monotonic() + within_s
        data: bytes | None = document
        while True:
            try:
                out, err = process.communicate(data, timeout=LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                data = None  # it is on its way
            if is_old() or (until is not None and time.monotonic() > until):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own, and is not reaped yet
                try:
                    process.communicate(timeout=REAP_WITHIN_S)
                except subprocess.TimeoutExpired as error:
                    raise ForeignError("it hangs in a read") from error
                raise ForeignError("a newer choice has begun" if is_old() else f"no answer in {within_s:g} s")
        if process.returncode:
            last = (err.decode(errors="replace").strip().splitlines() or [f"ended with {process.returncode}"])[-1]
            raise ForeignError(last[:PROBLEM_CHARACTERS_MAX])
        return out


# Files of the run directory, only of a script with another framework: one JSON document a line.

WORLDS_NAME = "worlds.jsonl"
"""How many ranks each launch has, for checkpoints that do not say it: our own manifests do."""
LEFT_OUT_NAME = "left-out.jsonl"
"""The checkpoints that training went back from, each as it was then."""
LINES_BYTES_MAX = 256 * 1024  # that are read: some thousand lines, the newest
Line = TypeVar("Line", bound=msgspec.Struct)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a launch; what was written since it began, and before the next one, is by them."""

    at: float  # Unix seconds
    attempt: int
    launch: int
    ranks: int | None  # None: CMD chooses their number


def read_lines(run: Path, name: str, kind: type[Line]) -> tuple[Line, ...]:
    """Return the newest lines, in their order; those that do not parse are passed over.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        descriptor = open_descriptor(run / name, within=run)
    except FileNotFoundError:
        return ()
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, LINES_BYTES_MAX, max(0, size - LINES_BYTES_MAX))
    finally:
        os.close(descriptor)
    decoder = msgspec.json.Decoder(kind)
    found = (parsed(decoder, line) for line in data.split(b"\n"))
    return tuple(line for line in found if line is not None)  # the beginning of the first one may not be read
