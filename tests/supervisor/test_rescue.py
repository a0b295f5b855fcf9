"""The one decision of a watcher: whether to requeue a job whose supervisor is gone."""

import time

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal
from stepkeeper.slurm.client import Resubmitted, SlurmError
from stepkeeper.watcher.rescue import RESCUES_MAX, SILENT_S, rescue
from stepkeeper_trainer.formats import lease, lineage, records
from tests.reasons import in_words
from tests.supervisor.assignments import assigned

FAILED = on.JobFacts(state=on.JobState.COMPLETING, slurm_state="COMPLETING", restarts=0, reason="JobLaunchFailure")
RUNNING = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, reason="None")


class Slurm:
    """A controller with one job."""

    def __init__(self, job=FAILED, error=None):
        self.facts, self.error, self.called, self.forbidden = job, error, [], False

    def job(self, job):  # noqa: ARG002 - as the Protocol has it
        if self.error:
            raise SlurmError(self.error, unreachable=True)
        return self.facts

    def requeue(self, job):
        if self.forbidden:
            raise SlurmError("Requested operation is presently disabled for job 7")
        self.called.append(("requeue", job))

    def resubmit(self, job, run_directory, nodes, words, exclude):
        self.called.append(("resubmit", job, run_directory, nodes, words, exclude))
        return Resubmitted(job_id=8)

    def cancel(self, job):
        self.called.append(("cancel", job))


@pytest.fixture
def assignment(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    lease.write(tmp_path, lease.Lease(job_id=7, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0))
    return assigned(tmp_path, nodes=("n1", "n2"))


def play(assignment, slurm, *, gone=False):
    return rescue(assignment, "n2", gone=gone, client=slurm)


def test_a_killed_supervisors_job_is_requeued(assignment):
    """`kill -9` of the batch process: Slurm itself would leave the job FAILED."""
    slurm = Slurm()

    assert play(assignment, slurm).done
    assert slurm.called == [("requeue", "7")]


@pytest.mark.parametrize("site", ["shows it", "refuses"])
def test_where_slurm_may_not_requeue_the_job_it_is_submitted_again(assignment, site):
    slurm = Slurm(msgspec.structs.replace(FAILED, requeue_allowed=site == "refuses"))
    slurm.forbidden = True

    result = play(msgspec.structs.replace(assignment, words=("run", "x")), slurm)

    assert result.done
    assert "submitted again as job 8" in result.why
    assert slurm.called == [("resubmit", "7", assignment.run_directory, 2, ("run", "x"), ())]


@pytest.mark.parametrize(
    ("facts", "requeued"),
    [
        ({"reason": "None"}, False),  # scancel
        (
            {"reason": "None", "preempt_at": 9.0, "end_at": 9.0},
            True,
        ),  # preempted without grace time, PreemptMode=CANCEL
        ({"reason": "None", "preempt_at": 9.0, "end_at": 12.0}, False),  # scancel in grace time
        ({"reason": "TimeLimit"}, True),  # the limit came while nobody was there to requeue
        ({"reason": "None", "restarts": 1}, False),  # somebody was faster
        ({"reason": "None", "state": on.JobState.PENDING}, False),
    ],
)
def test_slurms_table_decides(assignment, facts, requeued):
    slurm = Slurm(msgspec.structs.replace(FAILED, **facts))

    assert play(assignment, slurm).done
    assert bool(slurm.called) is requeued


def test_a_running_job_is_left_alone_until_the_lease_has_run_out(assignment):
    """A supervisor that is only slow must not lose its job."""
    slurm = Slurm(RUNNING)

    assert not play(assignment, slurm).done
    assert slurm.called == []
    assert play(assignment, slurm, gone=True).done
    assert slurm.called == [("requeue", "7")]


def test_a_finished_run_is_ended_not_requeued(assignment, tmp_path):
    """With the batch node lost, `--no-kill` would leave it RUNNING for ever."""
    records.write_outcome(
        tmp_path, records.Outcome(outcome="finished", step=9, tokens=9, save_id=None, launch="0.0", at=1.0)
    )
    slurm = Slurm(RUNNING)

    assert play(assignment, slurm, gone=True).done
    assert slurm.called == [("cancel", "7")]


def test_a_run_that_went_on_elsewhere_is_left_to_its_new_job(assignment, tmp_path):
    lease.write(tmp_path, lease.Lease(job_id=8, restart_count=0, attempt=1, node="n1", pid=1, taken_at=0.0))
    slurm = Slurm()

    assert play(assignment, slurm).done
    assert slurm.called == []


def test_an_attempt_that_ended_with_a_word_is_not_revived(assignment, tmp_path):
    record = journal.Record(
        v=journal.VERSION, job_id=7, restart_count=0, attempt=0, launch=0, phase=Phase.DONE,
        event=on.BusEnded(at=1.0, bus=1, code=0), why="cancelled",
        effects=(do.Exit(code=11, reasons=in_words("cancelled")),),
    )  # fmt: skip
    (tmp_path / "journal.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    slurm = Slurm()

    assert play(assignment, slurm).done
    assert slurm.called == []


def test_a_supervisor_that_dies_again_and_again_is_not_started_for_ever(assignment, tmp_path):
    """Only a new step directory opens a new budget."""
    slurm = Slurm()
    for _ in range(RESCUES_MAX):
        play(assignment, slurm)

    result = play(assignment, slurm)

    assert len(slurm.called) == RESCUES_MAX
    assert "manual repair is needed" in result.why
    commit = lineage.Commit(at=4e9, attempt=0, step=9, save_id="a" * 32, parent=None, directory="step_00000009")
    lineage.append(tmp_path / "checkpoints", commit)
    play(assignment, slurm)
    assert len(slurm.called) == RESCUES_MAX + 1


def test_a_node_that_the_run_has_left_rescues_nothing_while_somebody_is_in_charge(assignment, tmp_path):
    """Its own bus may be all that is broken: the run goes on elsewhere in the allocation."""
    slurm = Slurm(RUNNING)
    in_charge = record(time.time(), nodes=("n1",))
    journal.JournalWriter(tmp_path / "journal.jsonl").append(in_charge)
    wait_for_journal(tmp_path)

    result = play(assignment, slurm, gone=True)

    assert (result.done, result.left) == (False, True)
    assert slurm.called == []


def test_a_node_that_was_left_helps_when_nobody_has_been_in_charge_for_long(assignment, tmp_path):
    """The batch node died, and under --no-kill the job would run for ever."""
    slurm = Slurm(RUNNING)
    journal.JournalWriter(tmp_path / "journal.jsonl").append(record(time.time() - 2 * SILENT_S, nodes=("n1",)))
    wait_for_journal(tmp_path)

    result = play(assignment, slurm, gone=True)

    assert result.done
    assert slurm.called == [("requeue", "7")]


def record(at, *, nodes):
    event = on.Progressed(at=at, launch=0, step=1, tokens=1)
    return journal.Record(
        v=journal.VERSION,
        job_id=7,
        restart_count=0,
        attempt=0,
        launch=0,
        phase=Phase.TRAINING,
        event=event,
        nodes=nodes,
    )


def wait_for_journal(directory):
    limit = time.monotonic() + 90
    while not list(journal.read(directory / "journal.jsonl")):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_controller_that_is_away_is_asked_again(assignment):
    result = play(assignment, Slurm(error="no answer"))

    assert not result.done
    assert "no answer" in result.why
