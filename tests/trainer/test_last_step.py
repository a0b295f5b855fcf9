"""The state of the last step: what has changed it since is noticed, and what cannot be noticed was copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper_trainer.coordinate.agreement import Proposal
from stepkeeper_trainer.state import Counters, TrainingState
from stepkeeper_trainer.state.last_step import LastStep


class Buffer:
    """Returns its live array, as a replay buffer may."""

    def __init__(self) -> None:
        self.rows = np.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Marked:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.rand(3, 4)).sum().backward()
        self.optimizer.step()
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.ones(1))
        self.buffer = Buffer()
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "buffer": self.buffer}
        self.state = TrainingState(parts, counters=Counters(step=1), rank=0)
        self.whole = self.state.collect()
        self.last = LastStep(self.state)
        self.last.mark()


def _weights(marked: Marked) -> None:
    with torch.no_grad():
        marked.model[0].weight[0, 0] += 1


def _weights_by_data(marked: Marked) -> None:
    for parameter in marked.model.parameters():
        parameter.data.add_(1)


def _weights_exchanged(marked: Marked) -> None:
    marked.model[0].weight.data = torch.zeros(4, 4)


def _statistics(marked: Marked) -> None:
    marked.model(torch.rand(3, 4))


def _moments(marked: Marked) -> None:
    marked.optimizer.state[marked.model[0].weight]["exp_avg"].zero_()


def _scale(marked: Marked) -> None:
    assert marked.scaler._scale is not None
    marked.scaler._scale.mul_(0.5)


def _module(marked: Marked) -> None:
    marked.model[0].weight = torch.nn.Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize(
    "change", [_weights, _weights_by_data, _weights_exchanged, _statistics, _moments, _scale, _module]
)
def test_what_changes_the_state_is_noticed(change: Callable[[Marked], None]) -> None:
    marked = Marked()
    assert marked.last.unchanged

    change(marked)

    assert not marked.last.unchanged
    assert marked.last.why_not == "weights or buffers have changed since the last step"


def test_an_evaluation_that_draws_and_a_schedule_that_moves_change_nothing() -> None:
    marked = Marked()
    marked.model.eval()
    with torch.no_grad():
        marked.model(torch.rand(3, 4))
    marked.buffer.rows[:] = 7  # no counter tells of it: it was copied

    assert marked.last.unchanged
    collect = marked.last.take()
    assert collect is not None
    found = collect()
    assert list(found) == list(marked.whole)
    for name, value in marked.whole.items():
        if not name.startswith(("rng.", "buffer.", "keeper.loss_history")):
            assert torch.equal(value, found[name]), name
    assert torch.equal(found["buffer.rows"], torch.zeros(4, dtype=torch.float64))


def test_weights_that_are_unfrozen_wait_for_the_next_look_at_the_modules() -> None:
    """The description of a module says which are trained, and a resume puts that back."""
    marked = Marked()
    marked.model[0].requires_grad_(requires_grad=False)
    marked.last.mark()
    assert marked.last.take() is None
    assert "trained" in marked.last.why_not

    marked.state.collect()
    marked.last.mark()

    assert marked.last.take() is not None


def test_a_step_that_begins_is_not_to_be_saved() -> None:
    marked = Marked()
    marked.last.forget()

    assert not marked.last.unchanged
    assert marked.last.take() is None


@pytest.mark.parametrize(("answer_s", "step_s", "known"), [(0.0, 0.1, True), (0.03, 0.1, False)])
def test_a_state_that_costs_much_of_a_step_is_given_up(answer_s: float, step_s: float, *, known: bool) -> None:
    marked = Marked()
    answer = marked.buffer.state_dict
    marked.buffer.state_dict = lambda: time.sleep(answer_s) or answer()  # type: ignore[method-assign]

    last = LastStep(marked.state)
    for _ in range(6):
        time.sleep(step_s)
        last.forget()
        last.note_agreed(Proposal(too_dear=last.too_dear))
        last.mark()

    assert last.unchanged is known
    assert last.why_not.startswith("another rank" if known else "taking the state down costs 3")


def test_a_rank_asks_until_all_ranks_give_it_up() -> None:
    """A `state_dict()` may be a collective: who stops alone keeps the others waiting."""
    marked = Marked()
    asked = 0
    answer = marked.buffer.state_dict

    def slow() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        time.sleep(0.01)
        return answer()

    marked.buffer.state_dict = slow  # type: ignore[method-assign]
    last = LastStep(marked.state)
    counts = []
    for step in range(8):
        last.note_agreed(Proposal(too_dear=step == 6))
        last.mark()
        counts.append(asked)

    assert last.too_dear
    assert counts == [1, 2, 3, 4, 5, 6, 6, 6]
