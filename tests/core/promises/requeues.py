"""Promises on the requeue and the end: once, last, on a fresh answer, never of what was ended."""

from __future__ import annotations

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.eviction import preempted_at_last
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import BusStatus, Choice, Next, Phase, Question, Timer
from tests.core.promises.register import POLICY, promise


@promise
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
            assert turn.after.leaving.plan.next is Next.END
        done = turn.after.phase is Phase.DONE


@promise
def a_requeue_is_ordered_only_on_a_fresh_answer_with_nothing_running(turns):
    """Ranks beside a requeue fight the next attempt; an old answer revives what was cancelled since."""
    asked_at = signaled_at = -1
    requesting = False
    for number, turn in enumerate(turns):
        if turn.ordered(do.AskSlurm):
            asked_at = number
        if isinstance(turn.event, on.SignalReceived) and not requesting:
            signaled_at = number
        given_up = turn.after.requeue.tries > turn.before.requeue.tries
        requesting = requesting and not given_up and not isinstance(turn.event, on.RequeueAnswered)
        if not turn.ordered(do.Requeue):
            continue
        assert isinstance(turn.event, on.SlurmAnswered)
        job = turn.event.job
        assert job is not None
        assert job.restarts == 0
        (ordered,) = turn.ordered(do.Requeue)
        assert job.requeue_allowed or ordered.resubmit
        ends = job.state in (on.JobState.COMPLETING, on.JobState.ENDED)
        preempted = preempted_at_last(job, turn.before.leaving.preempted_at)
        assert not ends or job.reason == "TimeLimit" or preempted
        assert turn.before.phase is Phase.REQUEUEING
        assert not turn.before.launch.running
        assert turn.before.watchers.status is not BusStatus.LEAVING
        assert not requesting
        assert signaled_at <= asked_at
        requesting = True


@promise
def only_what_was_left_is_given_back_before_a_requeue(turns):
    """Our own node ends with the job; and where no node is left, Slurm refuses steps, and no node is lost."""
    for turn in turns:
        for ordered in turn.ordered(do.Requeue):
            if ordered.keep:
                assert turn.before.nodes.usable
                assert (
                    {turn.before.identity.batch_node, *turn.before.nodes.usable}
                    <= set(ordered.keep)
                    <= set(turn.before.nodes.allocated)
                )
                assert {node for node, _ in turn.before.nodes.lost} - set(ordered.keep)


@promise
def what_slurm_or_the_training_ended_is_never_requeued(turns):
    """`scancel` means stop; a finished run is finished."""
    over = False
    for turn in turns:
        assert not (over and turn.ordered(do.Requeue))
        assert not (over and turn.ordered(do.StartLaunch))
        job = turn.event.job if isinstance(turn.event, on.SlurmAnswered) else None
        heard = (
            job is not None
            and turn.before.query.asking
            and not (turn.before.phase is Phase.REQUEUEING and turn.before.query.question is Question.OUTDATED)
        )
        cancelled = job is not None and (
            job.restarts > 0
            or (
                job.state in (on.JobState.COMPLETING, on.JobState.ENDED)
                and job.reason != "TimeLimit"
                and not preempted_at_last(job, turn.before.leaving.preempted_at)
            )
        )
        finished = isinstance(turn.event, on.LaunchEnded) and turn.event.finished and turn.before.launch.running
        same_launch = not isinstance(turn.event, on.LaunchEnded) or turn.event.launch == turn.before.launch.number
        over = over or (heard and cancelled) or (finished and same_launch)
        over = over or isinstance(turn.event, on.Superseded)


@promise
def after_the_word_of_the_end_only_a_denial_requeues(turns):
    """`TrainingFinished` is rank 0's word; the end of its launch without an outcome takes it back."""
    finished = False
    for turn in turns:
        assert not (finished and turn.ordered(do.Requeue))
        plan = turn.after.leaving.plan
        if isinstance(turn.event, on.TrainingFinished) and plan is not None and turn.after.launch.running:
            finished = finished or plan.code is ExitCode.FINISHED
        if isinstance(turn.event, on.LaunchEnded) and turn.event.code:
            finished = finished and not turn.before.launch.running


@promise
def a_plan_to_end_stays_a_plan_to_end(turns):
    """Only the denial of an end that was never confirmed takes one back.

    The end of its launch without an outcome denies rank 0's word.  Slurm's answer that it stopped the job denies the
    status 0 of a command without the trainer library: its handler of the signal may have saved and ended.
    """
    for turn in turns:
        before, after = turn.before.leaving.plan, turn.after.leaving.plan
        if before is None or before.next is not Next.END:
            continue
        launch = turn.before.launch
        by_slurm = isinstance(turn.event, on.SlurmAnswered) and not launch.running and not launch.library_seen
        denied = (by_slurm or isinstance(turn.event, on.LaunchEnded)) and before.code is ExitCode.FINISHED
        assert denied or (after is not None and after.next is Next.END)


@promise
def what_silent_corruption_made_is_left_out_before_the_job_goes(turns):
    """The next attempt knows nothing of it: the lineage has to.  Only a newer attempt's lineage is left alone."""
    for turn in turns:
        wrong = turn.before.launch.found
        superseded = any(exits.code == ExitCode.SUPERSEDED for exits in turn.ordered(do.Exit))
        goes = turn.ordered(do.Requeue) or (turn.ordered(do.Exit) and not superseded)
        if goes and wrong is not None and wrong.back_to is not None:
            assert turn.before.resume.went_back, "it was ordered"
            waited = turn.before.resume.choice is not Choice.ROLLING_BACK
            assert waited, "and was done, or was late"


@promise
def a_question_is_asked_once_at_a_time(turns):
    """Zero calls while nothing happens, and few when something does."""
    for turn in turns:
        asked = len(turn.ordered(do.AskSlurm))
        assert asked <= 1
        answered = isinstance(turn.event, on.SlurmAnswered)
        late_at = turn.before.timers.get(Timer.SLURM_ANSWER)
        late = isinstance(turn.event, on.Tick) and late_at is not None and turn.event.at >= late_at
        assert not (asked and turn.before.query.asking and not (answered or late))
        if asked:
            assert turn.after.query.asking


@promise
def only_a_job_with_a_batch_script_is_requeued(turns):
    """Slurm would start nothing: the allocation of `salloc` would only be gone."""
    for turn in turns:
        assert turn.before.identity.has_batch_script or not turn.ordered(do.Requeue)


@promise
def a_requeue_is_tried_again_only_so_often(turns):
    """Each try is a call to a controller that may be in trouble already."""
    tries = 0
    for turn in turns:
        tries += len(turn.ordered(do.Requeue))
        assert tries <= POLICY.requeue_tries_max + 1  # one where the job is submitted again instead
