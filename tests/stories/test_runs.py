"""What a run does with its own past: damaged checkpoints, a finished run, other jobs, other world sizes."""

import os
import time

import pytest

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store.journal import Record
from tests.lab import Lab
from tests.lab.site import supervisor_python
from tests.measuring import cpu_s, rss_mib
from tests.stories.patience import hurry, patient, patient_line
from tests.training import SMALL, Training, assert_complete

pytestmark = pytest.mark.slurm


def again(training: Training, **changes) -> Training:
    """Submit another job on the same run directory."""
    fields = {
        name: getattr(training, name) for name in ("lab", "name", "steps", "every", "seed", "nodes", "step_seconds")
    }
    return Training(**{**fields, **changes}).submit()


@pytest.mark.campaign  # ranks choose in each run of the tests, without Slurm: `tests/trainer/test_load.py`
def test_damaged_step_directories_are_skipped_named_and_kept(lab: Lab, reference: Training) -> None:
    """Bit flip, truncation, no manifest: the one before them is used, and nothing is deleted."""
    training = Training(lab, name="damaged", steps=40, every=5, step_seconds=0.25).submit()
    training.wait_event(on.CheckpointCommitted, count=4)
    lab.cancel(training.job_id)
    training.wait_end()
    checkpoints = training.run_dir / "checkpoints"
    good, cut, bare, flipped = sorted(checkpoints.glob("step_*"))[-4:]
    data = max(flipped.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    (bare / "MANIFEST.json").unlink()
    data = max(cut.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size - 1)

    second = again(training, step_seconds=0.0)
    second.wait_end()

    chosen = second.events(on.CheckpointChosen)[-1].event
    assert chosen.directory == str(good)
    assert [skipped.directory for skipped in chosen.skipped] == [flipped.name, bare.name, cut.name]
    assert all(name in second.output() for name in (flipped.name, bare.name, cut.name))
    assert {good, cut, bare, flipped} <= set(checkpoints.iterdir())
    assert_complete(second, reference)


def test_a_finished_run_is_never_run_again(lab: Lab) -> None:
    training = Training(lab, name="finished", steps=5, step_seconds=0.0).submit()
    training.wait_end()
    losses = training.losses()

    lab.requeue(training.job_id)
    training.wait_attempt(1)
    training.wait_end()
    third = again(training)
    third.wait_end()

    assert third.exits() == [ExitCode.FINISHED] * 3, third.story()
    assert third.losses() == losses
    assert len(list(training.run_dir.glob("logs/*/launch-*"))) == 1, "it was launched again"


@pytest.mark.campaign
def test_another_job_is_refused_while_a_run_is_alive(lab: Lab, reference: Training) -> None:
    training = Training(lab, name="busy", steps=40, step_seconds=0.4).submit()
    training.wait_step(3)

    intruder = again(training)
    intruder.wait_end()
    training.wait_end()

    assert lab.job(intruder.job_id).exit_code == f"{int(ExitCode.RUN_BUSY)}:0", training.output()
    assert f"job {training.job_id}" in training.output()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_of_two_attempts_at_once_the_newer_one_wins(lab_factory, reference: Training) -> None:
    """Only slurmd of the batch node dies: Slurm gives the node up and requeues, and the old attempt lives on."""
    lab = lab_factory(slurmd_timeout_s=5, kill_wait_s=10)
    training = patient(
        lab,
        "two-at-once",
        nodes=1,  # with a second node, Slurm would tell the watcher there, and the old attempt would save and leave
        sbatch_args=("--no-kill=off", "--ntasks-per-node=2", "--gres=gpu:2"),
    )
    training.wait_step(3)
    batch_node = lab.job(training.job_id).batch_host
    old = lab.batch_pid(training.job_id)

    lab.kill_slurmd_only(batch_node)
    training.wait_attempt(1)
    training.until(lambda: not _alive(old), "the end of the older attempt", 240)
    hurry(training)
    training.wait_end()

    superseded = [record.attempt for record in training.events(on.Superseded)]
    asked = [r for r in training.events(on.SlurmAnswered) if r.attempt == 0 and _is_requeued(r)]
    assert superseded == [0] or asked, training.story()  # by the lease, or by Slurm's word if that came first
    assert [row["attempt"] for row in training.rows().values()][-1] == "1", training.story()
    assert_complete(training, reference)


@pytest.mark.campaign
def test_another_world_size_goes_on_within_rounding(lab: Lab, reference: Training) -> None:
    """Two ranks, then one, then two again: the data order is the same, and so are the losses but for rounding."""
    training = Training(lab, name="resharded", steps=40, step_seconds=0.2).submit()
    known = 0
    for nodes in (1, 2):
        training.wait_event(on.CheckpointCommitted, count=known + 1)  # its first: half of the steps are left
        lab.cancel(training.job_id)
        training.wait_end()
        known = len(training.events(on.CheckpointCommitted))
        training = again(training, nodes=nodes)
    training.wait_end()

    assert [len(nodes) for nodes in training.launches()] == [2, 1, 2], training.story()
    losses, expected = training.losses(), reference.losses()
    assert losses.keys() == expected.keys(), training.story()
    worst = max(abs(float(losses[step]) / float(expected[step]) - 1) for step in expected)
    assert worst < 1e-6, f"{worst:.2g}\n{training.story()}"


@pytest.mark.campaign
def test_the_supervisor_lives_in_an_environment_of_its_own(lab: Lab, reference: Training) -> None:
    """No torch beside the supervisor, and a PYTHONPATH full of traps for it: training finds torch in its own."""
    traps = lab.workdir("games") / "traps"
    traps.mkdir()
    for name in ("structlog", "msgspec", "xxhash"):
        (traps / f"{name}.py").write_text("raise SystemExit('the user\\'s module was imported')\n")
    os.chown(traps, lab.workdir("games").stat().st_uid, -1)
    training = Training(
        lab,
        name="two-environments",
        step_seconds=0.0,
        env={"STEPKEEPER": str(supervisor_python().parent / "stepkeeper"), "PYTHONPATH": str(traps)},
    )
    training.command = (
        "env", "--unset=PYTHONPATH", str(training.python), "-m", "stepkeeper_trainer.examples.train_lm", "--steps=40",
        "--seed=7", "--checkpoint-every-steps=10", *SMALL,
    )  # fmt: skip
    training.submit()
    training.wait_end()

    assert_complete(training, reference)


def test_nothing_secret_is_written_and_nothing_is_asked_while_nothing_happens(lab: Lab) -> None:
    """Secrets in the environment stay there; an idle supervisor is small and makes no Slurm call."""
    shims = lab.workdir("games") / "shims"
    shims.mkdir()
    for name in ("scontrol", "squeue", "scancel", "sacct", "sinfo"):
        (shims / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {shims}/calls\nexec /usr/bin/{name} "$@"\n')
        (shims / name).chmod(0o755)
    os.chown(shims, lab.workdir("games").stat().st_uid, -1)
    training = Training(
        lab,
        name="quiet",
        steps=400,
        step_seconds=0.1,
        env={"API_TOKEN": "sk-verysecret-123", "PATH": f"{shims}:/usr/bin:/bin"},
    ).submit()
    training.wait_step(5)
    supervisor = lab.batch_pid(training.job_id)
    calls = (shims / "calls").read_text()
    spent = cpu_s(supervisor)

    time.sleep(10)

    assert (shims / "calls").read_text() == calls, "a Slurm call while nothing happened"
    assert rss_mib(supervisor) < 40
    assert cpu_s(supervisor) - spent <= 0.1, "more than 1 % of a core"
    lab.cancel(training.job_id)
    training.wait_end()
    for path in [training.log, *training.run_dir.rglob("*.json*"), *training.run_dir.rglob("*.log")]:
        assert b"verysecret" not in path.read_bytes(), path


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["own-srun", "torchrun"])
def test_other_launch_lines(lab: Lab, reference: Training, how: str) -> None:
    """The user's own srun line (without our wrapper around the ranks), and one torchrun a node: preempted alike."""
    training = Training(lab, name=how)
    script = patient_line(training, after=12)
    line = ["srun", "--ntasks=2", "--ntasks-per-node=1", *script] if how == "own-srun" else list(script)
    options = ["--torchrun"] if how == "torchrun" else []
    training.job_id = lab.submit(
        "#!/bin/bash\nexec " + " ".join([str(training.stepkeeper), "run", *options, "--", *line]) + "\n",
        sbatch_args=["-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", "--requeue", "--open-mode=append",
                     f"--output={training.log}", f"--job-name={how}"],
        user=training.user,
        env={
            "STEPKEEPER_RUN_DIR": str(training.run_dir), "PATH": f"{training.python.parent}:/usr/bin:/bin",
            **training.env,
        },
    )  # fmt: skip
    training.wait_step(13)

    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING")
    hurry(training)
    lab.release(urgent)
    training.wait_end()

    assert len(training.events(on.AttemptStarted)) == 2, training.story()
    assert any(record.event.emergency for record in training.events(on.CheckpointCommitted)), training.story()
    assert_complete(training, reference)


def _is_requeued(record: Record) -> bool:
    return any(isinstance(each, because.SlurmSaid) and each.notice is Notice.REQUEUED for each in record.reasons)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
