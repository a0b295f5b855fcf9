"""What the ranks say, how they end, and what comes then.  Pure."""

from __future__ import annotations

from msgspec.structs import replace

from stepkeeper.core import baseline, scale_up, storage
from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.anomalies import at_commit, watch_loss, watch_pace
from stepkeeper.core.baseline import saved, step_taken
from stepkeeper.core.eviction import expecting
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import relaunch
from stepkeeper.core.phases import (
    Decision,
    all_ready,
    close,
    close_soon,
    kill,
    query_slurm,
    query_slurm_unprompted,
    stopping,
    take,
)
from stepkeeper.core.policy import STOP_SIGNALS, Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.silence import alive, printed, save_seconds, step_seconds
from stepkeeper.core.state import NO_SIGNAL, Announced, Blame, Next, Phase, Plan, State, Timer

EXIT_FINISHED = 0
EXIT_STOPPED = 75
EXIT_GAVE_UP = 93  # NVIDIA's ft_launcher: do not start me again
SHELL_OF_SIGNAL = 128  # and the number: how shells, and many handlers, report an end by a signal


def on_launch_began(state: State, event: on.LaunchBegan, policy: Policy) -> Decision:
    """Every task runs: whether the script uses the trainer library is not known yet."""
    if state.launch.all_tasks_started:
        return Decision(state)
    why = because.TasksStarted(warm=event.warm, cold=event.cold)
    return Decision(_with_tasks_started(state, event.at, policy), (), (why,))


def _with_tasks_started(state: State, at: float, policy: Policy) -> State:
    """The launch need not be waited for, but the first message of the library.  A lost watcher keeps its deadline."""
    waited_for = not state.launch.all_tasks_started and state.phase is Phase.TRAINING and all_ready(state)
    if not state.launch.all_tasks_started:
        state = replace(state, launch=replace(state.launch, announced=Announced.TASKS_STARTED))
    state = replace(state, start=replace(state.start, slurm_away_since=None))
    return state.waiting(Timer.LIBRARY, at + policy.announce_within_s) if waited_for else state


def on_rank_hello(state: State, event: on.RankHello, policy: Policy) -> Decision:
    """The script can save, stop and resume."""
    if event.unable:
        return _on_unable(state, event)
    if state.launch.library_withdrawn and event.rank:
        return Decision(state)  # late, or repeated to a new watcher: only rank 0's begins another training
    why: Why = () if state.launch.library_seen else (because.LibraryAnswers(framework=event.framework),)
    if event.resumed_step is not None and event.resumed_step != state.resume.step:
        why = (because.ResumedElsewhere(step=event.resumed_step, chosen=state.resume.step),)
        state = replace(state, resume=replace(state.resume, step=event.resumed_step))
        if event.in_memory:
            state = replace(state, launch=replace(state.launch, snapshot=event.resumed_step))
    elif state.launch.library_seen:
        return Decision(state)
    starts = not (state.launch.library_seen or state.launch.library_withdrawn)
    if starts and state.launch.began_at is not None:
        state = replace(state, baseline=baseline.started(state.baseline, event.at - state.launch.began_at))
    return Decision(alive(_library_answers(state), event.at, policy), (), why)


def _on_unable(state: State, event: on.RankHello) -> Decision:
    """The script is one without the library, perhaps only from now on: its silence means nothing any more.

    All ranks withdraw; rank 0 says it for all.
    """
    if event.rank or state.launch.library_withdrawn:
        return Decision(state)
    state = _library_answers(state)
    launch = replace(state.launch, announced=Announced.WITHDRAWN, saving=None)
    silence = replace(state.silence, looking=False)
    state = replace(state, launch=launch, silence=silence).beside(Timer.HANG, None)
    return Decision(state, (), (because.NotAttached(framework=event.framework, error=event.unable),))


def _library_answers(state: State) -> State:
    """The trainer library is there: it need not be waited for.  A lost watcher keeps its deadline."""
    waited_for = not state.launch.library_seen and state.phase is Phase.TRAINING and all_ready(state)
    launch = replace(state.launch, announced=Announced.LIBRARY)
    state = replace(state, launch=launch, start=replace(state.start, slurm_away_since=None))
    return state.waiting_for_nothing() if waited_for else state


def on_progressed(state: State, event: on.Progressed, policy: Policy) -> Decision:
    """A step was completed."""
    if state.launch.library_withdrawn:
        return Decision(state)
    if event.printed:
        return Decision(_printed(state, event, policy))
    state, seconds = step_seconds(state, event.step_seconds)
    pace = step_taken(state.pace, seconds) if seconds is not None else state.pace
    state = _library_answers(state)
    said_at = event.at - event.late_s
    state = alive(replace(state, launch=replace(state.launch, step=event.step), pace=pace), said_at, policy)
    paced = watch_pace(state, policy)
    watched = watch_loss(paced.state, event, policy)
    return Decision(watched.state, (*paced.effects, *watched.effects), paced.why + watched.why)


def _printed(state: State, event: on.Progressed, policy: Policy) -> State:
    """A script without the library printed a later step."""
    if state.launch.library_seen or state.phase is not Phase.TRAINING:
        return state
    pace = state.pace
    if event.step_seconds is not None and state.launch.step is not None:
        pace = step_taken(pace, event.step_seconds * (event.step - state.launch.step))  # from print to print
    state = replace(state, launch=replace(state.launch, step=event.step), pace=pace)
    return printed(state, event.at, policy)


def on_save_began(state: State, event: on.SaveBegan, policy: Policy) -> Decision:
    """A save is in flight."""
    if state.launch.library_withdrawn:
        return Decision(state)
    suspended = replace(state.suspended, save=0.0)
    state = _library_answers(replace(state, suspended=suspended))
    return Decision(alive(replace(state, launch=replace(state.launch, saving=event.save_id)), event.at, policy))


def on_committed(state: State, event: on.CheckpointCommitted, policy: Policy) -> Decision:
    """A step directory is complete; an emergency one is read back while the ranks leave."""
    state, seconds = save_seconds(state, event.seconds)
    pace = saved(state.pace, seconds, by_disk=event.by_disk)
    state = replace(
        state,
        launch=replace(state.launch, saving=None),
        pace=pace,
        resume=replace(state.resume, went_back=False),
    )
    state = alive(state, event.at, policy)
    state = expecting(state, policy) if state.timers.get(Timer.LIMIT) is not None else state
    why: Why = (because.Committed(step=event.step, framework=event.framework),)
    if event.drift:
        why += (because.CopiesDiffer(tensors=event.drift),)
    emergency = state.phase is Phase.SAVING and event.emergency
    ours = not event.framework
    read = storage.on_commit(state, event.directory, policy) if ours else Decision(state)
    state, effects = read.state, read.effects
    if ours and emergency and not _leaves_to_grow(state):  # the next launch of this attempt reads it anyway
        effects = (do.VerifyCheckpoint(directory=event.directory, from_disk=storage.from_disk(policy)),)
        state = replace(state, storage=replace(state.storage, verifying=event.directory, reading_back=()))
    if state.launch.first_failure:
        ended = _end_survivors(state, event.at, why, policy)
        return Decision(ended.state, (*effects, *ended.effects), ended.why)
    if emergency or state.phase is Phase.STOPPING:
        state = _leave_soon(state, event.at, policy)
    replaced = at_commit(state, event.at, policy)
    if replaced is not None:
        return Decision(replaced.state, (*effects, *replaced.effects), why + replaced.why)
    grown = scale_up.at_commit(state, event.at, policy)
    if grown is not None:
        return Decision(grown.state, (*effects, *grown.effects), why + grown.why)
    return Decision(state, effects, why)


def _leaves_to_grow(state: State) -> bool:
    """Tell whether the ranks were asked to leave for a larger launch in the same allocation."""
    return state.leaving.plan is not None and state.leaving.plan.to_grow and state.leaving.plan.next is Next.RELAUNCH


def on_save_failed(state: State, event: on.SaveFailed, policy: Policy) -> Decision:
    """A save failed: training goes on, and older steps are untouched."""
    state = replace(state, launch=replace(state.launch, saving=None))
    why = (because.SaveFailed(step=event.step, error=event.error),)
    if state.launch.first_failure:
        return _end_survivors(state, event.at, why, policy)
    return Decision(state, (), why)


def _end_survivors(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """A rank has failed, and the save that the others were spared for is over."""
    if state.launch.killed:
        return Decision(state, (), why)
    return kill(replace(state, phase=Phase.STOPPING), at, policy, why)


def _leave_soon(state: State, at: float, policy: Policy) -> State:
    """The ranks are about to leave: never put off a deadline for that."""
    deadline = at + policy.leave_within_s
    if state.launch.killed:
        return state
    known = state.deadline_at if state.phase is not Phase.TRAINING else None  # there it is the watchers'
    return state.waiting(Timer.RANKS_LEAVE, deadline if known is None else min(known, deadline))


def on_finished(state: State, event: on.TrainingFinished, policy: Policy) -> Decision:
    """The work is done: that wins over every notice."""
    if state.launch.killed:
        return Decision(state)
    why = (because.TrainingFinished(step=event.step),)
    if state.leaving.plan is not None and state.leaving.plan.code is ExitCode.FINISHED:
        return Decision(state)
    plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
    state = _leave_soon(state, event.at, policy)
    leaving = replace(state.leaving, plan=plan, fallback_plan=state.leaving.plan)
    state = replace(state, phase=Phase.STOPPING, leaving=leaving)
    return Decision(state, (), why)


def on_stopped(state: State, event: on.TrainingStopped, policy: Policy) -> Decision:
    """The ranks leave, on request or on their own."""
    known = state.leaving.plan
    asked = known is not None and (known.next is not Next.RELAUNCH or known.to_grow)
    if asked or state.launch.first_failure or state.launch.killed:
        state = _leave_soon(state, event.at, policy)
        return Decision(state, (), (because.RanksLeave(step=event.step),))
    why = (because.RanksLeftAlone(step=event.step),)
    plan = Plan(next=Next.RELAUNCH, why=why)
    state = stopping(_leave_soon(state, event.at, policy), plan)
    return query_slurm(_prompted(state), why)


def _prompted(state: State) -> State:
    """The ranks left as if they had been asked to: a question of our own accord becomes one about that."""
    return replace(state, query=replace(state.query, signal="")) if state.query.signal == NO_SIGNAL else state


def on_rank_exited(state: State, event: on.RankExited, policy: Policy) -> Decision:
    """A rank ended: if it failed, end the others, but let a commit in flight come to its end."""
    if not state.launch.library_seen and state.identity.wrapped:
        state = _with_tasks_started(state, event.at, policy)
    faults = tuple(fault for node, fault in state.launch.hints if node == event.node)
    why: Why = (
        because.RankFailed(rank=event.rank, node=event.node, code=event.code, signal=event.signal, faults=faults),
    )
    if _slurm_may_have_ended_it(state, event):
        first = state.launch.first_failure or why
        state = replace(state, launch=replace(state.launch, first_failure=first))
        return Decision(state, (), (*why, because.Plain(because.Fact.SIGNAL_UNEXPLAINED)))
    if event.signal is None and event.code in (EXIT_FINISHED, EXIT_STOPPED, None):
        return _on_rank_left(state, event, policy)
    if _ends_as_asked(state, event, policy):
        return Decision(state, (), (*why, because.Plain(because.Fact.ENDED_AS_ASKED)))
    return _on_rank_failed(state, event, policy, why)


def _on_rank_failed(state: State, event: on.RankExited, policy: Policy, why: Why) -> Decision:
    first = state.launch.first_failure or why
    ours = state.launch.killed or state.phase is not Phase.TRAINING  # it was ended, or dies of another's death
    look = () if ours else (do.Look(node=event.node, reasons=why),)
    state = replace(state, launch=replace(state.launch, first_failure=first))
    if event.code == EXIT_GAVE_UP:
        state = take(state, Plan(next=Next.END, why=why, code=ExitCode.TRAINING_GAVE_UP))
    elif state.leaving.plan is None or _leaves_to_grow(state) or _blames_training(state.leaving.plan):
        state = replace(state, leaving=replace(state.leaving, plan=Plan(next=Next.RELAUNCH, why=first)))
    if state.launch.killed:
        return Decision(state)
    if state.launch.saving is None:
        killed = kill(replace(state, phase=Phase.STOPPING), event.at, policy, why)
        return Decision(killed.state, (*killed.effects, *look), why)
    if state.phase is Phase.TRAINING:
        state = replace(state, phase=Phase.STOPPING)
        state = state.waiting(Timer.RANKS_LEAVE, event.at + policy.commit_grace_s)
    return Decision(state, look, (*why, because.Plain(because.Fact.COMMIT_IN_FLIGHT)))


def _ends_as_asked(state: State, event: on.RankExited, policy: Policy) -> bool:
    """Tell the end of a rank that got the stop signal from a failure: others may still be saving.

    Without the trainer library any end is one: how a script ends after its save is its own affair.
    """
    if state.phase is not Phase.SAVING or event.code == EXIT_GAVE_UP:
        return False
    number = STOP_SIGNALS[policy.stop_signal]
    return not state.launch.library_seen or event.signal == number or event.code == SHELL_OF_SIGNAL + number


def _slurm_may_have_ended_it(state: State, event: on.RankExited) -> bool:
    """Tell whether Slurm's own signal may have ended a rank that no wrapper shields: others may be saving for it."""
    unasked = state.phase is Phase.TRAINING and state.query.asking and event.code not in (EXIT_FINISHED, EXIT_GAVE_UP)
    return unasked and bool(state.launch.slurm_sent) and not state.launch.library_seen


def _blames_training(plan: Plan) -> bool:
    return plan.next is Next.RELAUNCH and plan.blame is Blame.TRAINING


def _on_rank_left(state: State, event: on.RankExited, policy: Policy) -> Decision:
    """A rank ended without a failure that anyone saw: the word on why must come soon, or it is one.

    A rank may be done before the others, so 0 alone means nothing.
    """
    if state.phase is not Phase.TRAINING or event.code == EXIT_FINISHED:
        return Decision(state)
    left = because.RankLeft(rank=event.rank, node=event.node, seen=event.code is not None)
    wait = policy.leave_within_s if state.launch.saving is None else policy.commit_grace_s
    plan = Plan(next=Next.RELAUNCH, why=(left,))
    state = stopping(state, plan).waiting(Timer.RANKS_LEAVE, event.at + wait)
    return Decision(state, (), (replace(left, waiting=True),))


def on_launch_ended(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    """No rank runs any more: go on with the plan, or find out what happened."""
    state = replace(state, launch=replace(state.launch.ended(), saving=None))
    if event.finished:
        finished = Plan(next=Next.END, why=(because.TrainingFinished(step=event.step),), code=ExitCode.FINISHED)
        return close(state, event.at, finished, policy)
    if state.phase is Phase.TRAINING:
        return _after_unasked_end(state, event, policy)
    plan = state.plan
    if plan.code is ExitCode.FINISHED and event.code:  # with 0, rank 0's word counts without the file
        failed = (because.OutcomeMissing(error=event.error, code=event.code),)
        plan = state.leaving.fallback_plan or Plan(next=Next.RELAUNCH, why=failed)
    if _leaves_to_grow(state) and not state.query.asking:
        return relaunch(state, event.at, plan.why, policy)
    if plan.next is Next.RELAUNCH:
        return _after_failure(state, event, plan.why, policy)
    return close(state, event.at, plan, policy)


def _after_unasked_end(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    if not state.launch.library_seen and event.code == 0 and event.target is None and not event.unproven:
        why: Why = (because.CommandEnded(),)
        plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
        if state.identity.wrapped:
            return close(state, event.at, plan, policy)
        # Slurm's signal reaches these ranks before us: a handler that saves ends with 0 as well
        state = stopping(state, plan).waiting(Timer.SLURM_ANSWER, event.at + policy.ask_within_s)
        return (
            Decision(state, (), why)
            if state.query.asking
            else query_slurm_unprompted(state, (*why, because.SlurmAsked()))
        )
    if event.code == EXIT_GAVE_UP:
        plan = Plan(next=Next.END, why=(because.Plain(because.Fact.COMMAND_GAVE_UP),), code=ExitCode.TRAINING_GAVE_UP)
        return close(state, event.at, plan, policy)
    how = state.launch.first_failure or (because.StepFailed(code=event.code, error=event.error),)
    if event.stopped:
        how = (because.RanksLeftAlone(),)
    elif event.target is not None:
        how = (because.EndedBeforeTarget(step=event.step, target=event.target),)
    elif event.unproven:
        how = (because.Plain(because.Fact.END_UNPROVEN),)
    elif event.code == 0:
        how = (because.Plain(because.Fact.RANKS_ENDED_SILENTLY),)
    elif state.identity.wrapped and not state.launch.all_tasks_started and not state.launch.library_seen:
        return _never_began(state, event.at, how, policy)
    return _after_failure(state, event, how, policy)


def _never_began(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """Not every task was started: where Slurm itself is away, that is no failure, and the next launch waits for it."""
    since = state.start.slurm_away_since if state.start.slurm_away_since is not None else at
    state = replace(
        stopping(state, Plan(next=Next.RELAUNCH, why=why)), start=replace(state.start, slurm_away_since=since)
    )
    state = state.waiting(Timer.SLURM_ANSWER, at + policy.ask_within_s)
    return query_slurm_unprompted(state, (*why, because.SlurmAsked()))


def _after_failure(state: State, event: on.LaunchEnded, why: Why, policy: Policy) -> Decision:
    """Relaunch; but while Slurm is being asked, its answer may show that this was no failure."""
    if not state.query.asking and not event.stopped:
        return relaunch(state, event.at, why, policy)
    if event.stopped:
        state = _prompted(state)
    state = stopping(state, _again(state, why)).waiting(Timer.SLURM_ANSWER, event.at + policy.ask_within_s)
    asked = Decision(state) if state.query.asking else query_slurm(state, why)
    return Decision(asked.state, asked.effects, (*why, because.SlurmAsked()))


def _again(state: State, why: Why) -> Plan:
    """Return the plan of a relaunch; whose fault it is stays as it was."""
    if state.leaving.plan is None:
        return Plan(next=Next.RELAUNCH, why=why)
    return replace(state.leaving.plan, next=Next.RELAUNCH, why=why)


def on_checkpoint_verified(state: State, event: on.CheckpointVerified, policy: Policy) -> Decision:
    """The emergency checkpoint was read back, or one beside training."""
    if event.directory != state.storage.verifying and event.directory in state.storage.reading_back[:1]:
        return storage.on_read_back(state, event)
    if event.directory != state.storage.verifying:
        return Decision(state)
    state = replace(state, storage=replace(state.storage, verifying=None))
    why: Why
    if event.ok:
        why = (because.CheckpointRead(directory=event.directory, result="verified"),)
    else:
        damaged = because.CheckpointRead(directory=event.directory, result="damaged", problem=event.problem)
        why = (damaged, because.Plain(because.Fact.CHECKPOINT_BEFORE_USED))
    if state.phase is Phase.CLOSING:
        return close_soon(state, event.at, policy, why)
    return Decision(state, (), why)
