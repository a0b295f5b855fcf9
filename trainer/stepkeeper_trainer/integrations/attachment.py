"""What a framework's callback talks to: requests that all ranks have agreed on, and words on what was saved.

Nothing here makes a training fail.  An error of ours is reported, and the attachment withdraws: this rank says so in
its last message to the others, who read it at their next boundary and withdraw likewise.  From then on the script is
one without the library.
"""

from __future__ import annotations

import functools
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch.distributed as dist

from stepkeeper_trainer.coordinate import ending, groups
from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Proposal
from stepkeeper_trainer.coordinate.requests import Requests, owner
from stepkeeper_trainer.environment import find_place, read_environment
from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.formats.messages import Committed, Finished, SaveFailed, SaveStarted, shorten
from stepkeeper_trainer.integrations import hook
from stepkeeper_trainer.integrations.joining import join
from stepkeeper_trainer.integrations.leaving import at_exit, current, leave
from stepkeeper_trainer.link import Link, Reporter
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.environment import Environment

P = ParamSpec("P")
R = TypeVar("R")

EVALUATION_WITHIN_S = 30.0  # ranks between two batches of an evaluation wait no longer for each other
PATH_CHARACTERS_MAX = 400


class Asked(IntEnum):
    """What all ranks have agreed on at a boundary."""

    NOTHING = 0
    SAVE = 1  # and go on
    STOP = 2  # save, and leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the framework knows when its training begins."""

    framework: str  # the adapter's name, as in docs/frameworks.md
    version: str  # of the package, with its name
    step: int = 0  # done already: what it resumed from
    total_steps: int | None = None
    unable: str = ""  # why it could save nothing


class Attachment:
    """Of one rank, in one training of a framework.  After `withdraw` or `ended` every method does nothing."""

    def __init__(self, training: Training) -> None:
        """Do nothing yet: see `attach`."""
        self.training = training  # replaced once the framework has described it
        self.open = False
        self.over = False  # the training has ended: another one may begin in this process
        self._step = self._saved_step = self._reported_step = 0
        self._begun_at = 0.0  # of the save at hand; Unix seconds
        self._to_confirm: Committed | None = None  # saved on this rank
        self._confirming: Committed | None = None  # the message that tells the others so is on its way
        self._agreement = Agreement(None, within_s=0.0)
        self._link = Link(None, "")
        self._reporter: Reporter | None = None
        self._requests: Requests | None = None
        self.rank = 0
        self._environment: Environment | None = None

    def join(self, number: int) -> None:
        """Find the other ranks, and introduce this one; all ranks come here at the same point of the script.

        Args:
            number: of the training in this process, the same on all ranks.

        Raises:
            StepkeeperError: it cannot be.
            RuntimeError: another rank is gone.
        """
        environment = self._environment = read_environment()
        supervised = environment.socket is not None
        self._link = Link(environment.socket, environment.launch_name)
        self.rank, world_size = groups.find_rank()
        training = self.training
        self._step = self._saved_step = self._reported_step = training.step
        named = Reporter(
            self._link, self.rank, world_size, None, total_steps=training.total_steps, framework=training.version
        )
        self._reporter = named
        group = None
        if dist.is_available() and dist.is_initialized() and world_size > 1:
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
            join(store, f"stepkeeper/attach/{number}", world_size)
            within_s = groups.hang_limit_s()
            group = groups.new_group(2 * within_s)
            self._agreement = Agreement(group, within_s=within_s)
        self._requests = Requests(self._link, signals=supervised or environment.epoch is not None)
        self.open = True
        named.resumed(training.step or None)
        self._agreement.issue(self._proposal(self._requests))
        say("attached", framework=training.version, step=training.step)

    # --- what a framework's callback calls, on all ranks in the same order --------------------------

    def stepped(self, step: int) -> None:
        """Report a complete optimizer step at once; `step_done` follows when the script has done its own work of it.

        Until then a notice would find nothing to save in a launch that has done its first step.
        """
        self._guarded(lambda: self._report(step), None)

    def step_done(self, step: int) -> Asked:
        """Say that an optimizer step is complete; return what to do before the next one."""
        return self._guarded(lambda: self._look(step, Call.STEP), Asked.NOTHING)

    def evaluated(self) -> Asked:
        """Say between two batches of an evaluation that this rank is well; return whether to save and leave there."""
        return self._guarded(lambda: self._look(self._step, Call.EVALUATION), Asked.NOTHING)

    def evaluates(self, save: Callable[[], None], *, alike: bool, last: bool) -> None:
        """Do all that is to be done between two batches of an evaluation: the state is that of the step before.

        Args:
            save: has the framework save, and calls `saved_to`.
            alike: whether all ranks come here equally often; else a notice waits for the end of the evaluation.
            last: whether all steps are done: the evaluation goes on, and nobody leaves.

        Raises:
            SystemExit: the ranks were asked to stop.
        """
        if not alike:
            self.alive()
        elif self.evaluated() is Asked.STOP:
            if not self.saved:
                save()
            elif not last:
                self.leave_if_asked(saved=True)

    def unable_anywhere(self, why: str) -> str:
        """Return why this rank cannot save, or that another one cannot; all ranks wait for each other here."""
        return self._guarded(lambda: self._ask_all(why), "the attachment has withdrawn")

    def alive(self) -> None:
        """Say that this rank is well."""
        self._guarded(self._say_alive, None)

    @property
    def saved(self) -> bool:
        """Whether the state at hand is saved already."""
        return self._saved_step == self._step

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.open and self._requests is not None and self._requests.stop_agreed

    def saving(self) -> None:
        """Say that the framework begins a save of the step at hand, whether it or Stepkeeper wanted it."""
        self._guarded(self._say_saving, None)

    def saved_to(self, directory: str, *, step: int | None = None, last: bool = False) -> None:
        """Say that the framework has returned from its save on this rank; after its `last` step nobody leaves.

        Args:
            directory: of the checkpoint; or the file.
            step: of the checkpoint, where the script saves before `step_done` is called for that step.
            last: whether all steps are done: training comes to its end by itself.

        Raises:
            SystemExit: the ranks were asked to stop: this rank is to leave now.
        """
        self._guarded(lambda: self._note_saved(directory, self._step if step is None else step, last=last), None)
        if not last:
            self.leave_if_asked(saved=True)

    def not_saved(self, why: str) -> None:
        """Say that the framework cannot save what was asked for; the last checkpoint counts.

        Raises:
            SystemExit: the ranks were asked to stop.
        """
        warn("cannot_save", framework=self.training.version, step=self._step, why=why)
        self.leave_if_asked(saved=False, why=why)
        self._guarded(lambda: self._say_failed(why, emergency=False), None)

    def leave_if_asked(self, *, saved: bool, why: str = "") -> None:
        """Leave, where the ranks were asked to stop; `saved` is whether the step at hand is, `why` why it is not.

        Raises:
            SystemExit: with the exit code for that.
        """
        if not self.stopping:
            return
        code = ending.EXIT_UNSAVED
        try:
            code = self._conclude(saved=saved, why=why)
        except Exception as error:  # noqa: BLE001 - the checkpoint is written: leaving is all that is left
            warn("attachment_failed", why=f"{type(error).__name__}: {error}")
        self.open, self.over = False, True
        leave(code)

    def ended(self, step: int) -> None:
        """Say that training has come to its end by itself; the script goes on, and its silence tells nothing."""
        self._guarded(lambda: self._end(step), None)
        self.over = True

    def withdraw(self, why: str) -> None:
        """Take part no more, on all ranks; the training goes on without us."""
        if not self.open:
            return
        self.open = False
        warn("attachment_withdrawn", framework=self.training.version, why=why)
        with suppress(Exception):  # the group has failed: the others learn it from the same failure
            self._agreement.leave(Proposal(broken=True))
        if self._requests is not None:
            self._requests.close()
        if self._reporter is not None:
            with suppress(Exception):  # the training goes on, whatever is wrong with the word
                self._reporter.unable(why)

    # --- inside ------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], R], otherwise: R) -> R:
        if not self.open:
            self._link.flush()  # the word that it has withdrawn may still wait for a watcher
            return otherwise
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without us
            self.withdraw(in_words(error))
            return otherwise

    def _look(self, step: int, call: Call) -> Asked:
        requests, reporter = self._requests, self._reporter
        assert requests is not None and reporter is not None, "an open attachment has joined"  # noqa: PT018
        evaluation = call is Call.EVALUATION
        if evaluation:
            reporter.alive(step, 0, None)
        else:
            self._step = step
            self._report(step)
        self._link.flush()
        requests.receive()
        if not requests.stop_agreed:
            agreed = self._agreement.read(
                lambda: self._proposal(requests), within_s=EVALUATION_WITHIN_S if evaluation else None
            )
            if agreed.broken:
                self.withdraw("the attachment of another rank has withdrawn")
                return Asked.NOTHING
            requests.agree(agreed)
            self._say_confirmed()
        if requests.stop_agreed:
            return Asked.STOP
        asked = Asked.SAVE if requests.save_agreed and not evaluation else Asked.NOTHING
        if asked is Asked.SAVE:
            requests.served()
        self._issue(call)
        return asked

    def _issue(self, call: Call) -> None:
        assert self._requests is not None, "an open attachment has joined"
        self._confirming, self._to_confirm = self._to_confirm, None
        self._agreement.issue(self._proposal(self._requests), call)

    def _proposal(self, requests: Requests) -> Proposal:
        return requests.propose(Proposal())

    def _ask_all(self, why: str) -> str:
        (unable,) = self._agreement.settle(Call.SAVE, [bool(why)], within_s=EVALUATION_WITHIN_S)
        return why or ("another rank cannot save" if unable else "")

    def _report(self, step: int) -> None:
        assert self._reporter is not None, "an open attachment has joined"
        if step != self._reported_step:
            self._reported_step = step
            self._reporter.step(step, 0, None)

    def _say_alive(self) -> None:
        assert self._reporter is not None, "an open attachment has joined"
        self._reporter.alive(self._reported_step, 0, None)

    def _say_saving(self) -> None:
        self._begun_at = time.time()
        assert self._requests is not None, "an open attachment has joined"
        if self.rank == 0:
            save_id, emergency = self._save_id(self._step), self._requests.stop_agreed
            self._link.send(SaveStarted(step=self._step, save_id=save_id, emergency=emergency), keep=True)

    def _save_id(self, step: int) -> str:
        launch = self._environment.launch_name if self._environment is not None else ""
        return f"{self.training.framework}-{launch}-{step}"

    def _note_saved(self, directory: str, step: int, *, last: bool) -> None:
        assert self._requests is not None, "an open attachment has joined"
        self._saved_step = step
        stopping = self._requests.stop_agreed
        bytes_written = settle_on_disk(Path(directory), sync=stopping and first_of_node()) if self.rank == 0 else 0
        if stopping and self.rank and first_of_node():
            settle_on_disk(Path(directory), sync=True)
        path = os.path.abspath(directory)
        self._to_confirm = Committed(
            step=step,
            save_id=self._save_id(step),
            directory=path if len(path.encode()) <= PATH_CHARACTERS_MAX else "",
            bytes=bytes_written,
            seconds=round(time.time() - self._begun_at, 3) if self._begun_at else 0.0,
            emergency=stopping and not last,  # a supervisor expects the ranks to leave right behind an emergency save
            framework=self.training.framework,
        )

    def _say_confirmed(self) -> None:
        """All ranks have returned from the save: they said a word after it."""
        done, self._confirming = self._confirming, None
        if done is not None and self.rank == 0:
            self._link.send(done, keep=True)

    def _say_failed(self, why: str, *, emergency: bool) -> None:
        if self.rank == 0:
            save_id = self._save_id(self._step)
            failed = SaveFailed(step=self._step, save_id=save_id, error=shorten(why), emergency=emergency)
            self._link.send(failed, keep=True)

    def _conclude(self, *, saved: bool, why: str) -> int:
        """Wait until all ranks have saved, say so, and return the exit code."""
        assert self._requests is not None, "an open attachment has joined"
        limit_at = self._requests.limit_at(groups.hang_limit_s())
        everywhere = saved
        try:
            left_s = max(0.0, limit_at - time.time()) + ending.TOGETHER_WITHIN_S
            (unsaved,) = self._agreement.settle(Call.FINISH, [not saved], within_s=left_s)
            everywhere = not unsaved
        except (RuntimeError, StepkeeperError) as error:  # another rank died, or is late
            warn("left_alone", why=in_words(error))
            everywhere = saved and self._agreement.group is None
        if self.rank == 0:
            if everywhere:
                self._confirming, self._to_confirm = self._to_confirm, None
                self._say_confirmed()
            else:
                self._say_failed(why or "another rank did not return from its save", emergency=True)
            self._say_stopped(limit_at)
        with suppress(RuntimeError):  # another rank died: nothing is lost by that
            self._agreement.settle(Call.FINISH, [], within_s=ending.TOGETHER_WITHIN_S)
        return records.EXIT_STOPPED if everywhere else ending.EXIT_UNSAVED

    def _say_stopped(self, limit_at: float) -> None:
        environment = self._environment
        if environment is None or environment.run_directory is None:
            return  # no supervisor
        last = ending.Ending(
            run_directory=environment.run_directory,
            launch=environment.launch_name,
            rank=self.rank,
            step=self._step,
            tokens=0,
            stopping=True,
            limit_at=limit_at,
        )
        ending.last_words(last, None, self._link)

    def _end(self, step: int) -> None:
        """All ranks are there: nothing is agreed on any more, and the process may end when the script does."""
        self._step = step
        self._agreement.settle(Call.FINISH, [], within_s=EVALUATION_WITHIN_S)
        self._confirming = self._to_confirm or self._confirming
        self._say_confirmed()
        self.open = False
        assert self._requests is not None and self._reporter is not None, "an open attachment has joined"  # noqa: PT018
        self._requests.close()
        self._link.flush()
        self._reporter.unable("the training has ended")
        self._agreement.close()
        if self.training.total_steps is None or step >= self.training.total_steps:
            at_exit.finished = functools.partial(self._say_finished, step)
            self._record_end(step)

    def _record_end(self, step: int) -> None:
        """Keep that the training has ended, whatever the script's exit code says later of what comes behind it."""
        environment = self._environment
        if self.rank or environment is None or environment.run_directory is None:
            return
        trained = records.Trained(launch=environment.launch_name, step=step, at=time.time())
        try:
            records.write_trained(environment.run_directory, trained)
        except OSError as error:
            warn("end_not_recorded", why=in_words(error))

    def _say_finished(self, step: int) -> None:
        """Say it without a record: the exit code is not known yet, and this word counts with 0 only."""
        say("finished", step=step)
        self._link.send(Finished(step=step), keep=True)
        self._link.flush(ending.LAST_WORDS_WITHIN_S)

    def ends_now(self, *, failed: bool) -> None:
        """Say at the end of the process that a loop of the script's own is over: its exit code tells how.

        The group is closed: its threads would abort the exit.
        """
        if self.open and not failed and self._reporter is not None:
            self._reporter.unable("the script has ended")
        self._agreement.close()


def attach(framework: str, describe: Callable[[], Training]) -> Attachment:
    """Attach to a training that begins; all ranks call it at the same point.  Never raises.

    What it returns does nothing where another framework's training is under way around this one, where this process
    is the child of a rank, or where it failed: the log and the supervisor know why.
    """
    attachment = Attachment(Training(framework=framework, version=framework))
    if current.is_anothers(framework) or not hook.is_rank():
        return attachment
    if owner.has_manager:
        warn("not_attached", framework=framework, why="the script's CheckpointManager saves on notice itself")
        return attachment
    current.take(attachment)
    if current.number > 1:
        _forget_end()
    owner.withdraw = attachment.withdraw
    try:
        attachment.training = describe()
        os.environ[hook.ATTACHED_VARIABLE] = str(os.getpid())
        if attachment.training.unable:
            _refuse(attachment.training, attachment.training.unable)
        else:
            attachment.join(current.number)
    except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without us
        attachment.open = False
        _refuse(attachment.training, in_words(error))
        if attachment._reporter is not None:  # noqa: SLF001  # it has introduced itself before it failed
            attachment._reporter.unable(in_words(error))  # noqa: SLF001
    return attachment


def _forget_end() -> None:
    """Another training begins in this process: that the one before has ended is not the end of the work."""
    try:
        directory = read_environment().run_directory
        if directory is not None and groups.find_rank()[0] == 0:
            (directory / records.TRAINED_NAME).unlink(missing_ok=True)
    except (OSError, StepkeeperError) as error:
        warn("end_not_forgotten", why=in_words(error))


def _refuse(training: Training, why: str) -> None:
    warn("not_attached", framework=training.version, why=why)
    hook.report(training.version, why)


def harmless(act: Callable[P, None]) -> Callable[P, None]:
    """Have an error of a callback withdraw its attachment instead of ending the training."""

    @functools.wraps(act)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            act(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without us
            if current.attachment is not None:
                current.attachment.withdraw(in_words(error))

    return guarded


def with_each(made_class: Any, add: Callable[[Any], None]) -> None:
    """Add what is ours to each object that the script makes of a framework's class, once it is made."""
    begin, add = made_class.__init__, harmless(add)

    @functools.wraps(begin)
    def begin_and_add(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        add(self)

    made_class.__init__ = begin_and_add


def in_words(error: BaseException) -> str:
    """Return an error on one line."""
    said = str(error).strip().splitlines()
    text = said[0] if said else ""
    return text if isinstance(error, StepkeeperError) else f"{type(error).__name__}: {text}"


def names_step(directory: str, step: int) -> bool:
    """Tell whether a number in a path may be that of the step: at a word's end, so not that of `s5dx70q4`.

    >>> names_step("/scratch/run/epoch_05", 5), names_step("/tmp/s5dx70q4/out", 5), names_step("/data/2025/out", 5)
    (True, False, False)
    """
    return re.search(rf"(?<!\d)0*{step}(?![0-9A-Za-z])", directory) is not None


def first_of_node() -> bool:
    """Tell whether this is the first rank of its node."""
    place = find_place()
    return place is None or place.local_rank == 0


def settle_on_disk(path: Path, *, sync: bool) -> int:
    """Return how many bytes a checkpoint has; with `sync`, once what this node has written of it is on the disk."""
    total = 0
    for each in [path] if path.is_file() else sorted(path.rglob("*")):
        with suppress(OSError):  # removed meanwhile, or not ours to read
            if each.is_file() and not each.is_symlink():
                total += each.stat().st_size
                if sync:
                    _sync(each)
    return total


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
