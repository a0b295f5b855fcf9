"""A step is the same step on every world that shares it evenly; another world is refused with those that would do."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper_trainer import GlobalSampler
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.sampler import accumulation_steps


@settings(max_examples=50, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_the_samples_of_a_step_are_the_same_on_every_world(
    accumulated: int, ranks: int, micro: int, fewer: int
) -> None:
    """All micro-batches of all ranks together, each once and none besides, whatever the world."""
    batch = accumulated * ranks * fewer * micro
    sampler = GlobalSampler(10 * batch, seed=1)
    whole = [sampler.micro_batch(index, micro) for index in range(batch // micro)]

    for world in {1, ranks, ranks * fewer}:
        steps = accumulation_steps(batch, micro, world)
        taken = {
            index: sampler.micro_batch(index, micro)
            for rank in range(world)
            for index in range(rank, batch // micro, world)
        }
        assert steps * world * micro == batch
        assert [taken[index] for index in range(batch // micro)] == whole


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "words"),
    [
        (64, 4, 6, ("64 cannot be shared by 6 ranks in micro-batches of 4", "1, 2, 4, 8, 16", "--micro-batches 16")),
        (64, 4, 32, ("32 ranks", "1, 2, 4, 8, 16")),
        (10, 4, 1, ("a batch of 10 is no whole number of micro-batches of 4",)),
        (0, 4, 1, ("batch 0", "at least 1")),
    ],
)
def test_a_world_that_does_not_divide_a_step_is_refused(
    batch: int, micro: int, ranks: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        accumulation_steps(batch, micro, ranks)

    for word in words:
        assert word in str(refused.value)


def test_of_many_worlds_that_would_do_the_nearest_are_named() -> None:
    with pytest.raises(UsageError, match=r"could: 80, 84, 90, 105, 112, 120, 126, 140, 144, 168, 180, 210 "):
        accumulation_steps(5040 * 2, 2, 150)
