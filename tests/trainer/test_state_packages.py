"""State of packages beside torch: `make test-state-packages` plays all, in an environment that has them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.trainer.any_state import Play, play
from tests.trainer.package_scenes import NEEDS, PACKAGE_SCENES
from tests.trainer.test_any_state import STEPS, STOP

pytestmark = pytest.mark.campaign


def _need(name: str) -> None:
    package = NEEDS.get(name, "torchdata")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-state-packages")


@pytest.mark.parametrize("name", ["hugging_face_streaming", "torchdata_nodes"])
def test_a_position_that_each_rank_counts_is_refused_on_another_number_of_ranks(tmp_path: Path, name: str) -> None:
    """All ranks may have read equally much: on more ranks that is another place in the data."""
    _need(name)

    first, second = play(
        [
            Play(scene=name, run_dir=str(tmp_path), steps=STOP),
            Play(scene=name, run_dir=str(tmp_path), steps=STEPS, resume=True, world_size=3),
        ]
    )

    assert set(first.codes) == {0}, first.said
    assert set(second.codes) == {66}, second.said
    assert re.search(r"3 ranks cannot resume what 2 saved: .*(loader|data)", second.said), second.said


@pytest.mark.parametrize("name", sorted(PACKAGE_SCENES))
def test_a_resume_goes_on_to_the_last_bit(tmp_path: Path, name: str) -> None:
    _need(name)

    whole, first, second = play(
        [
            Play(scene=name, run_dir=str(tmp_path / "whole"), steps=STEPS),
            Play(scene=name, run_dir=str(tmp_path / "parts"), steps=STOP),
            Play(scene=name, run_dir=str(tmp_path / "parts"), steps=STEPS, resume=True),
        ]
    )

    for each in (whole, first, second):
        assert set(each.codes) == {0}, each.said
    for rank, expected in enumerate(whole.prints):
        assert first.prints[rank] == {step: expected[step] for step in map(str, range(1, STOP + 1))}, first.said
        again = {step: found for step, found in second.prints[rank].items() if step != str(STOP)}
        assert again == {step: expected[step] for step in map(str, range(STOP + 1, STEPS + 1))}, second.said
