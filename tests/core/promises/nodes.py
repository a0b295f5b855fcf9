"""Promises on nodes: which a launch gets, which are left and on what evidence, which may come back."""

from __future__ import annotations

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.faults import was_lost
from stepkeeper.core.state import Phase
from tests.core.promises.register import GROWING, POLICY, promise


@promise
def a_launch_gets_no_node_that_was_left_and_as_many_as_it_wants_or_may_shrink_to(turns):
    """Known bad hardware costs one launch, not the next three."""
    left = set()
    for turn in turns:
        left |= set(turn.before.nodes.usable) - set(turn.after.nodes.usable)
        if turn.before.watchers.bus:  # the attempt has begun
            back = set(turn.after.nodes.usable) - set(turn.before.nodes.usable)
            assert back <= {each.node for each in turn.before.nodes.growth.resting}
            left -= back
        if isinstance(turn.event, on.NodeFaulted) and turn.event.leave and turn.before.phase is not Phase.DONE:
            assert turn.event.node not in turn.after.nodes.usable
            assert all(each.node != turn.event.node for each in turn.after.nodes.growth.resting)
        for launch in turn.ordered(do.StartLaunch):
            assert not left & set(launch.nodes)
            number, state = len(launch.nodes), turn.after
            fewer = 0 < state.nodes.min <= number and (not state.nodes.counts or number in state.nodes.counts)
            assert number == state.nodes.wanted or fewer
        for release in turn.ordered(do.ReleaseNodes):
            assert turn.after.identity.batch_node in release.keep
            assert set(turn.after.nodes.usable) <= set(release.keep)


@promise
def only_nodes_that_failed_a_check_rest_and_they_stay_in_the_allocation(turns):
    """A faulty node must not come back without a repair, and nodes that were given back are not ours."""
    released = set()
    for turn in turns:
        before = {each.node for each in turn.before.nodes.growth.resting}
        resting = {each.node for each in turn.after.nodes.growth.resting}
        assert not resting & set(turn.after.nodes.usable)
        if resting - before:
            assert isinstance(turn.event, on.NodesCleared)
            assert resting - before <= {each.node for each in turn.event.unfit}
        for release in turn.ordered(do.ReleaseNodes):
            assert resting <= set(release.keep)
            released |= set(turn.after.nodes.allocated) - set(release.keep)
        assert not released & (resting | set(turn.after.nodes.usable))


@promise
def growing_back_asks_seldom_and_only_a_launch_that_lacks_nodes(turns):
    """No call while nothing is missing, and never one while another is unanswered within the pause."""
    asked_at = None
    for turn in turns:
        for _ in turn.ordered(do.AskIdleNodes):
            assert turn.before.phase is Phase.TRAINING
            assert len(turn.before.launch.nodes) < turn.before.nodes.wanted
            assert asked_at is None or turn.event.at - asked_at >= GROWING.grow_idle_s / 2
            asked_at = turn.event.at
        if turn.after.leaving.plan is not None and turn.after.leaving.plan.to_grow and turn.before.leaving.plan is None:
            assert isinstance(turn.event, on.CheckpointCommitted)
            assert len(turn.after.launch.nodes) < turn.after.nodes.wanted
            assert turn.ordered(do.RequestSave)


@promise
def a_faulty_node_never_uses_up_the_budget_of_the_training(turns):
    """Whose fault it was decides which budget is used."""
    for turn in turns:
        if isinstance(turn.event, on.NodeFaulted):
            assert turn.after.budgets.failures <= turn.before.budgets.failures


@promise
def a_node_is_excluded_only_on_evidence_about_itself(turns):
    """Each exclusion makes a job harder to place, and each drain, which the agent decides on its own, a node idle."""
    for turn in turns:
        known = {each.node for each in turn.before.nodes.excluded}
        new = [each for each in turn.after.nodes.excluded if each.node not in known]
        if isinstance(turn.event, (on.AttemptStarted, on.SlurmAnswered)):
            continue
        for each in new:
            assert each.node in turn.before.nodes.usable
            match turn.event:
                case on.NodeFaulted():
                    assert (turn.event.node, turn.event.leave, turn.event.drained) == (each.node, True, False)
                case on.NodesCleared():
                    assert each.node in {unfit.node for unfit in turn.event.unfit}
                case on.NodesNotCleared():
                    assert each.node in turn.event.nodes
                case on.Judged() | on.Corrupted():
                    assert each.node == turn.event.node
                case on.CheckpointChosen():  # its failure was judged before
                    assert turn.before.failure is not None
                    assert each.node == turn.before.failure.judged.node
                case on.CheckpointCommitted():
                    assert each.node in {slow.node for slow in turn.before.stragglers.suspects if slow.reported}
                case _:
                    pytest.fail(f"{each} by {turn.event}")


@promise
def a_lost_node_is_excluded_for_a_while_and_only_where_the_job_leaves(turns):
    """Slurm may not have noticed yet, and does so soon; no faulty node comes back for it before its time."""
    for turn in turns:
        if isinstance(turn.event, on.SlurmAnswered):
            before, after = set(turn.before.nodes.excluded), set(turn.after.nodes.excluded)
            for each in after - before:
                assert turn.ordered(do.Requeue)
                since = [at for node, at in turn.before.nodes.lost if node == each.node]
                assert each.until == since[-1] + POLICY.exclude_lost_for_s > turn.event.at
            faulty = [each for each in turn.before.nodes.excluded if not was_lost(each)]
            over = len(faulty) - POLICY.excluded_max  # of an attempt that might exclude more
            gone = [each for each in faulty if each not in after and each.until > turn.event.at]
            assert gone == faulty[: max(0, over)] or not gone


@promise
def the_weakest_reasons_to_exclude_a_node_come_first(turns):
    """They give way where nodes run short: a lost one may be back any moment, an old fault may be repaired."""
    for turn in turns:
        for ordered in turn.ordered(do.Requeue):
            reasons = {each.node: (not was_lost(each), each.until) for each in turn.after.nodes.excluded}
            assert [reasons[node] for node in ordered.exclude] == sorted(reasons.values())


@promise
def a_node_with_a_fault_of_an_earlier_attempt_is_used_only_for_want_of_others(turns):
    """Slurm may give it again; the next fault would cost a launch, and to be without nodes costs the attempt."""
    for turn in turns:
        if not isinstance(turn.event, on.AttemptStarted) or turn.before.watchers.bus:
            continue
        told = turn.event
        bad = {each.node for each in told.excluded if each.until > told.at and not was_lost(each)}
        others = [node for node in told.nodes if node not in bad]
        fewer = told.node_counts or range(1, len(told.nodes) + 1)
        enough = len(others) >= (told.nodes_wanted or len(told.nodes)) or (
            told.nodes_min and any(told.nodes_min <= number <= len(others) for number in fewer)
        )
        assert turn.after.nodes.usable == (tuple(others) if enough else told.nodes)


@promise
def what_most_nodes_share_is_no_fault_of_theirs(turns):
    """The storage of all, or their clock's server: nobody is left for it."""
    for turn in turns:
        if not isinstance(turn.event, on.NodesCleared):
            continue
        named = {each.node for each in turn.event.unfit if each.node in turn.before.nodes.usable}
        shared = all(each.shared for each in turn.event.unfit if each.node in turn.before.nodes.usable)
        if shared and 2 * len(named) > len(turn.before.nodes.usable):
            assert turn.after.nodes.usable == turn.before.nodes.usable
            assert not turn.ordered(do.StartLaunch)
