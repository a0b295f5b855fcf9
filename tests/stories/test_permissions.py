"""What others may see of a run: with `--group-readable` every file, whatever the umask; and nowhere a secret."""

import stat
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from tests.lab import Lab
from tests.stories import acts
from tests.stories.patience import hurry, patient_line
from tests.training import Training

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
SECRET = "S3cr3tValueThatNobodyMaySee42"  # noqa: S105 - what the tests look for


def submit(training: Training, line: str, *options: str, before: str = "") -> None:
    training.job_id = training.lab.submit(
        f"#!/bin/bash\n{before}\nexec {training.stepkeeper} run {' '.join(options)} -- {line}\n",
        sbatch_args=["-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=2000", f"--output={training.log}"],
        user=training.user,
        env={
            "STEPKEEPER_RUN_DIR": str(training.run_dir),
            "PATH": f"{training.python.parent}:/usr/bin:/bin",
            **training.env,
        },
    )


def unreadable(run: Path) -> list[str]:
    """What of a run directory its group cannot read."""
    found = []
    for path in (run, *run.rglob("*")):
        mode = path.lstat().st_mode
        needed = 0o050 if stat.S_ISDIR(mode) else 0o040
        if mode & needed != needed:
            found.append(f"{stat.filemode(mode)} {path}")
    return found


def test_the_group_reads_every_file_of_a_group_readable_run(lab: Lab) -> None:
    """Journal, checkpoints, logs of ranks and of srun, settings, losses: under the strictest umask."""
    training = Training(lab, name="readable", steps=30)
    submit(training, " ".join(patient_line(training, after=12)), "--group-readable", before="umask 077")
    training.wait_step(13)
    acts.kill_ranks(training)
    hurry(training)
    training.wait_end()

    assert training.exits() == [ExitCode.FINISHED], training.story()
    assert len(list(training.run_dir.rglob("*"))) > 30
    assert unreadable(training.run_dir) == []


def test_a_run_is_its_owners_alone_by_default(lab: Lab) -> None:
    training = Training(lab, name="private", steps=3, step_seconds=0.0).submit()
    training.wait_end()

    for name in ("status", "logs", "checkpoints"):
        done = lab.run("ls", training.run_dir / name, user="news", check=False)
        assert "Permission denied" in done.stderr
    assert stat.S_IMODE(training.run_dir.stat().st_mode) == 0o700
    done = lab.run(training.stepkeeper, "stop", training.run_dir, user="news", check=False)
    assert done.returncode != 0


def test_no_secret_leaves_the_ranks_own_output(lab: Lab) -> None:
    """On the command line, in a traceback, in a URL, by srun: not in journal, status, log, comment, notice, report."""
    training = Training(lab, name="secrets")
    script = training.work / "tells_all.py"  # beside other stories' scripts: no name of a library
    notices = training.work / "notices.txt"
    script.write_text(
        "import sys\n"
        f"print('HF_TOKEN={SECRET} https://me:{SECRET}@host/x', flush=True)\n"
        f"raise RuntimeError('401 for https://me:{SECRET}@host/v1 with Authorization: Bearer {SECRET}')\n"
    )
    script.chmod(0o644)
    notify = f"--notify-command='env >> {notices}'"
    submit(training, f"env AWS_SECRET_ACCESS_KEY={SECRET} python {script} --hub-token {SECRET}", notify)
    training.wait_end()
    shown = {
        command: lab.run(training.stepkeeper, command, training.run_dir, *more, user=training.user, check=False).stdout
        for command, *more in (("status", "--json"), ("events",), ("explain",), ("explain", "--json"), ("report",))
    }
    comment = lab.run("scontrol", "-o", "show", "job", str(training.job_id)).stdout

    assert training.exits()[-1] > ExitCode.FINISHED, training.story()
    assert training.events(on.Judged), training.story()
    assert "401 for https://me:***@host" in shown["explain"] + shown["events"]
    assert notices.exists()
    told = [line for line in notices.read_text().splitlines() if line.startswith("STEPKEEPER_")]
    assert told
    assert SECRET not in "\n".join(told)
    assert {name for name, text in shown.items() if SECRET in text} == set()
    assert SECRET not in comment.replace(str(script), "")
    printed_by_ranks = set(training.run_dir.glob("logs/*/*/*n[0-9].log"))
    files = [path for path in training.run_dir.rglob("*") if path.is_file() and path not in printed_by_ranks]
    assert files
    assert [str(path) for path in (*files, training.log) if SECRET.encode() in path.read_bytes()] == []
