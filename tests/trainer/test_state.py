"""Resuming exactly: generators after loaders have drawn from them, loaders in mid-epoch, steps in mid-accumulation."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.errors import UsageError
from tests.trainer.forked import Story, play

pytestmark = pytest.mark.usefixtures("one_process")

STEPS = 8
SAVED = 3


class Squares(Dataset[torch.Tensor]):
    """A small data set."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index)) / 40


class Training:
    """A model whose dropout draws from torch's own generator at every step."""

    def __init__(self, run_dir: Path, *, resume: bool, more: Any = None, **options: Any) -> None:
        torch.manual_seed(11 if resume else 5)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.manager = CheckpointManager(
            {"model": self.model, "optimizer": self.optimizer, **(more or {})},
            run_dir=run_dir,
            resume_from="latest" if resume else None,
            storage_test="off",
            **({"every": None} | options),
        )

    def micro_batch(self, x: torch.Tensor, parts: int = 1) -> float:
        loss = self.model(x).square().mean() / parts
        loss.backward()
        return float(loss.detach())

    def step(self, loss: float) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.step_done(loss=loss)

    def save(self) -> None:
        self.manager.save()
        assert self.manager.wait_saved(90)


def _with_loader(run_dir: Path, *, resume: bool, restore: bool = True) -> list[float]:
    """Train with a DataLoader of two workers over a shuffled order, its iterator made after `resume`."""
    sampler = GlobalSampler(40, seed=7)
    training = Training(run_dir, resume=resume, more={"sampler": sampler})
    training.manager.resume()
    order = [sampler.micro_batch(number, 4) for number in range(STEPS - training.manager.step)]
    batches = iter(DataLoader(Squares(), batch_sampler=order, num_workers=2))
    if restore:
        training.manager.restore_random_state()
    losses = []
    for batch in batches:
        loss = training.micro_batch(batch)
        sampler.advance(4)
        training.step(loss)
        losses.append(loss)
        if not resume and training.manager.step == SAVED:
            training.save()
    return losses


def test_a_loader_that_is_made_after_the_resume_changes_no_loss(tmp_path: Path) -> None:
    whole = _with_loader(tmp_path / "run", resume=False)

    resumed = _with_loader(tmp_path / "run", resume=True)

    assert resumed == whole[SAVED:], "to the last bit"
    without = _with_loader(tmp_path / "run", resume=True, restore=False)
    assert without != whole[SAVED:], "making the iterator has drawn from the generator"


def test_the_generators_are_put_back_before_the_first_step_only(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", resume=False)
    with pytest.raises(UsageError, match="resume"):
        training.manager.restore_random_state()
    training.manager.resume()
    before = torch.get_rng_state()
    training.manager.restore_random_state()
    assert torch.equal(before, torch.get_rng_state()), "a start from the very beginning is left alone"
    training.step(training.micro_batch(torch.ones(2, 6)))
    with pytest.raises(UsageError, match="before the first one"):
        training.manager.restore_random_state()


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_with_shuffling_and_workers_goes_on_to_the_last_bit(tmp_path: Path, workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def train(*, resume: bool) -> list[float]:
        loader = loaders.StatefulDataLoader(Squares(), batch_size=4, shuffle=True, num_workers=workers)
        training = Training(tmp_path / "run", resume=resume, more={"loader": loader})
        training.manager.resume()
        batches = iter(loader)
        training.manager.restore_random_state()
        losses = []
        for batch in itertools.islice(batches, STEPS - training.manager.step):
            loss = training.micro_batch(batch)
            training.step(loss)
            losses.append(loss)
            if not resume and training.manager.step == SAVED:
                training.save()
        if workers:
            batches._shutdown_workers()  # they are in the middle of an epoch
        return losses

    whole = train(resume=False)

    assert train(resume=True) == whole[SAVED:]


def _accumulate(run_dir: Path, *, resume: bool, stop_at: tuple[int, int] | None = None) -> list[float]:
    """Train in steps of three micro-batches; leave in the middle of one where it is asked for."""
    sampler = GlobalSampler(40, seed=7)
    training = Training(run_dir, resume=resume, more={"sampler": sampler}, every=1)
    training.manager.resume()
    losses: list[float] = []
    while training.manager.step < STEPS:
        loss = 0.0
        for part in range(3):
            if stop_at == (training.manager.step, part):
                training.manager._last_seconds()  # as an exception that nobody catches does
                return losses
            samples = torch.stack([Squares()[index] for index in sampler.micro_batch(part, 2)])
            loss += training.micro_batch(samples, parts=3)
        sampler.advance(6)
        training.step(loss)
        losses.append(loss)
        if training.manager._saver is not None and training.manager._saver.busy:
            assert training.manager.wait_saved(90)
    return losses


def test_a_step_that_was_left_between_two_micro_batches_is_done_again(tmp_path: Path) -> None:
    whole = _accumulate(tmp_path / "whole", resume=False)
    run_dir = tmp_path / "run"
    generator = random.Random(3)  # noqa: S311
    losses: list[float] = []

    for interrupted in (1, 2, 4, 4, 7):
        part = generator.choice((1, 2))
        losses += _accumulate(run_dir, resume=bool(losses), stop_at=(interrupted, part))
        assert len(losses) == interrupted, "what was done of the step is gone, and no sample is lost"
    losses += _accumulate(run_dir, resume=True)

    assert losses == whole, "to the last bit"


@pytest.mark.campaign
def test_state_of_single_ranks_is_refused_by_another_number_of_real_ranks(tmp_path: Path) -> None:
    """A loader's position belongs to its rank: two positions cannot become one."""
    run_dir = str(tmp_path / "run")
    made, same, fewer = play(
        [
            Story(run_dir=run_dir, steps=2, loader=True),
            Story(run_dir=run_dir, steps=4, loader=True, resume_from="latest"),
            Story(run_dir=run_dir, steps=6, loader=True, resume_from="latest", world_size=1),
        ]
    )

    assert made.codes == [0, 0], made.said
    assert same.codes == [0, 0], same.said
    for rank in (0, 1):
        assert f"[{rank}] loader at {20 * rank + 6}" in same.said, "each rank goes on where it was"
    assert fewer.codes == [66], fewer.said
    assert re.search(r"1 ranks cannot resume what 2 saved: .*loader.*resume on 2 ranks", fewer.said), fewer.said
