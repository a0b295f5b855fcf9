"""What can befall a run, and when: the two axes of the campaign."""

import os
import signal
import time
from collections.abc import Callable

from stepkeeper.core.state import Phase
from tests.lab import LabError, facts, processes
from tests.lab.jobs import ENDED
from tests.training import Training

QUICK_POLL_S = 0.002
AGAIN_S = 0.05  # each look goes through all processes of the machine
MOMENT_S = 120.0


# --- when -----------------------------------------------------------------------------------------


def starting(training: Training) -> None:
    """Watchers answer, ranks are being started; none has said a word yet.

    Before the first watcher answers (0.3 s) nobody can stand in for a lost supervisor: see docs/limitations.md.
    """
    training.until(lambda: any(record.phase is Phase.TRAINING for record in training.records()), "the launch")


def in_training(training: Training) -> None:
    """Some steps are done, some of them saved."""
    training.wait_step(13)


def saving(training: Training) -> None:
    """A save is in flight: its directory is there, and not yet renamed."""
    training.wait_step(8)
    checkpoints = training.run_dir / "checkpoints"
    before = {path.name for path in checkpoints.glob(".tmp-step*")}  # of one that was interrupted
    quickly(lambda: any(path.name not in before for path in checkpoints.glob(".tmp-step*")))


def requeueing(training: Training) -> None:
    """The job was preempted, its last checkpoint is committed, and it is about to be requeued."""
    training.wait_step(13)
    training.lab.preempt(training.job_id)
    quickly(lambda: training.records()[-1].phase in (Phase.CLOSING, Phase.REQUEUEING, Phase.DONE))


MOMENTS = {"starting": starting, "training": in_training, "saving": saving, "requeueing": requeueing}


def quickly(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + MOMENT_S
    while not condition():
        assert time.monotonic() < limit, "the moment never came"
        time.sleep(QUICK_POLL_S)


# --- what -----------------------------------------------------------------------------------------


def preempt(training: Training) -> None:
    """An urgent job wants the nodes."""
    nodes = training.lab.job(training.job_id).nodes
    if nodes:  # else preempted already; a second look might find that it has just been
        training.lab.preempt(training.job_id, nodes)


def requeue_by_admin(training: Training) -> None:
    try:
        training.lab.requeue(training.job_id)
    except LabError as error:
        assert "requeue" in str(error).lower() or "pending" in str(error).lower(), error  # noqa: PT017 - too late


def kill_supervisor(training: Training) -> None:
    kill_one(training, lambda command: "stepkeeper" in command and " run " in command, batch=True)


def kill_watcher(training: Training) -> None:
    kill_one(training, lambda command: "stepkeeper.watcher.main" in command)


def kill_rank(training: Training) -> None:
    kill_one(training, _is_rank)


def kill_ranks(training: Training) -> None:
    """All at once: the training's Slurm step, whatever its number; those beside it have names of ours."""
    lines = training.lab.run("scontrol", "-o", "show", "step", str(training.job_id)).stdout.splitlines()
    steps = {found["StepId"]: found["Name"] for line in lines if "StepId" in (found := facts.pairs(line))}
    theirs = [step for step, name in steps.items() if step[-1].isdigit() and not name.startswith("stepkeeper-")]
    assert len(theirs) == 1, steps
    training.lab.run("scancel", "--signal=KILL", theirs[0])


def stop_rank(training: Training) -> None:
    """One stands still from now on: no step is done any more, and nothing can be saved."""
    kill_one(training, _is_rank, number=signal.SIGSTOP)


def _is_rank(command: str) -> bool:
    return "train_lm" in command and "wrapper.py" not in command and " run " not in command


def lose_node(training: Training) -> None:
    """Power loss of a node that is not the batch host."""
    found = training.lab.job(training.job_id)
    for node in found.nodes:
        if node != found.batch_host:
            training.lab.kill_node(node)
            return


def lose_batch_node(training: Training) -> None:
    found = training.lab.job(training.job_id)
    if found.nodes:
        training.lab.kill_node(found.batch_host)


ACTS = {
    "preempt": preempt,
    "admin-requeue": requeue_by_admin,
    "kill-supervisor": kill_supervisor,
    "kill-watcher": kill_watcher,
    "kill-rank": kill_rank,
    "lose-node": lose_node,
    "lose-batch-node": lose_batch_node,
}


def kill_one(
    training: Training,
    wanted: Callable[[str], bool],
    *,
    batch: bool = False,
    within_s: float = 90.0,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Signal one process of the job, by its pid; wait for it to appear unless the job is gone by then."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        for pid in sorted(pids_of(training, batch=batch), reverse=True):
            # the uppermost: a child that a process has just forked shows its command line until it becomes another
            if wanted(command_of(pid)) and not wanted(command_of(processes.parent(pid))):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
                return
        found = training.lab.job(training.job_id)
        if not found.nodes or found.state in ENDED:
            return  # the job waits, or is over: nothing of it runs
        time.sleep(AGAIN_S)


def pids_of(training: Training, *, batch: bool) -> set[int]:
    """Return the pids of a job, without srun and slurmstepd; with `batch` those of its batch step."""
    if batch:
        return {pid for pids in training.lab.task_pids(training.job_id, "batch").values() for pid in pids}
    nodes = training.lab.job(training.job_id).nodes
    own = {pid for node in nodes for pid in processes.by_environment("SLURMD_NODENAME", node)}
    return {pid for pid in own if processes.name(pid) not in ("srun", "slurmstepd")}


def command_of(pid: int) -> str:
    """Return the command line of a process; empty where it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
