"""Which worker plays which test, and when: long ones first and each for itself, so that nobody waits for the last one.

The others go by module, which shares what it has set up.  Which are long is in `durations.txt`: a line for each test,
with the seconds that it took; `TEST_DURATIONS=1 make campaign-and-newest` writes down what it sees.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TABLE = Path(__file__).with_name("durations.txt")
VARIABLE = "TEST_DURATIONS"  # not STEPKEEPER_...: those are settings, and an unknown one is refused
ALONE_S = 12.0
"""A test that takes longer is given to the worker that is free, without the rest of its module."""
USUAL_S = 0.1
"""Of a test that is not listed: of most, a module has many."""
STORIES = "tests/stories/"
STORY_S = 60.0
"""Of a story that is not listed: a new one.  A module of them would else be the last unit, for many minutes."""
LISTED_S = 2.0
SHARED = "reference"
"""A fixture that one worker plays for all, while the others would wait for it."""
_MARKS = re.compile(r"\w+( or \w+)*")


@cache
def seconds() -> dict[str, float]:
    """Return what the longer tests take."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {name: float(took) for took, _, name in (line.partition(" ") for line in lines)}


def expected_s(nodeid: str) -> float:
    """Return what a test took, or what one of its kind takes."""
    return seconds().get(nodeid, STORY_S if nodeid.startswith(STORIES) else USUAL_S)


def unit(nodeid: str) -> str:
    """Return what a test is given away with: itself, or its module."""
    return nodeid if expected_s(nodeid) >= ALONE_S else nodeid.partition("::")[0]


def in_order(names: Iterable[tuple[str, bool]], workers: int) -> list[str]:
    """Return the units of some tests in the order in which they are given away: the longest first.

    `names`: each test, and whether it needs what one worker makes for all.  Of those that come first, one for each
    worker, only one does: the others would wait for it.
    """
    takes: dict[str, float] = defaultdict(float)
    waits: set[str] = set()
    for name, needs_shared in names:
        takes[unit(name)] += expected_s(name)
        if needs_shared:
            waits.add(unit(name))
    longest = sorted(takes, key=lambda each: (-takes[each], each))
    first = [each for each in longest if each in waits][:1]
    first += [each for each in longest if each not in waits][: workers - 1]
    return first + [each for each in longest if each not in first]


def arrange(items: list[pytest.Item], workers: int) -> None:
    """Bring collected tests into that order; within a unit they stay as they are."""
    units = in_order([(item.nodeid, SHARED in getattr(item, "fixturenames", ())) for item in items], workers)
    place = {each: number for number, each in enumerate(units)}
    items.sort(key=lambda item: place[unit(item.nodeid)])


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # its own has no types
    """Gives units away in the order of the collection, and what a crashed worker has left to the others.

    xdist's own gives a crashed worker's units away as they were: with the test that crashed, which ends the next worker
    too, and with units of which nothing is left.  A worker that gets no two tests and no end waits for ever.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take out a worker that ended or crashed; return the test that it crashed in, None where it had none left."""
        units = self.assigned_work.pop(node)
        if self.collection is None:  # the worker that replaces it collects in its place
            self.registered_collections.pop(node, None)
        left = _left(units)
        crashed = _first(left)
        for name, tests in reversed(left.items()):
            if remaining := dict.fromkeys((test for test in tests if test != crashed), False):
                self.workqueue[name] = remaining
                self.workqueue.move_to_end(name, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more, if it has little left, or end it: it plays a test only when it knows what comes next."""
        if node not in self.registered_collections:
            return  # it replaces a crashed one and collects: xdist calls again
        with contextlib.suppress(OSError):  # it has crashed as well: `remove_node` is to come, and gives its units away
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Give tests to workers by our own rule, where the command line says that modules stay together."""
    if config.getoption("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False  # not by how many tests there are: by how long they take
    return Scheduling(config, log)


def _left(units: Mapping[str, Mapping[str, bool]]) -> dict[str, list[str]]:
    """Return which tests of a worker's units have not ended."""
    return {name: [test for test, ended in tests.items() if not ended] for name, tests in units.items()}


def _first(left: Mapping[str, list[str]]) -> str | None:
    """Return the test that a worker plays, or crashed in."""
    return next((test for tests in left.values() for test in tests), None)


def being_played(config: pytest.Config) -> list[str]:
    """Return what each worker was playing when the session was interrupted, as `gw0 tests/test_some.py::test_it`."""
    scheduler = getattr(config.pluginmanager.get_plugin("dsession"), "sched", None)
    assigned = scheduler.assigned_work if isinstance(scheduler, Scheduling) else {}
    playing = {node.gateway.id: _first(_left(units)) for node, units in assigned.items()}
    return [f"{worker} {test}" for worker, test in playing.items() if test is not None]


def let_forked_children_go(config: pytest.Config) -> None:
    """Take xdist's pipes from whatever a worker forks: a child that outlives it would hide that it crashed."""
    if not hasattr(config, "workerinput"):
        return
    standard = {os.fstat(each).st_ino for each in range(3)}
    pipes = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found = os.fstat(int(name))
            if stat.S_ISFIFO(found.st_mode) and found.st_ino not in standard:
                pipes.append(int(name))

    def in_child() -> None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for pipe in pipes:  # not closed: execnet's objects may close the number later
            os.dup2(nowhere, pipe, inheritable=False)
        os.close(nowhere)

    os.register_at_fork(after_in_child=in_child)


def has_none_of(path: Path, wanted: str) -> bool:
    """Whether no test of a module can be what `-m WANTED` asks for: it need not be imported, and torch with it."""
    if not (_MARKS.fullmatch(wanted) and path.name.startswith("test_") and path.suffix == ".py"):
        return False
    text = path.read_text()
    return not any(mark in text for mark in wanted.split(" or "))


def parts(names: Iterable[str], count: int) -> list[set[str]]:
    """Divide tests into parts that take about as long; the units of one stay together.

    >>> parts(["a.py::one", "a.py::two", "b.py::one"], 2)
    [{'a.py::one', 'a.py::two'}, {'b.py::one'}]
    """
    members: dict[str, list[str]] = defaultdict(list)
    for name in names:
        members[unit(name)].append(name)
    takes = {each: sum(expected_s(name) for name in found) for each, found in members.items()}
    found: list[set[str]] = [set() for _ in range(count)]
    loads = [0.0] * count
    for each in sorted(takes, key=lambda each: (-takes[each], each)):
        least = loads.index(min(loads))
        loads[least] += takes[each]
        found[least].update(members[each])
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line choose one part of what is marked `campaign` (with `-p tests.scheduling`)."""
    parser.addoption("--campaign-part", metavar="K/N", help="play the K-th of N parts of the campaign, from 1")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the campaign that are not in the chosen part."""
    if not (wanted := config.getoption("campaign_part", None)):
        return
    number, _, count = wanted.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--campaign-part {wanted}: give K/N with 1 <= K <= N, such as 2/3")
    campaign = [item.nodeid for item in items if item.get_closest_marker("campaign")]
    others = set(campaign) - parts(campaign, int(count))[int(number) - 1]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]


def long_and_not_listed(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return the tests that took long and are not in the table, as its lines: a part that has them takes too long."""
    return [
        f"{report.duration:.0f} {report.nodeid}"
        for report in reports
        if report.nodeid not in seconds() and report.duration >= ALONE_S and report.duration > expected_s(report.nodeid)
    ]


def write_down(reports: Iterable[pytest.TestReport]) -> None:
    """Take the seconds of these tests over into the table, where that is asked for."""
    if not os.environ.get(VARIABLE):
        return
    known = dict(seconds())
    for report in reports:
        known[report.nodeid] = round(report.duration, 1)
    kept = sorted((-took, name) for name, took in known.items() if took >= LISTED_S or name.startswith(STORIES))
    TABLE.write_text("".join(f"{-took:g} {name}\n" for took, name in kept))
