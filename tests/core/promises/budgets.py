"""Promises on budgets: each loop ends, by verified progress, and a person is called where nothing else helps."""

from __future__ import annotations

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import IN_A_STATE, UNCHARGED, Cause, Rung
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import repeats
from stepkeeper.core.state import Next, Phase
from tests.core.promises.register import CODES, POLICY, promise

STORAGE_MAX = len(POLICY.row(Cause.STORAGE)) - 1  # launches that wait for a file system, in no budget
BY_SLURM = 3  # preempted or out of time as a log says, or as Slurm says a moment later: once each


def _is_unseen(state):
    """Nobody can tell of progress: neither the library, nor checkpoints of a framework."""
    return not state.launch.library_seen and state.budgets.best_step is None


@promise
def failures_bound_the_launches_without_progress(turns):
    """A bug must not burn the allocation; what nodes and storage did is bounded on its own."""
    launches = taken_back = together = 0
    for turn in turns:
        before, after = turn.before, turn.after
        together += _are_lost_together(turn)
        unseen = after.budgets.failures < before.budgets.failures and any(
            each.count == 0 for each in after.budgets.tried
        )
        if after.budgets.best_step != before.budgets.best_step or unseen:
            launches = taken_back = 0
        taken_back += (
            after.launch.nodes == before.launch.nodes
            and before.budgets.failure_counted
            and not after.budgets.failure_counted
        )
        launches += len(turn.ordered(do.StartLaunch))
        assert launches <= POLICY.failures_max + taken_back
        assert taken_back <= POLICY.node_losses_max + STORAGE_MAX + BY_SLURM + together


def _are_lost_together(turn):
    """Tell whether nodes are lost with others before, and count no more: each node can be lost once only."""
    before, after = turn.before, turn.after
    return len(after.nodes.lost) > len(before.nodes.lost) and after.budgets.node_losses == before.budgets.node_losses


@promise
def each_failed_launch_counts_until_there_is_verified_progress(turns):
    """A budget that is filled again by anything else bounds nothing."""
    for turn in turns:
        before, after = turn.before, turn.after
        ran_long = (
            before.launch.began_at is not None and turn.event.at - before.launch.began_at >= POLICY.unseen_progress_s
        )
        if after.launch.number > before.launch.number:
            kept = 0 if ran_long and _is_unseen(before) else before.budgets.failures
            assert after.budgets.failures == kept + after.budgets.failure_counted
        elif after.budgets.failures < before.budgets.failures:
            progressed = (
                isinstance(turn.event, on.CheckpointChosen) and after.budgets.best_step != before.budgets.best_step
            )
            taken_back = (
                before.budgets.failure_counted
                and not after.budgets.failure_counted
                and after.budgets.failures == before.budgets.failures - 1
            )
            assert progressed or taken_back
        if turn.ordered(do.StartLaunch) and before.launch.number:
            assert before.budgets.failures < POLICY.failures_max


@promise
def an_hour_of_unseen_training_begins_the_rows_again_and_forgets_no_failure(turns):
    """A launch that nobody could see may have progressed, or not: its failures count anew, the same one goes on."""
    for turn in turns:
        before, after = turn.before, turn.after
        relaunched = after.launch.number > before.launch.number
        ran_long = (
            before.launch.began_at is not None and turn.event.at - before.launch.began_at >= POLICY.unseen_progress_s
        )
        if relaunched and ran_long and _is_unseen(before):
            assert after.budgets.failures <= 1
            assert all(each.count == 0 for each in after.budgets.tried)
            assert [repeats(each) for each in after.budgets.tried] == [repeats(each) for each in before.budgets.tried]


@promise
def the_same_failure_is_bounded_without_a_newly_verified_step(turns):
    """Whatever launches may have done unseen: nothing verified says so."""
    for turn in turns:
        for each in turn.after.budgets.tried if turn.ordered(do.StartLaunch) else ():
            bound = len(POLICY.row(each.cause)) if each.cause is Cause.STORAGE else POLICY.failures_max
            if each.repeats > each.count:
                assert each.repeats < bound or each.cause in UNCHARGED - {Cause.STORAGE}


@promise
def restarts_of_the_bus_and_lost_nodes_are_bounded(turns):
    """Every loop has a budget that only a bus that lasted, or a step that was verified anew, fills again."""
    restarts = 0
    for turn in turns:
        complete_at = turn.before.watchers.complete_at
        lasted = complete_at is not None and turn.event.at - complete_at >= POLICY.bus_lasts_s
        restarts = 0 if lasted and turn.ordered(do.StartBus) else restarts
        beside = turn.before.phase is Phase.TRAINING and not turn.before.watchers.ready  # while Slurm is away
        started = len([order for order in turn.ordered(do.StartBus) if order.bus > 1])
        restarts += started if not beside and not _are_lost_together(turn) else 0
        assert restarts <= POLICY.bus_restarts_max
        assert turn.after.requeue.tries <= POLICY.requeue_tries_max
        if turn.ordered(do.StartLaunch):
            assert turn.after.budgets.node_losses <= POLICY.node_losses_max


@promise
def a_commit_that_nobody_verified_fills_no_budget(turns):
    """It may be damaged, and each attempt may commit the same step again."""
    for turn in turns:
        before, after = turn.before, turn.after
        if isinstance(turn.event, on.CheckpointCommitted):
            assert after.budgets.failures == before.budgets.failures
            assert after.budgets.node_losses >= before.budgets.node_losses
            assert after.budgets.tried == before.budgets.tried
            assert after.budgets.best_step == before.budgets.best_step
            assert after.watchers.restarts >= before.watchers.restarts


@promise
def what_was_tried_is_remembered_until_the_place_is_passed(turns):
    """A budget that forgets is none: a failure counts until a step is verified beyond it, or hours have passed."""
    for turn in turns:
        before, after = turn.before, turn.after
        known = {(each.cause, each.place): each for each in after.budgets.tried}
        gone = [each for each in before.budgets.tried if (each.cause, each.place) not in known]
        if not gone or isinstance(turn.event, on.AttemptStarted):
            continue
        passed = isinstance(turn.event, on.CheckpointChosen) and after.budgets.best_step != before.budgets.best_step
        unseen = isinstance(turn.event, on.LaunchEnded | on.SlurmAnswered | on.Tick) and _is_unseen(before)
        assert passed or unseen or _are_lost_together(turn) or after.budgets.node_losses > before.budgets.node_losses
        if passed:
            assert all(each.step is None or each.step < after.budgets.best_step for each in gone)


@promise
def a_person_is_called_exactly_where_one_is_needed(turns):
    """Once, at the end, and never for what goes on by itself: unless it may go on from what was not confirmed."""
    for turn in turns:
        calls = turn.ordered(do.NotifyUser)
        wrong, after = turn.after.launch.found, turn.after
        corrupt = wrong is not None and wrong.back_to is not None and after.plan.code != ExitCode.SUPERSEDED
        missed = corrupt and bool(after.resume.not_led_back)
        exits = [exit_ for exit_ in turn.ordered(do.Exit) if CODES[exit_.code].needs_person or missed]
        assert [call.code for call in calls] == [exit_.code for exit_ in exits]


@promise
def failures_in_the_same_way_go_along_their_row_and_end_with_it(turns):
    """A budget that does not count is none: where the row says stop, nothing is started any more."""
    for turn in turns:
        before, after = turn.before, turn.after
        if before.failure is None or after.failure is not None or after.budgets.tried == before.budgets.tried:
            continue
        if isinstance(turn.event, on.CheckpointChosen) and after.budgets.best_step != before.budgets.best_step:
            continue  # what lies behind it is forgotten in the same turn
        new = after.budgets.tried[-1] if len(after.budgets.tried) >= len(before.budgets.tried) else None
        if new is None or new in before.budgets.tried:
            continue  # taken back: it was the node's fault
        old = next((each for each in before.budgets.tried if (each.cause, each.place) == (new.cause, new.place)), None)
        counted = old.count if old is not None else 0
        assert new.count > counted
        row = POLICY.row(new.cause)
        again = old is not None and new.step is not None and old.step == new.step and bool(after.resume.directory)
        if again and new.cause in IN_A_STATE:
            assert new.stepped_back
            assert _ends(turn) if old.stepped_back else turn.ordered(do.RollBack) or after.resume.step is None
        elif row[-1].rung is Rung.STOP and counted >= len(row) - 1:
            assert _ends(turn)
        if new.cause in UNCHARGED and counted >= len(row):
            assert after.budgets.failures >= before.budgets.failures


def _ends(turn):
    return (
        turn.after.leaving.plan is not None
        and turn.after.leaving.plan.next is Next.END
        and turn.after.leaving.plan.code != 0
    )


@promise
def ninety_three_is_the_last_word_of_a_launcher(turns):
    """It asks not to be started again, and is not."""
    gave_up = False
    for turn in turns:
        assert not (gave_up and (turn.ordered(do.StartLaunch) or turn.ordered(do.Requeue)))
        heard = isinstance(turn.event, on.RankExited) and turn.event.code == 93
        now = heard and turn.before.launch.running and turn.event.launch == turn.before.launch.number
        assert not now or turn.after.leaving.plan.next is Next.END
        gave_up = gave_up or now


@promise
def a_job_excludes_only_so_many_nodes(turns):
    """An exclusion that never ends makes a job unschedulable."""
    for turn in turns:
        new = {each.node for each in turn.after.nodes.excluded} - {each.node for each in turn.before.nodes.excluded}
        if new and turn.before.watchers.bus:  # what an attempt is told was written under a policy of its own
            assert len(turn.after.nodes.excluded) <= POLICY.excluded_max


@promise
def what_slurm_ended_is_no_failure_of_the_training(turns):
    """The ranks may hear of a preemption before we do, and their end comes first."""
    for turn in turns:
        before, after = turn.before, turn.after
        leaves = (
            after.leaving.plan is not None
            and after.leaving.plan.next is Next.REQUEUE
            and after.leaving.eviction_confirmed
        )
        if isinstance(turn.event, on.SlurmAnswered) and before.phase is Phase.STARTING and before.failure and leaves:
            assert after.budgets.failures == max(0, before.budgets.failures - before.budgets.failure_counted)
