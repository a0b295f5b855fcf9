"""A rank is killed, or stands still, outside of the writing of a save too: where ranks agree, load, and end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.exact import Fall
from tests.trainer.scenes import Stage
from tests.trainer.test_exact_resume import SCENE, STEPS, Reference, _reference, check_equal, interrupt

pytestmark = pytest.mark.campaign
# places in the library, the call, and the rank; `test_coordination` has those within a save, and the crash campaign
# every system call of it
PLACES = [
    ("coordinate.agreement:Agreement.issue", 6, 0),
    ("coordinate.agreement:Agreement.issue", 6, 1),
    ("save.persist:Persister.prepare", 1, 1),
    ("save.saver:Saver._settle", 1, 0),
    ("save.saver:Saver._settle", 1, 1),
    ("load.resume:load", 1, 0),
    ("load.resume:load", 1, 1),
    ("load.resume:record_start", 1, 0),
    ("coordinate.ending:conclude", 1, 0),
    ("coordinate.ending:conclude", 1, 1),
]
of_places = pytest.mark.parametrize(
    "hit",
    [{"place": place, "number": number, "rank": rank} for place, number, rank in PLACES],
    ids=lambda hit: f"{hit['place']}-{hit['rank']}",
)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture(scope="module")
def reference(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return _reference(stage, tmp_path_factory.mktemp("reference") / "run", STEPS)


@pytest.fixture(scope="module")
def half_done(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("half") / "run"
    interrupt(stage, run_dir, Fall(how="term", step=10, micro_batch=1, ranks=(0,)), STEPS)
    return run_dir


@pytest.fixture
def run_dir(half_done: Path, tmp_path: Path) -> Path:
    shutil.copytree(half_done, tmp_path / "run")
    return tmp_path / "run"


@of_places
def test_a_rank_that_stands_still_there_changes_nothing(
    stage: Stage, run_dir: Path, reference: Reference, hit: dict[str, Any]
) -> None:
    options = {"steps": STEPS, "resume_from": "latest", "hit": hit | {"how": "stop"}}
    ended = stage.play(SCENE, run_dir, ranks=2, stop_s=0.5, **options)

    assert "hit" in ended.said
    assert ended.codes == [0, 0], ended.said
    check_equal(run_dir, reference, STEPS)


@of_places
def test_a_rank_that_is_killed_there_costs_a_launch_and_no_more(
    stage: Stage, run_dir: Path, reference: Reference, hit: dict[str, Any]
) -> None:
    options = {"steps": STEPS, "resume_from": "latest", "hit": hit | {"how": "kill"}}
    ended = stage.play(SCENE, run_dir, ranks=2, limit_s=30.0, **options)

    assert ended.codes[hit["rank"]] == -9, ended.said
    assert all(verify(step.path).ok for step in list_steps(run_dir / "checkpoints"))
    assert stage.play(SCENE, run_dir, ranks=2, steps=STEPS, resume_from="latest").codes == [0, 0]
    check_equal(run_dir, reference, STEPS)
