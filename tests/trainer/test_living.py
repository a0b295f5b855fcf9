"""Looking for living objects disturbs no other thread, and asks no object."""

from __future__ import annotations

import threading

import torch

from stepkeeper_trainer.living import living


class Pretends:
    @property
    def __class__(self) -> type:  # type: ignore[override]  # as proxies and lazy modules have it
        raise AssertionError("it was asked")


def test_objects_of_a_type_and_of_derived_ones_are_found() -> None:
    kept = [torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), Pretends()]

    found = living(torch.nn.Linear, torch.optim.Optimizer)

    assert {id(each) for each in kept[:2]} <= {id(each) for each in found}
    assert all(isinstance(each, (torch.nn.Linear, torch.optim.Optimizer)) for each in found)


def test_a_thread_that_makes_tuples_meanwhile_is_not_disturbed() -> None:
    """CPython ends a tuple only if nobody else holds it: a list of all objects would."""
    errors: list[SystemError] = []
    ended = threading.Event()

    def make() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(37))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        living(torch.optim.Optimizer)
    ended.set()
    for thread in threads:
        thread.join()

    assert errors == []
