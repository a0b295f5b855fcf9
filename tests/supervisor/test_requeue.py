"""Requeueing our own job: what becomes of the list of nodes on which it may not run."""

from itertools import pairwise

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.slurm import requeue as slurm_requeue
from stepkeeper.slurm.client import ClusterSettings, Resubmitted, SlurmError
from tests.supervisor.assignments import assigned

RUNNING = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, excluded="n8,n9")


class Slurm:
    """A controller with one job, and a partition of nine nodes."""

    def __init__(self, facts=RUNNING, nodes=9, refuses=()):
        self.facts, self.nodes, self.refuses, self.called = facts, nodes, refuses, []

    def _called(self, *call):
        if call[0] in self.refuses:
            raise SlurmError(f"{call[0]}: refused")
        self.called.append(call)

    def job(self, job):
        self._called("job", job)
        return self.facts

    def hostnames(self, node_list):
        return tuple(node_list.split(","))

    def usable_nodes(self, job, like=()):
        self._called("usable_nodes", job, tuple(like))
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def requeue(self, job):
        self._called("requeue", job)

    def resubmit(self, job, run_directory, nodes, words, exclude):
        self._called("resubmit", job, run_directory, nodes, words, exclude)
        return Resubmitted(job_id=8, found=True, unknown=("--signal",))

    def exclude(self, job, nodes, *, within_s):
        self._called("exclude", job, tuple(nodes), *([within_s] if within_s else []))

    def settings(self):
        self._called("settings")
        return ClusterSettings(kill_wait_s=10.0, version="22.05.8", accounting=True)

    def keep(self, job, nodes):
        self._called("keep", job, tuple(nodes))


@pytest.fixture
def assignment(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPKEEPER_AGENT_SOCKET", str(tmp_path / "no-agent"))
    return assigned(tmp_path, nodes=("n1", "n2"))


def test_without_a_fault_the_users_own_list_is_not_touched(assignment):
    """`sbatch --exclude` is the user's: an ordinary preemption must not wipe it."""
    slurm = Slurm()

    said = slurm_requeue.requeue(slurm, assignment)

    assert slurm.called == [("requeue", "7")]
    assert said == ""


def test_a_node_that_the_job_wants_by_name_is_not_excluded(assignment):
    """Slurm refuses a job with a node in both lists, or lets it wait for ever."""
    slurm = Slurm(facts=msgspec.structs.replace(RUNNING, required="n1,n2"))

    slurm_requeue.requeue(slurm, assignment, exclude=["n2", "n3"])

    assert slurm.called[-1] == ("exclude", "7", ("n8", "n9", "n3"))


def test_a_lost_node_is_given_back_before_the_job_leaves_the_others():
    slurm = Slurm()

    said = slurm_requeue.give_back(slurm, "7", ("n1",))

    assert slurm.called == [("keep", "7", ("n1",))]
    assert said == ""


def test_a_lost_node_that_slurm_does_not_take_back_stands_in_nobodys_way():
    said = slurm_requeue.give_back(Slurm(refuses={"keep"}), "7", ("n1",))

    assert said == "the lost nodes stay in the job, which may wait for them: keep: refused"


def test_a_faulty_node_is_added_and_one_whose_time_is_over_taken_off(assignment):
    slurm = Slurm()

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n2"], readmit=["n9"])

    assert slurm.called[-2:] == [("requeue", "7"), ("exclude", "7", ("n8", "n2"))]
    assert said == ""


def test_a_controller_that_does_not_show_its_settings_is_asked_to_exclude_nodes_all_the_same(assignment):
    slurm = Slurm(refuses={"settings"})

    assert slurm_requeue.requeue(slurm, assignment, exclude=["n2"], shrunk=True) == ""

    assert slurm.called[-2:] == [("requeue", "7"), ("exclude", "7", ("n8", "n9", "n2"))]


@pytest.mark.parametrize(("shrunk", "accounting"), [(True, False), (True, True), (False, False)])
def test_a_job_that_was_shrunk_without_accounting_does_not_wait_for_a_database(assignment, shrunk, accounting):
    """Slurm 22.05 waits for 5 s there, and refuses, unless the job has ended meanwhile; so we leave at once."""
    slurm = Slurm()
    assignment = msgspec.structs.replace(assignment, accounting=accounting)

    slurm_requeue.requeue(slurm, assignment, exclude=["n2"], shrunk=shrunk)

    at_once = (slurm_requeue.UNKNOWN_S,) if shrunk and not accounting else ()
    assert slurm.called[-1] == ("exclude", "7", ("n8", "n9", "n2"), *at_once)


def test_where_too_few_nodes_would_be_left_none_is_excluded_and_that_is_said(assignment):
    """An exclusion that nobody lifts would let the job wait for ever, without a word."""
    slurm = Slurm(nodes=2)

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n2"])

    assert slurm.called[-2:] == [("requeue", "7"), ("exclude", "7", ("n8", "n9"))]
    assert said == "not excluded, for want of others: n2 (without n2 the job has 1 usable nodes, and wants 2)"


def test_only_nodes_like_those_of_the_job_count(assignment):
    """Of a hundred nodes without GPUs none helps."""
    slurm = Slurm()

    slurm_requeue.requeue(slurm, assignment, exclude=["n2"])

    assert ("usable_nodes", "7", ("n1", "n2")) in slurm.called


def test_the_weakest_reasons_give_way_and_no_more_than_needed(assignment):
    """The first ones: nodes that were lost, then those whose faults are the oldest."""
    slurm = Slurm(nodes=4)

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n2", "n3", "n4"])

    assert slurm.called[-1] == ("exclude", "7", ("n8", "n9", "n3", "n4"))
    assert said == ("not excluded, for want of others: n2 (without n2, n3, n4 the job has 1 usable nodes, and wants 2)")


def test_what_was_excluded_at_the_requeue_before_gives_way_too(assignment):
    """Else the new fault would be the one that the job gets again."""
    slurm = Slurm(facts=msgspec.structs.replace(RUNNING, excluded="n9,n2"), nodes=3)

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n2", "n3"])

    assert slurm.called[-1] == ("exclude", "7", ("n9", "n3"))
    assert "n2 (without n2, n3" in said


def test_a_node_that_the_user_excluded_is_none_that_is_left(assignment):
    slurm = Slurm(facts=msgspec.structs.replace(RUNNING, excluded="n3,n4"), nodes=4)

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n2"])

    assert slurm.called[-1] == ("exclude", "7", ("n3", "n4"))
    assert "1 usable nodes, and wants 2" in said


def test_a_node_that_the_job_wants_by_name_is_one_that_is_left(assignment):
    slurm = Slurm(facts=msgspec.structs.replace(RUNNING, required="n1"), nodes=3)

    said = slurm_requeue.requeue(slurm, assignment, exclude=["n1", "n2"])

    assert (slurm.called[-1], said) == (("exclude", "7", ("n8", "n9", "n2")), "")


def test_a_list_that_only_gets_shorter_needs_no_look_at_the_partition(assignment):
    slurm = Slurm(refuses={"usable_nodes"})

    said = slurm_requeue.requeue(slurm, assignment, readmit=["n9"])

    assert (slurm.called[-1], said) == (("exclude", "7", ("n8",)), "")


FIT = ["a", "b", "c", "lost", "old", "new"]


@pytest.mark.parametrize(
    ("exclude", "fit", "wanted", "left"),
    [
        (["lost", "old", "new"], FIT, 3, ("lost", "old", "new")),
        (["lost", "old", "new"], FIT, 4, ("old", "new")),
        (["lost", "old", "new"], FIT, 5, ("new",)),
        (["lost", "old", "new"], FIT, 6, ()),
        (["lost", "old", "new"], FIT, 7, ()),  # nodes are down: none that returns shall stay out
        (["gone", "old", "new"], FIT, 5, ("gone", "new")),  # to allow a node that is down helps nobody
        (["gone", "old"], ["a"], 3, ()),
        ([], FIT, 7, ()),
        (["old"], [], 1, ()),
    ],
)
def test_a_job_does_without_as_many_nodes_as_it_can(exclude, fit, wanted, left):
    assert slurm_requeue.affordable(exclude, fit, wanted) == left


def test_the_more_nodes_there_are_the_more_can_be_done_without():
    """Of several reasons the strongest is given up last, whatever the number of nodes."""
    exclude = ["lost", "old", "new"]

    kept = [slurm_requeue.affordable(exclude, FIT, wanted) for wanted in range(8)]

    assert all(set(fewer) <= set(more) for more, fewer in pairwise(kept))
    assert all(each == tuple(exclude[len(exclude) - len(each) :]) for each in kept)


def test_the_job_is_requeued_though_its_list_cannot_be_read_or_set(assignment):
    unread, unset = Slurm(refuses={"job"}), Slurm(refuses={"exclude"})

    first = slurm_requeue.requeue(unread, assignment, exclude=["n2"])
    second = slurm_requeue.requeue(unset, assignment, exclude=["n2"])

    assert unread.called == [("requeue", "7")]
    assert "not changed" in first
    assert unset.called[-1] == ("requeue", "7")
    assert "has not confirmed the excluded nodes" in second


def test_a_refused_requeue_is_the_callers_to_deal_with(assignment):
    with pytest.raises(SlurmError):
        slurm_requeue.requeue(Slurm(refuses={"requeue"}), assignment)


def test_a_job_that_is_submitted_again_keeps_its_excluded_nodes_and_gets_ours(assignment):
    slurm = Slurm()

    again = slurm_requeue.resubmit(slurm, assignment, exclude=["n3"], readmit=["n9"])
    slurm_requeue.resubmit(slurm, assignment)

    assert (again.job_id, "submitted before" in again.besides, "--signal" in again.besides) == (8, True, True)
    asked = [call for call in slurm.called if call[0] == "resubmit"]
    assert [call[-1] for call in asked] == [("n8", "n3"), ("n8", "n9")]


def test_a_job_is_submitted_again_even_where_no_node_can_be_excluded(assignment):
    short, unread = Slurm(nodes=2), Slurm(refuses={"job"})

    again = slurm_requeue.resubmit(short, assignment, exclude=["n1"])
    blind = slurm_requeue.resubmit(unread, assignment, exclude=["n1"])

    assert "not excluded, for want of others: n1" in again.besides
    assert short.called[-1] == ("resubmit", "7", assignment.run_directory, 2, (), ("n8", "n9"))
    assert "no nodes are excluded" in blind.besides
    assert unread.called == [("resubmit", "7", assignment.run_directory, 2, (), ())]
