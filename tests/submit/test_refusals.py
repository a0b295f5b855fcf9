"""What `stepkeeper submit` refuses before Slurm is asked anything: it would end the job when it starts, hours later."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepkeeper.cli import main
from stepkeeper.core.exits import ExitCode
from stepkeeper_trainer.formats import records


@pytest.fixture(autouse=True)
def far_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, no command of Slurm, and nothing set."""
    for name in [name for name in os.environ if name.startswith("STEPKEEPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a refused submission prints."""
    assert main.main(["submit", "--dry-run", *words]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert not said.out
    return said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--checkpoint-every=sometimes", "--", "x"), "--checkpoint-every: checkpoint_every: "),
        (("--set", "retention=newest three", "--", "x"), "--set: retention: "),
        (("--cold-tier=archive", "--", "x"), "--cold-tier: cold_tier: "),
        (("--peer-copies", "--", "x"), "set local_tier too"),
        (("-N", "2", "--spares=2", "--", "x"), "--spares 2: the allocation has 2 nodes, and at least one must train"),
        (("-N", "1-3", "--min-nodes=4", "--", "x"), "--min-nodes 4: a launch has 3 nodes"),
        (("-N", "2", "--spares=1", "--", "srun", "x"), "which an own srun line does itself"),
        (("-N", "4k", "--", "bash", "-c", "srun x | tee log"), "give the srun line itself"),
        (("--torchrun", "--", "torchrun", "t.py"), "leave out one of the two"),
        (("--", "mpirun", "-np", "4", "x"), "mpirun starts processes on all nodes"),
        (("-t", "2", "--", "x"), "-t 2: the time limit of an attempt is 2 min, and 2 min before its end"),
        (("-t", "0:30", "--notice-s", "10", "--", "x"), "nothing is left for training"),
    ],
)
def test_what_would_end_the_job_hours_later_is_refused_now(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert told in refused(capsys, *words)


def test_a_variable_and_a_file_are_named_as_the_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPKEEPER_RETENTION", "newest 0")
    assert "STEPKEEPER_RETENTION: retention: " in refused(capsys, "--", "x")
    monkeypatch.delenv("STEPKEEPER_RETENTION")

    run = tmp_path / "runs" / "week"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('checkpoint_every = "500 stops"\n')
    said = refused(capsys, "--run-dir", str(run), "--", "x")
    assert f"{run}/config.toml, line 1: checkpoint_every: " in said
    said = refused(capsys, "--run-dir", "runs/%x", "-J", "week", "--", "x")
    assert f"{run}/config.toml, line 1: checkpoint_every: " in said


def test_a_script_that_cannot_hear_where_to_resume_is_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "say {resume} where it shall go" in warned(capsys, "--", "bash", "-c", "python train.py")
    assert "{resume}" not in warned(capsys, "--", "bash", "-c", "python train.py {resume}")


def warned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a submission is warned of that is printed."""
    assert main.main(["submit", "--dry-run", *words]) == ExitCode.FINISHED
    said = capsys.readouterr()
    assert "#SBATCH --requeue" in said.out
    return said.err


def test_a_dry_run_prints_the_script_where_no_slurm_is_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = warned(capsys, "--", "python", "x")
    assert "the script is not checked against a cluster: scontrol show config" in said
    assert main.main(["submit", "--dry-run", "--json", "--", "x"]) == ExitCode.FINISHED
    assert "not checked" in json.loads(capsys.readouterr().out)["findings"][0]
    assert main.main(["submit", "--", "x"]) == ExitCode.NO_SLURM


def test_a_mistyped_script_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    told = f"trian.py: no such file in {tmp_path}"
    assert told in warned(capsys, "--", "python", "-u", "trian.py", "--lr", "1")
    assert told not in warned(capsys, "--sbatch=--chdir=/w", "--", "python", "trian.py")
    assert "no such file" not in warned(capsys, "--", "python", "train.py", "trian.py")
    assert "no such file" not in warned(capsys, "--", "apptainer", "exec", "i.sif", "python", "/w/t.py")
    assert "no such file" not in warned(capsys, "--", "python", "-m", "train")


def test_a_script_of_ones_own_is_looked_into(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("args = argparse.ArgumentParser().parse_args()\n")
    asked = warned(capsys, "--resume-argument", "--", "python", "train.py")
    assert "knows no --resume-from, which --resume-argument appends on a resume" in asked
    assert "--resume-from" not in warned(capsys, "--", "python", "train.py")
    (tmp_path / "train.sh").write_text("torchrun train.py\n")
    said = warned(capsys, "--", "bash", "train.sh")
    assert "train.sh, line 1: starts ranks itself: one task a node" in said
    assert "train.sh passes no argument on" in said
    assert "leave out one of the two" in refused(capsys, "--torchrun", "--", "bash", "train.sh")
    (tmp_path / "train.sh").write_text("module load cuda\nsrun python train.py\n")
    assert "train.sh, line 2: srun starts processes on all nodes" in refused(capsys, "--", "bash", "train.sh")


def test_a_run_that_is_over_or_not_ones_own_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    over = records.Outcome(outcome="finished", step=60, tokens=1, save_id=None, launch="0.0", at=1.0)
    records.write_outcome(run, over)
    assert main.main(["submit", "--dry-run", "--run-dir=run", "--", "x"]) == ExitCode.RUN_DIRECTORY
    assert "this run has finished, at step 60" in capsys.readouterr().err
