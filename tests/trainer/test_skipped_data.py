"""Which data a state has never seen is told by the lineage, and by the manifest of each step directory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stepkeeper_trainer import GlobalSampler
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.lineage import LeftOut
from stepkeeper_trainer.formats.manifest import Manifest
from stepkeeper_trainer.formats.steps import newest_verified, read_manifest
from stepkeeper_trainer.store.run_directory import record_left_out
from stepkeeper_trainer.tiers.search import ANCESTORS, counts
from tests.trainer.test_keeper import Loop, save_at

pytestmark = pytest.mark.usefixtures("one_process")

TOLD = (LeftOut(4, 2),)


def passed(*steps: int) -> GlobalSampler:
    """Return a sampler that has left out data at these steps."""
    sampler = GlobalSampler(30, seed=1)
    sampler.advance(3)
    for step in steps:
        sampler.skip(step, 1)
    return sampler


def recorded(checkpoints: Path) -> tuple[LeftOut, ...]:
    told = lineage.read(checkpoints)
    assert told is not None
    return told.left_out


def lines(checkpoints: Path) -> int:
    path = checkpoints / lineage.LINEAGE_NAME
    return len(path.read_bytes().splitlines()) if path.exists() else 0


class OldRollback(msgspec.Struct, kw_only=True, tag_field="record", tag="rollback"):
    """As a release before this field reads it."""

    at: float
    attempt: int = 0
    save_id: str | None
    why: str


def test_lines_of_either_age_are_read_by_readers_of_the_other(tmp_path: Path) -> None:
    (tmp_path / lineage.LINEAGE_NAME).write_bytes(
        b'{"record":"rollback","at":1.0,"attempt":0,"save_id":"a","why":"poison"}\n'
    )
    assert recorded(tmp_path) == ()

    window = LeftOut(step=18, steps=2)
    lineage.append(tmp_path, lineage.Rollback(at=2.0, save_id="b", why="a spike", left_out=(window,)))

    *_, line = (tmp_path / lineage.LINEAGE_NAME).read_bytes().splitlines()
    assert msgspec.json.decode(line, type=OldRollback).save_id == "b"
    assert recorded(tmp_path) == (window,)


def test_a_rollback_that_says_nothing_of_data_changes_nothing_and_one_that_names_none_does(tmp_path: Path) -> None:
    window = LeftOut(step=18, steps=2)
    lineage.append(tmp_path, lineage.Rollback(at=1.0, save_id="a", why="a spike", left_out=(window,)))
    lineage.append(tmp_path, lineage.Rollback(at=2.0, save_id="a", why="resumed by hand"))
    assert recorded(tmp_path) == (window,)

    lineage.append(tmp_path, lineage.Rollback(at=3.0, save_id="a", why="it takes all again", left_out=()))

    assert recorded(tmp_path) == ()


def test_what_a_launch_leaves_out_is_recorded_once(tmp_path: Path) -> None:
    for _ in range(2):
        record_left_out(tmp_path, passed(), TOLD, done=2, attempt=1)

    assert recorded(tmp_path) == (LeftOut(step=4, steps=2),)
    assert lines(tmp_path) == 1
    told = lineage.read(tmp_path)
    assert told is not None
    assert told.head is None, "there was nothing to go back from"


def test_where_all_is_as_recorded_no_line_is_written(tmp_path: Path) -> None:
    record_left_out(tmp_path, passed(), (), done=0, attempt=0)
    record_left_out(tmp_path, object(), (), done=0, attempt=0)

    assert lines(tmp_path) == 0


def test_a_state_from_behind_the_window_has_it_still_though_nobody_tells_the_launch(tmp_path: Path) -> None:
    record_left_out(tmp_path, passed(), TOLD, done=2, attempt=0)

    record_left_out(tmp_path, passed(4), (), done=9, attempt=1)

    assert recorded(tmp_path) == (LeftOut(step=4, steps=2),)


@pytest.mark.parametrize(
    ("sampler", "windows", "done"),
    [
        pytest.param(passed(), (), 2, id="nobody tells the launch, and its state is of before"),
        pytest.param(object(), TOLD, 2, id="the sampler cannot leave out anything"),
        pytest.param(passed(), TOLD, 9, id="the state has seen the data"),
    ],
)
def test_data_that_is_taken_after_all_is_no_longer_said_to_be_left_out(
    tmp_path: Path, sampler: object, windows: tuple[LeftOut, ...], done: int
) -> None:
    window = LeftOut(step=4, steps=2)
    lineage.append(tmp_path, lineage.Rollback(at=1.0, save_id=None, why="a spike", left_out=(window,)))

    record_left_out(tmp_path, sampler, windows, done=done, attempt=1)

    assert recorded(tmp_path) == ()


def counts_still(checkpoints: Path, *ancestors: str | None) -> bool:
    """Tell whether a step that a node's disk has, saved long ago, may come back."""
    step = Manifest(
        step=20,
        tokens=0,
        world_size=1,
        created_at="2020-09-21T00:00:00+00:00",
        save_id="of-a-disk",
        files={},
        state={ANCESTORS: ancestors},
    )
    return counts(step, lineage.read(checkpoints))


def test_what_a_node_has_of_a_loss_gone_wrong_does_not_return_in_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest step on shared storage lies before the loss, so that there is nothing there to go back from."""
    run_dir = tmp_path / "run"
    save_at(run_dir, 2)
    checkpoints = run_dir / "checkpoints"
    newest = newest_verified(checkpoints).chosen
    assert newest is not None
    assert newest.manifest is not None
    assert Loop(run_dir, resume_from=newest.path).manager.resume() == 2
    assert counts_still(checkpoints, newest.manifest.save_id, None)
    monkeypatch.setenv("STEPKEEPER_RESUME_NEWEST", "")

    for _ in range(2):
        assert Loop(run_dir, resume_from=newest.path).manager.resume() == 2

    assert not counts_still(checkpoints, newest.manifest.save_id, None)
    assert lines(checkpoints) == 2, "a commit, and one rollback, though two launches went back"


def test_nor_where_nothing_was_on_shared_storage_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKEEPER_RESUME_NEWEST", "")
    assert counts_still(tmp_path / "run/checkpoints", None)

    assert Loop(tmp_path / "run").manager.resume() == 0

    assert not counts_still(tmp_path / "run/checkpoints", None)


def test_the_manifest_names_the_samples_and_a_copy_of_the_step_alone_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("STEPKEEPER_SKIP_DATA", "4:2")
    loop = save_at(run_dir, 2)
    before = newest_verified(run_dir / "checkpoints").chosen
    assert before is not None
    assert before.manifest is not None
    assert "left_out" not in before.manifest.state, "it has seen all"

    loop.run(5)
    loop.manager.save()
    loop.saved()

    (_, epoch, consumed, samples) = loop.sampler.skipped[0]
    told = read_manifest(run_dir / "checkpoints/step_00000005").state["left_out"]
    assert told == [{"step": 4, "epoch": epoch, "consumed": consumed, "samples": samples}]
    assert recorded(run_dir / "checkpoints") == (LeftOut(step=4, steps=2),)


def test_a_resume_by_hand_from_before_the_window_takes_the_data_and_the_lineage_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("STEPKEEPER_SKIP_DATA", "4:2")
    loop = save_at(run_dir, 2)
    loop.run(5)
    loop.manager.save()
    loop.saved()
    monkeypatch.delenv("STEPKEEPER_SKIP_DATA")

    assert Loop(run_dir, resume_from="latest").manager.resume() == 5
    assert recorded(run_dir / "checkpoints") == (LeftOut(step=4, steps=2),)
    assert Loop(run_dir, resume_from=run_dir / "checkpoints/step_00000002").manager.resume() == 2

    assert recorded(run_dir / "checkpoints") == ()
