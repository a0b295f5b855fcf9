"""What a script does to its state right after `step_done` reaches no byte of that step: on the CPU, as on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.mutation_scenes import HOW
from tests.trainer.scenes import Stage

SCENES = "tests.trainer.mutation_scenes"
IN_EACH_RUN = {("filled", 2), ("freed", 2), ("in_the_depths", 1)}
"""The others are played by the campaign."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        pytest.param(how, ranks, marks=[] if (how, ranks) in IN_EACH_RUN else pytest.mark.campaign)
        for how in HOW
        for ranks in (1, 2)
    ],
)
def test_a_change_right_after_a_step_is_not_in_that_step(stage: Stage, tmp_path: Path, how: str, ranks: int) -> None:
    """Ranks change it differently: nor is it taken for values that differ."""
    ended = stage.play(f"{SCENES}:changed", tmp_path, ranks=ranks, limit_s=300.0, how=how)
    assert ended.codes == [0] * ranks, ended.said
    again = stage.play(f"{SCENES}:resumed", tmp_path, ranks=ranks, limit_s=300.0)
    assert again.codes == [0] * ranks, again.said

    for rank in range(ranks):
        then = dict(re.findall(rf"^\[{rank}\] done (\d+) (\w+)$", ended.said, re.MULTILINE))
        [step] = re.findall(rf"^\[{rank}\] changed (\d+)$", ended.said, re.MULTILINE)
        assert (step, then[step]) in re.findall(rf"\[{rank}\] resumed (\d+) (\w+)", again.said)
    assert not re.search("replicas_differ|kept_for_each_rank|save_taken_again|save_failed", ended.said), ended.said
