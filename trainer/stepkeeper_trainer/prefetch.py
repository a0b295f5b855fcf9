"""The micro-batches of one rank, read ahead of training: the `batch_sampler` of a DataLoader with workers.

A loader asks for samples long before they are trained on, and what was read ahead and not used must count in no
checkpoint.  So reading ahead moves a copy of the sampler; its own position moves with `advance` alone.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.observe.skipping import Skipping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepkeeper_trainer.sampler import GlobalSampler


NAMED_MAX = 12  # worlds in a message


def accumulation_steps(batch: int, micro_batch: int, world_size: int) -> int:
    """Return how many micro-batches each rank takes in an optimizer step of `batch` samples of all ranks together.

    So tokens per step stay the same when the world shrinks or grows: fewer ranks accumulate more.  With a
    `GlobalSampler`, rank R of W takes the micro-batches R, R + W, R + 2 W, ... of the step, and the order stays too.

    >>> accumulation_steps(batch=64, micro_batch=4, world_size=8)
    2

    Raises:
        UsageError: the ranks cannot share it evenly; says which numbers of ranks could.
    """
    if min(batch, micro_batch, world_size) < 1:
        raise UsageError(f"batch {batch}, micro-batch {micro_batch}, {world_size} ranks: each is at least 1")
    if batch % micro_batch:
        raise UsageError(f"a batch of {batch} is no whole number of micro-batches of {micro_batch}: choose a multiple")
    micro_batches = batch // micro_batch
    if micro_batches % world_size == 0:
        return micro_batches // world_size
    worlds = [ranks for ranks in range(1, micro_batches + 1) if micro_batches % ranks == 0]
    nearest = sorted(worlds, key=lambda ranks: abs(ranks - world_size))[:NAMED_MAX]
    raise UsageError(
        f"a batch of {batch} cannot be shared by {world_size} ranks in micro-batches of {micro_batch}; these numbers "
        f"of ranks could: {', '.join(map(str, sorted(nearest)))} (`--micro-batches {micro_batches}` has Stepkeeper "
        "start no other)"
    )


class MicroBatches:
    """Yields indices for ever, from where training is when the iterator is made; data to be left out is left out."""

    def __init__(self, sampler: GlobalSampler, *, batch: int, micro_batch: int, rank: int, world_size: int) -> None:
        """Share the batch of all ranks.

        Raises:
            UsageError: the ranks cannot share it evenly.
        """
        accumulation_steps(batch, micro_batch, world_size)
        self._sampler = sampler
        self._batch, self._micro_batch = batch, micro_batch
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        """Begin where training is."""
        ahead = copy.copy(self._sampler)  # what it holds is replaced, never changed in place
        skipping = Skipping(ahead, ahead.windows, ahead.steps_done, quiet=True)
        while True:
            for index in range(self._rank, self._batch // self._micro_batch, self._world_size):
                yield ahead.micro_batch(index, self._micro_batch)
            ahead.advance(self._batch)
            skipping.at(ahead.steps_done)
