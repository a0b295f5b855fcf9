"""What `stepkeeper submit` refuses before Slurm is asked anything: it would end the job when it starts, hours later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper import cli
from stepkeeper.core.exits import ExitCode


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
    assert cli.main(["submit", "--dry-run", *words]) == ExitCode.USAGE
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
    code = cli.main(["submit", "--dry-run", "--", "bash", "-c", "python train.py"])
    assert code == ExitCode.NO_SLURM, "all else is in order"
    assert "say {resume} where it shall go" in capsys.readouterr().err
    cli.main(["submit", "--dry-run", "--", "bash", "-c", "python train.py {resume}"])
    assert "{resume}" not in capsys.readouterr().err
