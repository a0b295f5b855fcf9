"""What a user sees who starts it wrongly: one line that says what, which, and what to do, and an exit code."""

import os
import subprocess
import sys

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.run_store import submission


@pytest.fixture
def inside_a_job(tmp_path):
    """Run a command in place of a shell, as a batch script does, with a job's environment and fake Slurm commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (commands / name).write_text("#!/bin/sh\nexit 1\n")
        (commands / name).chmod(0o755)

    def run(*argv, batch_process=True, **changes):
        environment = {
            "PATH": f"{commands}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NAME": "train",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **changes,
        }
        pid = "$$" if batch_process else "1"
        script = f'SLURM_TASK_PID={pid} exec {sys.executable} -m stepkeeper "$@"'
        return subprocess.run(
            ["/bin/sh", "-c", script, "sh", *argv],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return run


def says(done, code: ExitCode, *words: str) -> None:
    assert done.returncode == code, done
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_no_slurm_around():
    """On a login node or a laptop."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}

    done = subprocess.run(
        [sys.executable, "-m", "stepkeeper", "run", "--", "true"],
        env=environment, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip

    says(done, ExitCode.NO_SLURM, "not inside a Slurm job", "sbatch")


def test_not_in_the_place_of_the_batch_script(inside_a_job):
    """Without `exec` Slurm would signal the shell, and the supervisor would never hear of a preemption."""
    says(inside_a_job("run", "--", "true", batch_process=False), ExitCode.NOT_BATCH_PROCESS, "exec stepkeeper run")


def test_a_parent_of_the_run_directory_that_does_not_exist(inside_a_job, tmp_path):
    done = inside_a_job("run", "--run-dir", str(tmp_path / "no" / "such" / "place"), "--", "true")

    says(done, ExitCode.RUN_DIRECTORY, str(tmp_path / "no" / "such"), "create it")
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_directory_that_is_no_directory(inside_a_job, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")

    done = inside_a_job("run", "--run-dir", str(tmp_path / "run"), "--", "true")

    says(done, ExitCode.RUN_DIRECTORY, "checkpoints")
    assert (tmp_path / "run" / "checkpoints").read_text() == "in the way"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("run", "--no-such-option", "--", "true"), ("--no-such-option",)),
        (("run", "--tasks-per-node", "two", "--", "true"), ("two",)),
        (("run", "--failures-max", "0", "--", "true"), ("--failures-max",)),
        (("run", "--run-dir", "%q", "--", "true"), ("%q",)),
        (("run",), ("no CMD",)),
        (("run", "--"), ("no CMD",)),
        (("walk",), ("walk",)),
    ],
)
def test_wrong_words(inside_a_job, argv, words):
    says(inside_a_job(*argv), ExitCode.USAGE, *words)


def test_the_command_alone_shows_its_help(inside_a_job):
    done = inside_a_job()

    assert done.returncode == ExitCode.USAGE
    assert "usage: stepkeeper" in done.stderr
    assert "doctor" in done.stderr


def test_a_slurm_that_does_not_answer(inside_a_job, tmp_path):
    done = inside_a_job("run", "--run-dir", str(tmp_path / "run"), "--", "true")

    says(done, ExitCode.NO_SLURM, "scontrol")


REMOVED = {"STEPKEEPER_POLICY_ON_HANG": "stop"}


def test_a_requeued_job_does_not_die_of_a_setting_that_an_upgrade_has_removed(inside_a_job, tmp_path):
    line = (
        "run",
        "--run-dir",
        str(tmp_path / "run"),
        "--max-nodes",
        "2",
        "--set",
        "policy.resubmit=auto",
        "--",
        "true",
    )

    says(inside_a_job(*line, **REMOVED, SLURM_RESTART_COUNT="1"), ExitCode.NO_SLURM, "scontrol")
    says(inside_a_job(*line, SLURM_RESTART_COUNT="0"), ExitCode.USAGE, "--max-nodes", "set `spares`")
    says(inside_a_job("run", "--", "true", **REMOVED), ExitCode.USAGE, "STEPKEEPER_POLICY_ON_HANG")


def test_a_job_that_continues_a_run_does_not_die_of_it_either(inside_a_job, tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    submission.write(run, submission.Submission(job="6", at=1.0, directory=str(tmp_path)))

    done = inside_a_job("run", "--", "true", **REMOVED, STEPKEEPER_CONTINUES=f"6:{run}")

    says(done, ExitCode.NO_SLURM, "scontrol")


def test_the_users_own_modules_do_not_reach_the_supervisor(inside_a_job, tmp_path):
    """A PYTHONPATH with modules named like ours must not break the supervisor, or run in it."""
    for name in ("structlog", "msgspec", "xxhash", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s module ran')")

    done = inside_a_job("run", "--", "true", batch_process=False, PYTHONPATH=str(tmp_path))

    assert "module ran" not in done.stderr + done.stdout


def test_torch_stays_out_of_the_supervisor():
    """It would cost 200 MB and a second on every batch host."""
    code = "import sys, stepkeeper.cli.run, stepkeeper.cli.main; print({'torch', 'numpy'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=90, capture_output=True, text=True)

    assert done.stdout.strip() == "set()"
