"""What ranks that stand still do: stacks of real processes, and what is said of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions.stack_collector import StackCollector, find_suspect, summarise
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher import stacks as taking
from stepkeeper.watcher.frames import Frame, describe, of_faulthandler, of_py_spy
from stepkeeper.watcher.stacks import StackTaker, Word
from stepkeeper.watcher.tracing import calls_made
from stepkeeper_trainer.formats import collectives
from tests.supervisor.assignments import assigned

RANK = """
import faulthandler, os, socket, subprocess, sys, threading, time
from stepkeeper_trainer.formats import collectives
faulthandler.register(collectives.STACKS_SIGNAL, file=open(sys.argv[1], "a"), all_threads=True, chain=False)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

def stuck():
    print("ready", flush=True); time.sleep(600)

def busy():
    print("ready", flush=True)
    for number in range(10**6):
        scope = {"time": time}
        exec(f"def step_{number}(): time.sleep(0.2)", scope)
        scope[f"step_{number}"]()

def only_sleeps():
    print("ready", flush=True)
    while True: time.sleep(0.2)

def waits_for_a_file():
    print("ready", flush=True)
    while not os.path.exists("/nowhere"): time.sleep(0.2)

def looks_for_a_file_at_times():
    print("ready", flush=True)
    while not os.path.exists("/nowhere"):
        for _ in range(6): time.sleep(0.2)

def waits_for_a_service():
    print("ready", flush=True)
    while True:
        try: socket.create_connection(("127.0.0.1", 9))
        except OSError: time.sleep(0.2)

def waits_for_a_process():
    program = "import os, time; parent = os.getppid()\\nwhile os.getppid() == parent: pass"
    subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    print("ready", flush=True)
    while True: time.sleep(0.2)

def waits_for_a_download():
    here, there = socket.socketpair()
    threading.Thread(target=here.recv, args=(1,), daemon=True).start()
    print("ready", flush=True)
    while True: time.sleep(0.2)

def waits_for_an_answer():
    here, there = socket.socketpair()
    here.settimeout(600)
    threading.Thread(target=here.recv, args=(1,), daemon=True).start()
    print("ready", flush=True)
    while True: time.sleep(0.2)

def waits_for_a_thread():
    print("ready", flush=True)
    threading.Event().wait()

def computes():
    print("ready", flush=True)
    while True: pass

globals()[sys.argv[2]]()
"""
PAUSES = (
    "waits_for_a_file",
    "looks_for_a_file_at_times",
    "waits_for_a_service",
    "waits_for_a_process",
    "waits_for_a_download",
    "waits_for_an_answer",
    "waits_for_a_thread",
    "computes",
    "stuck",
    "busy",
)
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a busy machine takes its time to write its stack."""
    monkeypatch.setattr(taking, "DUMP_WITHIN_S", WITHIN_S)


@pytest.fixture
def rank(tmp_path: Path):
    """Start a process that stands for a rank; its main thread runs the function named."""
    running: list[subprocess.Popen[str]] = []
    script = tmp_path / "training.py"
    script.write_text(RANK)

    def start(number: int, function: str) -> int:
        path = collectives.stacks_file(tmp_path, 0, 3, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, str(script), str(path), function], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def taken(tmp_path: Path, pids: dict[int, int], *, apart_s: float = 1.0, brief: bool = False) -> dict[int, lines.Stood]:
    words = said(tmp_path, pids, apart_s=apart_s, brief=brief)
    return {each.rank: each for each in words if isinstance(each, lines.Stood)}


def said(tmp_path: Path, pids: dict[int, int], *, apart_s: float, brief: bool) -> list[Word]:
    """Return all that the watcher of a node says."""
    taker = StackTaker(assigned(tmp_path), "n1", find_spy=lambda: None, apart_s=apart_s)
    taker.take(lines.Stacks(launch=3, number=7, brief=brief), pids)
    os.set_blocking(taker.fileno(), True)
    words = taker.words()
    while not any(isinstance(word, lines.StacksTaken) for word in words):
        words += taker.words()
    *words, last = words
    assert last == lines.StacksTaken(node="n1", number=7)
    for thread in threading.enumerate():
        if thread.name == "stacks":  # it may be about to tell of its last word, on that descriptor
            thread.join(WITHIN_S)
    os.close(taker.fileno())
    return words


def test_of_the_requests_that_come_during_a_look_the_newest_follows(tmp_path: Path) -> None:
    taker = StackTaker(assigned(tmp_path), "n1", find_spy=lambda: None, apart_s=0.5)
    os.set_blocking(taker.fileno(), True)
    for number in (7, 8, 9):
        taker.take(lines.Stacks(launch=3, number=number, brief=True), {})
    words: list[Word] = []
    while lines.StacksTaken(node="n1", number=9) not in words:
        words += taker.words()
    for thread in threading.enumerate():
        if thread.name == "stacks":
            thread.join(WITHIN_S)
    os.close(taker.fileno())
    answered = [word.number for word in words if isinstance(word, lines.StacksTaken)]
    assert answered in ([7, 9], [9]), "the first one may not have begun yet"


def stop_after_a_stack(pid: int, file: Path) -> None:
    limit = time.monotonic() + WITHIN_S
    while time.monotonic() < limit and not (file.exists() and "in stuck" in file.read_text()):
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)


def test_a_rank_that_is_stuck_one_that_works_and_one_that_was_stopped(rank, tmp_path: Path) -> None:
    pids = {0: rank(0, "stuck"), 1: rank(1, "busy"), 2: rank(2, "stuck"), 3: rank(3, "stuck")}
    os.kill(pids[2], signal.SIGSTOP)
    stops = threading.Thread(target=stop_after_a_stack, args=(pids[3], collectives.stacks_file(tmp_path, 0, 3, 3)))
    stops.start()

    stood = taken(tmp_path, pids, apart_s=3.0)  # in which one is stopped

    stops.join(WITHIN_S)
    assert not stood[3].moved, "only its second stack is missing"

    assert stood[0].where.startswith("is in stuck (")
    assert not stood[0].moved
    assert stood[1].moved
    assert stood[2].where == "was stopped by a signal"
    assert [stood[rank].halted for rank in (0, 1, 2, 3)] == [False, False, True, True]
    assert "in stuck" in collectives.stacks_file(tmp_path, 0, 3, 0).read_text()


def test_a_brief_look_tells_who_only_sleeps(rank, tmp_path: Path) -> None:
    pid = rank(1, "only_sleeps")
    if calls_made(pid, 0.5) is None:
        pytest.skip("processes may not be traced here")
    limit = time.monotonic() + WITHIN_S
    while not taken(tmp_path, {1: pid}, apart_s=1.5, brief=True)[1].sleeps:
        assert time.monotonic() < limit, "a busy machine may be seen at a waking moment, but not each time"
    assert "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text(), "it is held still"
    assert not taken(tmp_path, {1: pid}, apart_s=0.5)[1].sleeps, "only where seconds count"


def test_a_brief_look_takes_nobody_who_waits_for_something_for_one_who_only_sleeps(rank, tmp_path: Path) -> None:
    pids = {number: rank(number, function) for number, function in enumerate(PAUSES)}
    for _ in range(3):
        stood = taken(tmp_path, pids, apart_s=1.5, brief=True)
        assert {PAUSES[number]: each.sleeps for number, each in stood.items()} == dict.fromkeys(PAUSES, False)


@pytest.mark.parametrize("stopped", [1, None])
def test_who_does_nothing_is_told_before_the_second_look(rank, tmp_path: Path, stopped: int | None) -> None:
    pids = {0: rank(0, "busy"), 1: rank(1, "busy")}
    if stopped is not None:
        os.kill(pids[stopped], signal.SIGSTOP)

    words = said(tmp_path, pids, apart_s=0.5, brief=False)

    first = words[0]
    assert isinstance(first, lines.DoesNothing) == (stopped is not None)
    assert not isinstance(first, lines.DoesNothing) or first.rank == stopped
    assert sum(isinstance(word, lines.DoesNothing) for word in words) == (stopped is not None)


def test_a_process_that_would_die_of_the_signal_gets_none(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        stood = taken(tmp_path, {0: process.pid})

        assert process.poll() is None
        process.kill()
    assert stood[0].where.startswith("is in state S")
    assert not stood[0].moved


def test_a_process_whose_stack_nobody_can_tell_moves_as_long_as_it_reads(tmp_path: Path) -> None:
    """Before the trainer library listens: an import from slow storage is no hang."""
    with (
        Path("/dev/null").open("wb") as nowhere,
        subprocess.Popen(["cat", "/dev/zero"], stdout=nowhere) as process,
    ):
        stood = taken(tmp_path, {0: process.pid})

        process.kill()
    assert stood[0].moved


def test_a_rank_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert taken(tmp_path, {0: process.pid})[0].where == "is gone"


TORCH = "/v/lib/python3.11/site-packages/torch"
ALL_REDUCE = f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"
BACKWARD = f"{TORCH}/autograd/graph.py", "_engine_run_backward"
LOADER = f"{TORCH}/utils/data/dataloader.py", "_try_get_data"
LAYER = f"{TORCH}/nn/modules/linear.py", "forward"
OURS = "/v/lib/python3.11/site-packages/stepkeeper_trainer/coordinate/agreement.py", "share"
GROUP = "/v/lib/python3.11/site-packages/stepkeeper_trainer/coordinate/groups.py"
STEP = "/w/train.py", "step"


@pytest.mark.parametrize(
    ("frames", "where", "waits"),
    [
        ([ALL_REDUCE, STEP], "waits in all_reduce (train.py:7 in step)", True),
        ([BACKWARD, STEP], "is in _engine_run_backward (train.py:7 in step)", True),
        ([LOADER, STEP], "is in the data loader (train.py:7 in step)", False),
        ([STEP, ALL_REDUCE], "is in step (train.py:7)", False),
        ([LAYER, STEP], "is in step (train.py:7)", False),
        ([LAYER], f"is in forward ({TORCH}/nn/modules/linear.py:7)", False),
        ([OURS, STEP], "is in stepkeeper_trainer's share (train.py:7 in step)", False),
        ([(GROUP, "reduce_max"), OURS, STEP], "waits in reduce_max (train.py:7 in step)", True),
        ([(GROUP, "gather"), OURS, STEP], "waits in gather (train.py:7 in step)", True),
        ([(GROUP, "_connect"), (GROUP, "new_group"), STEP], "waits in _connect (train.py:7 in step)", True),
        ([(OURS[0], "_started"), OURS, STEP], "waits in the agreement of all ranks (train.py:7 in step)", True),
        ([ALL_REDUCE, OURS, STEP], "waits in all_reduce (train.py:7 in step)", True),
    ],
)
def test_a_stack_in_words(frames: list[tuple[str, str]], where: str, waits: bool) -> None:  # noqa: FBT001
    doing = describe(tuple(Frame(path, "7", name) for path, name in frames))

    assert (doing.where, doing.waits) == (where, waits)


def test_the_main_thread_is_the_one_that_counts() -> None:
    text = """Thread 0x00007f1 (most recent call first):
  File "/w/loader.py", line 3 in fetch

Current thread 0x00007f2 (most recent call first):
  File "/w/train.py", line 9 in step
  File "/w/train.py", line 20 in main
"""
    spied = """Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 13 (idle): "loader"
    fetch (loader.py:3)
Thread 12 (active): "MainThread"
    step (train.py:9)
    main (train.py:20)
"""
    assert [frame.function for frame in of_faulthandler(text)] == ["step", "main"]
    assert [frame.function for frame in of_py_spy(spied)] == ["step", "main"]


def stood(rank: int, where: str, *, waits: bool = False, node: str = "a") -> lines.Stood:
    return lines.Stood(node=node, number=1, rank=rank, where=where, waits=waits)


def test_the_rank_that_all_others_wait_for_is_named_first() -> None:
    words = [stood(rank, "waits in all_reduce", waits=True) for rank in range(5)]
    words.append(stood(5, "is in the data loader", node="b"))

    assert find_suspect(words) == words[5]
    assert summarise(words, ["c"]) == (
        "rank 5 is in the data loader; 5 ranks, 0 to 4: each waits in all_reduce; nothing is known about the ranks on c"
    )


def test_a_rank_that_can_do_nothing_is_suspected_before_one_whose_stack_nobody_can_tell() -> None:
    words = [stood(0, "is in state S, in the kernel's ep_poll"), stood(1, "was stopped by a signal")]
    halted = msgspec.structs.replace(words[1], halted=True)

    assert find_suspect(words) is None
    assert find_suspect([words[0], halted]) == halted
    assert find_suspect([words[0], halted], by_collectives=0) == words[0], "what the collectives say comes first"


def test_where_all_do_the_same_nobody_is_suspected() -> None:
    assert find_suspect([stood(0, "is in evaluate"), stood(1, "is in evaluate")]) is None
    assert find_suspect([stood(0, "waits", waits=True)]) is None


def test_a_watcher_that_does_not_answer_is_waited_for_only_so_long() -> None:
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    number = standing.begin(do.CollectStacks(launch=4, nodes=("a", "b"), within_s=2.0))
    standing.receive(msgspec.structs.replace(stood(0, "sleeps"), number=number))
    standing.receive(lines.StacksTaken(node="a", number=number))
    standing.receive(lines.StacksTaken(node="b", number=number + 1))

    event = inbox.get(WITHIN_S)

    assert isinstance(event, on.StacksCollected)
    assert (event.launch, event.moved) == (4, False)
    assert event.summary == "rank 0 sleeps; nothing is known about the ranks on b"


def test_a_rank_that_does_nothing_at_the_first_look_is_told_at_once_and_only_once() -> None:
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    for _ in range(2):
        number = standing.begin(do.CollectStacks(launch=4, nodes=("a", "b"), within_s=600.0))
        standing.receive(lines.DoesNothing(node="b", number=number - 1, rank=3))
        standing.receive(lines.DoesNothing(node="b", number=number, rank=3))
        standing.receive(lines.DoesNothing(node="a", number=number, rank=0))

        event = inbox.get(WITHIN_S)

        assert isinstance(event, on.Suspected)
        assert (event.nodes, event.rank) == (("b",), 3)
        assert inbox.get(0.0) is None


def test_all_watchers_answers_end_the_collection_at_once() -> None:
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    number = standing.begin(do.CollectStacks(launch=4, nodes=("a",), within_s=600.0))
    standing.receive(lines.StacksTaken(node="a", number=number))

    began = time.monotonic()

    assert inbox.get(WITHIN_S) is not None
    assert time.monotonic() - began < WITHIN_S
    standing.receive(lines.StacksTaken(node="a", number=number))
    assert inbox.get(0.1) is None, "it came twice"
