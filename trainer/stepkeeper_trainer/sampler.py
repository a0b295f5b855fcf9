"""Which samples a step takes: a function of (seed, position), the same on any world size.

Each epoch is a permutation of the data set, computed one index at a time (a Feistel network with cycle
walking), so the state is a few integers and resuming is free.

How one optimizer step is shared by the ranks that there are: the same step on any world that divides it.

The micro-batches of one rank can be read ahead of training, as the `batch_sampler` of a DataLoader with workers.  A
loader asks for samples long before they are trained on, and what was read ahead and not used must count in no
checkpoint.  So reading ahead moves a copy of the sampler; its own position moves with `advance` alone.

Data is left out where a loss went wrong on it: training went back, and the run does not take it again.  The supervisor
says which steps' data; the sampler moves on past it right before the first of them, on all ranks alike, and keeps that
in its state, so that a resume from behind does not leave out twice.

With tensor, context or pipeline parallelism several ranks read the same data.  A mesh says which: its ranks are the
data-parallel ones.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from stepkeeper_trainer.errors import ResumeError, UsageError
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from stepkeeper_trainer.formats.lineage import LeftOut
    from stepkeeper_trainer.state.tree import Stateful


@runtime_checkable
class Skips(Protocol):
    """A sampler that can leave out data, as `GlobalSampler` does."""

    def skip(self, step: int, steps: int) -> int:
        """Move past the data of `steps` steps from `step` on; return the samples, 0 where that is not known yet."""
        ...

    def skipped_at(self, step: int) -> int:
        """Return how often data was left out at a step."""
        ...


@runtime_checkable
class Expects(Protocol):
    """A sampler that is read ahead of training, and has to know beforehand."""

    def expect(self, windows: tuple[LeftOut, ...], done: int) -> None:
        """Take in what will be left out from `done` completed steps on."""
        ...


class Skipping:
    """Of one rank."""

    def __init__(self, sampler: object, windows: tuple[LeftOut, ...], done: int, *, quiet: bool = False) -> None:
        """Prepare at `done` completed steps; what begins at or before them is in the state already.

        `sampler` is that of the state, or a copy of it that is read ahead, which is `quiet`.
        """
        self._windows = [window for window in windows if window.step > done]
        self._sampler = sampler if isinstance(sampler, Skips) else None
        self._quiet = quiet
        if self._windows and self._sampler is None:
            warn("data_not_skipped", why="the sampler has no `skip`: give the CheckpointManager a GlobalSampler")
        if isinstance(sampler, Expects):
            sampler.expect(tuple(self._windows), done)
        self.at(done)

    def at(self, done: int) -> None:
        """Leave out what is due when so many steps are completed."""
        if not self._windows or self._sampler is None:
            return
        for window in [each for each in self._windows if each.step <= done + 1]:
            same = [each for each in self._windows if each.step == window.step]
            if self._sampler.skipped_at(window.step) >= len(same):
                self._windows = [each for each in self._windows if each.step != window.step]
                continue
            samples = self._sampler.skip(window.step, window.steps)
            if not samples:
                return  # how many a step takes is known after the first one
            if not self._quiet:
                say("data_skipped", step=window.step, steps=window.steps, samples=samples)


WORLDS_NAMED_MAX = 12  # worlds in a message


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
    nearest = sorted(worlds, key=lambda ranks: abs(ranks - world_size))[:WORLDS_NAMED_MAX]
    raise UsageError(
        f"a batch of {batch} cannot be shared by {world_size} ranks in micro-batches of {micro_batch}; these numbers "
        f"of ranks could: {', '.join(map(str, sorted(nearest)))} (`--micro-batches {micro_batches}` has Stepkeeper "
        "start no other)"
    )


class MicroBatches:
    """Yields indices for ever, from where training is when the iterator is made; data to be left out is left out."""

    def __init__(self, sampler: GlobalSampler, *, batch: int, micro_batch: int, rank: int, world_size: int) -> None:
        """Share the batch of all ranks.  Raises UsageError."""
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


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the data-parallel rank of this process, and their number.

    Args:
        mesh: with the dimensions along which ranks read different data, and no others: `mesh["dp"]`, or
            `mesh["dp_replicate", "dp_shard"]`.

    Raises:
        UsageError: this process is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"this process is not in {mesh}: give each rank the mesh that it is in")
    rank = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + at
    return rank, mesh.size()


class MeshLoader:
    """A part of the state: a loader with a position of each data-parallel rank, where several ranks read the same data.

    As many data-parallel ranks can resume it, on any number of ranks: tensor and pipeline parallelism may change.
    """

    def __init__(self, loader: Stateful, mesh: DeviceMesh) -> None:
        """Take a loader with `state_dict` and `load_state_dict`, and the mesh of `data_rank`.  Raises UsageError."""
        self.loader = loader
        self.rank, self.degree = data_rank(mesh)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, and whose it is."""
        return {"data_rank": self.rank, "degree": self.degree, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the loader take back its state."""
        self.loader.load_state_dict(state["loader"])

    def reshard(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state of the first rank that read the same data.

        Raises:
            ResumeError: there were more or fewer data-parallel ranks.
        """
        degree = states[0]["degree"]
        if degree != self.degree:
            raise ResumeError(
                f"the loader has a position of each data-parallel rank: {self.degree} of them (rank {rank} of "
                f"{world_size}) cannot resume what {degree} saved; resume with {degree}, or use a GlobalSampler"
            )
        return next(state for state in states if state["data_rank"] == self.rank)


_MASK = (1 << 64) - 1
_ROUNDS = 6
SKIPPED_MAX = 64  # windows that are remembered, the newest


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64).

    >>> hex(mix(1))
    '0x5692161d100b05e5'
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A pseudo-random order of range(length), in constant memory.

    >>> sorted(Permutation(10, key=7)[i] for i in range(10)) == list(range(10))
    True
    """

    def __init__(self, length: int, *, key: int) -> None:
        """Prepare the round keys; `length` is at least 1."""
        self._length = length
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [mix((key + (i + 1) * 0x9E3779B97F4A7C15) & _MASK) for i in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._length, f"{index} is outside of {self._length}"
        while True:  # walk the cycle until it is back inside: at most 4 turns on average
            left, right = index >> self._half_bits, index & self._half_mask
            for key in self._keys:
                left, right = right, left ^ (mix((right + key) & _MASK) & self._half_mask)
            index = left << self._half_bits | right
            if index < self._length:
                return index


class GlobalSampler:
    """The data position of the whole job: `consumed` samples of epoch `epoch`.

    `micro_batch(g, size)` of a step takes samples [consumed + g * size, + size), over the end of the epoch
    into the next if need be.  `advance` is called once a step, with the samples of all ranks together.
    """

    def __init__(self, dataset_len: int, *, seed: int, fingerprint: str = "") -> None:
        """Start at the first sample; `fingerprint` names the data, and another one is refused at resume."""
        if dataset_len < 1:
            raise UsageError("the data set is empty: give the sampler a dataset_len of at least 1")
        self.dataset_len = dataset_len
        self.seed = seed
        self.fingerprint = fingerprint
        self.epoch = 0
        self.consumed = 0
        self.skipped: list[list[int]] = []  # [step, epoch, consumed, samples]: what was left out, and where
        self.steps_done = 0  # by the manager's count, once it has resumed
        self.windows: tuple[LeftOut, ...] = ()  # of steps to come, whose data will be left out
        self._taken = 0  # samples of the newest step
        self._orders: dict[int, Permutation] = {}

    def micro_batch(self, index: int, size: int) -> list[int]:
        """Return the samples of micro-batch `index` of the step at hand, each micro-batch of `size`."""
        start = self.consumed + index * size
        return [self._sample(start + offset) for offset in range(size)]

    def batches(
        self,
        *,
        batch: int,
        micro_batch: int,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> MicroBatches:
        """Return what this rank takes from here on, step after step: a `batch_sampler` for a DataLoader with workers.

        Make the loader's iterator after `manager.resume()`, then call `manager.restore_random_state()`.  `advance` is
        called once a step all the same.

        Args:
            batch: samples of one optimizer step, of all ranks together.
            micro_batch: samples of one of the lists.
            rank: of this process among those that read different data.
            world_size: number of ranks that read different data.
            mesh: instead of both, where several ranks read the same data: the data-parallel dimensions, `mesh["dp"]`.

        Raises:
            UsageError: the ranks cannot share the batch evenly, or are given twice or not at all.
        """
        if mesh is not None and rank is None and world_size is None:
            rank, world_size = data_rank(mesh)
        elif mesh is not None or rank is None or world_size is None:
            raise UsageError("batches(): give rank= and world_size=, or mesh=")
        return MicroBatches(self, batch=batch, micro_batch=micro_batch, rank=rank, world_size=world_size)

    def expect(self, windows: tuple[LeftOut, ...], done: int) -> None:
        """Take in what will be left out, and how many steps are completed: reading ahead has to know both."""
        self.windows, self.steps_done = windows, done

    def advance(self, samples: int) -> None:
        """Move on by the samples that all ranks together have used in a step."""
        self.steps_done += 1
        self._taken = samples
        self._move(samples)

    def skip(self, step: int, steps: int) -> int:
        """Leave out the data of `steps` steps from `step` on; what follows keeps its order.

        Returns:
            The samples; 0 where no step was done yet, so that nobody knows how many one takes.
        """
        samples = steps * self._taken
        if samples:
            self.skipped = [*self.skipped, [step, self.epoch, self.consumed, samples]][-SKIPPED_MAX:]
            self._move(samples)
        return samples

    def skipped_at(self, step: int) -> int:
        """Return how often data was left out at a step."""
        return sum(window[0] == step for window in self.skipped)

    def _move(self, samples: int) -> None:
        epochs, self.consumed = divmod(self.consumed + samples, self.dataset_len)
        self.epoch += epochs

    def state_dict(self) -> dict[str, Any]:
        """Return the position: one copy for the whole job."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "dataset_len": self.dataset_len,
            "fingerprint": self.fingerprint,
            "taken": self._taken,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ResumeError: it is a position in other data, or in another order.
        """
        for name in ("fingerprint", "dataset_len", "seed"):
            if state[name] != getattr(self, name):
                raise ResumeError(
                    f"the data's {name} is {getattr(self, name)!r}, the checkpoint's is {state[name]!r}: "
                    "resume with the data and the seed it was made with, or start from the beginning"
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]
        self._taken, self.skipped = state.get("taken", 0), state.get("skipped", [])  # an older version has none

    def _sample(self, position: int) -> int:
        ahead, index = divmod(position, self.dataset_len)
        epoch = self.epoch + ahead
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e >= self.epoch}
            key = mix((self.seed & _MASK) ^ mix(epoch + 1))
            self._orders[epoch] = Permutation(self.dataset_len, key=key)
        return self._orders[epoch][index]
