"""A run whose job waits: what each command says of it, and what stops it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.run_analytics import queue
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store import submission
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.submission import Submission
from tests.reading import build
from tests.reading.conftest import Command
from tests.reading.test_queue import squeue

__all__ = ["squeue"]  # a fixture
Squeue = Callable[[str], None]


def submitted(run: RunDirectory, **changes: object) -> None:
    fields: dict[str, object] = {"job": "28", "at": time.time() - 95, "directory": "/home/me", "log": "/home/me/28.log"}
    submission.write(run.path, Submission(**{**fields, **changes}))  # type: ignore[arg-type]


@pytest.fixture
def waits(run: RunDirectory, squeue: Squeue) -> RunDirectory:
    submitted(run)
    squeue(f"echo '28|PENDING|{time.time() + 7300:.0f}|Resources'")
    return run


def test_status_tells_why_it_waits_since_when_its_expected_start_and_the_place_of_its_logs(
    command: Command, waits: RunDirectory
) -> None:
    said = command("status", waits.path)

    assert said.code == 0
    for words in (
        "pending, for 95 s (submitted ",
        "job 28 is PENDING (Resources): expected to start in 2 h 01 min (",
        "/home/me/28.log",
        f"stepkeeper stop {waits.path}, or scancel 28",
    ):
        assert words in said.out, (words, said.out)


@pytest.mark.parametrize("name", ["events", "explain", "logs"])
def test_other_commands_answer_the_same(command: Command, waits: RunDirectory, name: str) -> None:
    assert "job 28 is PENDING (Resources): expected" in command(name, waits.path).out
    assert json.loads(command(name, waits.path, "--json").out)["queue"]["reason"] == "Resources"


def test_a_command_that_prints_paths_for_programs_prints_none(command: Command, waits: RunDirectory) -> None:
    said = command("checkpoints", "latest", waits.path)

    assert (said.code, said.out) == (1, "")


def test_it_is_followed_until_slurm_knows_of_no_job_any_more(
    command: Command, waits: RunDirectory, squeue: Squeue
) -> None:
    squeue("echo '28|CANCELLED|N/A|None'")

    said = command("status", "--follow", waits.path)

    assert said.code == 0
    assert "gone  job 28 is CANCELLED: it does not continue without you" in said.out


def test_the_list_of_all_runs_tells_what_slurm_says_by_one_call(
    command: Command, waits: RunDirectory, tmp_path: Path
) -> None:
    for name in ("other", "third"):
        other = build.make_run(tmp_path / "runs" / name)
        build.write_status(other, phase="done", exit_code=10, updated_at=time.time())
    waits.path.rename(tmp_path / "runs" / "waits")

    said = command("status").out

    assert "pending (Resources)" in said
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_a_run_that_was_submitted_again_waits_for_its_new_job(
    command: Command, run: RunDirectory, squeue: Squeue
) -> None:
    build.write_status(run, phase="done", exit_code=27, why="games asks to save and end", updated_at=time.time() - 50)
    submitted(run, at=time.time() - 20)
    squeue("echo '28|PENDING|N/A|Priority'")

    said = command("status", run.path).out

    assert "pending, for 20 s (submitted" in said
    assert "job 28 is PENDING (Priority)" in said
    assert "before         stopped on request" in said


def test_the_job_that_works_on_a_run_counts_more_than_one_that_waits_for_it(run: RunDirectory) -> None:
    now = time.time()
    submitted(run, at=now - 20)

    def waits_for(**changes: object) -> str | None:
        build.write_status(run, started_at=now - 100, **changes)
        found = queue.waiting(run, status_file.read(run.status))
        return found.job if found is not None else None

    assert waits_for(updated_at=now - 30, alive_at=now - 2) is None
    assert waits_for(updated_at=now - 30, alive_at=now - 25) == "28"  # its supervisor was killed before
    assert waits_for(phase="done", exit_code=27, updated_at=now - 10) == "28"
    assert waits_for(phase="done", exit_code=10, updated_at=now - 10) == "12"
    assert waits_for(phase="done", exit_code=10, job_id=28, updated_at=now - 10) == "28"
    assert waits_for(phase="done", exit_code=0, job_id=28, updated_at=now - 10) is None


@pytest.mark.parametrize(
    ("state", "told"),
    [("PENDING", "PENDING (Resources)"), ("CANCELLED", "CANCELLED (Resources): it does not continue")],
)
def test_nothing_is_saved_of_a_run_that_does_not_run(
    command: Command, waits: RunDirectory, squeue: Squeue, state: str, told: str
) -> None:
    squeue(f"echo '28|{state}|N/A|Resources'")

    said = command("save", waits.path)

    assert said.code == 40
    assert told in said.err
    assert "nothing is running that could save" in said.err


def waits_requeued(run: RunDirectory, squeue: Squeue, tmp_path: Path, *, behind_the_cancel: str = "") -> None:
    """Let job 12 wait in the queue until `scancel` is called, which writes its arguments to `cancelled`."""
    build.write_status(run, phase="done", exit_code=10, updated_at=time.time())
    squeue(f"test -e {tmp_path}/cancelled && echo '12|CANCELLED|N/A|None' || echo '12|PENDING|N/A|BeginTime'")
    scancel = tmp_path / "bin" / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\n{behind_the_cancel}\n')
    scancel.chmod(0o755)


def test_a_requeued_job_that_waits_is_cancelled_and_its_checkpoints_stay(
    command: Command, run: RunDirectory, squeue: Squeue, tmp_path: Path
) -> None:
    waits_requeued(run, squeue, tmp_path)

    said = command("stop", run.path)

    assert said.code == 0
    assert "job 12 waited in the queue" in said.out
    assert "the checkpoint of step 200 stays" in said.out
    assert f"to continue: stepkeeper resume {run.path}" in said.out
    assert (tmp_path / "cancelled").read_text() == "--state=PENDING 12\n", "a job that has started is not cancelled"


def test_a_status_that_cannot_be_read_behind_the_cancel_is_no_traceback(
    command: Command, run: RunDirectory, squeue: Squeue, tmp_path: Path
) -> None:
    waits_requeued(run, squeue, tmp_path, behind_the_cancel=f'echo "[" > {run.status}')

    said = command("stop", run.path)

    assert said.code == 32, said.err
    assert f"{run.status}: not a status" in said.err


def test_a_job_that_starts_meanwhile_is_asked_and_not_cancelled(
    command: Command, waits: RunDirectory, squeue: Squeue, tmp_path: Path
) -> None:
    squeue(f"test -e {tmp_path}/tried && echo '28|RUNNING|N/A|None' || echo '28|PENDING|N/A|None'")
    scancel = tmp_path / "bin" / "scancel"
    scancel.write_text(f"#!/bin/sh\ntouch {tmp_path}/tried\n")
    scancel.chmod(0o755)

    said = command("stop", waits.path, "--within", "2")

    assert said.code == 40
    assert "job 28 is RUNNING, and its supervisor has written nothing yet" in said.err


# --- how it was submitted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret",
    [
        {"script": "#!/bin/sh\nexport WANDB_API_KEY=0123456789abcdef\n"},
        {"options": ("--comment=token=abcdefgh1234",)},
        {"arguments": ("--hub-token", "abcdefgh")},
    ],
)
def test_no_secret_is_ever_written(run: RunDirectory, secret: dict[str, object]) -> None:
    submitted(run, path="/home/me/train.sh", **secret)

    assert "abcdef" not in (run.path / submission.NAME).read_text()
    found = submission.read(run.path)
    assert found is not None
    assert found.secret


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o750, 0o640)])
def test_who_may_read_the_run_directory_may_read_how_it_was_submitted(
    run: RunDirectory, directory: int, file: int
) -> None:
    run.path.chmod(directory)
    submitted(run)

    assert (run.path / submission.NAME).stat().st_mode & 0o777 == file


def test_of_an_environment_only_settings_are_kept() -> None:
    environment = {
        "STEPKEEPER_SPARES": "1", "STEPKEEPER": "/opt/sk", "SBATCH_PARTITION": "train", "HOME": "/home/me",
        "STEPKEEPER_CONTINUES": "1:/run", "STEPKEEPER_SOCKET": "x", "STEPKEEPER_NOTIFY_COMMAND": "post?key=12345678",
    }  # fmt: skip

    assert set(submission.settings(environment)) == {"STEPKEEPER_SPARES", "STEPKEEPER", "SBATCH_PARTITION"}


@pytest.mark.parametrize("content", [b"", b"{torn", b'{"job": "../../x", "at": 1, "directory": "/"}', b"\xff"])
def test_a_torn_record_tells_nothing(command: Command, run: RunDirectory, content: bytes) -> None:
    (run.path / submission.NAME).write_bytes(content)

    assert submission.read(run.path) is None
    assert "no supervisor has worked on this run yet" in command("status", run.path).err


def test_a_run_whose_script_held_a_secret_is_not_submitted_without_it(
    command: Command, run: RunDirectory, squeue: Squeue, tmp_path: Path
) -> None:
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    scontrol.chmod(0o755)
    submitted(run, script="#!/bin/sh\nexport WANDB_API_KEY=0123456789abcdef\n")

    said = command("resume", run.path)

    assert said.code == 40
    assert "hold what looks like a secret, of which no copy is kept" in said.err
    assert f"STEPKEEPER_RUN_DIR={run.path}" in said.err


def test_a_run_is_not_submitted_again_with_a_setting_that_was_removed(
    command: Command, run: RunDirectory, squeue: Squeue
) -> None:
    squeue("echo '28|COMPLETED|N/A|None'")
    environment = {"STEPKEEPER_POLICY_ON_HANG": "relaunch, leave, requeue, stop", "SBATCH_X": "1"}
    submitted(run, script="#!/bin/sh\n", environment=environment)

    assert command("resume", run.path, "--dry-run").code == 0
    submitted(run, script="#!/bin/sh\n", environment={"STEPKEEPER_POLICY_ON_HANG": "stop"})
    said = command("resume", run.path, "--dry-run")

    assert said.code == ExitCode.USAGE
    for words in ("STEPKEEPER_POLICY_ON_HANG: ", "no setting any more", "job 28", f"STEPKEEPER_RUN_DIR={run.path}"):
        assert words in said.err, (words, said.err)
