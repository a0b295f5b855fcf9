"""Collecting the state again and again: what was worked out before is used only where nothing is different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from stepkeeper_trainer.errors import StateError
from stepkeeper_trainer.state import Counters, TrainingState
from stepkeeper_trainer.state.module import ModulePart
from stepkeeper_trainer.state.optimizer import OptimizerPart


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


def part_of(training: Training) -> OptimizerPart:
    state = TrainingState({"model": training.model, "optimizer": training.optimizer}, counters=Counters(), rank=0)
    return state.optimizers["optimizer"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_is_collected_as_if_for_the_first_time(change: Callable[[Training], None]) -> None:
    training = Training()
    kept = part_of(training)
    for _ in range(2):
        kept.collect({})
    change(training)

    for _ in range(2):
        found: dict[str, torch.Tensor] = {}
        expected: dict[str, torch.Tensor] = {}
        said = kept.collect(found)

        assert said == part_of(training).collect(expected)
        assert list(found) == list(expected), "in the same order too"
        for name, tensor in expected.items():
            assert found[name] is tensor or torch.equal(found[name], tensor), name


def test_an_extra_state_that_is_neither_tensor_nor_json_is_refused() -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return range(2)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Odd(2, 2))
    state = TrainingState(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters())}, counters=Counters(), rank=0
    )

    with pytest.raises(StateError, match=r"model\.1\._extra_state is a range"):
        state.collect()


@pytest.mark.parametrize(
    "harm", [{"trained": "2:zz"}, {"trained": "2:ffff"}, {"trained": 7}, {"versions": ["a"]}, {"versions": {"a": "b"}}]
)
def test_a_description_of_a_module_that_cannot_be_used_is_found_before_anything_is_loaded(harm: dict[str, Any]) -> None:
    """A hostile or damaged one: `load.resume` makes a DamagedError of these."""
    part = ModulePart("model", torch.nn.Linear(2, 2))
    tensors: dict[str, torch.Tensor] = {}
    skeleton = part.collect(tensors) | harm
    saved = {
        name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [])
        for name, tensor in tensors.items()
    }

    with pytest.raises((ValueError, TypeError, AttributeError)):
        part.targets(skeleton, saved)
