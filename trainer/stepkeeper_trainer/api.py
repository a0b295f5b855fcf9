"""What a training loop uses: `resume()`, `step_done()` after each optimizer step, `finish()`.

Decisions are taken at step boundaries, from what all ranks have agreed on.  It works with and without a supervisor.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

import torch

from stepkeeper_trainer.coordinate import ending, groups
from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Proposal
from stepkeeper_trainer.coordinate.between import BetweenSteps, end_notices
from stepkeeper_trainer.coordinate.boundary import Boundary
from stepkeeper_trainer.coordinate.cadence import Rule, choose_rule
from stepkeeper_trainer.coordinate.ending import install_excepthook
from stepkeeper_trainer.coordinate.requests import Periodic, Requests, begin_snapshots, owner
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import StepkeeperError, UsageError, check_seconds
from stepkeeper_trainer.link import Link, Reporter
from stepkeeper_trainer.load import resume as resuming
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.observe import collectives
from stepkeeper_trainer.observe.confirmation import Confirmation, begin_confirmation, choose_every
from stepkeeper_trainer.observe.exactness import Exactness, begin_replay
from stepkeeper_trainer.observe.metrics import Records, begin_records, whole
from stepkeeper_trainer.observe.straggler_probe import StragglerProbe
from stepkeeper_trainer.observe.trackers import Tracker, keep_runs
from stepkeeper_trainer.sampler import Skipping
from stepkeeper_trainer.save.commit import Listeners
from stepkeeper_trainer.save.saver import Saver
from stepkeeper_trainer.state import Counters, Stateful, TrainingState, random_state
from stepkeeper_trainer.state.last_step import LastStep
from stepkeeper_trainer.store import guard, run_directory
from stepkeeper_trainer.store.retention import Policy, choose_policy
from stepkeeper_trainer.store.run_directory import keep_house
from stepkeeper_trainer.tiers.tiering import find_tiers, place_in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepkeeper_trainer.tiers.tier import Tiers


T = TypeVar("T")
SAVE_WITHIN_S = 600.0
LAST_SECONDS_S = 20.0  # for a save in flight when training fails


class CheckpointManager:
    """Each rank makes one, when the model is sharded; all ranks call its methods in the same order."""

    def __init__(
        self,
        state: Mapping[str, torch.nn.Module | torch.optim.Optimizer | Stateful],
        *,
        run_dir: str | os.PathLike[str] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        strict: bool = True,
        with_optimizer: bool = False,
        every: str | int | Rule | None = "auto",
        total_steps: int | None = None,
        retention: str | Policy | None = None,
        seed: int = 0,
        save_within_s: float = SAVE_WITHIN_S,
        confirm_every: int | None = None,
        read_back: bool = False,
        storage_test: str | int = "quick",
        tracker: Tracker | None = None,
        tiers: Tiers | None = None,
        load_memory_gib: float | None = None,
        overlap_copies: bool = False,
        attach_signals: bool | None = None,
        attach_hooks: bool | None = None,
        attach_excepthook: bool | None = None,
    ) -> None:
        """Attach to the supervisor, if there is one.

        Args:
            state: what is saved, by names without dots: modules (plain, compiled, DDP, `fully_shard`, tensor parallel),
                optimizers, and anything with `state_dict` and `load_state_dict`: a scheduler, a gradient scaler, a
                `GlobalSampler`, a StatefulDataLoader.  Ranks may hold different values, and even different names.
            run_dir: where checkpoints and metrics go; `STEPKEEPER_RUN_DIR` if it is not given, and without that, below
                the working directory, `runs/SCRIPT-JOBID` in a Slurm job and `runs/SCRIPT` outside.
            resume_from: a step directory, `latest`, or initial weights: a directory of plain DCP, a safetensors file
                or a directory of those; `STEPKEEPER_RESUME_FROM` if it is not given.  A step of this run counts first.
            strict: whether initial weights must have each tensor of the model, and no other one of it.
            with_optimizer: whether initial weights of plain DCP bring the optimizer's state too, but not its options.
            every: how often to save: `500 steps` (or 500), `30 min`, `auto` (as often as pays), or several joined by
                `or`; None saves on request and at the end only.  `STEPKEEPER_CHECKPOINT_EVERY` counts instead, where it
                is set.
            total_steps: when the work is done.
            retention: which steps are kept, such as `newest 3, every 1000 steps, best loss 2` (see `parse_policy`), or
                `all`; the newest 3 and ends of epochs if it is not given.  `STEPKEEPER_RETENTION` counts instead, where
                it is set.
            seed: for the generators of ranks that a checkpoint does not know.
            save_within_s: how long one save may take.
            confirm_every: have `confirm` compute twice at every so many steps, and compare; never if it is not given.
                `STEPKEEPER_CONFIRM_EVERY` counts instead, where it is set.
            read_back: each rank reads its files back from the disk before a save counts, but where the job is to end.
            storage_test: a dummy save beside the first steps, on each node: `quick`, a number of bytes, or `off`.
            tracker: where losses and metrics go besides `metrics.csv`, such as `MlflowTracker("experiment")`.
            tiers: where steps are kept besides the run directory (docs/tiers.md); the variables that `stepkeeper run`
                sets count instead, where they name any.
            load_memory_gib: what all ranks of a node together may take to load a step, beyond the state itself; 1 GiB
                a rank if it is not given.
            overlap_copies: copy from a GPU beside training, which then waits less.  Only an optimizer's step waits for
                the copies: call `wait_staged` before the state changes in another way.
            attach_signals: take SIGTERM and SIGUSR1 as notices; a handler of the script's own is still called.  If it
                is not given: under a supervisor or in a Slurm job.
            attach_hooks: have the first module and each optimizer call back, to name slow ranks and to save between
                steps.  If it is not given: where signals are taken.
            attach_excepthook: when training fails, a save in flight may end, and an error of ours has its exit code and
                no traceback.  If it is not given: under a supervisor.

        Raises:
            StepkeeperError: what is wrong and what to do.
        """
        owner.take()
        self._saver: Saver | None = None
        self._records: Records | None = None  # on rank 0
        self._environment = read_environment()
        supervised = self._environment.socket is not None
        notified = supervised or self._environment.epoch is not None  # somebody may send a notice
        if supervised if attach_excepthook is None else attach_excepthook:
            install_excepthook(self._last_seconds)
        attach_signals = notified if attach_signals is None else attach_signals
        self._hooks = attach_signals if attach_hooks is None else attach_hooks
        self.rank, self.world_size = groups.find_rank()
        self._resume_from, self._strict = str(resume_from) if resume_from else None, strict
        self._with_optimizer = with_optimizer
        check_seconds("save_within_s", save_within_s)
        self._tracker = tracker
        self._rule = choose_rule(self._environment.checkpoint_every, every)
        self._policy = choose_policy(self._environment.retention, retention, total_steps=total_steps)
        self._test_bytes = guard.bytes_to_test(storage_test)
        self._total_steps, self._save_within_s = total_steps, save_within_s
        self._confirm_every = choose_every(self._environment.confirm_every, confirm_every)
        self._group = groups.new_group(save_within_s)
        agree_within_s = max(save_within_s, groups.hang_limit_s())
        self._agreement = Agreement(groups.new_group(agree_within_s + save_within_s), within_s=agree_within_s)
        self._agreement.check_alike(
            hooks=self._hooks,
            every=str(self._rule),
            confirm_every=self._confirm_every,
            total_steps=total_steps,
            overlap_copies=overlap_copies,
        )
        self._notices = groups.new_group(agree_within_s) if self._hooks else None
        self._nodes = self._agreement.gather(self._environment.node)  # of the ranks
        self._read_back, self._overlap_copies = read_back, overlap_copies
        self._load_limits = resuming.choose_limits(load_memory_gib, ranks=self._nodes.count(self._environment.node))
        self._commits = run_directory.open_run_directory(run_dir, self._environment, self._agreement, self.rank)
        self.run_dir, self._environment = self._commits.run_directory, self._commits.environment
        collectives.listen(self._environment, self.run_dir, self.rank)
        self._link = Link(self._environment.socket, self._environment.launch_name)
        self._requests = Requests(self._link, signals=attach_signals)
        self.listeners = Listeners()  # told of each commit
        self._tiering = find_tiers(tiers, self._commits, self._agreement, self.rank, self.world_size)
        self._exactness: Exactness | None = None  # on rank 0
        self._counters = Counters(seed=seed)
        self._state = TrainingState(state, counters=self._counters, rank=self.rank, world_size=self.world_size)
        self._last_step = LastStep(self._state)
        self._between: BetweenSteps | None = None
        self._confirmation: Confirmation | None = None  # where steps are confirmed
        self._resumed: resuming.Resumed | None = None
        self._random: dict[str, torch.Tensor] | None = None  # the generators, as they were resumed
        self._prepared = False  # the state has been complete once, and memory for saves is being made
        self._ended = False  # `finish` has returned
        if self.rank == 0:
            keep_runs(self._environment.run_id, self.run_dir, tracker)
        probe = StragglerProbe(self._state.main_module if self._hooks else None, lambda: self._saver)
        self._reporter = Reporter(self._link, self.rank, self.world_size, probe, total_steps=total_steps)

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
        """Whether to leave the loop and call `finish`: `total_steps` are done, or all ranks have agreed to stop."""
        return self._requests.stop_agreed or self._work_done

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop before `total_steps` are done."""
        return self._requests.stop_agreed and not self._work_done

    @property
    def saved_step(self) -> int | None:
        """The step that this launch has saved last, or is saving, unless that save has failed."""
        return self._boundary.saved_step if self._saver is not None else None

    @property
    def _work_done(self) -> bool:
        return self._total_steps is not None and self.step >= self._total_steps

    def steps(self) -> Iterator[int]:
        """Yield how many steps are done, before each step, until it is time to call `finish`.

        Call `step_done` in each round; a round without it is the same step once more.
        """
        self._ready()
        if self._exactness is not None:
            self._exactness.begin()
        while not self.finished:
            yield self.step
            if self._exactness is not None and not self.finished:
                self._exactness.turn()

    def resume(self) -> int:
        """Load what this launch resumes from, if anything, and return how many steps are done.

        Call it once, before the iterators over the data are made: those begin at that position.  Making them draws
        random numbers, so `restore_random_state` comes after them.

        Raises:
            ResumeError: what to resume from is not there, or does not fit.
            DamagedError: its bytes are not what its manifest says.
            StateError: something to save is neither a tensor nor JSON.
        """
        if self._resumed is not None:
            raise UsageError("resume() was called twice: call it once, before the first step")
        if self.rank == 0:
            self._exactness = Exactness(self._state)
            self._exactness.resumes()
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
        tensors = self._check_state(Call.START)
        if self._random is not None:
            random_state.restore(self._random)  # a loader that is asked for its state may begin its iterator, and draw
        if self.rank == 0:
            self._records = begin_records(self._counters, self.run_dir, self._environment, self._tracker)
            self._records.replay = begin_replay(self._environment, self.run_dir, resumed, self._link)
        if self._exactness is not None:
            self._exactness.resumed(
                resumed,
                tensors,
                hooked=self._state.main_module if self._hooks else None,
                run_directory=self.run_dir,
                environment=self._environment,
            )
        self._confirmation = begin_confirmation(
            self._confirm_every,
            resumed,
            state=self._state,
            agreement=self._agreement,
            link=self._link,
            rank=self.rank,
            node=self._environment.node,
        )
        saver = self._wire(resumed)
        if resumed.step:  # the state is complete; else the optimizer makes its part in the first step
            saver.prepare(tensors)
        self._reporter.resumed(resumed.step, saved=resumed.is_saved, memory=place_in_memory(self._tiering))
        self._skipping = Skipping(self._state.sampler, self._environment.skip_data, self.step)
        self._periodic.start(self.step, saved=resumed.is_saved)
        self._agreement.issue(self._proposal())
        self._listen_between_steps(resumed)
        return self.step

    def confirm(self, compute: Callable[[], T]) -> T:
        """Compute, and every `confirm_every` steps twice before it, to find a device that computes wrongly.

        Give it the first micro-batch of a step: `loss = manager.confirm(lambda: forward_and_backward(batch))`.  The
        loss and the gradients of each rank are compared bit for bit, and nothing is left of the computations besides
        the last one.  A run that is not deterministic is recognised in its second step, and left alone.

        Args:
            compute: forward and backward of data that is fetched already; it returns the loss, and changes no
                parameter.

        Returns:
            what `compute` returned.

        Raises:
            CorruptionError: a rank came to other bits: on all ranks, and the supervisor leaves its node.
            UsageError: `compute` changes parameters, or ranks differ in whether they call this.
        """
        self._ready()
        if self._confirmation is not None and self._confirmation.check_if_due(compute, self.step):
            self.alive()
        return compute()

    def restore_random_state(self) -> None:
        """Put the random generators back to where `resume` has set them, where something has drawn from them since.

        Making the iterator of a DataLoader draws.  It is made after `resume`, and then this is called, before the first
        step.  At a start from the very beginning it does nothing.

        Raises:
            UsageError: a step was done already.
        """
        self._ready()
        if self._prepared:
            raise UsageError("restore_random_state() came after a step: call it before the first one")
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
            loss: of this step, over all ranks; one on a GPU is read a step later, so that no rank waits for it.
            tokens: of this step, of all ranks together.
            lr: the learning rate that the step used.
            grad_norm: before clipping.
            metrics: whatever else the best step may be chosen by (see `retention`); the newest of each name counts.
            epoch_end: an epoch ended with this step: it is saved, and marked as such.  The same on all ranks.
        """
        saver = self._ready()
        self._begin_change()
        counters = self._counters
        counters.step += 1
        counters.tokens += tokens
        if self._exactness is not None:
            self._exactness.arrive(counters.step)
        self._skipping.at(counters.step)
        loss, lr, grad_norm = whole(loss), whole(lr), whole(grad_norm)
        if self._records is not None:
            self._records.step(loss, lr, grad_norm, metrics)
        self._reporter.held_step = saver.held_step
        self._reporter.step(counters.step, counters.tokens, counters.last_loss if self.rank == 0 else None)
        self._periodic.step(counters.step, epoch_end=epoch_end)
        self._snapshots.step(counters.step)
        self._boundary.note_metrics(metrics)
        if self._confirmation is not None:
            self._confirmation.note_step(counters.step)
        agreed = self._listen()
        if not self._prepared:
            self._prepared = True
            tensors = self._check_state(Call.STEP)  # the first step makes the optimizer's part
            if self._exactness is not None:
                self._exactness.gathered(tensors)
            if not self._boundary.wanted:  # the save does it itself
                saver.prepare(tensors)
        self._boundary.save_as_agreed(agreed)
        self._boundary.spoken()
        self._agreement.issue(self._proposal())
        self._leave_step()
        self._end_change()
        return self.finished

    def alive(self) -> None:
        """Say in a long evaluation or warm-up that this rank is well; any rank may call it as often as it likes."""
        self._ready()
        self._periodic.paused()
        self._reporter.alive(self.step, self.tokens, self._counters.last_loss if self.rank == 0 else None)

    def wait_staged(self) -> None:
        """Return when the state may change: the copy that a save in flight takes of it is complete, or ordered before.

        Needed before weights change by other ways than an optimizer's step, and only with `overlap_copies`.
        """
        if self._saver is not None:
            self._saver.wait_before_change()

    def save(self) -> None:
        """Begin to save the state as it is now; all ranks call it, between steps."""
        self._ready()
        self._begin_change()
        if not self._boundary.begin_together(Call.SAVE, limit_at=0.0):
            say("save_waits", step=self.step, why="another is in flight")
            if not self._boundary.begin_together(Call.SAVE, limit_at=time.time() + self._save_within_s):
                self._periodic.due = True
                warn("save_postponed", step=self.step, why="another is in flight, and over its limit")
        self._leave_step()
        self._end_change()

    def wait_saved(self, within_s: float | None = None) -> bool:
        """Wait until this rank has done its part of the save in flight; true unless that has failed, or is late.

        Rank 0's part includes the commit.  Any rank may call it; it waits for `save_within_s` if no time is given.
        """
        return self._ready().wait_shared(time.time() + (self._save_within_s if within_s is None else within_s))

    def finish(self) -> int:
        """Save what is not saved yet, wait until it is durable, and return the exit code: `sys.exit(manager.finish())`.

        Exit codes: 0 the work is finished, 75 stopped on request with the state saved, 1 stopped
        without (the ranks' last words say why).  The process continues; nothing else of the manager can be called.

        Raises:
            SaveError: the work is finished, and its last step could not be saved.
        """
        saver = self._ready()
        self._begin_change()
        self._listen()
        limit_at = self._requests.limit_at(self._save_within_s)
        talked = end_notices(self._between, self._agreement, max(limit_at, time.time()) + ending.TOGETHER_WITHIN_S)
        stopping = self._requests.stop_agreed and not self._work_done
        self._settle_records()
        saver.give_way(limit_at)
        if self._tiering is not None:
            self._tiering.leave()
        code = ending.conclude(
            ending.Ending(
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
            begin_save=lambda limit_at: self._boundary.begin_together(
                Call.FINISH, limit_at=limit_at, emergency=stopping
            ),
            agreement=self._agreement,
            link=self._link,
            when_saved=self._finish_copies,
        )
        committed = saver.save_sequence if code != ending.EXIT_UNSAVED else 0
        saver.flush(committed, self._requests.limit_at(ending.TOGETHER_WITHIN_S))
        self.listeners.close(self._requests.limit_at(self._save_within_s))
        if self._tiering is not None and code != ending.EXIT_UNSAVED:
            self._tiering.discard_snapshots()
        if self._records is not None:
            self._records.finish(finished=self._work_done)
        self._ended = True
        self.wait_staged()
        self._requests.close()
        if code != ending.EXIT_UNSAVED:  # of a save without an end, its thread still waits in them
            if self._boundary.group is not None:
                self._boundary.group.close()
            for each in (talked, self._agreement):
                if each is not None:
                    each.close()
        return code

    def _check_state(self, call: Call) -> dict[str, torch.Tensor]:
        """Return the state; what cannot be saved, or loaded again, ends all ranks before another step is lost for it.

        Raises:
            StateError: which, and on which rank.
        """
        tensors: dict[str, torch.Tensor] = {}
        refusal: StepkeeperError | None = None
        try:
            tensors = self._state.check()
        except StepkeeperError as error:
            refusal = error
        self._agreement.raise_together(refusal, call)
        return tensors

    def _finish_copies(self, limit_at: float) -> None:
        """Have the last step of finished work copied to the cold tier, before anybody hears that all is done."""
        if self._tiering is not None:
            self._ready().flush(self._ready().save_sequence, limit_at)
            self._tiering.finish_copies(limit_at)

    def _wire(self, resumed: resuming.Resumed) -> Saver:
        """Make what works from the first step on; all ranks at the same time."""
        self._periodic = Periodic(
            self._rule, rank=self.rank, nodes=len(set(self._nodes)), seen=self._environment.reliability
        )
        retention = keep_house(self._commits, self._policy, self._tiering, self.rank)
        self._guard = guard.Guard(
            self._commits.checkpoints,
            rank=self.rank,
            world_size=self.world_size,
            last=resumed.manifest,
            on_trouble=retention.request if retention is not None else lambda: None,
        )
        if self._test_bytes and self._nodes.index(self._environment.node) == self.rank:  # the first rank of its node
            self.listeners.add(guard.StartTest(self._commits, self._test_bytes, self.rank, self._guard.trouble))
        self.listeners.add(self._guard, retention, self._tiering)
        if self._tiering is not None:
            self._tiering.start(resumed.directory, resumed.manifest)
        self._snapshots = begin_snapshots(self._tiering, step=self.step, rank=self.rank)
        self._saver = Saver(
            commits=self._commits,
            rank=self.rank,
            world_size=self.world_size,
            group=self._group,
            private=self._state.private,
            link=self._link,
            nonce=self._agreement.share(os.urandom(16).hex()),
            parent=resumed.parent,
            limit_s=self._save_within_s,
            before_commit=self._records.sync if self._records else lambda _limit_at, _unwanted: None,
            guard=self._guard,
            listeners=self.listeners,
            uploader=self._tiering.uploader if self._tiering is not None else None,
            snapshots=self._tiering.snapshots if self._tiering is not None else None,
            read_back=self._read_back,
            overlap_copies=self._overlap_copies,
            dcp_values=self._environment.reads_values,
        )
        self._boundary = Boundary(
            saver=self._saver,
            agreement=self._agreement,
            requests=self._requests,
            periodic=self._periodic,
            state=self._state,
            group=self._group,
            save_within_s=self._save_within_s,
            settle=self._settle_records,
            snapshots=self._snapshots,
        )
        return self._saver

    def _listen_between_steps(self, resumed: resuming.Resumed) -> None:
        """Have notices answered while the main thread is not at the end of a step."""
        if self._hooks or self._overlap_copies:
            for part in self._state.optimizers.values():
                part.optimizer.register_step_pre_hook(self._before_optimizer_step)
        if not self._hooks:
            return
        self._between = BetweenSteps(
            group=self._notices,
            within_s=self._agreement.within_s,
            boundary=self._boundary,
            requests=self._requests,
            last_step=self._last_step,
            counters=self._counters,
            saved_step=resumed.step if resumed.is_saved else None,
            save_within_s=self._save_within_s,
            saver=self._ready(),
            rank=self.rank,
            link=self._link,
        )
        if not resumed.is_saved:  # a notice in the first step finds it nowhere else
            self._last_step.mark()
        self._between.gate.leave()

    def _before_optimizer_step(self, *_: object) -> None:
        if torch.compiler.is_compiling():  # a step that is compiled has no room for it
            return
        self._begin_change()
        self.wait_staged()

    def _begin_change(self) -> None:
        if self._between is not None:
            self._between.begin_change()

    def _end_change(self) -> None:
        if self._between is not None:
            self._between.end_change()

    def _listen(self) -> Proposal:
        self._link.flush()
        self._requests.receive()
        agreed = self._agreement.read(self._proposal)
        self._requests.agree(agreed)
        self._ready().note_agreed(agreed)
        self._periodic.note_agreed(agreed)
        self._snapshots.note_agreed(agreed)
        self._last_step.note_agreed(agreed)
        self._periodic.note_commit(self._ready().newest)
        return agreed

    def _proposal(self) -> Proposal:
        own = self._ready().propose(held=self._guard.held, too_dear=self._last_step.too_dear)
        return self._requests.propose(own, due=self._periodic.asks(self.step), snapshot=self._snapshots.asks(self.step))

    def _ready(self) -> Saver:
        if self._ended:
            raise UsageError("finish() was called: make another CheckpointManager to continue")
        if self._saver is None:
            raise UsageError("resume() was not called: call it once, before the first step")
        return self._saver

    def _leave_step(self) -> None:
        if self._exactness is not None:
            last = self._ready().last
            self._exactness.leave(
                self.step,
                last.sequence if last is not None else 0,
                of_now=last is not None and last.summary.step == self.step,
            )

    def _settle_records(self) -> None:
        if self._records is not None:
            self._records.settle()

    def _last_seconds(self) -> None:
        """Give a save in flight the chance to be committed, when training has failed."""
        if self._saver is not None and self._saver.busy:
            self._saver.wait(time.time() + LAST_SECONDS_S)
        if self._records is not None:
            self._records.finish(finished=False)
