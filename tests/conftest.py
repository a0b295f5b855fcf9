"""Fixtures that every test may use: lab clusters, and the check that none of them left anything behind."""

from collections.abc import Callable, Iterator

import pytest

from tests.lab import Lab, LabOptions, requirements
from tests.lab.leaks import leftovers


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip where this machine cannot run a lab, fail where CI says that it must."""
    if missing := requirements.missing():
        reason = "no lab cluster here: " + "; ".join(missing)
        if requirements.required():
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab_factory(slurm: None) -> Iterator[Callable[..., Lab]]:  # noqa: ARG001
    """Return a function that brings up a lab, `lab_factory(nodes=2, grace_time_s=5)`: one for each set of options.

    Equal options share one lab for the whole session: tests bring it back to the state that they found.
    """
    labs: dict[LabOptions, Lab] = {}

    def make(**options: object) -> Lab:
        wanted = LabOptions(**options)  # type: ignore[arg-type]  # a wrong name is a TypeError at once
        if wanted not in labs:
            labs[wanted] = Lab(wanted).up()
        return labs[wanted]

    yield make
    for lab in labs.values():
        lab.down()


@pytest.fixture(scope="session")
def lab(lab_factory: Callable[..., Lab]) -> Lab:
    """The lab with default options, shared by the whole session."""
    return lab_factory()


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> Iterator[None]:
    """Fail the session where a lab's daemon, a lab's directory or a child process outlives its test."""
    yield
    found = leftovers()
    assert not found, f"left behind by the tests: {found}"
