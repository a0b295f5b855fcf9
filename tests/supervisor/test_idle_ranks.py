"""A short silence ends a launch only where every rank is known to do nothing: what is known of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.diagnosis import collectives
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions.stack_collector import StackCollector, find_sure_s, is_awaited
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.kernel import FOREVER_S, Life, Wait, family_rests, of_family, of_life, rests, sure_s, wait_of
from stepkeeper.watcher.stacks import only_sleeps
from stepkeeper.watcher.tracing import calls_made
from stepkeeper_trainer.formats.collectives import Place

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


def wait_known(pid: int) -> Wait:
    limit = time.monotonic() + WITHIN_S
    while (found := wait_of(pid)) is None:
        assert time.monotonic() < limit, "it is said to go on at any time"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("process", ["print(flush=True)\ntime.sleep(3600)"], indirect=True, ids=["sleeps"])
def test_how_long_a_process_sleeps_is_known(process):
    """The kernel was told until when: a process that sleeps for less than anybody would wait is left alone by it."""
    found = wait_known(process)

    assert 3600 - WITHIN_S < sure_s(found, wait_known(process)) <= 3600


@pytest.mark.parametrize(
    "process",
    [
        "print(flush=True)\nwhile True: pass",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nprint(flush=True)\nlock.acquire()",
        "print(flush=True)\nsys.stdin.read()",
    ],
    indirect=True,
    ids=["computes", "is in a lock, which a thread may open", "reads"],
)
def test_a_process_that_may_go_on_at_any_time_is_not_sure_to_do_nothing(process):
    for _ in range(20):
        assert wait_of(process) is None
        time.sleep(0.02)


@pytest.mark.parametrize("process", ["print(flush=True)\nwhile True: time.sleep(0.2)"], indirect=True, ids=["polls"])
def test_a_sleep_that_begins_anew_is_another_one(process):
    first = wait_known(process)
    time.sleep(0.5)

    assert sure_s(first, wait_of(process)) == 0.0


@pytest.mark.parametrize("process", ["print(flush=True)\nwhile True: pass"], indirect=True, ids=["stopped"])
def test_a_process_that_is_stopped_does_nothing_until_it_is_continued(process):
    os.kill(process, signal.SIGSTOP)

    before = wait_known(process)
    assert sure_s(before, wait_of(process)) == FOREVER_S
    os.kill(process, signal.SIGCONT)
    limit = time.monotonic() + WITHIN_S
    while wait_of(process) is not None:
        assert time.monotonic() < limit, "it is said to be stopped still"
    assert sure_s(before, wait_of(process)) == 0.0


def asleep(rank: int, *, moved: bool = False) -> lines.Stood:
    return lines.Stood(node="a", number=0, rank=rank, where="is in load (a.py:1)", sure_s=3000.0, moved=moved)


def stopped(rank: int) -> lines.Stood:
    where = "was stopped by a signal"
    return lines.Stood(node="a", number=0, rank=rank, where=where, sure_s=FOREVER_S, halted=True, idle=True)


def in_collective(rank: int) -> lines.Stood:
    return lines.Stood(node="a", number=0, rank=rank, where="waits in all_reduce (a.py:2)", waits=True)


def test_training_is_sure_to_stand_still_where_one_rank_does_and_all_others_wait():
    assert find_sure_s([in_collective(0), asleep(1), in_collective(2)]) == 3000.0
    assert find_sure_s([in_collective(0), stopped(1)]) == FOREVER_S
    assert find_sure_s([stopped(0)]) == FOREVER_S
    assert find_sure_s([stood(0, idle=True), stopped(1)]) == FOREVER_S, "a script without the library says no more"


@pytest.mark.parametrize(
    "others",
    [
        [stood(0)],
        [stood(0, idle=True)],
        [stood(0, waits=True)],
        [in_collective(0), stood(2)],
        [],
        [asleep(0)],
    ],
    ids=["computes", "idle elsewhere", "in a backward that computes", "one of two computes", "alone", "all sleep"],
)
def test_a_rank_that_sleeps_alone_says_nothing_of_the_training(others):
    assert find_sure_s([*others, asleep(1)]) == 0.0


def test_a_rank_that_moved_is_none_that_stands():
    assert find_sure_s([in_collective(0), asleep(1, moved=True)]) == 0.0
    assert find_sure_s([in_collective(0), stood(1, idle=True)]) == 0.0


def test_a_rank_whose_gpu_waits_for_the_sleeping_one_waits():
    """Its main thread is in the user's code and spins: its flight recorder says that it waits, and for whom."""
    waits = Place(group="0", members="0-1", last=9, at=9, op="all_reduce")
    late = Place(group="0", members="0-1", last=8)

    standstills = collectives.compare({0: (waits,), 1: (late,)}, (0, 1))

    assert find_sure_s([stood(0), asleep(1)], standstills) == 3000.0
    assert find_sure_s([asleep(0), stood(1)], standstills) == 0.0, "the other way round"


def test_ranks_that_are_all_stopped_are_stopped_by_who_goes_on_with_all():
    assert find_sure_s([stopped(0), stopped(1)]) == 0.0


def sleeping(rank: int, *, moved: bool = False) -> lines.Stood:
    return lines.Stood(node="a", number=0, rank=rank, where="is in load (a.py:1)", idle=True, sleeps=True, moved=moved)


def test_a_rank_that_only_sleeps_is_awaited_where_all_others_wait():
    assert is_awaited([in_collective(0), sleeping(1), in_collective(2)])


@pytest.mark.parametrize(
    "stood_all",
    [
        [stood(0), sleeping(1)],
        [stood(0, idle=True), sleeping(1)],
        [in_collective(0), stood(2), sleeping(1)],
        [sleeping(1)],
        [sleeping(0), sleeping(1)],
        [in_collective(0), sleeping(1), sleeping(2)],
        [in_collective(0), sleeping(1, moved=True)],
        [in_collective(0), asleep(1)],
        [in_collective(0), in_collective(1)],
    ],
    ids=[
        "another computes", "another rests elsewhere", "one of two computes", "alone", "all of them", "two of them",
        "it moved", "until an instant that is known", "all wait",
    ],
)  # fmt: skip
def test_a_rank_that_only_sleeps_says_nothing_where_somebody_else_may_be_at_work(stood_all):
    assert not is_awaited(stood_all)


def test_the_flight_recorders_have_to_name_the_same_rank():
    waits = Place(group="0", members="0-2", last=9, at=9, op="all_reduce")
    late = Place(group="0", members="0-2", last=8)
    stood_all = [in_collective(0), sleeping(1), in_collective(2)]

    assert is_awaited(stood_all, collectives.compare({0: (waits,), 1: (late,), 2: (waits,)}, (0, 1, 2)))
    assert not is_awaited(stood_all, collectives.compare({0: (waits,), 1: (waits,), 2: (late,)}, (0, 1, 2)))
    assert not is_awaited(stood_all, collectives.compare({0: (waits,), 1: (late,), 2: (late,)}, (0, 1, 2)))


def calls_of(pid: int) -> tuple[str, ...]:
    calls = calls_made(pid, 1.0)
    if calls is None:
        pytest.skip("processes may not be traced here")
    assert "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text(), "it is held still"
    return calls


@pytest.mark.parametrize("process", ["print(flush=True)\nwhile True: time.sleep(0.1)"], indirect=True, ids=["sleeps"])
def test_a_process_that_only_sleeps_asks_the_kernel_for_nothing_else(process):
    wait_known(process)
    assert only_sleeps(calls_of(process))


CONNECTS = """
import socket
while True:
    try: socket.create_connection(("127.0.0.1", 9))
    except OSError: time.sleep(0.1)
"""
STARTS = "import subprocess; child = subprocess.Popen(['sleep', '20'], stdout=subprocess.DEVNULL)"


@pytest.mark.parametrize(
    "process",
    [
        "print(flush=True)\nwhile not os.path.exists('/nowhere'): time.sleep(0.1)",
        f"print(flush=True)\n{CONNECTS}",
        f"{STARTS}\nprint(flush=True)\nwhile child.poll() is None: time.sleep(0.1)",
        "print(flush=True)\nwhile True: pass",
        "print(flush=True)\ntime.sleep(600)",
        "print(flush=True)\nwhile True: time.sleep(30)",
        "import threading\nopened = threading.Event()\nprint(flush=True)\nwhile not opened.wait(0.1): pass",
    ],
    indirect=True,
    ids=["a file", "a service", "a process", "computes", "one sleep", "long sleeps", "a thread"],
)
def test_a_process_that_waits_for_something_does_more_than_sleep(process):
    for _ in range(3):
        assert not only_sleeps(calls_of(process))


def test_a_process_that_is_stopped_is_let_go_as_it_was():
    def comes(*, stopped: bool) -> None:
        """Wait: a process that is let go stops anew, or wakes, when the kernel lets it run next."""
        limit = time.monotonic() + WITHIN_S
        while (wait_of(process.pid) == Wait("stopped")) is not stopped:
            assert time.monotonic() < limit, f"it is not {'stopped' if stopped else 'awake'}"

    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            assert calls_made(process.pid, 0.5) is None
            comes(stopped=True)
            process.send_signal(signal.SIGCONT)
            comes(stopped=False)
        finally:
            process.kill()
    assert calls_made(process.pid, 0.1) is None, "it is gone"


def test_a_signal_reaches_a_process_that_is_traced():
    handles = "signal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True))"
    program = f"import signal, time\n{handles}\nprint(flush=True)\nwhile True: time.sleep(0.1)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        kills = threading.Timer(0.3, process.send_signal, (signal.SIGUSR1,))
        kills.start()
        calls = calls_of(process.pid)
        kills.join(WITHIN_S)
        assert process.stdout.readline() == b"handled\n"
        assert not only_sleeps(calls)
        process.kill()


FAMILY = "import subprocess, threading\n{}\nprint(flush=True)\nwhile True: time.sleep(0.1)"
CHILD = "subprocess.Popen([sys.executable, '-c', {!r}], stdout=subprocess.DEVNULL)"
ORPHAN = "import os, time\nparent = os.getppid()\nwhile os.getppid() == parent: {}"


def rests_for(pid: int, seconds: float) -> bool:
    before = of_family(pid)
    time.sleep(seconds)
    return family_rests(before, of_family(pid), seconds)


@pytest.mark.parametrize(
    "process",
    [
        FAMILY.format(CHILD.format(ORPHAN.format("pass"))),
        FAMILY.format("import socket\npair = socket.socketpair()\n"
                      "threading.Thread(target=pair[0].recv, args=(1,), daemon=True).start()"),
        FAMILY.format("import socket\npair = socket.socketpair()\npair[0].settimeout(600)\n"
                      "threading.Thread(target=pair[0].recv, args=(1,), daemon=True).start()"),
    ],
    indirect=True,
    ids=["a child computes", "a thread reads from a socket", "a thread waits for an answer for some time"],
)  # fmt: skip
def test_a_process_whose_children_or_threads_are_at_work_does_not_rest(process):
    for _ in range(3):
        assert not rests_for(process, 1.0)


@pytest.mark.parametrize(
    "process",
    [
        FAMILY.format(CHILD.format(ORPHAN.format("time.sleep(1)"))),
        FAMILY.format("import select, socket\npair = socket.socketpair()\npoll = select.poll()\n"
                      "poll.register(pair[0], select.POLLIN | select.POLLHUP)\n"
                      "threading.Thread(target=poll.poll, daemon=True).start()"),
    ],
    indirect=True,
    ids=["a child sleeps", "a thread of NCCL"],
)  # fmt: skip
def test_a_process_whose_children_and_threads_only_wait_rests(process):
    limit = time.monotonic() + WITHIN_S
    while not rests_for(process, 1.0):  # at first it may still start
        assert time.monotonic() < limit
