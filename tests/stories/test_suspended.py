"""Jobs that stand still for a while and go on: suspended by an admin or a gang, and clocks that somebody sets."""

import ctypes
import os
import subprocess
import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.liveness import GONE_AFTER_S
from stepkeeper.run_analytics.model import SECOND, Use
from stepkeeper.run_analytics.reading import see
from stepkeeper.run_store import journal
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from tests.lab import Lab
from tests.stories.patience import hurry, patient
from tests.stories.test_campaign import release_urgent_jobs
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
AWAY_S = GONE_AFTER_S + 6.0  # longer than it takes to be gone for others, and than every pause of a loop
CLOCK = Path(__file__).with_name("wall_clock.c")
HOUR_NS = 3600 * 10**9
# lower and upper partition of a site that suspends what it preempts; two jobs share each CPU of the lower one in turns
GANGS = (
    "PreemptMode=SUSPEND,GANG",
    "SchedulerTimeSlice=5",
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=SUSPEND OverSubscribe=FORCE:2 MaxTime=INFINITE State=UP",
    "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF OverSubscribe=FORCE:1 MaxTime=INFINITE State=UP",
)
TURN_S = 12  # longer than the supervisor waits for anything, and five seconds more
TURNS = (
    "PreemptType=preempt/none",
    "PreemptMode=GANG",
    f"SchedulerTimeSlice={TURN_S}",
    "PartitionName=turns Nodes=ALL OverSubscribe=FORCE:2 MaxTime=INFINITE State=UP",
)


def wants_its_cpus(training: Training, partition: str) -> int:
    """Submit a job that fits beside ours but for the CPUs; return its id."""
    nodes = training.lab.job(training.job_id).nodes
    return training.lab.submit(
        "exec sleep infinity",
        sbatch_args=[
            f"--partition={partition}", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=8",
            "--mem=100", "--job-name=urgent", "--output=/dev/null",
        ],
    )  # fmt: skip


def suspensions(training: Training) -> list[float]:
    return [record.event.seconds for record in training.events(on.Suspended)]


def assert_it_only_paused(training: Training, reference: Training, least_s: float) -> None:
    """One attempt, one launch, one bus, no question to Slurm, and the losses of an uninterrupted run."""
    assert len(training.launches()) == 1, training.story()
    assert len(training.events(on.AttemptStarted)) == 1, training.story()
    for kind in (on.WatcherLost, on.BusEnded, on.StacksCollected):
        told = [record for record in training.events(kind) if not _leaves(record)]
        assert told == [], training.story()
    assert not (training.run_dir / "rescues.jsonl").exists(), training.story()
    assert any(seconds >= least_s for seconds in suspensions(training)), training.story()
    assert "did not run for" in training.output()
    seen = see(RunDirectory(training.run_dir))
    assert seen.accounts.wall[Use.SUSPENDED] >= (least_s - 5) * SECOND, training.story()
    assert sum(seen.accounts.wall.values()) == seen.accounts.wall_total
    status = status_file.read(training.run_dir / "status.json")
    assert status is not None
    assert status.suspended_seconds >= least_s
    assert training.lab.job(training.job_id).restarts == 0, training.story()
    assert_complete(training, reference)


def _leaves(record: journal.Record) -> bool:
    return record.phase.value in ("closing", "done")


@pytest.mark.campaign
def test_a_suspended_job_has_neither_hung_nor_lost_anybody(lab: Lab, reference: Training) -> None:
    """`scontrol suspend` stops supervisor, watchers and ranks for longer than each of them waits for the others."""
    training = patient(lab, "suspended", after=12)
    training.wait_step(13)

    lab.run("scontrol", "suspend", str(training.job_id))
    lab.wait_job(training.job_id, "SUSPENDED")
    stood_at = training.step()
    time.sleep(AWAY_S)
    assert training.step() <= stood_at + 5, "the ranks are given two seconds before they are stopped"
    lab.run("scontrol", "resume", str(training.job_id))
    hurry(training)
    training.wait_end()

    assert_it_only_paused(training, reference, AWAY_S - 10)


@pytest.mark.campaign
def test_a_job_that_a_gang_suspends_for_an_urgent_one_goes_on_after_it(lab_factory, reference: Training) -> None:
    """PreemptMode=SUSPEND,GANG: no signal announces it; the urgent job runs beside our sleeping processes."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, slurm_conf=GANGS)
    training = patient(lab, "gang", after=12, sbatch_args=("--partition=low",))
    training.wait_step(13)

    urgent = wants_its_cpus(training, "high")
    lab.wait_job(training.job_id, "SUSPENDED")
    lab.wait_job(urgent, "RUNNING")
    time.sleep(AWAY_S)
    hurry(training)
    release_urgent_jobs(lab)
    training.wait_end()

    assert_it_only_paused(training, reference, AWAY_S - 10)


@pytest.mark.campaign
def test_jobs_that_take_turns_on_a_node_are_not_hung(lab_factory, reference: Training) -> None:
    """OverSubscribe=FORCE without any preemption: every twelve seconds the other job's turn comes, and then ours."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=10, slurm_conf=TURNS)
    training = patient(lab, "turns", after=8, sbatch_args=("--partition=turns",))
    training.wait_step(8)

    other = wants_its_cpus(training, "turns")  # whose turn comes at once, or a whole one of ours later
    lab.wait_job(training.job_id, "SUSPENDED", timeout_s=60)
    lab.wait_job(other, "RUNNING")
    lab.wait_job(training.job_id, "RUNNING", timeout_s=60)
    hurry(training)
    release_urgent_jobs(lab)
    training.wait_end()

    assert_it_only_paused(training, reference, TURN_S - 2)
    seen = see(RunDirectory(training.run_dir))
    assert seen.accounts.wall[Use.SUSPENDED] >= TURN_S / 2 * SECOND, training.story()  # ranks stop 2 s later


@pytest.mark.campaign
def test_a_wall_clock_that_is_set_does_not_matter(lab: Lab, reference: Training) -> None:
    """An hour back in training, then two forward: the deadline of a save that comes then has not passed."""
    library, hand = _clock(lab.workdir("games") / "clocks")
    env = {"LD_PRELOAD": str(library), "STORY_CLOCK": str(hand)}
    training = patient(lab, "clock", after=8, env=env)
    training.wait_step(8)

    _set(hand, -HOUR_NS)
    training.wait_step(12)
    _set(hand, HOUR_NS)
    training.wait_step(14)
    lab.preempt(training.job_id)
    training.wait_event(on.RequeueAnswered)
    hurry(training)
    _set(hand, 0)  # Slurm's own commands start nothing where the clock is not the controller's
    release_urgent_jobs(lab)
    training.wait_end()

    assert suspensions(training) == []
    assert any(record.event.emergency for record in training.events(on.CheckpointCommitted)), training.story()
    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert_complete(training, reference)


def _clock(directory: Path) -> tuple[Path, Path]:
    """Build a wall clock that goes wrong by as many nanoseconds as a file says."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    library, hand = directory / "wall_clock.so", directory / "hand"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(CLOCK), "-ldl"], check=True, timeout=240)
    hand.write_bytes(bytes(8))
    for path in (library, hand):
        path.chmod(0o644)
    return library, hand


def _set(hand: Path, nanoseconds: int) -> None:
    """Set the clock of every process that looks at it, at once: eight bytes are written in one go."""
    descriptor = os.open(hand, os.O_WRONLY)
    try:
        os.pwrite(descriptor, bytes(ctypes.c_int64(nanoseconds)), 0)
    finally:
        os.close(descriptor)
