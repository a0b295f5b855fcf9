"""Fixtures that every test may use: lab clusters, and the check that none of them left anything behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import scheduling, seeding
from tests.lab import Lab, LabOptions, requirements
from tests.lab.leaks import leftovers
from tests.scheduling import pytest_xdist_make_scheduler

__all__ = ["pytest_xdist_make_scheduler"]

# A busy machine is no finding, and no session remembers what another one found: the seed tells it (tests/seeding.py).
settings.register_profile(
    "stepkeeper",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,  # Hypothesis's own choice where CI is set: no seed would count
)
settings.load_profile("stepkeeper")


@pytest.hookimpl(tryfirst=True)  # Hypothesis takes the seed in its own
def pytest_configure(config: pytest.Config) -> None:
    """Make files as most machines do, whatever this one's umask: what a group may write is refused in places."""
    os.umask(0o022)
    seeding.seed_examples(config)
    scheduling.let_forked_children_go(config)


def pytest_report_header(config: pytest.Config) -> str:
    """Say by which seed examples are drawn."""
    return seeding.header(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the part of the campaign, and bring the tests into the order in which workers get them."""
    scheduling.leave_out(config, items)
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        scheduling.arrange(items, workers)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules in which nothing is marked as the command line wants."""
    return scheduling.has_none_of(collection_path, config.getoption("markexpr")) or None


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write down how long tests took, where that is asked for; say what was long, and what an interrupt has ended."""
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        for each in scheduling.being_played(config):
            terminalreporter.write_line(f"INTERRUPTED in {each}")
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    for each in scheduling.long_and_not_listed(passed):
        terminalreporter.write_line(f"NOT IN tests/durations.txt: {each}")
    scheduling.write_down(passed)


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
