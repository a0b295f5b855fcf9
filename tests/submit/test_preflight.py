"""What stands in the place of a run before a job is submitted for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper.cli import main
from stepkeeper.core.events import JobState
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm.client import SlurmError
from stepkeeper.submit import preflight
from stepkeeper_trainer.formats import lease, records
from tests.submit.clusters import Answering

OURS = lease.Lease(job_id=7, restart_count=0, attempt=0, node="n1", pid=1, taken_at=0.0)


def finished(run: Path) -> None:
    records.write_outcome(
        run, records.Outcome(outcome="finished", step=60, tokens=1, save_id=None, launch="0.0", at=1.0)
    )


def test_a_place_where_nothing_is_and_a_run_that_may_go_on_are_open(tmp_path: Path) -> None:
    preflight.require_open(tmp_path / "run")
    (tmp_path / "run").mkdir(mode=0o700)
    preflight.require_open(tmp_path / "run")
    records.write_outcome(
        tmp_path / "run", records.Outcome(outcome="stopped", step=6, tokens=1, save_id=None, launch="0.0", at=1.0)
    )
    preflight.require_open(tmp_path / "run")


def test_a_finished_run_is_refused_before_a_job_waits_for_it(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(StepkeeperError, match=r"finished, at step 60, .*--resume-from .*step_00000060") as refused:
        preflight.require_open(tmp_path)
    assert refused.value.code is ExitCode.RUN_DIRECTORY


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_run_directory_that_the_job_would_refuse_is_refused(tmp_path: Path, below: str) -> None:
    run = tmp_path / "run"
    (run / below).mkdir(parents=True)
    (run / below).chmod(0o777)
    with pytest.raises(StepkeeperError, match="everybody may write it"):
        preflight.require_open(run)
    link = tmp_path / "link"
    link.symlink_to(run)
    with pytest.raises(StepkeeperError, match="is a symbolic link"):
        preflight.require_open(link)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (JobState.RUNNING, "job 7 works on this run"),
        (JobState.COMPLETING, "job 7 works on this run"),
        (JobState.PENDING, "job 7 waits in the queue to continue this run"),
        (JobState.ENDED, ""),
        (None, ""),  # Slurm has forgotten it
    ],
)
def test_another_job_of_the_run_is_told(tmp_path: Path, state: JobState | None, told: str) -> None:
    assert preflight.busy(tmp_path, Answering({})) == ""
    lease.write(tmp_path, OURS)

    said = preflight.busy(tmp_path, Answering({} if state is None else {7: state}))

    assert said.startswith(told)
    assert bool(said) is bool(told)


def test_a_slurm_that_does_not_answer_is_no_answer(tmp_path: Path) -> None:
    lease.write(tmp_path, OURS)
    with pytest.raises(SlurmError, match="away"):
        preflight.busy(tmp_path, Answering({}, away=True))


def test_an_outcome_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / records.OUTCOME_NAME).write_text('{"torn')
    for command in ("run", "submit"):
        code = main.main([command, "--dry-run", "--run-dir", str(tmp_path), "--", "x"])
        assert code == ExitCode.RUN_DIRECTORY
        assert "outcome.json: cannot be read" in capsys.readouterr().err
