"""Training in another world than the supervisor: a container, an environment that a batch script sets up."""

import shutil

import pytest

from stepkeeper.core import events as on
from tests.lab import Lab, requirements
from tests.lab.site import supervisor_python
from tests.training import SMALL, Training, assert_complete

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
# what a container has of its own: /run, /dev, processes, IPC; and no Slurm
CONTAINER = (
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--unshare-pid",
    "--unshare-ipc", "--unshare-uts", "--hostname", "container",
)  # fmt: skip
SLURM = ("scontrol", "srun", "squeue", "scancel", "sbatch")


@pytest.fixture
def bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        if requirements.required():
            pytest.fail("no bwrap: apt-get install bubblewrap")
        pytest.skip("no bwrap here: apt-get install bubblewrap")


@pytest.mark.usefixtures("bubblewrap")
def test_training_in_a_container_is_preempted_and_goes_on(lab: Lab, reference: Training) -> None:
    """The supervisor and Slurm's commands outside, the library inside; the ranks' socket needs no mount."""
    training = Training(lab, name="container", env={"STEPKEEPER": str(supervisor_python().parent / "stepkeeper")})
    hidden = [word for name in SLURM if (path := shutil.which(name)) for word in ("--ro-bind", "/dev/null", path)]
    training.command = (
        *CONTAINER, *hidden, "--bind", str(training.work), str(training.work), "--",
        "bash", "-c", 'hostname; ! scontrol --version && exec "$@"', "in-the-container",
        str(training.python), "-m", "stepkeeper_trainer.examples.train_lm", "--steps=40", "--seed=7",
        "--checkpoint-every-steps=10", "--step-seconds-min=0.1", *SMALL,
    )  # fmt: skip
    training.submit()
    training.wait_step(13)

    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING", timeout_s=60)
    lab.release(urgent)
    training.wait_end()

    printed = "".join(path.read_text() for path in training.run_dir.glob("logs/*/*/*.log"))
    assert "container" in printed
    assert "scontrol" in printed, "its absence"
    assert training.events(on.RankHello), training.story()
    saved = [r.event for r in training.events(on.CheckpointCommitted) if isinstance(r.event, on.CheckpointCommitted)]
    assert any(event.emergency for event in saved), training.story()
    assert_complete(training, reference)


def test_modules_and_an_activated_environment_reach_the_ranks(lab: Lab, reference: Training) -> None:
    """A batch script that loads modules (a shell function) and activates an environment, as `conda activate` does."""
    training = Training(lab, name="modules")
    prefix = training.work / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").write_text(f'#!/bin/sh\nexec {training.python} "$@"\n')
    (prefix / "bin" / "python").chmod(0o755)
    script = "python -m stepkeeper_trainer.examples.train_lm --steps=40 --seed=7 --checkpoint-every-steps=10"
    line = " ".join([script, *SMALL])
    training.job_id = lab.submit(
        "#!/bin/bash\n"
        'module() { [ "$1" = load ] && export LOADEDMODULES="$2"; }\n'
        "module load cuda/12\n"
        f'export CONDA_PREFIX="{prefix}" PATH="{prefix}/bin:$PATH"\n'
        f"exec {supervisor_python().parent}/stepkeeper run -- "
        f"""bash -c 'test "$LOADEDMODULES" = cuda/12 && test "$(command -v python)" = "$CONDA_PREFIX/bin/python" """
        f"""&& exec {line} {{resume}}'\n""",
        sbatch_args=["-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", f"--output={training.log}"],
        user=training.user,
        env={"STEPKEEPER_RUN_DIR": str(training.run_dir)},
    )
    training.wait_end()

    assert_complete(training, reference)
