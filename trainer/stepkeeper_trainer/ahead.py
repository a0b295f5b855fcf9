"""The micro-batches of one rank, read ahead of training: the `batch_sampler` of a DataLoader with workers.

A loader asks for samples long before they are trained on, and what was read ahead and not used must count in no
checkpoint.  So reading ahead moves a copy of the sampler; its own position moves with `advance` alone.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from stepkeeper_trainer.accumulation import accumulation_steps
from stepkeeper_trainer.skipping import Skipping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepkeeper_trainer.sampler import GlobalSampler


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
