"""Samples that a loader reads ahead of training: the same ones, on any world, also where data is left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Dataset

from stepkeeper_trainer import GlobalSampler
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.lineage import LeftOut
from stepkeeper_trainer.sampler import Skipping

BATCH, MICRO = 8, 2
AHEAD = 5  # micro-batches that a loader has asked for beyond those that were trained on


def sampler() -> GlobalSampler:
    return GlobalSampler(50, seed=3)


def loaded(data: GlobalSampler, rank: int, world: int) -> Iterator[list[int]]:
    """Read ahead, as a loader with workers does."""
    batches = iter(data.batches(batch=BATCH, micro_batch=MICRO, rank=rank, world_size=world))
    waiting = list(itertools.islice(batches, AHEAD))
    for each in batches:
        waiting.append(each)
        yield waiting.pop(0)


def step(readers: list[Iterator[list[int]]]) -> list[int]:
    """Return the samples of a step in the order of their micro-batches, whatever the world."""
    taken = [[next(reader) for reader in readers] for _ in range(BATCH // MICRO // len(readers))]
    return [sample for turn in taken for batch in turn for sample in batch]


def trained(
    data: GlobalSampler, world: int, done: int, last: int, windows: tuple[LeftOut, ...] = ()
) -> list[list[int]]:
    """Do the steps up to one, each rank with a loader of its own."""
    skipping = Skipping(data, windows, done)
    readers = [loaded(data, rank, world) for rank in range(world)]
    found = []
    for number in range(done + 1, last + 1):
        found.append(step(readers))
        data.advance(BATCH)
        skipping.at(number)
    return found


def direct(steps: int) -> list[list[int]]:
    data = sampler()
    found = []
    for _ in range(steps):
        found.append(data.micro_batch(0, BATCH))
        data.advance(BATCH)
    return found


def test_what_is_read_ahead_is_what_each_step_takes_on_any_world() -> None:
    for world in (1, 2, 4):
        assert trained(sampler(), world, 0, 20) == direct(20), world


def test_a_world_that_shrinks_and_grows_goes_on_right_behind_what_was_trained_on() -> None:
    """What the old loaders had read ahead is in no checkpoint."""
    data = sampler()
    found = trained(data, 4, 0, 6)
    for world, last in ((2, 11), (1, 13), (4, 20)):
        again = sampler()
        again.load_state_dict(data.state_dict())
        found += trained(again, world, len(found), last)
        data = again

    assert found == direct(20)


def test_data_that_is_left_out_is_not_read_ahead_either() -> None:
    windows = (LeftOut(1, 1), LeftOut(7, 2), LeftOut(7, 1), LeftOut(12, 3))
    data = sampler()
    expected = []
    skipping = Skipping(data, windows, 0)
    for number in range(1, 21):
        expected.append(data.micro_batch(0, BATCH))
        data.advance(BATCH)
        skipping.at(number)

    assert trained(sampler(), 2, 0, 20, windows) == expected
    first = sampler()
    found = trained(first, 4, 0, 9, windows)
    again = sampler()
    again.load_state_dict(first.state_dict())
    assert found + trained(again, 1, 9, 20, windows) == expected, "resumed behind a window and before another"


def test_a_batch_that_cannot_be_shared_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cannot be shared by 3 ranks"):
        sampler().batches(batch=BATCH, micro_batch=MICRO, rank=0, world_size=3)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def test_a_real_loader_with_workers_gives_the_same_samples_after_a_resume_on_fewer_ranks() -> None:
    data = sampler()
    found = []
    for world, last in ((2, 5), (1, 9)):
        again = sampler()
        again.load_state_dict(data.state_dict())
        loaders = [
            DataLoader(
                Numbers(),
                batch_sampler=again.batches(batch=BATCH, micro_batch=MICRO, rank=rank, world_size=world),
                num_workers=2,
                timeout=90,
            )
            for rank in range(world)
        ]
        readers = [(batch.tolist() for batch in loader) for loader in loaders]
        while len(found) < last:
            found.append(step(readers))
            again.advance(BATCH)
        for reader in readers:
            reader.close()
        data = again

    assert found == direct(9)
