"""What ranks are told of their shares of a save."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from stepkeeper_trainer.save.planner import _divide, _Sent

RANKS = 16


def test_a_share_that_was_sent_is_what_it_was_and_costs_no_name_of_all_that_is_replicated() -> None:
    """As data-parallel ranks have it: each holds everything, and a part of its own in between."""
    names = [f"model.layers.{number}.attention.projection.weight" for number in range(2000)]
    state: list[dict[str, torch.Tensor]] = [{name: torch.zeros(1) for name in names} for _ in range(RANKS)]
    for rank, own in enumerate(state):
        own[f"a part of rank {rank}"] = torch.zeros(1)
        if rank % 2:
            own[names[0]] = own.pop(names[0])  # in another order than on the others
    plans = [create_default_local_save_plan(own, rank == 0) for rank, own in enumerate(state)]

    shares = _divide(plans)
    sent = [pickle.dumps(_Sent.of(share, plan)) for share, plan in zip(shares, plans, strict=True)]

    for share, data, plan in zip(shares, sent, plans, strict=True):
        received = pickle.loads(data).received(plan)  # noqa: S301  # our own bytes
        assert received.replicas == share.replicas
        assert received.items == share.items
    assert all(share.replicas.groups[0][1] == tuple(names) for share in shares)
    assert max(map(len, sent)) < sum(map(len, names)) / 2
    assert len(pickle.dumps(shares[1])) > sum(map(len, names)), "as it would be with all names"
