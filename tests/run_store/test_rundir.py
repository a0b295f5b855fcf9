"""The run directory: its place, and what is said when it cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import paths

SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "gpt", "USER": "ada", "SLURM_SUBMIT_DIR": "/home/ada"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("runs/%x-%j", "/home/ada/runs/gpt-12"),
        ("/scratch/%u/%A_%j", "/scratch/ada/12_12"),
        ("100%%", "/home/ada/100%"),
        ("../other", "/home/other"),
        ("plain", "/home/ada/plain"),
    ],
)
def test_fields_expand_as_in_sbatch(pattern: str, expected: str) -> None:
    assert paths.expand_pattern(pattern, SLURM) == Path(expected)


def test_an_array_job_has_its_own_fields() -> None:
    array = {**SLURM, "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}

    assert paths.expand_pattern("r/%A_%a", array) == Path("/home/ada/r/10_3")


def test_a_job_name_cannot_lead_elsewhere() -> None:
    assert paths.expand_pattern("runs/%x-%j", {**SLURM, "SLURM_JOB_NAME": "../../etc"}) == Path(
        "/home/ada/runs/.._.._etc-12"
    )


@pytest.mark.parametrize("pattern", ["%N", "runs/%5j", "%a"])
def test_a_field_that_is_not_known_or_not_set_is_a_usage_error(pattern: str) -> None:
    with pytest.raises(StepkeeperError, match="%") as caught:
        paths.expand_pattern(pattern, SLURM)

    assert caught.value.code is ExitCode.USAGE


def test_prepare_makes_what_is_missing_and_can_be_repeated(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        for group_readable, mode in ((False, 0o700), (True, 0o750)):
            path = tmp_path / f"run-{mode:o}"
            made = paths.prepare_run_directory(path, group_readable=group_readable, default=False)
            assert paths.prepare_run_directory(path, group_readable=group_readable, default=False) == made
            for each in (path, path / "checkpoints", path / "logs"):
                assert each.stat().st_mode & 0o777 == mode
            assert sorted(os.listdir(path)) == ["checkpoints", "logs"]
    finally:
        os.umask(umask)


def test_runs_is_made_for_the_default_place_only(tmp_path: Path) -> None:
    with pytest.raises(StepkeeperError, match="does not exist; create it") as caught:
        paths.prepare_run_directory(tmp_path / "runs" / "a", group_readable=False, default=False)
    assert caught.value.code is ExitCode.RUN_DIRECTORY

    assert paths.prepare_run_directory(tmp_path / "runs" / "a", group_readable=False, default=True).path.is_dir()


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("")
    for name, words in (
        ("file", "not a directory"),
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("file/below", "does not exist"),
        ("run", "logs"),
    ):
        with pytest.raises(StepkeeperError, match=words) as caught:
            paths.prepare_run_directory(tmp_path / name, group_readable=False, default=False)
        assert caught.value.code is ExitCode.RUN_DIRECTORY


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    paths.prepare_run_directory(tmp_path / "run", group_readable=False, default=False)
    (tmp_path / "run" / "checkpoints").chmod(0o500)

    with pytest.raises(StepkeeperError, match="cannot be written"):
        paths.prepare_run_directory(tmp_path / "run", group_readable=False, default=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 12345, 12345)

    with pytest.raises(StepkeeperError, match="belongs to user id 12345"):
        paths.prepare_run_directory(tmp_path / "run", group_readable=False, default=False)


def test_a_run_has_one_id_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    first = paths.prepare_run_directory(tmp_path / "real" / "run", group_readable=False, default=False)
    second = paths.prepare_run_directory(tmp_path / "link" / "run", group_readable=False, default=False)

    assert first.run_id == second.run_id


# --- what a hostile colleague could do ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_a_link_below_a_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    run = paths.prepare_run_directory(tmp_path / "run", group_readable=False, default=False)
    (run.path / name).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (run.path / name).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StepkeeperError, match=f"{name}/ is a symbolic link"):
        paths.prepare_run_directory(run.path, group_readable=False, default=False)

    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["", "checkpoints", "logs"])
def test_what_others_may_write_is_refused(tmp_path: Path, name: str) -> None:
    run = paths.prepare_run_directory(tmp_path / "run", group_readable=True, default=False)
    (run.path / name).chmod(0o757)

    with pytest.raises(StepkeeperError, match="everybody may write it"):
        paths.prepare_run_directory(run.path, group_readable=True, default=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_what_a_group_may_write_is_refused_unless_it_is_ours_alone(tmp_path: Path) -> None:
    run = paths.prepare_run_directory(tmp_path / "run", group_readable=True, default=False)
    run.path.chmod(0o770)
    paths.prepare_run_directory(run.path, group_readable=True, default=False)  # root's own group
    os.chown(run.path, 0, 12345)

    with pytest.raises(StepkeeperError, match="its group may write it"):
        paths.prepare_run_directory(run.path, group_readable=True, default=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_planted_directory_of_checkpoints_is_refused(tmp_path: Path) -> None:
    run = paths.prepare_run_directory(tmp_path / "run", group_readable=False, default=False)
    os.chown(run.checkpoints, 12345, 12345)

    with pytest.raises(StepkeeperError, match="checkpoints/ belongs to user id 12345"):
        paths.prepare_run_directory(run.path, group_readable=False, default=False)


def test_a_place_that_everybody_may_rename_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o777)

    with pytest.raises(StepkeeperError, match="everybody may rename"):
        paths.prepare_run_directory(tmp_path / "scratch" / "run", group_readable=False, default=False)

    (tmp_path / "scratch").chmod(0o1777)
    assert paths.prepare_run_directory(tmp_path / "scratch" / "run", group_readable=False, default=False)


def test_the_tasks_of_an_array_never_share_a_run_directory() -> None:
    task = {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "5", "SLURM_JOB_ID": "6"}
    named = {**task, "SLURM_JOB_NAME": "x", "SLURM_SUBMIT_DIR": "/w"}

    for pattern in ("one", "one-%A", "one-%%a"):
        with pytest.raises(StepkeeperError, match="would share it"):
            paths.expand_pattern(pattern, named)
    assert str(paths.expand_pattern("one-%A_%a", named)) == "/w/one-5_3"
    assert str(paths.expand_pattern(paths.DEFAULT_PATTERN, named)) == "/w/runs/x-6"
    assert str(paths.expand_pattern("one", {**named, "SLURM_ARRAY_TASK_COUNT": "1"})) == "/w/one"
