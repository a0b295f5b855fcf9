"""A rank that dies while the others wait for it in `manager.finish` is found out, without a supervisor too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.scenes import Stage

SCENE = "tests.trainer.ending_scenes:finishes"
KILLED = -9
LIMIT_S = 200.0  # of a scene: whoever is left then is killed too


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_dies_before_its_report_ends_the_wait_for_it(stage: Stage, tmp_path: Path, who: int) -> None:
    """The save may take ten minutes; whoever still waits at the end of the scene is killed, and ends with -9."""
    ended = stage.play(SCENE, tmp_path / "run", ranks=3, limit_s=LIMIT_S, hit="report.publish", who=who)

    assert ended.codes[who] == KILLED, ended.said
    assert [code for rank, code in enumerate(ended.codes) if rank != who] == [1, 1], ended.said
    assert f"the last step (2) could not be saved: rank {who} ended before it had written its part" in ended.said
    assert not list_steps(tmp_path / "run/checkpoints")


def test_a_rank_that_is_slow_is_waited_for_though_another_has_died_after_its_report(
    stage: Stage, tmp_path: Path
) -> None:
    ended = stage.play(SCENE, tmp_path / "run", ranks=3, limit_s=LIMIT_S, hit="reported", who=2, slow=1)

    assert ended.codes[0] == 0, ended.said
    assert ended.codes[2] == KILLED
    [step] = list_steps(tmp_path / "run/checkpoints")
    assert (step.step, verify(step.path).ok) == (2, True)


def test_a_rank_that_stands_still_is_not_taken_for_dead(stage: Stage, tmp_path: Path) -> None:
    """Its kernel answers for it: that of a node without power is taken for silent after 3 s here."""
    ended = stage.play(
        SCENE, tmp_path / "run", ranks=3, limit_s=LIMIT_S, stop_s=5.0, hit="report.publish", who=1, how="stop"
    )

    assert ended.codes == [0, 0, 0], ended.said
    assert "rank_lost" not in ended.said
    assert [step.step for step in list_steps(tmp_path / "run/checkpoints")] == [2]


@pytest.mark.campaign
def test_a_rank_whose_node_lost_its_power_ends_the_wait_for_it(tmp_path: Path) -> None:
    """In a network of their own, which is taken down: rank 1 stands still, and nothing answers for it."""
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace here: this needs root")
    with Stage(own_network=True) as dark:
        ended = dark.play(
            SCENE, tmp_path / "run", ranks=2, limit_s=LIMIT_S, stop_s=999.0, hit="report.publish", who=1, how="power"
        )

    assert ended.codes == [1, KILLED], ended.said
    assert "the last step (2) could not be saved: rank 1 ended before it had written its part" in ended.said
    assert not list_steps(tmp_path / "run/checkpoints")


@pytest.mark.campaign
def test_a_rank_that_dies_before_its_files_are_on_shared_storage_ends_the_wait_too(
    stage: Stage, tmp_path: Path
) -> None:
    ended = stage.play(
        SCENE, tmp_path / "run", ranks=3, limit_s=LIMIT_S, hit="uploader.push", who=1, local=str(tmp_path / "disk")
    )

    assert ended.codes[1] == KILLED, ended.said
    assert ended.codes[0] == 1, ended.said
    assert "__1_0.distcp will never be copied: its rank has ended" in ended.said
    assert not list_steps(tmp_path / "run/checkpoints")
