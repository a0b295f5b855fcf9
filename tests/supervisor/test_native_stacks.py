"""What ranks do below Python: stacks of processes that are really stuck there, and a py-spy that fails in many ways."""

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
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions.stack_collector import StackCollector
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import kernel, py_spy
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher import stacks as taking
from stepkeeper.watcher.frames import Below, Frame, below, describe, of_py_spy
from stepkeeper.watcher.stacks import NATIVE_WITHIN_S, StackTaker, in_words
from stepkeeper_trainer.formats import collectives
from tests.supervisor.assignments import assigned

WITHIN_S = 60.0
RANK = """
import ctypes, faulthandler, os, subprocess, sys, time
from stepkeeper_trainer.formats import collectives
faulthandler.register(collectives.STACKS_SIGNAL, file=open(sys.argv[1], "a"), all_threads=True, chain=False)
libc = ctypes.CDLL(None)

def pauses():  # in one line, for ever: its stack is the same whenever it is taken; a signal ends each pause
    print("ready", flush=True); all(iter(libc.pause, 0))

def reads():
    print("ready", flush=True)
    open(sys.argv[3]).read()

def waits_for_its_loader():
    worker = subprocess.Popen(["cat", sys.argv[3]])
    print("ready", flush=True)
    worker.wait()

def is_stuck_in_the_kernel():
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    if libc.vfork() == 0:  # the caller is suspended until the child ends or becomes another program, and it does not
        time.sleep(600)

globals()[sys.argv[2]]()
"""
DUMP = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    load (/w/data.py:7)
    main (/w/train.py:20)
"""
needs_py_spy = pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed: pip install py-spy")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy on a busy machine takes its time."""
    monkeypatch.setattr(taking, "DUMP_WITHIN_S", WITHIN_S)


@pytest.fixture
def rank(tmp_path: Path):
    """Start a process that stands for rank 0; its main thread runs the function named."""
    running: list[subprocess.Popen[str]] = []

    def start(function: str, *arguments: str | Path) -> int:
        path = collectives.stacks_file(tmp_path, 0, 3, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, path, function, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WITHIN_S)
        process.stdout.close()


@pytest.fixture
def fifo(tmp_path: Path):
    """A file that has somebody who could write into it, and never does."""
    path = tmp_path / "shard-7.bin"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    yield path
    os.close(held)


def until(holds, what: str) -> None:
    limit = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


def taken(tmp_path: Path, pid: int, spy: str | None, native_within_s: float = NATIVE_WITHIN_S) -> list:
    taker = StackTaker(
        assigned(tmp_path),
        "n1",
        find_spy=lambda: spy,
        native_within_s=native_within_s,
        apart_s=0.2,
    )
    taker.take(lines.Stacks(launch=3, number=7), {0: pid})
    os.set_blocking(taker.fileno(), True)
    words = taker.words()
    while not of_kind(words, lines.StacksTaken):
        words += taker.words()
    for thread in threading.enumerate():
        if thread.name == "stacks":  # it may be about to tell of its last word, on that descriptor
            thread.join(WITHIN_S)
    os.close(taker.fileno())
    assert words[-1] == lines.StacksTaken(node="n1", number=7)
    return words


def of_kind(words: list, kind: type) -> list:
    return [word for word in words if isinstance(word, kind)]


def summary_of(words: list) -> str:
    """What the supervisor makes of it."""
    inbox = Inbox(Clock())
    standing = StackCollector(inbox)
    number = standing.begin(do.CollectStacks(launch=3, nodes=("n1",), within_s=600.0))
    for word in words:
        if isinstance(word, lines.OfStacks):
            standing.receive(
                lines.decode_from_watcher(lines.encode(word).replace(b'"number":7', b'"number":%d' % number))
            )
    event = inbox.get(WITHIN_S)
    assert isinstance(event, on.StacksCollected)
    return event.summary


def fake_py_spy(tmp_path: Path, native: str, python: str | None = None) -> str:
    """Return a program that does as told for native stacks, and for those of Python (else it writes one)."""
    program = tmp_path / "py-spy"
    python = python or f"cat <<END\n{DUMP.format(pid='$pid')}END"
    text = f'#!/bin/sh\neval "pid=\\${{$#}}"\ncase " $* " in *" --native "*) {native};; *) {python}\n;; esac\n'
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


@needs_py_spy
def test_a_rank_that_is_stuck_in_native_code_is_told_by_its_call(rank, tmp_path: Path) -> None:
    pid = rank("pauses")

    words = taken(tmp_path, pid, py_spy.find(), native_within_s=WITHIN_S)

    (stood,), (deeper,) = of_kind(words, lines.Stood), of_kind(words, lines.StoodBelow)
    assert stood.where.startswith("is in pauses (")
    assert deeper.where == "in pause"
    assert summary_of(words) == f"rank 0 {stood.where}, in pause"
    kept = collectives.stacks_file(tmp_path, 0, 3, 0)
    until(lambda: "libc" in kept.read_text(), "the native frames are not written")
    assert "pauses (" in kept.read_text()
    assert f"What the kernel says of process {pid}" in kept.read_text()


@needs_py_spy
@pytest.mark.parametrize(
    ("function", "state", "words"),
    [
        ("pauses", "T", "was stopped by a signal, and is in pauses ("),
        ("is_stuck_in_the_kernel", "D", "waits for a device or file system, and cannot be interrupted"),
    ],
)
def test_a_rank_that_stands_anyway_tells_where_it_is_in_python(
    rank, tmp_path: Path, function: str, state: str, words: str
) -> None:
    pid = rank(function)
    if state == "T":
        os.kill(pid, signal.SIGSTOP)
    until(lambda: kernel.state_of(pid) == state, "it does not stand")

    (stood,) = of_kind(taken(tmp_path, pid, py_spy.find()), lines.Stood)

    assert stood.where.startswith(words)
    assert f"and is in {function} (" in stood.where
    assert stood.halted
    assert kernel.state_of(pid) == state


def test_without_py_spy_the_kernel_names_the_file_that_a_rank_waits_for(rank, fifo: Path, tmp_path: Path) -> None:
    pid = rank("reads", fifo)
    until(lambda: kernel.call_of(pid).target.endswith(fifo.name), "it does not read")

    words = taken(tmp_path, pid, None)

    (stood,) = of_kind(words, lines.Stood)
    assert stood.where.startswith("is in reads (")
    assert summary_of(words).startswith(f"rank 0 {stood.where}, in read of ")
    assert summary_of(words).endswith(f"/{fifo.name}")
    assert of_kind(words, lines.Note) == []


def test_a_worker_of_the_data_loader_that_waits_for_a_file_is_told(rank, fifo: Path, tmp_path: Path) -> None:
    pid = rank("waits_for_its_loader", fifo)
    until(lambda: fifo.name in kernel.worker_that_waits(pid), "the worker does not read")
    until(lambda: kernel.call_of(pid).name in ("wait4", "waitid"), "its parent does not wait")

    words = taken(tmp_path, pid, None)

    (worker,) = kernel.children(pid)
    assert f", its process {worker} is in read of " in summary_of(words)
    assert summary_of(words).endswith(f"/{fifo.name}")


def test_a_process_that_is_stuck_in_the_kernel_is_not_waited_for(rank, tmp_path: Path) -> None:
    pid = rank("is_stuck_in_the_kernel")
    until(lambda: kernel.state_of(pid) == "D", "it is not stuck")

    words = taken(tmp_path, pid, fake_py_spy(tmp_path, "exit 1", "exit 1"))

    (stood,), (note,) = of_kind(words, lines.Stood), of_kind(words, lines.Note)
    assert stood.halted
    assert stood.where.startswith("waits for a device or file system, and cannot be interrupted")
    assert note.text == "no native stacks of rank 0: the process is stopped, or stuck in the kernel"


def test_what_py_spy_may_not_do_is_told_and_costs_no_stack_of_python(rank, tmp_path: Path) -> None:
    denied = "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"

    words = taken(tmp_path, rank("pauses"), fake_py_spy(tmp_path, denied, denied))

    (stood,), (note,) = of_kind(words, lines.Stood), of_kind(words, lines.Note)
    assert stood.where.startswith("is in pauses ("), "by faulthandler"
    assert note.text.startswith("no native stacks of rank 0: py-spy: Error: Permission Denied")


def test_a_py_spy_that_takes_too_long_over_native_frames_is_ended_and_its_process_goes_on(rank, tmp_path: Path) -> None:
    """Killed in its work it leaves a stop signal behind."""
    pid = rank("pauses")

    words = taken(tmp_path, pid, fake_py_spy(tmp_path, "kill -STOP $pid; exec sleep 600"), native_within_s=1.0)

    (stood,), (note,) = of_kind(words, lines.Stood), of_kind(words, lines.Note)
    assert stood.where == "is in load (data.py:7)"
    assert note.text == "no native stacks of rank 0: py-spy did not end in time"
    until(lambda: kernel.state_of(pid) in ("S", "R"), "it is stopped")


def test_a_rank_that_was_stopped_before_stays_so(rank, tmp_path: Path) -> None:
    pid = rank("pauses")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: kernel.state_of(pid) == "T", "it is not stopped")

    py_spy.dump(fake_py_spy(tmp_path, "exec sleep 600"), pid, native=True, within_s=0.2)

    assert kernel.state_of(pid) == "T"


def test_a_program_that_is_gone_is_told(tmp_path: Path) -> None:
    found = py_spy.dump(str(tmp_path / "nothing"), os.getpid(), native=False, within_s=5.0)

    assert found == py_spy.PySpyStacks(problem=f"{tmp_path / 'nothing'}: No such file or directory")


def test_ranks_whose_turn_does_not_come_are_left_out() -> None:
    found = py_spy.of_each(
        dict.fromkeys(range(1000), 1), lambda rank, _: time.sleep(0.05) or rank, time.monotonic() + 2.0, at_once=1
    )

    assert list(found) == list(range(len(found)))
    assert 0 < len(found) < 1000


def test_storage_that_does_not_take_the_stacks_costs_no_word(rank, tmp_path: Path) -> None:
    """The run directory may be what the ranks wait for: its files are written beside."""
    pid = rank("pauses")
    file = collectives.stacks_file(tmp_path, 0, 3, 0)
    file.unlink()
    os.mkfifo(file)  # to open it is to wait for a reader

    words = taken(tmp_path, pid, fake_py_spy(tmp_path, "exit 1"))

    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    (stood,) = of_kind(words, lines.Stood)
    assert stood.where == "is in load (data.py:7)"
    os.close(reader)


def frame(function: str, path: str) -> Frame:
    return Frame(path, "?", function)


LIBC, TORCH, FFI = "/lib/x86_64-linux-gnu/libc.so.6", "/v/torch/lib/libtorch_cpu.so", "/lib/libffi.so.8.1.2"
INTERPRETER = "/build/Python-3.11.7/Modules/_ctypes/callproc.c"
OWN = Frame("/w/train.py", "9", "step")
GLOO = "gloo::transport::tcp::UnboundBuffer::waitRecv(int*, std::chrono::duration<long, std::ratio<1l, 1000l> >)"


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ([frame("pause", LIBC), frame("0x7f83", FFI), frame("_call_function_pointer", INTERPRETER)], ("pause", "")),
        (
            [frame("pthread_cond_wait", LIBC), frame(GLOO, TORCH)],
            ("", "gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)"),
        ),
        ([frame("__GI___libc_read", LIBC), frame("0x7f00", "/x/libcuda.so.1")], ("read", "libcuda.so.1")),
        ([frame("__read", "./nptl/read.c"), frame("os_read", "/usr/bin/python3.11")], ("read", "")),
        ([frame("cuStreamSynchronize", "libcuda.so.1")], ("", "cuStreamSynchronize (libcuda.so.1)")),
        ([frame("clock_nanosleep", LIBC)], ("clock_nanosleep", "")),
        ([], ("", "")),
    ],
)
def test_native_frames_in_short(native: list[Frame], expected: tuple[str, str]) -> None:
    inner = (*native, OWN, frame("__libc_start_main", LIBC))

    assert below(inner, (OWN,)) == Below(*expected)


def test_a_script_without_a_suffix_is_no_native_code() -> None:
    own = Frame("/usr/local/bin/train", "9", "step")

    assert below((own,), (own,)) == Below()


def test_what_says_nothing_is_not_said() -> None:
    assert in_words(Below(), kernel.Call("futex")) == ""
    assert in_words(Below("", "ncclCommDestroy (libnccl.so.2)"), kernel.Call("futex")) == (
        "in ncclCommDestroy (libnccl.so.2)"
    )
    assert in_words(Below(), kernel.Call("ioctl", "/dev/nvidia0")) == "in ioctl of /dev/nvidia0"


def test_the_main_thread_of_a_process_whose_threads_have_no_names_is_known_by_its_pid() -> None:
    text = DUMP.format(pid=12).replace(' "MainThread"', "")

    assert [each.function for each in of_py_spy(text, 12)] == ["load", "main"]
    assert of_py_spy(text, 13) == ()


def test_py_spy_names_classes_too() -> None:
    fsdp = "/v/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"

    text = DUMP.format(pid=12).replace("load (/w/data.py:7)", f"FSDPParamGroup.wait_for_unshard ({fsdp}:3)")

    frames = of_py_spy(text)
    doing = describe(frames)

    assert frames[0].function == "wait_for_unshard", "as faulthandler does"
    assert (doing.where, doing.waits) == ("waits in wait_for_unshard (train.py:20 in main)", True)
