"""A short silence ends a launch only where every rank is known to do nothing: what is known of real processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions.stack_collector import StackCollector
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.kernel import Life, of_life, rests

WITHIN_S = 60.0


@pytest.fixture
def process(request):
    program = "import os, sys, time\n" + request.param
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    yield started.pid
    started.kill()
    started.communicate(timeout=WITHIN_S)


@pytest.mark.parametrize(
    "process",
    ["print(flush=True)\ntime.sleep(600)", "print(flush=True)\nwhile True: time.sleep(1)"],
    indirect=True,
    ids=["waits for ever", "looks around"],
)
def test_a_process_that_only_waits_rests(process):
    def seen_to_rest() -> bool:
        before = of_life(process)
        time.sleep(0.2)
        return rests(before, of_life(process))

    limit = time.monotonic() + WITHIN_S
    while not seen_to_rest():  # at first it may still be on its way to its wait
        assert time.monotonic() < limit, "it does not seem to rest"


@pytest.mark.parametrize(
    "process",
    [
        "print(flush=True)\nwhile True: pass",
        "file = open('/dev/null', 'wb', 0)\nprint(flush=True)\nwhile True: file.write(bytes(10_000)); time.sleep(0.01)",
        "print(flush=True)\nwhile True: time.sleep(0.005)",
    ],
    indirect=True,
    ids=["computes", "writes", "is woken"],
)
def test_a_process_that_is_at_work_does_not(process):
    before = of_life(process)

    limit = time.monotonic() + WITHIN_S
    while rests(before, of_life(process)):
        assert time.monotonic() < limit, "it seems to rest"
        time.sleep(0.1)


def test_a_process_that_is_gone_is_not_said_to_rest():
    assert not rests(Life(switches=1), of_life(2**22))


def collected(*stood: lines.Stood, nodes: tuple[str, ...] = ("a",)) -> on.StacksCollected:
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    number = standing.begin(do.CollectStacks(launch=1, nodes=nodes, within_s=0.2 if len(nodes) > 1 else WITHIN_S))
    for word in stood:
        standing.receive(
            lines.Stood(node="a", number=number, rank=word.rank, where="", waits=word.waits, idle=word.idle)
        )
    standing.receive(lines.StacksTaken(node="a", number=number))
    event = inbox.get(WITHIN_S)
    assert isinstance(event, on.StacksCollected)
    return event


def stood(rank: int, *, waits: bool = False, idle: bool = False) -> lines.Stood:
    return lines.Stood(node="a", number=0, rank=rank, where="", waits=waits, idle=idle)


def test_all_are_idle_where_each_waits_for_others_or_rests():
    """Who waits on a GPU spins: that is no work."""
    assert collected(stood(0, waits=True), stood(1, idle=True)).idle
    assert not collected(stood(0, waits=True), stood(1)).idle
    assert not collected().idle, "of nobody nothing is known"


def test_nothing_is_known_where_a_watcher_does_not_answer():
    assert not collected(stood(0, waits=True), nodes=("a", "b")).idle
