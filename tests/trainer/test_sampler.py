"""The data position: each epoch a permutation, and exact on any world size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepkeeper_trainer.errors import ResumeError
from stepkeeper_trainer.sampler import GlobalSampler, Permutation

lengths = st.integers(1, 300)
seeds = st.integers(0, 2**63)


@given(length=lengths, key=seeds)
@settings(max_examples=100, deadline=None)
def test_a_permutation_gives_each_index_once(length: int, key: int) -> None:
    order = Permutation(length, key=key)

    assert sorted(order[i] for i in range(length)) == list(range(length))


@given(length=lengths, seed=seeds, size=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_each_epoch_shows_every_sample_once_also_where_batches_cross_its_end(length: int, seed: int, size: int) -> None:
    sampler = GlobalSampler(length, seed=seed)
    seen: list[int] = []
    while len(seen) < 2 * length:
        seen += sampler.micro_batch(0, size)
        sampler.advance(size)

    assert sorted(seen[:length]) == list(range(length))
    assert sorted(seen[length : 2 * length]) == list(range(length))


@given(
    length=st.integers(1, 100),
    seed=seeds,
    micro_batch=st.integers(1, 4),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_resharding_at_every_step_changes_no_sample(
    length: int, seed: int, micro_batch: int, worlds: list[int]
) -> None:
    """Twelve micro-batches a step, shared by as many ranks as there happen to be, resumed at each step."""
    reference = GlobalSampler(length, seed=seed, fingerprint="x")
    state = reference.state_dict()
    for world_size in worlds:
        taken: dict[int, list[int]] = {}
        for rank in range(world_size):
            sampler = GlobalSampler(length, seed=seed, fingerprint="x")
            sampler.load_state_dict(state)
            taken |= {g: sampler.micro_batch(g, micro_batch) for g in range(rank, 12, world_size)}
            sampler.advance(12 * micro_batch)
        state = sampler.state_dict()

        expected = [reference.micro_batch(g, micro_batch) for g in range(12)]
        reference.advance(12 * micro_batch)
        assert [taken[g] for g in range(12)] == expected
        assert state == reference.state_dict()


@pytest.mark.parametrize("change", [{"fingerprint": "b"}, {"dataset_len": 11}, {"seed": 2}])
def test_a_position_in_other_data_is_refused(change: dict[str, object]) -> None:
    state = GlobalSampler(10, seed=1, fingerprint="a").state_dict()

    with pytest.raises(ResumeError, match=next(iter(change))):
        GlobalSampler(10, seed=1, fingerprint="a").load_state_dict(state | change)


def test_two_seeds_and_two_epochs_give_different_orders() -> None:
    def first_epochs(seed: int) -> tuple[list[int], list[int]]:
        sampler = GlobalSampler(100, seed=seed)
        return sampler.micro_batch(0, 100), sampler.micro_batch(1, 100)

    orders = [*first_epochs(0), *first_epochs(1)]

    assert len({tuple(order) for order in orders}) == 4
    moved = [sum(i != sample for i, sample in enumerate(order)) for order in orders]
    assert min(moved) > 80
