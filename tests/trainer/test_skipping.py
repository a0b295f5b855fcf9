"""Data on which a loss went wrong is left out, once, by all ranks alike, and what follows keeps its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepkeeper_trainer import GlobalSampler
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.lineage import LeftOut
from stepkeeper_trainer.sampler import SKIPPED_MAX, Skipping
from tests.trainer.ranks import Ranks, finish, losses

SIZE = 4
DATA = 30


def sampler() -> GlobalSampler:
    return GlobalSampler(DATA, seed=1)


def take(data: GlobalSampler, skipping: Skipping, first: int, last: int) -> list[list[int]]:
    """Do steps, and return the samples of each."""
    found = []
    for step in range(first, last + 1):
        found.append(data.micro_batch(0, SIZE))
        data.advance(SIZE)
        skipping.at(step)
    return found


def whole(steps: int) -> list[list[int]]:
    data = sampler()
    return take(data, Skipping(data, (), 0), 1, steps)


def test_the_data_of_a_window_is_left_out_and_the_rest_keeps_its_order() -> None:
    data = sampler()
    found = take(data, Skipping(data, (LeftOut(6, 3),), 0), 1, 12)  # over the end of the epoch

    every = whole(15)
    assert found == every[:5] + every[8:]
    assert data.state_dict()["skipped"] == [[6, 0, 20, 12]]


def test_a_resume_from_behind_the_window_leaves_out_no_more() -> None:
    """Also right behind: the save at the end of step 5 has it in its state already."""
    for saved_at in (5, 6, 9):
        data, again = sampler(), sampler()
        take(data, Skipping(data, (LeftOut(6, 3),), 0), 1, saved_at)
        again.load_state_dict(data.state_dict())

        found = take(again, Skipping(again, (LeftOut(6, 3),), saved_at), saved_at + 1, 12)

        assert found == (whole(5) + whole(15)[8:])[saved_at:], saved_at


def test_a_resume_from_a_state_without_it_leaves_it_out_at_once_or_later() -> None:
    for saved_at in (2, 5):
        data, again = sampler(), sampler()
        take(data, Skipping(data, (), 0), 1, saved_at)
        again.load_state_dict(data.state_dict())

        found = take(again, Skipping(again, (LeftOut(6, 3),), saved_at), saved_at + 1, 12)

        assert found == (whole(5) + whole(15)[8:])[saved_at:], saved_at


def test_the_same_window_twice_leaves_out_twice_as_much() -> None:
    data = sampler()
    found = take(data, Skipping(data, (LeftOut(3, 1), LeftOut(3, 1)), 0), 1, 4)

    assert found == whole(2) + whole(6)[4:]


def test_a_state_of_an_older_version_leaves_out_as_soon_as_it_knows_how_much() -> None:
    data, again = sampler(), sampler()
    take(data, Skipping(data, (), 0), 1, 5)
    older = {name: value for name, value in data.state_dict().items() if name not in ("taken", "skipped")}
    again.load_state_dict(older)

    found = take(again, Skipping(again, (LeftOut(6, 2),), 5), 6, 8)

    assert found == [whole(6)[5], *whole(10)[8:]]


def test_what_is_remembered_is_bounded_and_other_samplers_are_left_alone() -> None:
    data = sampler()
    take(data, Skipping(data, tuple(LeftOut(step, 1) for step in range(2, 200)), 0), 1, 200)

    assert len(data.skipped) == SKIPPED_MAX
    Skipping(object(), (LeftOut(2, 1),), 0).at(1)
    Skipping(None, (), 0).at(1)


@pytest.mark.parametrize("text", ["6", "6:0", "0:3", "a:b", "6:1:2"])
def test_a_window_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="STEPKEEPER_SKIP_DATA"):
        read_environment({"STEPKEEPER_SKIP_DATA": text})


@pytest.mark.campaign
def test_ranks_that_are_killed_and_resumed_leave_out_what_they_would_have_left_out(tmp_path: Path) -> None:
    """Two real ranks, bit for bit: killed behind the window and resumed before it."""
    told = {"STEPKEEPER_SKIP_DATA": "12:2"}
    reference = finish(2, tmp_path / "reference", every=100, environment=told)
    with Ranks(2, tmp_path / "killed", "--step-seconds-min=0.05", every=8, environment=told) as ranks:
        ranks.until_step(13)
        ranks.kill()
    resumed = finish(2, tmp_path / "killed", "--resume-from=latest", every=8, environment=told)

    assert resumed == reference
    assert losses(tmp_path / "killed") == reference
