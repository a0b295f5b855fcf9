"""Promises on time: each wait ends, and what is left of a notice is used for a save and no longer."""

from __future__ import annotations

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.baseline import SAVES_ENOUGH
from stepkeeper.core.decide import decide
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import LIMIT, Next, Phase, Timer
from tests.core.promises.register import POLICY, all_watched, promise


@promise
def every_wait_has_a_deadline(turns):
    """Without one, a lost word would stop a run for ever."""
    for turn in turns:
        state = turn.after
        free = state.phase is Phase.DONE or (state.phase is Phase.TRAINING and all_watched(state))
        tested = [state.timers.get(each) for each in (Timer.STORAGE_TEST, Timer.STORAGE_RETRY)]
        held = state.phase is Phase.STARTING and any(at is not None for at in tested)
        assert free or held or state.deadline_at is not None
        heard = state.phase is Phase.TRAINING and state.launch.library_seen
        assert not heard or state.timers.get(Timer.HANG) is not None


@promise
def a_limit_that_is_known_is_acted_on(turns):
    """By our own clock: a site may send no signal before it."""
    for turn in turns:
        state = turn.before
        limit_at = state.timers.get(Timer.LIMIT)
        due = isinstance(turn.event, on.Tick) and limit_at is not None and turn.event.at >= limit_at
        if due and state.phase in (Phase.STARTING, Phase.TRAINING):
            assert turn.after.query.asking
            assert turn.after.timers.get(Timer.LIMIT) is None


@promise
def ranks_are_killed_no_later_than_the_save_deadline(turns):
    """The time after it belongs to the requeue."""
    limit = None
    for turn in turns:
        state = turn.after
        leaving = state.launch.running and state.phase in (Phase.SAVING, Phase.STOPPING)
        if not leaving:
            limit = None
            continue
        if state.launch.killed:
            assert turn.before.launch.killed or turn.ordered(do.KillRanks)
            continue
        assert state.deadline_at is not None
        if isinstance(turn.event, on.SlurmAnswered) and state.leaving.term_at is not None:
            limit = state.deadline_at  # Slurm has told everybody to end: its word counts
        if isinstance(turn.event, on.Suspended) and limit is not None:  # nobody ran meanwhile; Slurm's limit stays
            limit = limit + turn.event.seconds if state.leaving.leave_at is None else max(limit, state.leaving.leave_at)
        assert limit is None or state.deadline_at <= limit
        limit = state.deadline_at


@promise
def a_notice_ends_ranks_that_can_save_only_where_no_save_could_come(turns):
    """The work since the last save is lost by it: what is not known must not be taken for hopeless."""
    for turn in turns:
        before = turn.before
        able = before.phase is Phase.TRAINING and (
            before.launch.step is not None if before.launch.library_seen else before.launch.all_tasks_started
        )
        leaves = turn.after.leaving.plan is not None and turn.after.leaving.plan.next is Next.REQUEUE
        if able and leaves and isinstance(turn.event, on.SlurmAnswered) and turn.ordered(do.KillRanks):
            assert before.launch.library_seen, "nobody knows how long a script of its own way takes to save"
            assert before.launch.saving is None
            assert before.pace.saves >= SAVES_ENOUGH
            assert turn.after.leaving.leave_at - turn.event.at < before.pace.quickest


@promise
def ranks_that_do_not_die_hold_up_no_requeue_beyond_slurms_limit(turns):
    """After it Slurm kills us as well, and the run waits for a rescue, or for a person."""
    for turn in turns:
        state = turn.after
        killed = turn.ordered(do.KillRanks) and not turn.before.launch.killed
        if killed and state.leaving.leave_at is not None:
            assert state.deadline_at <= max(state.leaving.leave_at, turn.event.at) + POLICY.hurry_within_s


@promise
def a_requeue_that_nobody_takes_ends(turns):
    """Its controller may be gone for good, and nobody may be left who would end us."""
    for turn in turns:
        state = turn.after
        end = state.timers.get(Timer.REQUEUE_END)
        if state.phase is Phase.REQUEUEING:
            assert end is not None
            over = decide(state, on.Tick(at=end), POLICY).state
            assert over.phase in (Phase.CLOSING, Phase.DONE)
        told = isinstance(turn.event, on.SignalReceived) and turn.event.signal in ("TERM", "INT")
        if told and turn.before.phase is state.phase is Phase.REQUEUEING:
            assert end <= turn.event.at + state.identity.kill_wait_s


@promise
def a_watcher_that_is_lost_has_its_full_time_to_come_back(turns):
    """Whatever else was waited for, and however little time that had left."""
    for turn in turns:
        before, after = turn.before, turn.after
        begins = (
            isinstance(turn.event, on.WatcherLost) and after.watchers.bus > before.watchers.bus and all_watched(before)
        )
        if begins and after.phase is before.phase and after.phase in (Phase.STARTING, Phase.TRAINING):
            assert after.deadline_at >= turn.event.at + POLICY.watcher_back_within_s


@promise
def a_late_tick_in_saving_kills(turns):
    """The deadline is the deadline."""
    for turn in turns:
        state = turn.after
        if state.phase is Phase.SAVING:
            decision = decide(state, on.Tick(at=state.deadline_at), POLICY)

            assert [type(effect) for effect in decision.effects] == [do.KillRanks]


@promise
def a_save_that_a_notice_asks_for_ends_before_slurm_does(turns):
    """What is not durable by then is lost, and so is the time to requeue."""
    for turn in turns:
        begins = turn.after.phase is Phase.SAVING and turn.before.phase is Phase.TRAINING
        if not begins or not isinstance(turn.event, on.SlurmAnswered):
            continue
        if turn.after.leaving.plan.code is ExitCode.STOPPED:  # by hand: Slurm's own notice makes its deadline shorter
            continue
        job, at = turn.event.job, turn.event.at
        ours = (
            job is not None and job.state is on.JobState.RUNNING and job.restarts == turn.before.identity.restart_count
        )
        if ours and job.end_at is not None and job.end_at - at >= 1.0:
            limit = job.end_at
        elif job is None and turn.before.query.signal == LIMIT:
            limit = turn.before.identity.end_at
        else:
            limit = (
                turn.before.leaving.term_at if turn.before.leaving.term_at is not None else at
            ) + turn.before.identity.kill_wait_s
        assert turn.after.deadline_at < limit or limit <= at


@promise
def the_ranks_know_by_when_they_must_have_left(turns):
    """They choose the way of a save by the time that is left."""
    for turn in turns:
        for request in turn.ordered(do.RequestSave):
            assert request.deadline_at == (turn.after.deadline_at if request.stop else None)
        shorter = (
            turn.before.phase is turn.after.phase is Phase.SAVING
            and turn.before.storage.verifying is None
            and isinstance(turn.event, on.SlurmAnswered)
            and turn.after.deadline_at < turn.before.deadline_at
        )
        assert not shorter or turn.ordered(do.RequestSave)
