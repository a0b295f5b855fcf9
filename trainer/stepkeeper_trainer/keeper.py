"""What a training loop uses: `resume()`, `step_done()` after each optimizer step, `finish()`.

All decisions of a rank are taken here, at step boundaries, from what all ranks have agreed on; the
modules below only do.  It works the same with and without a supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
import uuid
from typing import TYPE_CHECKING, Literal, get_args

import torch

from stepkeeper_trainer import attach, outcomes, resuming
from stepkeeper_trainer.agreement import AGREE_WITHIN_S, Agreement, Wish
from stepkeeper_trainer.backpressure import WhenBusy, on_periodic, take_over
from stepkeeper_trainer.commit import Commits
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.later import whole
from stepkeeper_trainer.leave import install_excepthook, leave
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.listeners import Listeners
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.metrics import Metrics
from stepkeeper_trainer.optimizers import OptimizerStates
from stepkeeper_trainer.outcomes import TOGETHER_WITHIN_S
from stepkeeper_trainer.records import Records
from stepkeeper_trainer.reporter import Reporter
from stepkeeper_trainer.requests import Requests
from stepkeeper_trainer.saver import Saver, Summary
from stepkeeper_trainer.state import Counters, Stateful, TrainingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SAVE_WITHIN_S = 600.0
LAST_SECONDS_S = 20.0  # for a save in flight when training fails
Replication = Literal["check", "ignore", "save"]


class Keeper:
    """One a rank, made when the model is sharded; all ranks call its methods equally often."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        others: Mapping[str, Stateful] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        checkpoint_every_steps: int | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        save_within_s: float = SAVE_WITHIN_S,
        when_busy: WhenBusy = "wait",
        replicas: Replication = "check",
    ) -> None:
        """Attach to the supervisor, if there is one.

        Args:
            model: sharded by `fully_shard`, replicated by DDP, or plain.
            optimizer: of that model's parameters; several by name.
            scheduler: of the learning rate.
            sampler: the data position, of the whole job (see `GlobalSampler`).
            others: whatever else must be saved, by name: anything with `state_dict` and `load_state_dict`, such as a
                gradient scaler or an average of the weights; one of which each rank has its own state (torchdata's
                StatefulDataLoader, or with an attribute `per_rank = True`) can be resumed on as many ranks only.
            run_dir: where checkpoints and metrics go; `STEPKEEPER_RUN_DIR` if it is not given.
            resume_from: a step directory, or `latest`; `STEPKEEPER_RESUME_FROM` if it is not given.
            checkpoint_every_steps: None saves on request and at the end only.
            total_steps: when the work is done.
            seed: for the generators of ranks that a checkpoint does not know.
            save_within_s: how long one save may take.
            when_busy: what a periodic save does while another is in flight: `wait` until it is done, `skip`, or
                `cancel` the other.
            replicas: what becomes of tensors that several ranks hold: one copy is saved, and with `check` the others
                are compared with it (`ignore`: not); with `save` all copies are saved too.

        Raises:
            KeeperError: what is wrong and what to do; uncaught, it ends the process without a traceback.
        """
        self._saver: Saver | None = None
        install_excepthook(self._last_seconds)
        self._environment = read_environment()
        self.rank, self.world_size = attach.find_rank()
        self._resume_from = str(resume_from) if resume_from else self._environment.resume_from
        if when_busy not in get_args(WhenBusy) or replicas not in get_args(Replication):
            raise UsageError(
                f"when_busy={when_busy!r}, replicas={replicas!r}: "
                f"choose of {get_args(WhenBusy)} and of {get_args(Replication)}"
            )
        self._when_busy, self._replicas = when_busy, replicas
        self._every = checkpoint_every_steps
        self._total_steps = total_steps
        self._save_within_s = save_within_s
        self._group = attach.new_group(save_within_s)
        self._agreement = Agreement(attach.new_group(AGREE_WITHIN_S))
        self.run_dir = attach.open_run_directory(run_dir, self._environment, self._agreement, self.rank)
        self._commits = Commits(self.run_dir, self._environment)
        self._link = Link(self._environment.socket, self._environment.launch_name)
        self._requests = Requests(self._link)
        self.listeners = Listeners()  # told of each commit
        self._metrics: Metrics | None = None  # on rank 0, as the records
        self._records: Records | None = None
        self._counters = Counters(seed=seed)
        named = {"scheduler": scheduler, "sampler": sampler, **(others or {})}
        self._state = TrainingState(
            model=model,
            optimizers=OptimizerStates(model, optimizer),
            others={name: part for name, part in named.items() if part is not None},
            counters=self._counters,
            rank=self.rank,
            world_size=self.world_size,
            save_replicas=replicas == "save",
        )
        self._resumed: resuming.Resumed | None = None
        self._due = False  # a periodic save has not been begun yet
        self._unsaid_save = False  # begun since the ranks last spoke
        self._prepared = False  # the state has been complete once, and memory for saves is being made
        self._gave_up_for = False  # the save in flight was cancelled for the one that is due
        self._protected = False  # another was cancelled for the save in flight
        self._reporter = Reporter(self._link, self.rank, self.world_size)

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self._counters.step

    @property
    def tokens(self) -> int:
        """Tokens seen by all ranks together."""
        return self._counters.tokens

    @property
    def finished(self) -> bool:
        """Whether `total_steps` are done."""
        return self._total_steps is not None and self.step >= self._total_steps

    def resume(self) -> int:
        """Load what this launch resumes from, if anything, and return how many steps are done.

        Call it once, when the data iterators exist too: the random generators are restored last.

        Raises:
            ResumeError: what to resume from is not there, or does not fit.
            DamagedError: its bytes are not what its manifest says.
            StateError: something to save is neither a tensor nor JSON.
        """
        if self._resumed is not None:
            raise UsageError("keeper.resume() was called twice: call it once, before the first step")
        resumed = resuming.resume(
            self._resume_from,
            commits=self._commits,
            state=self._state,
            agreement=self._agreement,
            group=self._group,
            world_size=self.world_size,
        )
        self._resumed = resumed
        tensors = self._state.collect()  # what cannot be saved is said now, and not at the first save
        if self.rank == 0:
            self._metrics = Metrics(self.run_dir, self._environment.attempt, self._environment.launch)
            self._records = Records(self._counters, self._metrics)
        self._saver = Saver(
            commits=self._commits,
            rank=self.rank,
            world_size=self.world_size,
            group=self._group,
            link=self._link,
            nonce=self._agreement.share(uuid.uuid4().hex),
            parent=resumed.parent,
            limit_s=self._save_within_s,
            before_commit=self._metrics.sync if self._metrics else lambda _limit_at: None,
            listeners=self.listeners,
            check_replicas=self._replicas != "ignore",
            save_replicas=self._replicas == "save",
        )
        if resumed.step:  # the state is complete; else the optimizer makes its part in the first step
            self._saver.prepare(tensors)
        if torch.cuda.is_available():
            for optimizer in self._state.optimizers.all.values():
                optimizer.register_step_pre_hook(lambda *_: self._ready().wait_before_change())
        self._reporter.resumed(resumed.step)
        self._agreement.issue(self._wish())
        return self.step

    def step_done(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        tokens: int = 0,
        lr: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
    ) -> bool:
        """Say that an optimizer step is complete; true means leave the loop and call `finish`.

        Args:
            loss: of this step, over all ranks; one on a GPU is read a step later, so that nobody waits for it.
            tokens: of this step, of all ranks together.
            lr: the learning rate that the step used.
            grad_norm: before clipping.
        """
        saver = self._ready()
        counters = self._counters
        counters.step += 1
        counters.tokens += tokens
        loss, lr, grad_norm = whole(loss), whole(lr), whole(grad_norm)
        if self._records is not None:
            self._records.step(loss, lr, grad_norm)
        self._reporter.step(counters.step, counters.tokens, counters.last_loss if self.rank == 0 else None)
        self._due |= bool(self._every) and counters.step % (self._every or 1) == 0
        agreed = self._listen()
        if not self._prepared:
            self._prepared = True
            if not (self._due or self._requests.save_agreed or self._requests.stop_agreed):  # the save does it itself
                saver.prepare(self._state.collect())
        self._save_as_agreed(saver, agreed)
        self._unsaid_save = False
        self._agreement.issue(self._wish())
        return self._requests.stop_agreed or self.finished

    def poll(self) -> bool:
        """Listen between steps, in evaluation or warm-up; true means leave and call `finish`.

        All ranks must call it equally often.
        """
        self._ready()
        self._settle_records()
        self._reporter.alive(self.step, self.tokens, self._counters.last_loss if self.rank == 0 else None)
        self._listen()
        self._agreement.issue(self._wish())
        return self._requests.stop_agreed

    def save(self) -> None:
        """Begin to save the state as it is now; all ranks call it, between steps."""
        saver = self._ready()
        if not self._begin_together(saver, limit_at=0.0):
            say("save_waits", step=self.step, why="another is in flight")
            if not self._begin_together(saver, limit_at=time.time() + self._save_within_s):
                warn("save_postponed", step=self.step, why="another is in flight, and over its limit")
                self._due = True

    def finish(self, *, leave_process: bool = True) -> int:
        """Save what is not saved yet, wait until it is durable, say how the launch ended, and leave.

        Exit codes: 0 the work is finished, 75 stopped on request with the state saved, 1 stopped
        without (the ranks' last words say why).

        Args:
            leave_process: False returns the exit code instead, for a script with work after it.

        Raises:
            SaveError: the work is finished, and its last step could not be saved.
        """
        saver = self._ready()
        self._listen()
        stopping = self._requests.stop_agreed and not self.finished
        self._settle_records()
        code = outcomes.conclude(
            outcomes.Ending(
                run_directory=self.run_dir,
                launch=self._environment.launch_name,
                rank=self.rank,
                step=self.step,
                tokens=self.tokens,
                stopping=stopping,
                limit_at=self._requests.limit_at(self._save_within_s),
            ),
            saver=saver,
            saved=self._resumed.saved if self._resumed else None,
            begin_save=lambda limit_at: self._begin_together(saver, limit_at=limit_at, emergency=stopping, last=True),
            agreement=self._agreement,
            link=self._link,
        )
        saver.hear_committed(saver.sequence if code != outcomes.EXIT_UNSAVED else 0)
        self.listeners.close(self._requests.limit_at(LAST_SECONDS_S))
        if self._metrics is not None:
            self._metrics.finish()
        if leave_process:
            leave(code)
        return code

    def _listen(self) -> Wish:
        self._link.flush()
        self._requests.hear()
        agreed = self._agreement.read(self._wish())
        self._requests.agree(agreed)
        self._ready().hear_failure(agreed.failed_save)
        self._ready().hear_committed(agreed.committed)
        return agreed

    def _wish(self) -> Wish:
        saver = self._ready()
        busy = saver.busy  # asked first: what broke a save is known once it is over
        return self._requests.wish(
            Wish(
                busy=busy,
                failed_save=saver.failed_save,
                sequence=saver.sequence,
                broken=saver.broken,
                committed=saver.committed,
            )
        )

    def _save_as_agreed(self, saver: Saver, agreed: Wish) -> None:
        """Begin a save at this boundary if one is due; an urgent one waits for the one in flight."""
        requests = self._requests
        urgent = requests.stop_agreed or requests.deadline_at is not None
        if not (self._due or requests.save_agreed or requests.stop_agreed):
            return
        if not urgent:
            if agreed.busy or self._unsaid_save:
                self._make_way(saver)
            else:
                self._renew(saver, agreed.broken)
                self._begin_save(saver, sequence=agreed.sequence + 1)
            return
        in_flight = saver.last
        if in_flight is not None and in_flight.summary.step == self.step:
            requests.served()  # that one is what was asked for
            return
        if agreed.busy or self._unsaid_save:
            self._take_over(saver)
        # One that is over its limit on some rank is left to `finish`.
        self._begin_together(saver, limit_at=requests.limit_at(self._save_within_s), emergency=True)

    def _make_way(self, saver: Saver) -> None:
        """Do with a periodic save that cannot begin what the script wants; a requested one waits."""
        choice = on_periodic(self._when_busy, in_flight_protected=self._protected)
        if self._requests.save_agreed or choice == "wait":
            say("save_waits", step=self.step, why="another is in flight")
        elif choice == "skip":
            self._due = False
            say("save_skipped", step=self.step, why="another is in flight")
        else:
            self._gave_up_for = True
            saver.cancel(f"the save of step {self.step} is due")

    def _take_over(self, saver: Saver) -> None:
        """Give up the save in flight for an urgent one, if there is not time for both."""
        deadline_at = self._requests.deadline_at
        now = time.time()
        if deadline_at is None:
            return
        mine = [*saver.estimate_ms(now), -int(1000 * (deadline_at - now))]
        in_flight_ms, new_ms, left_ms = self._agreement.settle_all(mine, within_s=AGREE_WITHIN_S)
        if take_over(left_s=-left_ms / 1000, in_flight_s=in_flight_ms / 1000, new_s=new_ms / 1000):
            saver.cancel(f"no time for it and the save of step {self.step}")

    def _begin_together(self, saver: Saver, *, limit_at: float, emergency: bool = False, last: bool = False) -> bool:
        """Begin a save on all ranks or on none, however long theirs in flight take; true if it was begun.

        Args:
            saver: of this rank.
            limit_at: until when one in flight is waited for; Unix seconds.
            emergency: whether somebody waits for it.
            last: of the launch: it is not begun after `limit_at`, and the others are not waited for long.

        Raises:
            RuntimeError: another rank died, or did not come.
        """
        saver.wait(limit_at)
        left_s = max(0.0, limit_at - time.time())
        unable = saver.busy or (last and not left_s)
        within_s = left_s + (TOGETHER_WITHIN_S if last else AGREE_WITHIN_S)
        mine = [int(unable), saver.sequence, int(saver.broken)]
        any_unable, sequence, broken = self._agreement.settle_all(mine, within_s=within_s)
        if not any_unable:
            self._renew(saver, bool(broken))
            self._begin_save(saver, sequence=sequence + 1, emergency=emergency)
        return not any_unable

    def _renew(self, saver: Saver, broken: bool) -> None:  # noqa: FBT001
        """Make the saves a new group where theirs has failed; all ranks do, having agreed that it has."""
        if broken and self._group is not None:
            self._group = attach.new_group(self._save_within_s)
            saver.renew(self._group)

    def _begin_save(self, saver: Saver, *, sequence: int, emergency: bool = False) -> None:
        with _no_collection():
            self._start_save(saver, sequence=sequence, emergency=emergency)

    def _start_save(self, saver: Saver, *, sequence: int, emergency: bool) -> None:
        self._settle_records()  # the state and the manifest tell of this step's loss
        counters = self._counters
        loss = counters.last_loss
        tensors = self._state.collect()
        self._protected, self._gave_up_for = self._gave_up_for, False
        saver.start(
            tensors,
            Summary(
                step=counters.step,
                tokens=counters.tokens,
                loss=loss if loss is not None and math.isfinite(loss) else None,
                parts=self._state.parts(),
            ),
            sequence=sequence,
            emergency=emergency,
            requested_at=self._requests.asked_at,
            deadline_at=self._requests.deadline_at,
            early=self._state.early(tensors) if torch.cuda.is_available() else frozenset(),
        )
        self._unsaid_save = True
        self._due = False
        self._requests.served()

    def _ready(self) -> Saver:
        if self._saver is None:
            raise UsageError("keeper.resume() was not called: call it once, before the first step")
        return self._saver

    def _settle_records(self) -> None:
        if self._records is not None:
            self._records.settle()

    def _last_seconds(self) -> None:
        """Give a save in flight the chance to be committed, when training has failed."""
        if self._saver is not None and self._saver.busy:
            self._saver.wait(time.time() + LAST_SECONDS_S)
        with contextlib.suppress(RuntimeError):  # the device may be what has failed
            self._settle_records()
        if self._metrics is not None:
            self._metrics.finish()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cycle collector from walking over every object of the script while training waits."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
