"""What holds for every history, however unlikely: the promises that cost a run when they are broken."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Generation
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.decide import decide
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.judge import preempted_at_last
from stepkeeper.core.pace import SAVES_ENOUGH
from stepkeeper.core.phases import all_ready
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, State
from tests.core.histories import (
    FAILED,
    LEAVING,
    NODES_FAIL,
    SHRUNK,
    TRAINING,
    UNSEEN,
    Turn,
    any_event,
    arbitrary,
    realistic,
    run,
)

POLICY = Policy()
GROWING = Policy(grow_back="checkpoint", unfit_again_s=5.0, unfit_looks_max=3, grow_ask_s=5.0, grow_idle_s=5.0)
TICKS_MAX = 60  # from anywhere to DONE: 14 tries of a requeue, and a handful of phases before
STORAGE_MAX = len(POLICY.row(Cause.STORAGE)) - 1  # launches that wait for a file system, in no budget
EXAMPLES = int(os.environ.get("STEPKEEPER_EXAMPLES", "100"))
ALWAYS_THE_SAME = "STEPKEEPER_EXAMPLES" not in os.environ  # a find of one run only helps nobody in CI

histories = arbitrary() | realistic(POLICY)
check = settings(
    max_examples=EXAMPLES,
    derandomize=ALWAYS_THE_SAME,
    deadline=None,
    phases=(
        Generation.explicit,
        Generation.generate,
    ),  # a history is shrunk for minutes, and is read turn by turn anyway
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


INVARIANTS = []
CODES = {int(code): code for code in ExitCode}


def invariant(holds):
    """Have a promise checked on every history."""
    INVARIANTS.append(holds)
    return holds


@invariant
def one_requeue_and_one_exit_and_nothing_after_it(turns):
    """A job that is requeued twice loses its place, or runs twice."""
    done = requeued = False
    for turn in turns:
        if done:
            assert turn.decision == type(turn.decision)(turn.before)
        assert not (requeued and turn.ordered(do.Requeue))
        exits = turn.ordered(do.Exit)
        assert len(exits) == (turn.after.phase is Phase.DONE and turn.before.phase is not Phase.DONE)
        accepted = isinstance(turn.event, on.RequeueAnswered) and turn.event.ok
        if turn.before.phase is Phase.REQUEUEING and accepted:
            requeued = True
            assert turn.after.plan.next is Next.END
        done = turn.after.phase is Phase.DONE


@invariant
def a_launch_gets_no_node_that_was_left_and_as_many_as_it_wants_or_may_shrink_to(turns):
    """Known bad hardware costs one launch, not the next three."""
    left = set()
    for turn in turns:
        left |= set(turn.before.nodes) - set(turn.after.nodes)
        if turn.before.bus:  # the attempt has begun
            back = set(turn.after.nodes) - set(turn.before.nodes)
            assert back <= {each.node for each in turn.before.growth.resting}
            left -= back
        if isinstance(turn.event, on.NodeFaulted) and turn.event.leave and turn.before.phase is not Phase.DONE:
            assert turn.event.node not in turn.after.nodes
            assert all(each.node != turn.event.node for each in turn.after.growth.resting)
        for launch in turn.ordered(do.StartLaunch):
            assert not left & set(launch.nodes)
            assert len(launch.nodes) == turn.after.nodes_wanted or 0 < turn.after.nodes_min <= len(launch.nodes)
        for release in turn.ordered(do.ReleaseNodes):
            assert turn.after.batch_node in release.keep
            assert set(turn.after.nodes) <= set(release.keep)


@invariant
def only_nodes_that_failed_a_check_rest_and_they_stay_in_the_allocation(turns):
    """A faulty node must not come back without a repair, and nodes that were given back are not ours."""
    released = set()
    for turn in turns:
        before = {each.node for each in turn.before.growth.resting}
        resting = {each.node for each in turn.after.growth.resting}
        assert not resting & set(turn.after.nodes)
        if resting - before:
            assert isinstance(turn.event, on.NodesCleared)
            assert resting - before <= {each.node for each in turn.event.unfit}
        for release in turn.ordered(do.ReleaseNodes):
            assert resting <= set(release.keep)
            released |= set(turn.after.allocated) - set(release.keep)
        assert not released & (resting | set(turn.after.nodes))


@invariant
def growing_back_asks_seldom_and_only_a_launch_that_lacks_nodes(turns):
    """No call while nothing is missing, and never one while another is unanswered within the pause."""
    asked_at = None
    for turn in turns:
        for _ in turn.ordered(do.AskIdleNodes):
            assert turn.before.phase is Phase.TRAINING
            assert len(turn.before.launched) < turn.before.nodes_wanted
            assert asked_at is None or turn.event.at - asked_at >= GROWING.grow_ask_s
            asked_at = turn.event.at
        if turn.after.plan is not None and turn.after.plan.to_grow and turn.before.plan is None:
            assert isinstance(turn.event, on.CheckpointCommitted)
            assert len(turn.after.launched) < turn.after.nodes_wanted
            assert turn.ordered(do.RequestSave)


@invariant
def a_faulty_node_never_uses_up_the_budget_of_the_training(turns):
    """Whose fault it was decides which budget is used."""
    for turn in turns:
        if isinstance(turn.event, on.NodeFaulted):
            assert turn.after.failures <= turn.before.failures


@invariant
def a_requeue_is_ordered_only_on_a_fresh_answer_with_nothing_running(turns):
    """Ranks beside a requeue fight the next attempt; an old answer revives what was cancelled since."""
    asked_at = signaled_at = -1
    for number, turn in enumerate(turns):
        if turn.ordered(do.AskSlurm):
            asked_at = number
        if isinstance(turn.event, on.SignalReceived) and not turn.before.requesting:
            signaled_at = number
        if not turn.ordered(do.Requeue):
            continue
        assert isinstance(turn.event, on.SlurmAnswered)
        job = turn.event.job
        assert job is not None
        assert job.restarts == 0
        (ordered,) = turn.ordered(do.Requeue)
        assert job.requeue_allowed or ordered.resubmit
        ends = job.state in (on.JobState.COMPLETING, on.JobState.ENDED)
        preempted = preempted_at_last(job, turn.before.preempted_at)
        assert not ends or job.reason == "TimeLimit" or preempted
        assert turn.before.phase is Phase.REQUEUEING
        assert not turn.before.running
        assert not turn.before.bus_told
        assert not turn.before.requesting
        assert signaled_at <= asked_at


@invariant
def what_slurm_or_the_training_ended_is_never_requeued(turns):
    """`scancel` means stop; a finished run is finished."""
    over = False
    for turn in turns:
        assert not (over and turn.ordered(do.Requeue))
        assert not (over and turn.ordered(do.StartLaunch))
        job = turn.event.job if isinstance(turn.event, on.SlurmAnswered) else None
        heard = (
            job is not None and turn.before.asking and not (turn.before.phase is Phase.REQUEUEING and turn.before.again)
        )
        cancelled = job is not None and (
            job.restarts > 0
            or (
                job.state in (on.JobState.COMPLETING, on.JobState.ENDED)
                and job.reason != "TimeLimit"
                and not preempted_at_last(job, turn.before.preempted_at)
            )
        )
        finished = isinstance(turn.event, on.LaunchEnded) and turn.event.finished and turn.before.running
        same_launch = not isinstance(turn.event, on.LaunchEnded) or turn.event.launch == turn.before.launch
        over = over or (heard and cancelled) or (finished and same_launch)
        over = over or isinstance(turn.event, on.Superseded)


@invariant
def after_the_word_of_the_end_only_a_denial_requeues(turns):
    """`TrainingFinished` is rank 0's word; the end of its launch without an outcome takes it back."""
    finished = False
    for turn in turns:
        assert not (finished and turn.ordered(do.Requeue))
        plan = turn.after.plan
        if isinstance(turn.event, on.TrainingFinished) and plan is not None and turn.after.running:
            finished = finished or plan.code is ExitCode.FINISHED
        if isinstance(turn.event, on.LaunchEnded) and turn.event.code:
            finished = finished and not turn.before.running


@invariant
def every_wait_has_a_deadline(turns):
    """Without one, a lost word would stop a run for ever."""
    for turn in turns:
        state = turn.after
        free = state.phase is Phase.DONE or (state.phase is Phase.TRAINING and all_ready(state))
        assert free or state.deadline_at is not None
        heard = state.phase is Phase.TRAINING and state.heard
        assert not heard or state.hang_at is not None


@check
@given(histories, st.sampled_from(("silence", "no answer", "refused", "cancelled")))
def test_the_passing_of_time_alone_ends_what_does_not_train(events, world):
    """Liveness: when nobody answers any more, the supervisor still leaves."""
    state = run(events, POLICY)[-1].after
    at = events[-1].at

    for _ in range(TICKS_MAX):
        away = world in ("silence", "no answer")  # a controller that is away ends no training
        if state.phase is Phase.DONE or (state.phase is Phase.TRAINING and (state.wake_at is None or away)):
            return
        at = max(at, state.wake_at)
        pending = [on.Tick(at=at)]
        while pending:
            decision = decide(state, pending.pop(0), POLICY)
            state = decision.state
            for effect in decision.effects:
                pending += _bad_answer(effect, at, world)

    pytest.fail(f"still {state.phase} after {TICKS_MAX} ticks")


def _bad_answer(effect: do.Effect, at: float, world: str) -> list[on.Event]:
    if isinstance(effect, do.Requeue) and world == "refused":
        return [on.RequeueAnswered(at=at, ok=False, error="refused")]
    if not isinstance(effect, do.AskSlurm) or world == "silence":
        return []
    if world == "no answer":
        return [on.SlurmAnswered(at=at, error="unreachable")]
    state = on.JobState.COMPLETING if world == "cancelled" else on.JobState.RUNNING
    return [on.SlurmAnswered(at=at, job=on.JobFacts(state=state, slurm_state="?", restarts=0))]


@invariant
def a_limit_that_is_known_is_acted_on(turns):
    """By our own clock: a site may send no signal before it."""
    for turn in turns:
        state = turn.before
        due = isinstance(turn.event, on.Tick) and state.limit_at is not None and turn.event.at >= state.limit_at
        if due and state.phase in (Phase.STARTING, Phase.TRAINING):
            assert turn.after.asking
            assert turn.after.limit_at is None


@invariant
def ranks_are_killed_no_later_than_the_save_deadline(turns):
    """The time after it belongs to the requeue."""
    limit = None
    for turn in turns:
        state = turn.after
        leaving = state.running and state.phase in (Phase.SAVING, Phase.STOPPING)
        if not leaving:
            limit = None
            continue
        if state.killed:
            assert turn.before.killed or turn.ordered(do.KillRanks)
            continue
        assert state.deadline_at is not None
        if isinstance(turn.event, on.SlurmAnswered) and state.term_at is not None:
            limit = state.deadline_at  # Slurm has told everybody to end: its word counts
        if isinstance(turn.event, on.StoodStill) and limit is not None:  # nobody ran meanwhile; Slurm's limit stays
            limit = limit + turn.event.seconds if state.leave_at is None else max(limit, state.leave_at)
        assert limit is None or state.deadline_at <= limit
        limit = state.deadline_at


@invariant
def a_notice_ends_ranks_that_can_save_only_where_no_save_could_come(turns):
    """The work since the last save is lost by it: what is not known must not be taken for hopeless."""
    for turn in turns:
        before = turn.before
        able = before.phase is Phase.TRAINING and before.heard and before.step is not None
        leaves = turn.after.plan is not None and turn.after.plan.next is Next.REQUEUE
        if able and leaves and isinstance(turn.event, on.SlurmAnswered) and turn.ordered(do.KillRanks):
            assert before.saving is None
            assert before.pace.saves >= SAVES_ENOUGH
            assert turn.after.leave_at - turn.event.at < before.pace.quickest


@invariant
def ranks_that_do_not_die_hold_up_no_requeue_beyond_slurms_limit(turns):
    """After it Slurm kills us as well, and the run waits for a rescue, or for a person."""
    for turn in turns:
        state = turn.after
        killed = turn.ordered(do.KillRanks) and not turn.before.killed
        if killed and state.leave_at is not None:
            assert state.deadline_at <= max(state.leave_at, turn.event.at) + POLICY.hurry_within_s


@invariant
def a_late_tick_in_saving_kills(turns):
    """The deadline is the deadline."""
    for turn in turns:
        state = turn.after
        if state.phase is Phase.SAVING:
            decision = decide(state, on.Tick(at=state.deadline_at), POLICY)

            assert [type(effect) for effect in decision.effects] == [do.KillRanks]


@invariant
def a_launch_starts_alone_and_only_when_all_is_ready(turns):
    """Two launches at once write the same step directories."""
    for turn in turns:
        for effect in turn.ordered(do.StartLaunch):
            assert all_ready(turn.before)
            assert turn.before.chosen
            assert turn.before.clearing
            assert isinstance(turn.event, on.NodesCleared)
            assert turn.event.launch == effect.launch == turn.before.launch
            assert not turn.before.running
            assert turn.after.running


@invariant
def a_launch_ends_only_by_its_end(turns):
    """`running` is what everything else trusts."""
    for turn in turns:
        if turn.before.running and not turn.after.running:
            ended = isinstance(turn.event, on.LaunchEnded | on.LaunchRefused)
            given_up = isinstance(turn.event, on.Tick) and turn.before.killed
            assert ended or given_up


@check
@given(histories, any_event, st.integers(1, 3))
def test_words_of_older_launches_and_buses_change_nothing(events, event, age):
    """They arrive late, through buffers and pipes."""
    state = run(events, POLICY)[-1].after
    fields = type(event).__struct_fields__
    if "launch" in fields:
        stale = msgspec.structs.replace(event, launch=state.launch - age)
    elif "bus" in fields:
        stale = msgspec.structs.replace(event, bus=state.bus - age)
    else:
        return

    decision = decide(state, stale, POLICY)

    assert decision == type(decision)(state)


@invariant
def failures_bound_the_launches_without_progress(turns):
    """A bug must not burn the allocation; what nodes and storage did is bounded on its own."""
    launches = taken_back = 0
    for turn in turns:
        before, after = turn.before, turn.after
        unseen = after.failures < before.failures and after.tried == () != before.tried
        if after.best_step != before.best_step or unseen:
            launches = taken_back = 0
        taken_back += after.launched == before.launched and before.charged and not after.charged
        launches += len(turn.ordered(do.StartLaunch))
        assert launches <= POLICY.failures_max + taken_back
        assert taken_back <= POLICY.node_losses_max + STORAGE_MAX


@invariant
def an_hour_of_unseen_training_clears_the_budgets(turns):
    """A launch that nobody could see may have progressed: what is not known must not be counted as nothing."""
    for turn in turns:
        before, after = turn.before, turn.after
        relaunched = after.launch > before.launch
        ran_long = before.launched_at is not None and turn.event.at - before.launched_at >= POLICY.unseen_progress_s
        if relaunched and ran_long and not before.heard:
            assert after.failures <= 1
            assert after.tried == ()


@invariant
def a_node_is_excluded_only_on_evidence_about_itself(turns):
    """Each exclusion makes a job harder to place, and each drain, which the agent decides on its own, a node idle."""
    for turn in turns:
        known = {each.node for each in turn.before.excluded}
        new = [each for each in turn.after.excluded if each.node not in known]
        if isinstance(turn.event, on.AttemptStarted):
            continue
        for each in new:
            assert each.node in turn.before.nodes
            match turn.event:
                case on.NodeFaulted():
                    assert (turn.event.node, turn.event.leave, turn.event.drained) == (each.node, True, False)
                case on.NodesCleared():
                    assert each.node in {unfit.node for unfit in turn.event.unfit}
                case on.NodesNotCleared():
                    assert each.node in turn.event.nodes
                case on.Judged():
                    assert each.node == turn.event.node
                case on.CheckpointChosen():  # its failure was judged before
                    assert turn.before.failure is not None
                    assert each.node == turn.before.failure.judged.node
                case on.CheckpointCommitted():
                    assert each.node == turn.before.to_replace
                case _:
                    pytest.fail(f"{each} by {turn.event}")


@invariant
def restarts_of_the_bus_and_lost_nodes_are_bounded(turns):
    """Every loop has a budget that only a commit, or a step that was verified anew, fills again."""
    restarts = 0
    for turn in turns:
        committed = isinstance(turn.event, on.CheckpointCommitted) and turn.after.bus_restarts == 0
        restarts = 0 if committed else restarts
        beside = turn.before.phase is Phase.TRAINING and not turn.before.ready  # while Slurm is away
        started = len([order for order in turn.ordered(do.StartBus) if order.bus > 1])
        restarts += started if not beside else 0
        assert restarts <= POLICY.bus_restarts_max
        assert turn.after.requeue_tries <= POLICY.requeue_tries_max
        if turn.ordered(do.StartLaunch):
            assert turn.after.node_losses <= POLICY.node_losses_max


@invariant
def what_was_tried_is_remembered_until_the_place_is_passed(turns):
    """A budget that forgets is none: a failure counts until a step is verified beyond it, or hours have passed."""
    for turn in turns:
        before, after = turn.before, turn.after
        known = {(each.cause, each.place): each for each in after.tried}
        gone = [each for each in before.tried if (each.cause, each.place) not in known]
        if not gone or isinstance(turn.event, on.AttemptStarted):
            continue
        passed = isinstance(turn.event, on.CheckpointChosen) and after.best_step != before.best_step
        unseen = isinstance(turn.event, on.LaunchEnded | on.SlurmAnswered | on.Tick) and not before.heard
        assert passed or unseen or after.node_losses > before.node_losses
        if passed:
            assert all(each.step is None or each.step < after.best_step for each in gone)


@invariant
def a_person_is_called_exactly_where_one_is_needed(turns):
    """Once, at the end, and never for what goes on by itself."""
    for turn in turns:
        calls = turn.ordered(do.CallPerson)
        exits = [exit_ for exit_ in turn.ordered(do.Exit) if CODES[exit_.code].needs_person]
        assert [call.code for call in calls] == [exit_.code for exit_ in exits]


@invariant
def silence_ends_a_launch_only_after_a_look_at_its_stacks(turns):
    """What is only slow must not be killed; and a look has an end."""
    for turn in turns:
        looked = turn.before.looking
        assert not turn.ordered(do.CollectStacks) or not looked
        if turn.after.found is not None and turn.before.found is None:
            assert looked
            assert turn.ordered(do.KillRanks)
        if turn.after.looking:
            assert turn.after.hang_at is not None


@invariant
def a_rollback_goes_back(turns):
    """Never to the step that training came from, and never while ranks run."""
    for turn in turns:
        for effect in turn.ordered(do.RollBack):
            assert effect.below_step <= turn.before.resume_step
            assert not turn.after.running
            assert turn.after.deadline_at is not None
            assert not turn.after.chosen


@invariant
def no_launch_starts_on_storage_that_failed_its_test_or_is_under_test(turns):
    """Hours of training that nobody can save are lost hours."""
    for turn in turns:
        if turn.ordered(do.StartLaunch):
            assert not turn.before.testing
            assert turn.before.storage_since is None
        lied = isinstance(turn.event, on.StorageTested) and turn.event.untrue and not turn.event.ok
        assert not (lied and turn.after.phase is Phase.STARTING)


@invariant
def a_question_is_asked_once_at_a_time(turns):
    """Zero calls while nothing happens, and few when something does."""
    for turn in turns:
        asked = len(turn.ordered(do.AskSlurm))
        assert asked <= 1
        answered = isinstance(turn.event, on.SlurmAnswered)
        assert not (asked and turn.before.asking and not answered)
        if asked:
            assert turn.after.asking


@invariant
def a_restarted_bus_hears_the_standing_order(turns):
    """What the watchers before were told died with them."""
    for turn in turns:
        back = isinstance(turn.event, on.WatcherReady) and turn.after.ready != turn.before.ready
        # twice is enough: the first that is back, and all
        back = back and (len(turn.after.ready) == 1 or all_ready(turn.after))
        if back and turn.before.phase is Phase.SAVING and turn.before.verifying is None:
            assert [e.deadline_at for e in turn.ordered(do.RequestSave)] == [turn.after.deadline_at]
        if back and turn.before.killed and turn.before.running:
            assert turn.ordered(do.KillRanks)


@invariant
def a_plan_to_end_stays_a_plan_to_end(turns):
    """Only the denial of an end that was never confirmed takes one back."""
    for turn in turns:
        before, after = turn.before.plan, turn.after.plan
        if before is None or before.next is not Next.END:
            continue
        denied = isinstance(turn.event, on.LaunchEnded) and before.code is ExitCode.FINISHED
        assert denied or (after is not None and after.next is Next.END)


@check
@given(histories)
def test_all_invariants_hold(events):
    """`decide` never raises either: playing the history is the proof."""
    turns = run(events, POLICY)

    for holds in INVARIANTS:
        holds(turns)


@check
@given(realistic(POLICY, size_max=12, beginnings=LEAVING))
def test_they_hold_for_a_run_that_leaves(events):
    """Notices, cancels and the end cross each other here."""
    turns = run(events, POLICY)

    for holds in INVARIANTS:
        holds(turns)


@check
@given(realistic(POLICY, size_max=12, beginnings=TRAINING, often=NODES_FAIL))
def test_they_hold_for_nodes_that_fail(events):
    """Lost, faulty and drained ones, spares and others."""
    turns = run(events, POLICY)

    for holds in INVARIANTS:
        holds(turns)


@check
@given(realistic(POLICY, size_max=12, beginnings=(*FAILED, *UNSEEN)))
def test_they_hold_after_a_failure(events):
    """Why it failed, the newest checkpoint and the nodes are found out at the same time, in any order."""
    turns = run(events, POLICY)

    for holds in INVARIANTS:
        holds(turns)


@check
@given(realistic(GROWING) | realistic(GROWING, beginnings=(SHRUNK,)))
def test_they_hold_for_a_run_that_grows_back(events):
    """It has more ways: nodes that come and go, saves that end no attempt, requeues that nobody asked for."""
    turns = run(events, GROWING)

    for holds in INVARIANTS:
        holds(turns)


def test_a_history_is_played_from_its_start():
    turns: list[Turn] = run([on.Tick(at=1.0)], POLICY)

    assert turns[0].after == State()
