"""A run that was interrupted, however often, is the run that was not: every loss, and every bit of the last state."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import StepDirectory, list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.exact import EVERY, MICRO_BATCHES, Fall, How
from tests.trainer.forked import Ended
from tests.trainer.ranks import losses
from tests.trainer.scenes import Stage
from tests.trainer.steps_by_dcp import stock_load

STEPS, LONG = 24, 80
SCENE = "tests.trainer.exact:train"


@dataclass(frozen=True)
class Reference:
    """A run that nothing befell."""

    losses: dict[int, str]
    state: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture(scope="module")
def references(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reference]:
    return {STEPS: _reference(stage, tmp_path_factory.mktemp("reference") / "run", STEPS)}


def _reference(stage: Stage, run_dir: Path, steps: int) -> Reference:
    ended = stage.play(SCENE, run_dir, ranks=2, steps=steps)
    assert ended.codes == [0, 0], ended.said
    found = losses(run_dir)
    assert set(found) == set(range(1, steps + 1))
    assert len(set(found.values())) == steps, "every step has a loss of its own"
    return Reference(found, state_of(newest(run_dir)))


def newest(run_dir: Path) -> StepDirectory:
    chosen = newest_verified(run_dir / "checkpoints").chosen
    assert chosen is not None
    return chosen


def step_of(run_dir: Path) -> int:
    chosen = newest_verified(run_dir / "checkpoints").chosen if run_dir.exists() else None
    return chosen.step if chosen is not None else 0


def state_of(step: StepDirectory) -> dict[str, torch.Tensor]:
    """Return everything that a step directory holds, read by stock DCP."""
    sizes = dcp.FileSystemReader(step.path).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in sizes.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    stock_load(step.path, found)
    return found


def check_equal(run_dir: Path, reference: Reference, steps: int) -> None:
    """Losses by step, and all of the last state: weights, moments, schedule, data position, generators, history."""
    found = losses(run_dir)
    assert {step for step in found if found[step] != reference.losses[step]} == set()
    assert set(found) == set(reference.losses)
    last = newest(run_dir)
    assert last.step == steps
    state = state_of(last)
    assert state.keys() == reference.state.keys()
    differ = [name for name in state if not torch.equal(_bits(state[name]), _bits(reference.state[name]))]
    assert differ == []
    assert any(name.startswith("rng.rank_00001.") for name in state)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def interrupt(stage: Stage, run_dir: Path, fall: Fall, steps: int) -> Ended:
    """Launch from the newest step, and have it interrupted."""
    before = step_of(run_dir)
    assert before < fall.step
    resume_from = "latest" if run_dir.exists() else None
    ended = stage.play(SCENE, run_dir, ranks=2, steps=steps, resume_from=resume_from, **fall.arguments())
    assert re.findall(r"rank \d: goes on from (\d+)", ended.said) == [str(before)] * 2
    if fall.how == "term":
        assert ended.codes == [75, 75], (fall, ended.said)
        assert step_of(run_dir) >= fall.step, "it saved before it left"
    else:
        assert [code for rank, code in enumerate(ended.codes) if rank in fall.ranks] == [-9] * len(fall.ranks)
        assert all(code in (-9, 1) for code in ended.codes), (fall, ended.said)
        assert step_of(run_dir) < fall.step
    return ended


def random_fall(dice: random.Random, how: How, before: int, steps: int) -> Fall:
    step = before + dice.randint(1, 7)
    if how == "in flight":
        step = before - before % EVERY + EVERY + 1  # right after a save has begun
    return Fall(
        how=how,
        step=min(step, steps - 2),  # one that is asked to stop in the last step has finished
        micro_batch=0 if how == "in flight" else dice.randrange(MICRO_BATCHES),
        ranks=dice.choice([(0,), (1,), (0, 1)]),
    )


@pytest.mark.campaign
def test_the_losses_do_not_show_three_interruptions(
    stage: Stage, tmp_path: Path, references: dict[int, Reference]
) -> None:
    """One of each kind: in the middle of accumulation, by a signal to one rank, with a save in flight."""
    run_dir = tmp_path / "run"
    interrupt(stage, run_dir, Fall(how="kill", step=8, micro_batch=2, ranks=(1,), committed=3), STEPS)
    assert step_of(run_dir) in (3, 6)
    interrupt(stage, run_dir, Fall(how="term", step=11, micro_batch=1, ranks=(1,)), STEPS)
    begun = step_of(run_dir) // EVERY * EVERY + EVERY
    ended = interrupt(stage, run_dir, Fall(how="in flight", step=begun + 1, micro_batch=0, ranks=(0, 1)), STEPS)
    assert "killed with a save in flight" in ended.said
    assert step_of(run_dir) < begun

    assert stage.play(SCENE, run_dir, ranks=2, steps=STEPS, resume_from="latest").codes == [0, 0]

    check_equal(run_dir, references[STEPS], STEPS)
    assert all(verify(step.path).ok for step in list_steps(run_dir / "checkpoints"))
    left = (run_dir / "checkpoints").glob(".tmp-*")
    assert not [path for path in left if (path / "owner.json").exists()], "without an owner it stays until it is old"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_the_losses_do_not_show_twenty_interruptions(stage: Stage, tmp_path: Path) -> None:
    dice = random.Random(1)  # noqa: S311  # the same each time
    reference = _reference(stage, tmp_path / "reference", LONG)
    run_dir = tmp_path / "run"
    kinds: list[How] = ["kill"] * 8 + ["term"] * 7 + ["in flight"] * 5
    dice.shuffle(kinds)
    in_flight = 0
    for how in kinds:
        ended = interrupt(stage, run_dir, random_fall(dice, how, step_of(run_dir), LONG), LONG)
        in_flight += "killed with a save in flight" in ended.said
    assert in_flight >= 2
    assert step_of(run_dir) < LONG

    assert stage.play(SCENE, run_dir, ranks=2, steps=LONG, resume_from="latest").codes == [0, 0]

    check_equal(run_dir, reference, LONG)


@pytest.mark.campaign
def test_after_a_rollback_the_same_steps_are_saved_again_and_latest_follows(
    stage: Stage, tmp_path: Path, references: dict[int, Reference]
) -> None:
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    interrupt(stage, run_dir, Fall(how="term", step=14, micro_batch=1, ranks=(0,)), STEPS)
    abandoned = {step.path.name: step for step in list_steps(checkpoints)}
    back_to = min(abandoned.values(), key=lambda step: step.step)
    assert back_to.manifest is not None
    save_id = back_to.manifest.save_id
    lineage.append(checkpoints, lineage.Rollback(at=1.0, save_id=save_id, why="the loss has jumped"))
    assert newest(run_dir).path == back_to.path
    interrupt(stage, run_dir, Fall(how="kill", step=back_to.step + 2, micro_batch=1, ranks=(0, 1)), STEPS)
    assert newest(run_dir).path == back_to.path, "what was rolled back does not come back by a crash"
    interrupt(stage, run_dir, Fall(how="term", step=14, micro_batch=1, ranks=(0,)), STEPS)
    assert newest(run_dir).step == max(step.step for step in abandoned.values())

    ended = stage.play(SCENE, run_dir, ranks=2, steps=STEPS, resume_from="latest")

    assert ended.codes == [0, 0], ended.said
    check_equal(run_dir, references[STEPS], STEPS)
    known = lineage.read(checkpoints)
    assert known is not None
    chain = [known.commits[save_id].directory for save_id in known.chain()]
    assert chain[0] == newest(run_dir).path.name
    assert back_to.path.name in chain  # behind it are those that retention has removed
    assert set(chain) & set(abandoned) == {back_to.path.name}
    again = {step.step: step for step in abandoned.values() if step.step > back_to.step}
    replayed = [name for name in chain if name.split(".")[0] in {step.path.name for step in again.values()}]
    assert replayed, "a step number was saved twice"
    for name in replayed:
        assert re.fullmatch(r"step_\d{8}\.[0-9a-f]{8}", name)
        assert known.commits[next(i for i, c in known.commits.items() if c.directory == name)].save_id.startswith(
            name.split(".")[1]
        )
        old = abandoned[name.split(".")[0]]
        assert verify(old.path).ok, "the abandoned one is as it was"
        ours, theirs = state_of(old), state_of(next(s for s in list_steps(checkpoints) if s.path.name == name))
        assert [key for key in ours if not torch.equal(_bits(ours[key]), _bits(theirs[key]))] == []
