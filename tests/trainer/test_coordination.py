"""Ranks that die or stand still at each point of a save, in real processes over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import records
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.save.replicas import IN_PLACE_BYTES
from tests.trainer.forked import POINTS, POINTS_OF_RANK_0, Ended, Story, play

AT_ONCE = 4  # stories: who is left alone waits, most of the time
HITS = [(rank, point) for rank in (0, 1) for point in POINTS] + [(0, point) for point in POINTS_OF_RANK_0]


def committed(ended: Ended) -> list[str]:
    """Return the names of step directories that were said to be committed, in order."""
    return re.findall(r"^\[0\] committed .*directory=(\S+)", ended.said, re.MULTILINE)


def check_disk(story: Story, ended: Ended) -> str | None:
    """Every step directory is whole, and the newest one is what was said to be; return its name."""
    checkpoints = Path(story.run_dir) / "checkpoints"
    for step in list_steps(checkpoints):
        assert verify(step.path).ok, (story, step.path, ended.said)
    chosen = newest_verified(checkpoints).chosen
    said = committed(ended)
    name = chosen.path.name if chosen is not None else None
    if said:
        assert name is not None
        assert name >= said[-1], (story, said)
    return name


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_killed_at_every_point(tmp_path: Path) -> None:
    """A rank is killed at a point of its first save; then it goes on from what is there."""
    stories = [
        Story(run_dir=str(tmp_path / f"{rank}-{point}"), hit=point, rank=rank, save_within_s=10) for rank, point in HITS
    ]
    for story, ended in zip(stories, play(stories, at_once=AT_ONCE), strict=True):
        assert ended.codes[story.rank] == -9, (story, ended.said)
        assert ended.codes[1 - story.rank] == 1, (story, ended.said)
        name = check_disk(story, ended)
        if story.hit in ("renamed", "recorded") or (story.rank == 1 and story.hit == "reported"):
            assert name == "step_00000002", (story, ended.said)
        else:
            assert name is None, "nothing was committed before the rename"
    again = [Story(run_dir=story.run_dir, resume_from="latest", steps=4) for story in stories]
    for story, ended in zip(again, play(again, at_once=AT_ONCE), strict=True):
        assert ended.codes == [0, 0], ended.said
        assert check_disk(story, ended) == "step_00000004"
        assert not list(Path(story.run_dir).glob("checkpoints/.tmp-*/owner.json")), "the dead one's is cleared"


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_standing_still_at_every_point(tmp_path: Path) -> None:
    """A rank stands still for a moment at a point of its first save: that delays the commit, and no more."""
    stories = [
        Story(run_dir=str(tmp_path / f"{rank}-{point}"), hit=point, rank=rank, how="stop", stop_s=0.4)
        for rank, point in HITS
    ]
    for story, ended in zip(stories, play(stories, at_once=AT_ONCE), strict=True):
        assert ended.stopped == [story.rank], (story, ended.said)
        assert ended.codes == [0, 0], (story, ended.said)
        assert "save_failed" not in ended.said, (story, ended.said)
        assert "step_00000002" in committed(ended)
        assert check_disk(story, ended) == "step_00000006"


@pytest.mark.parametrize(("rank", "point"), [pytest.param(1, "made", marks=pytest.mark.campaign), (0, "reported")])
def test_a_rank_that_stands_still_for_too_long_costs_one_save(tmp_path: Path, rank: int, point: str) -> None:
    """The save fails as an event, training goes on, and the next saves are made over a new group."""
    story = Story(
        run_dir=str(tmp_path / "run"),
        hit=point,
        rank=rank,
        how="stop",
        stop_s=10.0,
        save_within_s=5.0,  # the other saves, on a busy machine, have to be made in that too
        steps=30,
        every=3,
    )

    [ended] = play([story])

    assert ended.stopped == [rank], ended.said
    assert ended.codes == [0, 0], ended.said
    assert re.search(r"save_failed step=3 ", ended.said), ended.said
    assert ("save_group_renewed" in ended.said) == (point == "made"), ended.said
    assert "step_00000003" not in committed(ended)
    assert check_disk(story, ended) == "step_00000030"
    assert len(committed(ended)) >= 2
    said = records.read_outcome(Path(story.run_dir))
    assert said is not None
    assert (said.outcome, said.step) == ("finished", 30)


@pytest.mark.campaign
def test_a_bit_that_differs_between_copies_is_said_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    stories = [
        Story(run_dir=str(tmp_path / "checked"), drift_at=3, steps=4),
        Story(run_dir=str(tmp_path / "large"), drift_at=3, steps=4, outputs=IN_PLACE_BYTES // 64),
        Story(run_dir=str(tmp_path / "equal"), steps=4),
    ]

    checked, large, equal = play(stories)

    for ended in (checked, large):
        assert ended.codes == [0, 0], ended.said
        assert re.findall(r"replicas_differ step=(\d+) tensors=(\S+) ranks=(\S+)", ended.said) == [
            ("4", "model.1.weight", "0,1")
        ]
        assert "save_taken_again" in ended.said
        assert "save_failed" not in ended.said
    assert "replicas_differ" not in equal.said
    steps = {Path(story.run_dir).name: list_steps(Path(story.run_dir) / "checkpoints")[0] for story in stories}
    assert steps["checked"].manifest is not None
    assert steps["checked"].manifest.state["drift"] == ["model.1.weight"]
    assert steps["equal"].manifest is not None
    assert "drift" not in steps["equal"].manifest.state
    assert _weights(steps["checked"].path, "model.1.weight", "ranks.rank_00001.model.1.weight") == [False]
    again = Story(run_dir=str(tmp_path / "checked"), resume_from="latest", steps=6)
    assert play([again])[0].codes == [0, 0]


def _weights(step: Path, one: str, *others: str) -> list[bool]:
    """Compare tensors of a step directory with `one`, as stock torch reads them."""
    import torch  # noqa: PLC0415
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    sizes = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    loaded = {name: torch.zeros(sizes[name].size) for name in (one, *others)}  # type: ignore[union-attr]
    dcp.load(loaded, checkpoint_id=step)
    return [torch.equal(loaded[one], loaded[other]) for other in others]
