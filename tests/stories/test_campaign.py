"""Whatever befalls a run, whenever: it ends complete, with the losses of an uninterrupted run, bit for bit.

`make test` plays the commonest three in training; `make campaign` each at each moment, one after the other in a run.
"""

import contextlib
import time

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from tests.lab import Lab, LabTimeoutError
from tests.stories.acts import ACTS, MOMENTS
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
STEPS = 40
STEP_SECONDS = 0.25
LATE_STEP_SECONDS = 0.4  # where it is seconds until anybody acts on it: watchers wait, nodes come back
COMMONEST = ("preempt", "kill-supervisor", "kill-rank")
NODE_LOSSES = ("lose-node", "lose-batch-node")
OTHERS = tuple(act for act in ACTS if act not in NODE_LOSSES)
LATE = ("kill-supervisor", "kill-watcher", *NODE_LOSSES)
SEVERAL_S = 900.0  # of what befalls one run
AGAIN_S = 240.0  # until it goes on, or ends


@pytest.mark.parametrize(  # a preemption alone: each run of the tests has it in `test_notices`
    "act", [pytest.param(act, marks=pytest.mark.campaign) if act == "preempt" else act for act in COMMONEST]
)
def test_a_run_survives(lab: Lab, reference: Training, act: str) -> None:
    training = started(lab, act, f"{act}-training")
    befalls(training, act, "training")

    assert_survived(training, reference)


@pytest.mark.campaign
@pytest.mark.timeout(SEVERAL_S)
@pytest.mark.parametrize("act", OTHERS)
def test_a_run_survives_it_at_each_moment(lab: Lab, reference: Training, act: str) -> None:
    """What befalls it first does not spare it the next time."""
    training = started(lab, act, f"{act}-each")
    befalls(training, act, *(moment for moment in MOMENTS if moment != "training" or act not in COMMONEST))

    assert_survived(training, reference)


@pytest.mark.campaign
@pytest.mark.timeout(SEVERAL_S)
@pytest.mark.parametrize("moments", [("starting", "saving"), ("training", "requeueing")], ids=" and ".join)
@pytest.mark.parametrize("act", NODE_LOSSES)
def test_a_run_survives_the_loss_of_a_node(
    lab_factory, reference: Training, act: str, moments: tuple[str, ...]
) -> None:
    """Twice, while the first node comes back.

    On a lab of its own: Slurm 22.05 goes on counting GPUs of a job that lost a node ("bad node_offset"), so that its
    nodes have many more than are used.
    """
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, slurmd_timeout_s=8, gpus=16)
    name = "-".join([act, *moments])
    training = started(lab, act, name)
    befalls(training, act, *moments)

    assert_survived(training, reference)


@pytest.mark.campaign
def test_a_lost_node_that_slurm_still_believes_in_is_not_waited_for(lab_factory, reference: Training) -> None:
    """A requeued job waits for all its nodes: for a dead one five minutes, and then 22.05 gives it no usable GPU."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, slurmd_timeout_s=1800)
    training = Training(lab, name="lost-unnoticed", steps=STEPS, step_seconds=STEP_SECONDS).submit()
    befalls(training, "lose-node", "training")

    assert_survived(training, reference)
    assert all(node.is_up for node in lab.nodes().values()), "Slurm has noticed: the story proves nothing"
    first, second = (record.event for record in training.events(on.AttemptStarted))
    lost = set(first.nodes) - {first.batch_node}
    assert not lost & set(second.nodes), training.story()
    asked = [effect for record in training.records() for effect in record.effects if isinstance(effect, do.Requeue)]
    assert [effect.keep for effect in asked] == [(first.batch_node,)]


@pytest.mark.campaign
def test_a_node_that_falls_silent_makes_room_for_a_spare_and_no_watcher_stays_deaf(
    lab_factory, reference: Training
) -> None:
    """The bus that is to bring back its watcher never begins there, and so is deaf: its watchers get no orders."""
    lab = lab_factory(nodes=3, grace_time_s=20, kill_wait_s=10)
    training = Training(
        lab, name="silent", nodes=3, steps=STEPS, step_seconds=STEP_SECONDS, run_args=("--spares=1",)
    ).submit()
    training.wait_step(13)
    silent = training.launches()[0][1]
    lab.freeze_node(silent)
    try:
        training.until(lambda: training.exits() == [0], "the end of the training", AGAIN_S)
    finally:
        lab.thaw_node(silent)
        mend(lab, training)

    assert_complete(training, reference)
    assert silent not in training.launches()[-1], training.story()
    given_up = next(record for record in training.records() if record.node_losses)
    (bus,) = [effect for effect in given_up.effects if isinstance(effect, do.StartBus)]
    assert silent not in bus.nodes


def started(lab: Lab, act: str, name: str) -> Training:
    """Submit a training that is not finished before what befalls it has had its effect."""
    step_seconds = LATE_STEP_SECONDS if act in LATE else STEP_SECONDS
    return Training(lab, name=name, steps=STEPS, step_seconds=step_seconds).submit()


def befalls(training: Training, act: str, *moments: str) -> None:
    """Have it befall a run at each moment, and wait for the end; once it goes on after the one before."""
    try:
        for number, moment in enumerate(moments):
            MOMENTS[moment](training)
            since = whereabouts(training)
            ACTS[act](training)
            release_urgent_jobs(training.lab, wait=act not in NODE_LOSSES)
            if number < len(moments) - 1:
                what = f"a launch after {act}, {moment}"
                training.until(lambda since=since: goes_on(training, act, since), what, AGAIN_S)
                start_lost_nodes(training.lab)
        training.wait_end(AGAIN_S)
    finally:
        mend(training.lab, training)


def whereabouts(training: Training) -> tuple[tuple[int, int], int]:
    """Return attempt and launch of a run, and how many watchers have answered so far."""
    newest = training.records()[-1]
    return (newest.attempt, newest.launch), len(training.events(on.WatcherReady))


def goes_on(training: Training, act: str, since: tuple[tuple[int, int], int]) -> bool:
    """Whether a later launch has done a step; where a watcher was killed, others in place of all is enough."""
    launch, watchers = since
    if act == "kill-watcher" and len(training.events(on.WatcherReady)) >= watchers + training.nodes:
        return True
    return any((int(row["attempt"]), int(row["launch"])) > launch for row in training.rows().values())


def assert_survived(training: Training, reference: Training) -> None:
    """It is complete, nothing verified was lost on the way, and Slurm has it as completed."""
    assert_complete(training, reference)
    assert_nothing_verified_was_lost(training)
    assert training.lab.job(training.job_id).state == "COMPLETED", training.story()


def assert_nothing_verified_was_lost(training: Training) -> None:
    """Each launch resumes from the newest step directory that was ever reported as committed."""
    committed = 0
    for record in training.records():
        if isinstance(record.event, on.CheckpointCommitted):
            committed = max(committed, record.event.step)
        if isinstance(record.event, on.CheckpointChosen):
            assert (record.event.step or 0) >= committed, training.story()


def give_way(lab: Lab, training: Training) -> float:
    """Have an urgent job preempt a training, and wait for its end; return the seconds until the nodes were free."""
    asked_at = time.time()
    urgent = lab.preempt(training.job_id)
    started_at = lab.wait_job(urgent, "RUNNING").started_at
    release_urgent_jobs(lab)
    training.wait_end()
    assert started_at is not None
    return started_at.timestamp() - asked_at


def release_urgent_jobs(lab: Lab, *, wait: bool = True) -> None:
    """Let urgent jobs run for a moment, then give the nodes back; do not `wait` for one whose node was lost."""
    queue = lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split()
    for job_id in queue:
        if wait:
            with contextlib.suppress(LabTimeoutError):  # another story's lost node, say: it would wait for ever
                lab.wait_job(int(job_id), lambda job: job.state != "PENDING", timeout_s=60)
        lab.release(int(job_id))


def mend(lab: Lab, training: Training) -> None:
    """Leave the lab whole for the next story."""
    lab.run("scancel", str(training.job_id), check=False)
    for job_id in lab.run("squeue", "--noheader", "--name=urgent", "--format=%i").stdout.split():
        lab.run("scancel", job_id, check=False)
    start_lost_nodes(lab)


def start_lost_nodes(lab: Lab) -> None:
    """Bring back every node that is down."""
    for name in [name for name, node in lab.nodes().items() if not node.is_up]:
        lab.start_node(name)
