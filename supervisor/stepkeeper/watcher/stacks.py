"""What ranks do that stand still: their Python stacks, and what the kernel says of them.

py-spy tells where it is installed; else the trainer library has Python's faulthandler write them on a signal.  They
stay in the launch's logs, each taken twice: a rank whose stack has changed is not stuck.  Meanwhile the ranks are asked
where they are in their collectives (`accounts`).
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.accounts import Asked, catches
from stepkeeper.watcher.assignment import Assignment
from stepkeeper_trainer.formats import stacks
from stepkeeper_trainer.formats.messages import shorten

APART_S = 3.0  # between the two
DUMP_WITHIN_S = 5.0
SETTLED_S = 0.3  # a file that has not grown for so long is written
CPU_SHARE = 0.2  # of the time between the two: less is what idle threads use
READ_LEAST = 64 * 1024
IDLE_CPU_SHARE = 0.05  # what else runs in an idle rank: heartbeats, threads that look around
IDLE_SWITCHES = 50  # of the main thread: who is busy with a network or a device sleeps and wakes oftener
READ_BYTES_MAX = 256 * 1024
FRAMES_MAX = 200

_FAULTHANDLER = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_PY_SPY = re.compile(r" {4}(?P<function>\S.*?) \((?P<path>[^()]+?)(?::(?P<line>\d+))?\)")
_COLLECTIVES = re.compile(
    r"(?:_?all_reduce|_?all_gather|_?all_to_all|_?reduce_scatter|_?broadcast|_?barrier|monitored_barrier|_?gather"
    r"|_?scatter|_?reduce|recv|send|wait|wait_for_unshard|_wait_for|synchronize)\w*"
)
_TORCH = re.compile(r"/torch/(?:distributed|autograd|cuda)/")
_LOADER = re.compile(r"/torch/utils/data/|/multiprocessing/(?:queues|connection)\.py$")
_LIBRARY = re.compile(r"(?:site|dist)-packages/|/lib(?:64)?/python\d|^<")
_OURS = re.compile(r"/stepkeeper_trainer/(?!examples/)")


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: str
    function: str


class Doing(NamedTuple):
    """What a rank does, in words."""

    where: str
    waits: bool = False  # for other ranks
    halted: bool = False  # it can do nothing at all


class StackTaker:
    """Takes stacks on a thread; its words are for the watcher's loop, which selects on it."""

    def __init__(self, assignment: Assignment, node: str) -> None:
        self._assignment = assignment
        self._node = node
        self._words: queue.SimpleQueue[bus.Stood | bus.Entered | bus.StacksTaken] = queue.SimpleQueue()
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._busy = threading.Lock()

    def fileno(self) -> int:
        """For select."""
        return self._ready

    def words(self) -> list[bus.Stood | bus.Entered | bus.StacksTaken]:
        """Return what there is to say."""
        os.eventfd_read(self._ready)
        words = []
        while not self._words.empty():
            words.append(self._words.get())
        return words

    def take(self, wanted: bus.Stacks, pids: Mapping[int, int]) -> None:
        """Begin; where one request is under way another is not answered: the supervisor has a time limit."""
        if self._busy.acquire(blocking=False):
            threading.Thread(target=self._take, args=(wanted, dict(pids)), name="stacks", daemon=True).start()

    def _take(self, wanted: bus.Stacks, pids: dict[int, int]) -> None:
        try:
            first = self._sample(wanted.launch, pids)
            lived = {rank: of_life(pid) for rank, pid in pids.items()}
            time.sleep(APART_S)
            lives_on = {rank: of_life(pid) for rank, pid in pids.items()}
            second = self._sample(wanted.launch, pids)
            # behind the stacks: faulthandler does one thing at a time, and drops a signal that comes meanwhile
            asked = Asked(self._file(wanted.launch, 0).parent.parent, pids)
            for rank, pid in sorted(pids.items()):
                frames = second[rank]
                doing = describe(frames) if frames else of_kernel(pid)
                stood = bus.Stood(
                    node=self._node,
                    number=wanted.number,
                    rank=rank,
                    where=shorten(doing.where),
                    waits=doing.waits,
                    halted=doing.halted,
                    moved=first[rank] != frames if first[rank] and frames else lives(lived[rank], lives_on[rank]),
                    idle=rests(lived[rank], lives_on[rank]),
                )
                self._words.put(stood)
            for rank, places in sorted(asked.take().items()):
                for place in places:
                    self._words.put(bus.Entered(node=self._node, number=wanted.number, rank=rank, place=place))
            self._words.put(bus.StacksTaken(node=self._node, number=wanted.number))
        finally:
            self._busy.release()
            os.eventfd_write(self._ready, 1)

    def _sample(self, launch: int, pids: dict[int, int]) -> dict[int, tuple[Frame, ...]]:
        """Return the stack of each rank's main thread, the innermost frame first; empty where nobody can tell."""
        files = {rank: self._file(launch, rank) for rank in pids}
        begun = {rank: _size(path) for rank, path in files.items()}
        spy = shutil.which("py-spy")
        found: dict[int, tuple[Frame, ...]] = {}
        asked: set[int] = set()
        for rank, pid in pids.items():
            frames = _by_py_spy(spy, pid, files[rank]) if spy is not None else ()
            if frames:
                found[rank] = frames
            elif catches(pid, stacks.SIGNAL) and _signal(pid):
                asked.add(rank)
        give_up_at = time.monotonic() + DUMP_WITHIN_S
        sizes, since = dict(begun), time.monotonic()
        while asked and time.monotonic() < give_up_at:
            time.sleep(0.05)
            now = {rank: _size(files[rank]) for rank in asked}
            if now != {rank: sizes[rank] for rank in asked}:
                sizes, since = sizes | now, time.monotonic()
            elif all(now[rank] > begun[rank] for rank in asked) and time.monotonic() - since > SETTLED_S:
                break
        for rank in asked:
            found[rank] = of_faulthandler(_read(files[rank], begun[rank]))
        return {rank: found.get(rank, ()) for rank in pids}

    def _file(self, launch: int, rank: int) -> Path:
        return stacks.file(Path(self._assignment.run_directory), self._assignment.attempt, launch, rank)


def describe(frames: tuple[Frame, ...]) -> Doing:
    """Say what a stack means.

    >>> describe((Frame("/p/site-packages/torch/distributed/distributed_c10d.py", "3", "all_reduce"),)).where
    'waits in all_reduce'
    """
    own = next((f for f in frames if not _LIBRARY.search(f.path) and not _OURS.search(f.path)), None)
    place = f" ({os.path.basename(own.path)}:{own.line} in {own.function})" if own is not None else ""
    for frame in frames:
        if _LOADER.search(frame.path):
            return Doing(f"is in the data loader{place}")
        if _OURS.search(frame.path):
            return Doing(f"is in stepkeeper_trainer's {frame.function}{place}", waits=_is_agreeing(frames))
        if _TORCH.search(frame.path) and _COLLECTIVES.fullmatch(frame.function):
            return Doing(f"waits in {frame.function}{place}", waits=True)
        if _TORCH.search(frame.path) and "backward" in frame.function:
            return Doing(f"is in {frame.function}{place}", waits=True)
        if frame is own:
            break
    if own is not None:
        return Doing(f"is in {own.function} ({os.path.basename(own.path)}:{own.line})")
    inner = frames[0]
    return Doing(f"is in {inner.function} ({inner.path}:{inner.line})")


def _is_agreeing(frames: tuple[Frame, ...]) -> bool:
    return any(_TORCH.search(frame.path) for frame in frames)


def of_faulthandler(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames of what faulthandler wrote: it is the last one, or the one that was current."""
    blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + text)
    chosen = next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
    return tuple(Frame(m["path"], m["line"], m["function"]) for m in _FAULTHANDLER.finditer(chosen))[:FRAMES_MAX]


def of_py_spy(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames of `py-spy dump`."""
    blocks = re.split(r"\n(?=Thread )", "\n" + text)
    chosen = next((block for block in blocks if "MainThread" in block.partition("\n")[0]), "")
    return tuple(Frame(m["path"], m["line"] or "?", m["function"]) for m in _PY_SPY.finditer(chosen))[:FRAMES_MAX]


def of_kernel(pid: int) -> Doing:
    """Say what the kernel knows of a process whose stack nobody can tell."""
    state, wchan = "", ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("\0 \n")
    except (OSError, IndexError):
        return Doing("is gone", halted=True) if not state else Doing(f"is in state {state}")
    words = {"T": "was stopped by a signal", "t": "is held by a debugger", "Z": "has ended"}
    inside = f", in the kernel's {wchan}" if wchan not in ("", "0") else ""
    if state == "D":
        return Doing(f"waits for a device or file system, and cannot be interrupted{inside}", halted=True)
    return Doing(words.get(state, f"is in state {state}{inside}"), halted=state in words)


class Life(NamedTuple):
    """What a process has used."""

    cpu_s: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    switches: int | None = None  # of the main thread, which went to sleep so often; None: not known
    in_device: bool = False  # it waits for one, or for a file system, and cannot be interrupted


def of_life(pid: int) -> Life:
    """Return what a process has used so far; nothing where the kernel does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status, io = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "io"))
    except (OSError, IndexError, ValueError):
        return Life()
    read, written = (re.search(rf"^{name}: (\d+)", io, re.MULTILINE) for name in ("rchar", "wchar"))
    slept = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    return Life(
        cpu_s,
        int(read[1]) if read else 0,
        int(written[1]) if written else 0,
        int(slept[1]) if slept else None,
        fields[0] == "D",
    )


def lives(before: Life, after: Life) -> bool:
    """Tell whether a process whose stack nobody can tell does something: it computes, or reads.

    >>> lives(Life(1.0, 0), Life(3.9, 0)), lives(Life(1.0, 0), Life(1.0, 2**20)), lives(Life(1.0, 7), Life(1.01, 9))
    (True, True, False)
    """
    return after.cpu_s - before.cpu_s >= CPU_SHARE * APART_S or after.bytes_read - before.bytes_read >= READ_LEAST


def rests(before: Life, after: Life) -> bool:
    """Tell whether a process is sure to have done nothing; not so where the kernel does not say enough.

    >>> rests(Life(1.0, 7, 7, 100), Life(1.0, 9, 7, 103)), rests(Life(1.0, 7, 7, 100), Life(1.0, 9, 7, 300))
    (True, False)
    >>> rests(Life(), Life())
    False
    """
    if before.switches is None or after.switches is None or after.in_device:
        return False
    return (
        after.cpu_s - before.cpu_s < IDLE_CPU_SHARE * APART_S
        and after.bytes_read - before.bytes_read < READ_LEAST
        and after.bytes_written - before.bytes_written < READ_LEAST
        and after.switches - before.switches < IDLE_SWITCHES
    )


def _by_py_spy(program: str, pid: int, path: Path) -> tuple[Frame, ...]:
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DUMP_WITHIN_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == 0:
            with path.open("a", encoding="utf-8") as file:
                file.write(done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return of_py_spy(done.stdout) if done.returncode == 0 else ()


def _signal(pid: int) -> bool:
    try:
        os.kill(pid, stacks.SIGNAL)
    except OSError:
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
