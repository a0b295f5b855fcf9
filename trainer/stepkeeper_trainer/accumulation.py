"""How one optimizer step is shared by the ranks that there are: the same step on any world that divides it."""

from __future__ import annotations

from stepkeeper_trainer.errors import UsageError

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
