"""Who is slow, stopped, cut off or gone, and when: it costs a living run nothing, and a loss is never missed.

Killed supervisors, watchers and nodes are in `test_campaign`, controllers that fail over in `test_controllers`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.liveness import GONE_AFTER_S, SUSPECT_AFTER_S
from stepkeeper.core.state import Phase
from stepkeeper.run_store import status as status_file
from tests.lab import Lab, LabError, processes
from tests.stories import acts
from tests.stories.patience import hurry, kill_rank, patient
from tests.training import Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign, pytest.mark.timeout(900)]
SLOW_S = SUSPECT_AFTER_S / 2
SUSPECT_S = (SUSPECT_AFTER_S + GONE_AFTER_S) / 2
ENDS_S = 240.0


def find(training: Training, wanted: Callable[[str], bool], *, batch: bool = False) -> list[int]:
    """Return the uppermost processes of a job whose command line is wanted."""
    found = {pid: acts.command_of(pid) for pid in acts.pids_of(training, batch=batch)}
    above = {pid: acts.command_of(processes.parent(pid)) for pid in found}
    return [pid for pid, command in found.items() if wanted(command) and not wanted(above[pid])]


def supervisor(training: Training) -> list[int]:
    return find(training, lambda command: "stepkeeper" in command and " run " in command, batch=True)


def watchers(training: Training) -> list[int]:
    return find(training, lambda command: "stepkeeper.watcher.main" in command)


def one_watcher(training: Training) -> list[int]:
    return watchers(training)[-1:]


def bus(training: Training) -> list[int]:
    """The srun below the watchers: without it nobody hears anybody."""
    host = training.lab.job(training.job_id).batch_host
    own = {pid for pid in processes.every_pid() if processes.name(pid) == "srun" and _is_on(pid, host)}
    return [pid for pid in own if "stepkeeper.watcher.main" in acts.command_of(pid)]


def _is_on(pid: int, node: str) -> bool:
    with contextlib.suppress(OSError):
        return processes.environment(pid).get("SLURMD_NODENAME") == node
    return False


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stop processes for a while."""
    assert pids
    processes.send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Pause(NamedTuple):
    """Somebody stands still for a while."""

    who: Callable[[Training], list[int]]
    for_s: float


PAUSES = {
    "slow supervisor": Pause(supervisor, SLOW_S),
    "stopped supervisor": Pause(supervisor, SUSPECT_S),
    "slow watcher": Pause(one_watcher, SLOW_S),
    "stopped watcher": Pause(one_watcher, SUSPECT_S),
    "stopped watchers": Pause(watchers, SUSPECT_S),
    "slow bus": Pause(bus, SLOW_S),
    "stopped bus": Pause(bus, SUSPECT_S),
}


def stopping(training: Training) -> None:
    """A rank has died, and the others are being ended for the next launch."""
    acts.in_training(training)
    kill_rank(training)
    acts.quickly(lambda: training.records()[-1].phase is not Phase.TRAINING)


MOMENTS = {**acts.MOMENTS, "stopping": stopping}
PLAIN = ("training", "saving")  # moments in which nothing else happens to the run
CASES = [
    *((who, moment) for who in PAUSES for moment in PLAIN),
    *((who, moment) for who in PAUSES if who.startswith("stopped") for moment in ("starting", "stopping")),
]


@pytest.mark.parametrize(("who", "moment"), CASES)
def test_who_is_not_heard_for_a_while_costs_the_run_nothing(
    lab: Lab, reference: Training, who: str, moment: str
) -> None:
    training = patient(lab, f"{who.replace(' ', '-')}-{moment}", after=12)
    MOMENTS[moment](training)
    with stopped(PAUSES[who].who(training)):
        time.sleep(PAUSES[who].for_s)
    hurry(training)
    training.wait_end()

    assert_it_cost_nothing(training, reference, moment)


def assert_it_cost_nothing(training: Training, reference: Training, moment: str) -> None:
    """Nobody asked the ranks to stop, and nobody took the supervisor for gone, whatever else happened then."""
    assert len(training.launches()) == (2 if moment == "stopping" else 1), training.story()
    assert training.lab.job(training.job_id).restarts == 0, training.story()
    assert not (training.run_dir / "rescues.jsonl").exists(), training.story()
    assert training.exits() == [ExitCode.FINISHED], training.story()
    assert_complete(training, reference)


@pytest.mark.parametrize(
    ("controller", "moment"),
    [*((each, moment) for each in ("there", "away") for moment in PLAIN), ("there", "stopping")],
)
def test_a_bus_whose_srun_is_killed_costs_the_run_nothing(
    lab: Lab, reference: Training, controller: str, moment: str
) -> None:
    """Also while the controller is away for half a minute and longer: watchers see that their supervisor writes."""
    training = patient(lab, f"bus-killed-{controller}-{moment}", after=12)
    MOMENTS[moment](training)
    of_bus, watcher = bus(training), one_watcher(training)
    with lab.hung_slurmctld() if controller == "away" else contextlib.nullcontext():
        processes.send(of_bus, signal.SIGKILL)
        processes.send(watcher, signal.SIGTERM)  # a stray one, as a person may send it
        time.sleep(SUSPECT_S)
    ready = len(training.events(on.WatcherReady))
    training.until(
        lambda: ready >= 2 * training.nodes or len(training.events(on.WatcherReady)) > ready, "watchers of a new bus"
    )
    hurry(training)
    training.wait_end()

    assert_it_cost_nothing(training, reference, moment)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_supervisor_that_stands_still_for_good_is_gone(lab: Lab, reference: Training, moment: str) -> None:
    """The ranks save, and the job goes on in its next attempt."""
    training = patient(lab, f"stands-still-{moment}", after=12, env={"PATIENT_STEP_S": "4"})
    MOMENTS[moment](training)
    with stopped(supervisor(training)):
        training.wait_attempt(1)
    hurry(training)
    training.wait_end()

    assert training.lab.job(training.job_id).restarts == 1, training.story()
    if moment != "requeueing":  # the watchers leave then, and Slurm itself ends and requeues the job
        assert len((training.run_dir / "rescues.jsonl").read_text().splitlines()) == 1
    assert_complete(training, reference)


def test_a_loss_after_a_false_alarm_is_saved(lab: Lab, reference: Training) -> None:
    """First the supervisor is suspect for a while; when it is killed later, the ranks save as if nothing had been."""
    training = patient(lab, "alarm-and-loss", after=12, every=1000)
    training.wait_step(13)
    with stopped(supervisor(training)):
        time.sleep(SUSPECT_S)
    seen = training.step()
    training.wait_step(seen + 2)
    before = training.step()
    processes.send(supervisor(training), signal.SIGKILL)
    training.wait_attempt(1)
    hurry(training)
    training.wait_end()

    chosen = [record.event.step for record in training.events(on.CheckpointChosen)]
    assert (chosen[1] or 0) >= before, training.story()
    assert_complete(training, reference)


def test_a_supervisor_ends_where_its_run_directory_is_removed(lab: Lab) -> None:
    """Nothing can be saved any more: it says so with a code of its own, and leaves the nodes."""
    training = patient(lab, "removed", after=12)
    training.wait_step(13)
    remove(training)
    training.wait_end()

    raw = lab.job(training.job_id).raw
    assert raw["ExitCode"] == f"{int(ExitCode.RUN_DIRECTORY_GONE)}:0", (raw, training.output())
    assert "the run directory is gone" in training.output()


def remove(training: Training) -> None:
    """Remove the run directory for good: ranks and supervisor write into it meanwhile."""
    aside = training.run_dir.with_name(f"{training.name}-aside")
    training.run_dir.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@pytest.mark.parametrize("told", ["by nobody", "by SIGTERM"])  # each on a lab of its own, which it leaves broken
def test_an_orphan_ends(lab_factory, told: str) -> None:
    """Its controller and its slurmd are gone for good: nobody takes the requeue, and nobody kills it."""
    lab = lab_factory(grace_time_s=20, kill_wait_s=8 if told == "by SIGTERM" else 7)
    training = patient(lab, f"orphan-{told.replace(' ', '-')}", after=12)
    training.wait_step(13)
    ours = supervisor(training)
    lab.stop_slurmctld(signal.SIGKILL)
    for node in lab.node_names:
        lab.kill_slurmd_only(node)
    try:
        if told == "by SIGTERM":
            processes.send(ours, signal.SIGTERM)  # Slurm does not answer: it means the worst
            training.until(lambda: training.records()[-1].phase.value == "requeueing", "the requeue")
            processes.send(ours, signal.SIGTERM)
        else:
            remove(training)
        training.until(lambda: not any(processes.alive(pid) for pid in ours), "the supervisor's end", ENDS_S)
        if told == "by SIGTERM":
            status = status_file.read(training.run_dir / "status.json")
            assert status is not None
            assert status.exit_code in (ExitCode.UNDECIDED, ExitCode.REQUEUE_FAILED), training.story()
        else:
            assert f"exit: code={int(ExitCode.RUN_DIRECTORY_GONE)}" in training.output(), training.output()
    finally:
        with contextlib.suppress(LabError):
            lab.start_slurmctld()
