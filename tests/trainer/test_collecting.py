"""Collecting the state again and again: what was worked out before is used only where nothing is different."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stepkeeper_trainer.errors import StateError
from stepkeeper_trainer.optimizers import OptimizerStates
from stepkeeper_trainer.state import Counters, TrainingState


class Training:
    """Three layers; the last one joins the optimizer late."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        first, second, _ = self.model
        self.optimizer = torch.optim.AdamW(
            [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.1}], lr=torch.tensor(0.01)
        )
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def replace_state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": self.model[2].parameters()})

    def add_group_and_step(self) -> None:
        self.add_group()
        self.step()

    def lose_one(self) -> None:
        del self.optimizer.state[self.model[0].bias]

    def reorder(self) -> None:
        state = self.optimizer.state.pop(self.model[0].weight)
        self.optimizer.state[self.model[0].weight] = state

    def add_to_one(self) -> None:
        self.optimizer.state[self.model[1].bias]["extra"] = torch.zeros(2)

    def add_a_number(self) -> None:
        self.optimizer.state[self.model[1].bias]["count"] = 3

    def another_parameter(self) -> None:
        old = self.model[1].bias
        new = torch.nn.Parameter(old.detach() + 1)
        self.model[1].bias = new
        group = self.optimizer.param_groups[1]
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        self.optimizer.state[new] = self.optimizer.state.pop(old)

    def another_rate(self) -> None:
        self.optimizer.param_groups[1]["lr"] = 0.2


CHANGES: list[Callable[[Training], None]] = [
    *(Training.step, Training.replace_state, Training.add_group, Training.add_group_and_step, Training.lose_one),
    *(Training.reorder, Training.add_to_one, Training.add_a_number, Training.another_parameter),
    Training.another_rate,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("single", [True, False], ids=["one optimizer", "by name"])
def test_a_state_is_collected_as_if_for_the_first_time(change: Callable[[Training], None], *, single: bool) -> None:
    training = Training()
    optimizer = training.optimizer if single else {"main": training.optimizer}
    kept = OptimizerStates(training.model, optimizer)
    for _ in range(2):
        kept.collect({})
    change(training)

    for _ in range(2):
        found: dict[str, torch.Tensor] = {}
        expected: dict[str, torch.Tensor] = {}
        said = kept.collect(found)

        assert said == OptimizerStates(training.model, optimizer).collect(expected)
        assert list(found) == list(expected), "in the same order too"
        for name, tensor in expected.items():
            assert found[name] is tensor or torch.equal(found[name], tensor), name


def test_a_model_whose_state_is_no_tensor_is_refused() -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> str:
            return "text"

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Odd(2, 2))
    state = TrainingState(
        model=model,
        optimizers=OptimizerStates(model, torch.optim.SGD(model.parameters())),
        others={},
        counters=Counters(),
        rank=0,
    )

    with pytest.raises(StateError, match=r"1\._extra_state of the model is no tensor"):
        state.collect()
