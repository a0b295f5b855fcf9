"""Ranks inside a framework agree on one step, or withdraw together: in real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.watcher.ranks import RankSocket
from stepkeeper_trainer.formats.messages import Finished, Hello
from stepkeeper_trainer.formats.records import read_trained
from tests.trainer.attachment_scenes import STEPS
from tests.trainer.scenes import Stage

HERE = "tests.trainer.attachment_scenes"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


def steps(directory: Path) -> list[int]:
    return [int((directory / f"steps.{rank}").read_text()) for rank in range(2)]


def saves(directory: Path) -> dict[str, list[str]]:
    return {each.name: sorted(file.name for file in each.iterdir()) for each in sorted(directory.glob("save-*"))}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_notice_of_one_rank_has_all_save_the_same_step_and_leave(
    ranks: list[int], stage: Stage, tmp_path: Path
) -> None:
    ended = stage.play(f"{HERE}:signalled", tmp_path, ranks=2, limit_s=60.0, ranks_told=ranks, at=4)

    assert ended.codes == [75, 75], ended.said
    assert steps(tmp_path) == [5, 5], "what is said at a boundary is read at the next"
    assert saves(tmp_path) == {"save-5": ["0", "1"]}


def test_a_notice_at_the_last_step_lets_training_come_to_its_end(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{HERE}:signalled", tmp_path, ranks=2, limit_s=60.0, ranks_told=[1], at=STEPS - 1)

    assert ended.codes == [0, 0], ended.said
    assert saves(tmp_path) == {f"save-{STEPS}": ["0", "1"]}


def test_a_notice_in_an_evaluation_is_answered_in_it(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{HERE}:evaluating", tmp_path, ranks=2, limit_s=60.0)

    assert ended.codes == [75, 75], ended.said
    assert saves(tmp_path) == {"save-5": ["0", "1"]}


@pytest.mark.parametrize(
    "where", ["behind", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("before", "saving"))]
)
def test_an_error_of_ours_on_one_rank_withdraws_all_and_training_goes_on(
    where: str, stage: Stage, tmp_path: Path
) -> None:
    ended = stage.play(f"{HERE}:fails", tmp_path, ranks=2, limit_s=60.0, where=where)

    assert ended.codes == [0, 0], ended.said
    assert steps(tmp_path) == [STEPS, STEPS]


@pytest.mark.parametrize(
    "scene", ["alone", pytest.param("nested", marks=pytest.mark.campaign), "described_badly", "with_manager"]
)
def test_ranks_attach_together_or_not_at_all(scene: str, stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{HERE}:{scene}", tmp_path, ranks=2, limit_s=60.0)

    assert ended.codes == [0, 0], ended.said


SCRIPT = """
import sys
from stepkeeper_trainer.integrations.attachment import Training, attach
attachment = attach("generic", lambda: Training(framework="generic", version="generic 1", total_steps=3))
for step in range(1, {steps} + 1):
    attachment.step_done(step)
attachment.ended({steps})
{end}
"""


ANOTHER = 'attach("generic", lambda: Training(framework="generic", version="generic 1", total_steps=9)); sys.exit(1)'


@pytest.mark.parametrize(
    ("steps", "end", "code", "finished"),
    [(3, "sys.exit(1)", 1, [3]), (2, "", 0, []), (3, ANOTHER, 1, [])],
)
def test_the_end_of_training_is_kept_whatever_the_script_does_then(
    steps: int, end: str, code: int, finished: list[int], tmp_path: Path
) -> None:
    socket = RankSocket(f"@{tmp_path.name}-{os.getpid()}")
    environment = os.environ | {
        "STEPKEEPER_SOCKET": f"@{tmp_path.name}-{os.getpid()}", "STEPKEEPER_RUN_DIR": str(tmp_path),
        "STEPKEEPER_RUN_ID": "x", "STEPKEEPER_ATTEMPT": "0", "STEPKEEPER_LAUNCH": "0",
    }  # fmt: skip
    script = SCRIPT.format(steps=steps, end=end)
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = []
    while (received := socket.receive()) is not None:
        said.append(received[0])
    socket.close()

    assert ended.returncode == code, ended.stderr
    assert [each.step for each in said if isinstance(each, Finished)] == finished
    assert "the training has ended" in [each.unable for each in said if isinstance(each, Hello)]
    assert not (tmp_path / "outcome.json").exists(), "that counts also where the script is ended from outside"
    trained = read_trained(tmp_path)
    assert ([] if trained is None else [(trained.launch, trained.step)]) == [("0.0", step) for step in finished]


WITHDRAWS = """
import os, sys
from stepkeeper.watcher.ranks import RankSocket
from stepkeeper_trainer.errors import StepkeeperError
from stepkeeper_trainer.integrations import attachment as attachments

class Requests(attachments.Requests):
    def __init__(self, *arguments, **named):
        if sys.argv[1] == "fails":
            raise StepkeeperError("a mistake of ours")
        super().__init__(*arguments, **named)

attachments.Requests = Requests
attachment = attachments.attach("generic", lambda: attachments.Training(framework="generic", version="generic 1"))
assert attachment.open == (sys.argv[1] != "fails")
attachment.withdraw("a mistake of ours")
watcher = RankSocket(os.environ["STEPKEEPER_SOCKET"])
attachment.step_done(1)
print(watcher.receive()[0].unable)
"""


@pytest.mark.parametrize("how", ["withdraws", "fails"])
def test_a_watcher_that_comes_later_learns_that_the_attachment_withdrew(how: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "STEPKEEPER_SOCKET": f"@{tmp_path.name}-{os.getpid()}", "STEPKEEPER_RUN_DIR": str(tmp_path),
        "STEPKEEPER_RUN_ID": "x", "STEPKEEPER_ATTEMPT": "0", "STEPKEEPER_LAUNCH": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", WITHDRAWS, how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1:] == ["a mistake of ours"]
