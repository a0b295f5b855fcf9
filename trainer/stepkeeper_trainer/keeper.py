"""What a training loop uses: `resume()`, `step_done()` after each optimizer step, `finish()`.

Decisions are taken at step boundaries, from what all ranks have agreed on.  It works with and without a supervisor.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, get_args

import torch

from stepkeeper_trainer import attach, outcomes, random_state, resuming, stacks, storage
from stepkeeper_trainer.agreement import AGREE_WITHIN_S, Agreement, Wish
from stepkeeper_trainer.backpressure import WhenBusy
from stepkeeper_trainer.boundary import Boundary
from stepkeeper_trainer.cadence import Rule, choose_rule
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import UsageError, check_choice, check_seconds
from stepkeeper_trainer.exactness import Exactness
from stepkeeper_trainer.housekeeping import choose_policy, keep_house
from stepkeeper_trainer.later import whole
from stepkeeper_trainer.leave import install_excepthook, leave
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.listeners import Listeners
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.own_time import OwnTime
from stepkeeper_trainer.periodic import Periodic
from stepkeeper_trainer.records import Records, begin_records
from stepkeeper_trainer.replay import begin_replay
from stepkeeper_trainer.reporter import Reporter
from stepkeeper_trainer.requests import Requests
from stepkeeper_trainer.retention import Policy
from stepkeeper_trainer.saver import Saver
from stepkeeper_trainer.skipping import Skipping
from stepkeeper_trainer.state import Counters, Stateful, TrainingState
from stepkeeper_trainer.tiering import find_tiers
from stepkeeper_trainer.trackers import Tracker, keep_mlflow_run, keep_wandb_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepkeeper_trainer.tiers.config import Tiers

SAVE_WITHIN_S = 600.0
LAST_SECONDS_S = 20.0  # for a save in flight when training fails


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
        strict: bool = True,
        with_optimizer: bool = False,
        checkpoint_every: str | int | Rule | None = None,
        checkpoint_every_steps: int | None = None,
        retention: str | Policy | None = None,
        storage_test: str | int = "quick",
        tracker: Tracker | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        save_within_s: float = SAVE_WITHIN_S,
        when_busy: WhenBusy = "wait",
        tiers: Tiers | None = None,
        load_memory_gib: float | None = None,
        read_back: bool = False,
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
            run_dir: where checkpoints and metrics go; `STEPKEEPER_RUN_DIR` if it is not given, and without that, below
                the working directory, `runs/SCRIPT-JOBID` in a Slurm job and `runs/SCRIPT` outside.
            resume_from: a step directory, `latest`, or initial weights: a directory of plain DCP, a safetensors file
                or a directory of those; `STEPKEEPER_RESUME_FROM` if it is not given.  A step of this run counts first.
            strict: whether initial weights must have each tensor of the model, and no other one of it.
            with_optimizer: whether initial weights of plain DCP bring the optimizer's state too, but not its options.
            checkpoint_every: `500 steps` (or 500), `30 min`, `auto` (as often as pays), or several joined by `or`; None
                saves on request and at the end only.  `STEPKEEPER_CHECKPOINT_EVERY` counts instead, where it is set.
            checkpoint_every_steps: the same, in steps.
            retention: which steps are kept, such as `newest 3, every 1000 steps, best loss 2` (see `parse_policy`), or
                `all`; the newest 3 and ends of epochs if it is not given.  `STEPKEEPER_RETENTION` counts instead, where
                it is set.
            storage_test: a dummy save beside the first steps, on each node: `quick`, a number of bytes, or `off`.
            tracker: where losses and metrics go besides `metrics.csv`, such as `MlflowTracker("experiment")`.
            total_steps: when the work is done.
            seed: for the generators of ranks that a checkpoint does not know.
            save_within_s: how long one save may take.
            when_busy: what a periodic save does while another is in flight: `wait` until it is done, `skip`, or
                `cancel` the other.
            tiers: where steps are kept besides the run directory (docs/tiers.md); the variables that `stepkeeper run`
                sets count instead, where they name any.
            load_memory_gib: what all ranks of a node together may take to load a step, beyond the state itself; 1 GiB
                a rank if it is not given.  `STEPKEEPER_LOAD_MEMORY_GIB` counts instead, where it is set.
            read_back: each rank reads its files back from the disk before a save counts, but where the job is to end.

        Raises:
            KeeperError: what is wrong and what to do; uncaught, it ends the process without a traceback.
        """
        self._saver: Saver | None = None
        install_excepthook(self._last_seconds)
        self._environment = read_environment()
        self.rank, self.world_size = attach.find_rank()
        self._resume_from, self._strict = str(resume_from) if resume_from else None, strict
        self._with_optimizer = with_optimizer
        check_choice("when_busy", when_busy, get_args(WhenBusy))
        check_seconds("save_within_s", save_within_s)
        self._when_busy, self._tracker = when_busy, tracker
        self._rule = choose_rule(self._environment.checkpoint_every, checkpoint_every, checkpoint_every_steps)
        self._policy = choose_policy(self._environment.retention, retention, total_steps=total_steps)
        self._test_bytes = storage.bytes_to_test(storage_test)
        self._total_steps, self._save_within_s = total_steps, save_within_s
        self._group = attach.new_group(save_within_s)
        self._agreement = Agreement(attach.new_group(AGREE_WITHIN_S))
        self._nodes = self._agreement.gather(self._environment.node)  # of the ranks
        self._read_back = read_back
        self._load_limits = resuming.choose_limits(
            self._environment.load_memory_gib, load_memory_gib, ranks=self._nodes.count(self._environment.node)
        )
        self._commits = attach.open_run_directory(run_dir, self._environment, self._agreement, self.rank)
        self.run_dir, self._environment = self._commits.run_directory, self._commits.environment
        stacks.listen(self._environment, self.run_dir, self.rank)
        self._link = Link(self._environment.socket, self._environment.launch_name)
        self._requests = Requests(self._link)
        self.listeners = Listeners()  # told of each commit
        self._tiering = find_tiers(tiers, self._commits, self._agreement, self.rank, self.world_size)
        self._records: Records | None = None  # on rank 0
        self._exactness: Exactness | None = None  # the same
        self._counters = Counters(seed=seed)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizers = {"optimizer": optimizer}
        else:
            optimizers = {f"optimizers.{name}": each for name, each in optimizer.items()}
            if not optimizers or any(not name or "." in name for name in optimizer):
                raise UsageError(f"optimizer: give one, or several by names without dots, not {sorted(optimizer)}")
        named = {"scheduler": scheduler, "sampler": sampler, **(others or {})}
        self._state = TrainingState(
            {
                "model": model,
                **optimizers,
                **{f"others.{name}": part for name, part in named.items() if part is not None},
            },
            counters=self._counters,
            rank=self.rank,
            world_size=self.world_size,
        )
        self._resumed: resuming.Resumed | None = None
        self._random: dict[str, torch.Tensor] | None = None  # the generators, as they were resumed
        self._prepared = False  # the state has been complete once, and memory for saves is being made
        if self.rank == 0:
            keep_wandb_run(self._environment.run_id)
            if tracker is None:  # a tracker knows by itself
                keep_mlflow_run(self.run_dir)
        own_time = OwnTime(model, lambda: self._saver)
        self._reporter = Reporter(self._link, self.rank, self.world_size, own_time, total_steps=total_steps)

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

        Call it once, before the iterators over the data are made: those begin where it has gone to.  Making them draws
        random numbers, so `restore_random_state` comes after them.

        Raises:
            ResumeError: what to resume from is not there, or does not fit.
            DamagedError: its bytes are not what its manifest says.
            StateError: something to save is neither a tensor nor JSON.
        """
        if self._resumed is not None:
            raise UsageError("keeper.resume() was called twice: call it once, before the first step")
        resumed = resuming.resume(
            self._resume_from,
            strict=self._strict,
            with_optimizer=self._with_optimizer,
            commits=self._commits,
            state=self._state,
            agreement=self._agreement,
            world_size=self.world_size,
            tiering=self._tiering,
            limits=self._load_limits,
        )
        self._resumed = resumed
        if resumed.step is not None:
            self._random = random_state.collect()
        tensors = self._state.collect()  # what cannot be saved is said now, and not at the first save
        if self.rank == 0:
            self._records = begin_records(self._counters, self.run_dir, self._environment, self._tracker)
            self._records.replay = begin_replay(self._environment, self.run_dir, resumed, self.world_size, self._link)
            self._exactness = Exactness(
                self._state.modules["model"].module,
                self._state.others,
                resumed=resumed,
                run_directory=self.run_dir,
                environment=self._environment,
            )
        saver = self._wire(resumed)
        if resumed.step:  # the state is complete; else the optimizer makes its part in the first step
            saver.prepare(tensors)
        if torch.cuda.is_available():
            for part in self._state.optimizers.values():
                part.optimizer.register_step_pre_hook(lambda *_: self._ready().wait_before_change())
        self._reporter.resumed(resumed.step)
        self._skipping = Skipping(self._state.others.get("sampler"), self._environment.skip_data, self.step)
        self._periodic.start(self.step)
        self._agreement.issue(self._wish())
        return self.step

    def restore_random_state(self) -> None:
        """Put the random generators back to where `resume` has set them, where something has drawn from them since.

        Making the iterator of a DataLoader draws.  It is made after `resume`, and then this is called, before the first
        step.  At a start from the very beginning it does nothing.

        Raises:
            UsageError: a step was done already.
        """
        self._ready()
        if self._prepared:
            raise UsageError("keeper.restore_random_state() came after a step: call it before the first one")
        if self._random is not None:
            random_state.restore(self._random)

    def step_done(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        tokens: int = 0,
        lr: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        metrics: Mapping[str, float] | None = None,
        epoch_end: bool = False,
    ) -> bool:
        """Say that an optimizer step is complete; true means leave the loop and call `finish`.

        Args:
            loss: of this step, over all ranks; one on a GPU is read a step later, so that nobody waits for it.
            tokens: of this step, of all ranks together.
            lr: the learning rate that the step used.
            grad_norm: before clipping.
            metrics: whatever else the best step may be chosen by (see `retention`); the newest of each name counts.
            epoch_end: an epoch ended with this step: it is saved, and marked as such.  The same on all ranks.
        """
        saver = self._ready()
        counters = self._counters
        counters.step += 1
        counters.tokens += tokens
        if self._exactness is not None:
            self._exactness.arrive(counters.step)
        self._skipping.at(counters.step)
        loss, lr, grad_norm = whole(loss), whole(lr), whole(grad_norm)
        if self._records is not None:
            self._records.step(loss, lr, grad_norm, metrics)
        self._reporter.step(counters.step, counters.tokens, counters.last_loss if self.rank == 0 else None)
        self._periodic.step(counters.step, epoch_end=epoch_end)
        self._boundary.note_metrics(metrics)
        agreed = self._listen()
        if not self._prepared:
            self._prepared = True
            if not self._boundary.wanted:  # the save does it itself
                saver.prepare(self._state.collect())
        self._boundary.save_as_agreed(agreed)
        self._boundary.spoken()
        self._agreement.issue(self._wish())
        self._leave_step()
        return self._requests.stop_agreed or self.finished

    def poll(self) -> bool:
        """Listen between steps, in evaluation or warm-up; true means leave and call `finish`.

        All ranks must call it equally often.
        """
        self._ready()
        self._settle_records()
        self._periodic.paused()
        self._reporter.alive(self.step, self.tokens, self._counters.last_loss if self.rank == 0 else None)
        self._listen()
        self._agreement.issue(self._wish())
        return self._requests.stop_agreed

    def save(self) -> None:
        """Begin to save the state as it is now; all ranks call it, between steps."""
        self._ready()
        if not self._boundary.begin_together(limit_at=0.0):
            say("save_waits", step=self.step, why="another is in flight")
            if not self._boundary.begin_together(limit_at=time.time() + self._save_within_s):
                self._periodic.due = True
                warn("save_postponed", step=self.step, why="another is in flight, and over its limit")
        self._leave_step()

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
        if self._tiering is not None:
            self._tiering.leave()
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
            begin_save=lambda limit_at: self._boundary.begin_together(limit_at=limit_at, emergency=stopping, last=True),
            agreement=self._agreement,
            link=self._link,
            when_saved=self._finish_copies,
        )
        committed = saver.sequence if code != outcomes.EXIT_UNSAVED else 0
        saver.flush(committed, self._requests.limit_at(outcomes.TOGETHER_WITHIN_S))
        self.listeners.close(self._requests.limit_at(self._save_within_s))
        if self._records is not None:
            self._records.finish(finished=self.finished)
        if leave_process:
            leave(code)
        return code

    def _finish_copies(self, limit_at: float) -> None:
        """Have the last step of finished work copied to the cold tier, before anybody hears that all is done."""
        if self._tiering is not None:
            self._ready().flush(self._ready().sequence, limit_at)
            self._tiering.finish_copies(limit_at)

    def _wire(self, resumed: resuming.Resumed) -> Saver:
        """Make what works from the first step on; all ranks at the same time."""
        self._periodic = Periodic(
            self._rule, rank=self.rank, nodes=len(set(self._nodes)), seen=self._environment.reliability
        )
        retention = keep_house(self._commits, self._policy, self._tiering, self.rank)
        self._guard = storage.Guard(
            self._commits.checkpoints,
            rank=self.rank,
            world_size=self.world_size,
            last=resumed.manifest,
            on_trouble=retention.request if retention is not None else lambda: None,
        )
        if self._test_bytes and self._nodes.index(self._environment.node) == self.rank:  # the first rank of its node
            self.listeners.add(storage.StartTest(self._commits, self._test_bytes, self.rank, self._guard.trouble))
        self.listeners.add(self._guard, retention, self._tiering)
        if self._tiering is not None:
            self._tiering.start(resumed.directory, resumed.manifest)
        self._saver = Saver(
            commits=self._commits,
            rank=self.rank,
            world_size=self.world_size,
            group=self._group,
            link=self._link,
            nonce=self._agreement.share(os.urandom(16).hex()),
            parent=resumed.parent,
            limit_s=self._save_within_s,
            before_commit=self._records.sync if self._records else lambda _limit_at: None,
            guard=self._guard,
            listeners=self.listeners,
            placing=self._tiering.placing if self._tiering is not None else None,
            read_back=self._read_back,
        )
        self._saver.know_private(self._state.private)
        self._boundary = Boundary(
            saver=self._saver,
            agreement=self._agreement,
            requests=self._requests,
            periodic=self._periodic,
            state=self._state,
            group=self._group,
            when_busy=self._when_busy,
            save_within_s=self._save_within_s,
            settle=self._settle_records,
        )
        return self._saver

    def _listen(self) -> Wish:
        self._link.flush()
        self._requests.hear()
        agreed = self._agreement.read(self._wish())
        self._requests.agree(agreed)
        self._ready().hear(agreed)
        self._periodic.hear(agreed)
        self._periodic.note_commit(self._ready().newest)
        return agreed

    def _wish(self) -> Wish:
        return self._requests.wish(self._ready().wish(held=self._guard.held), due=self._periodic.asks(self.step))

    def _ready(self) -> Saver:
        if self._saver is None:
            raise UsageError("keeper.resume() was not called: call it once, before the first step")
        return self._saver

    def _leave_step(self) -> None:
        if self._exactness is not None:
            self._exactness.leave(self.step, self._ready().sequence)

    def _settle_records(self) -> None:
        if self._records is not None:
            self._records.settle()

    def _last_seconds(self) -> None:
        """Give a save in flight the chance to be committed, when training has failed."""
        if self._saver is not None and self._saver.busy:
            self._saver.wait(time.time() + LAST_SECONDS_S)
        if self._records is not None:
            self._records.finish(finished=False)
