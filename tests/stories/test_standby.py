"""A killed rank's successor is a process that has waited with torch imported; nothing of it is left in the end."""

from pathlib import Path

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab
from tests.stories.patience import hurry, kill_rank, patient, patient_line
from tests.training import STORY_S, Training, assert_complete

pytestmark = pytest.mark.slurm


def left(training: Training) -> list[int]:
    """Return the processes that were started for the run: ranks, wrappers, standbys."""
    wanted = f"STEPKEEPER_RUN_DIR={training.run_dir}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0") and b"STEPKEEPER_TASKS_PER_NODE" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found


def wait_ready(training: Training, times: int = 1, *who: str) -> None:
    what = ("standby_ready", *who)
    training.until(lambda: min(map(training.output().count, what)) >= times, f"{what}, {times} times")


@pytest.mark.campaign
def test_a_killed_rank_goes_on_in_a_process_that_has_waited(lab: Lab, reference: Training) -> None:
    """Twice: what was used is replaced.  The losses are those of ranks that were started as ever."""
    training = patient(lab, "standby", "--warm-standby")
    for times in (1, 2):
        wait_ready(training, times)
        kill_rank(training)
        training.wait_event(on.LaunchBegan, count=times + 1)
    hurry(training)
    training.wait_end()

    assert [record.event.warm for record in training.events(on.LaunchBegan)] == [0, 2, 2], training.story()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert_complete(training, reference)
    training.until(lambda: not left(training), f"the end of {left(training)}")


LINES = {
    "torchrun": ((), ("torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"), ()),
    "module": ((), ("python", "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-backend=c10d"), ()),
    "our torchrun": (("--torchrun",), (), ("python",)),
    "own srun": ((), ("srun", "--cpu-bind=none", "-l", "-n", "2", "-o", "/dev/null", "env", "OWN=1"), ("python", "-u")),
}


@pytest.mark.campaign
@pytest.mark.parametrize("line", LINES)
def test_ranks_that_others_start_hand_over(lab: Lab, reference: Training, line: str) -> None:
    """torchrun's ranks and those of an own srun line: their Python makes way for a process that has waited."""
    options, before, python = LINES[line]
    training = Training(lab, name=f"standby-{line.replace(' ', '-')}", step_seconds=0.05)
    training.env["PATH"] = f"{training.python.parent}:/usr/bin:/bin"
    _, *script = patient_line(training)
    training.command = (*before, *python, *script)
    training.run_args = ("--warm-standby", *options)
    training.submit()
    for times in (1, 2):
        wait_ready(training, times, *([] if line == "own srun" else ["standby_of_torchrun_ready"]))
        kill_rank(training)
        told = f"standby_taken: launch={times} ranks=2"
        training.until(lambda told=told: told in training.output(), "ranks that have waited")
    hurry(training)
    training.wait_end()

    assert "standby_refused" not in training.output()
    assert len(training.launches()) == 3, training.story()
    warm = [record.event.warm for record in training.events(on.LaunchBegan)]
    assert warm == ([] if line == "own srun" else [0, 2, 2]), "torchrun itself has waited too"
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert_complete(training, reference)
    training.until(lambda: not left(training), f"the end of {left(training)}")


@pytest.mark.campaign
def test_no_requeue_waits_for_standbys_and_a_launch_without_them_is_as_ever(lab: Lab, reference: Training) -> None:
    """A preemption while they wait; the next attempt has none at first, and loses nothing by it."""
    training = patient(lab, "standby-preempted", "--warm-standby")
    wait_ready(training)
    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING", timeout_s=STORY_S)
    lab.release(urgent)
    training.wait_attempt(1)
    hurry(training)
    training.wait_end()

    assert [record.event.warm for record in training.events(on.LaunchBegan)] == [0, 0], training.story()
    assert_complete(training, reference)
    training.until(lambda: not left(training), f"the end of {left(training)}")
