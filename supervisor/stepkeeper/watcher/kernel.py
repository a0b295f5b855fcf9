"""What the kernel says of a rank: its state, what it has used, and the system call that it is in.

All of it is there for the processes' own user; system calls where the site lets that user trace them (as py-spy needs).
"""

from __future__ import annotations

import os
import re
import select
import struct
import time
from pathlib import Path
from typing import NamedTuple

from stepkeeper.watcher.frames import Doing

CPU_SHARE = 0.2  # of the time between two looks: less is what idle threads use
READ_LEAST = 64 * 1024
IDLE_CPU_SHARE = 0.05  # what else runs in an idle rank: heartbeats, threads that look around
IDLE_SWITCHES = 50  # of the main thread: who is busy with a network or a device sleeps and wakes oftener
THREADS_MAX = 128  # in an account
CHILDREN_MAX = 64
FAMILY_MAX = 256  # processes below a rank; of more nothing is concluded
FOREVER_S = 1e9  # what only another process ends
_TIMER_ABSTIME = 1
_TIMESPEC = struct.Struct("qq")
_POLLED = struct.Struct("ihh")  # descriptor, what is waited for, what has come
PATH_MAX = 80  # characters of a path in words

# calls in which a process may stand: (x86_64, aarch64)
_OF_A_FILE = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "fsync": (74, 82), "fdatasync": (75, 83), "ioctl": (16, 29), "fcntl": (72, 25), "flock": (73, 32),
    "fstat": (5, 80), "close": (3, 57), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "connect": (42, 203), "accept": (43, 202), "getdents64": (217, 61), "ftruncate": (77, 46),
}  # fmt: skip
_OTHERS = {
    "openat": (257, 56), "newfstatat": (262, 79), "statx": (332, 291), "ppoll": (271, 73), "pselect6": (270, 72),
    "epoll_pwait": (281, 22), "futex": (202, 98), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "wait4": (61, 260), "waitid": (247, 95), "msync": (26, 227), "munmap": (11, 215), "mkdirat": (258, 34),
    "unlinkat": (263, 35), "renameat": (264, 38), "io_getevents": (208, 4), "io_uring_enter": (426, 426),
}  # fmt: skip
_ONLY_X86 = {2: "open", 4: "stat", 6: "lstat", 7: "poll", 23: "select", 34: "pause", 82: "rename", 232: "epoll_wait"}
_PLAIN_WAITS = {
    "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "futex", "nanosleep", "clock_nanosleep",
}  # fmt: skip
_KINDS = {"pipe:": "a pipe", "socket:": "a socket", "anon_inode:[eventpoll]": "an epoll"}


class Call(NamedTuple):
    """The system call that a thread is in."""

    name: str = ""  # or its number; empty: it runs, or nobody may know
    target: str = ""  # what its descriptor is: a path, `a pipe`

    @property
    def says_something(self) -> bool:
        """More than that the thread sleeps."""
        return bool(self.name) and self.name not in _PLAIN_WAITS

    def __str__(self) -> str:
        shown = self.target if len(self.target) <= PATH_MAX else f"...{self.target[3 - PATH_MAX :]}"
        return f"{self.name} of {shown}" if shown else self.name


def _names() -> dict[int, str]:
    column = {"x86_64": 0, "aarch64": 1}.get(os.uname().machine)
    if column is None:
        return {}
    names = {numbers[column]: name for name, numbers in (_OF_A_FILE | _OTHERS).items()}
    return names | (_ONLY_X86 if column == 0 else {})


_NAMES = _names()


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def call_of(pid: int, thread: int = 0) -> Call:
    """Return the system call that a process's main thread, or another one of its threads, is in."""
    try:
        words = Path(f"/proc/{pid}/task/{thread or pid}/syscall").read_text().split()
        number = int(words[0])
    except (OSError, IndexError, ValueError):  # it runs ("running"), is gone, or is not ours to trace
        return Call()
    if number < 0:
        return Call()
    name = name_of_call(number)
    return Call(name, _target(pid, int(words[1], 16)) if name in _OF_A_FILE and len(words) > 1 else "")


def name_of_call(number: int) -> str:
    """Return the name of a system call, or its number in words."""
    return _NAMES.get(number, f"system call {number}")


class Wait(NamedTuple):
    """A wait that nothing in the process itself ends before its time."""

    what: str
    until: float = 0.0  # seconds of `clock`
    clock: int = time.CLOCK_MONOTONIC

    @property
    def left_s(self) -> float:
        """How long it lasts yet."""
        if self.what == _STOPPED:
            return FOREVER_S
        return min(max(0.0, self.until - time.clock_gettime(self.clock)), FOREVER_S)


_STOPPED = "stopped"
_ASLEEP = "asleep"


def wait_of(pid: int) -> Wait | None:
    """Return what a process's main thread waits for, where that has a certain end: None where it may end at any time.

    It is stopped by a signal; or sleeps until an instant that it has told the kernel, as `time.sleep` does since
    Python 3.11.  A sleep that begins anew each second may be the last one: it has no certain end.
    """
    if state_of(pid) == "T":
        return Wait(_STOPPED)
    try:
        words = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()
        number, clock, flags, request = int(words[0]), *(int(word, 16) for word in words[1:4])
        if _NAMES.get(number) != "clock_nanosleep" or not flags & _TIMER_ABSTIME:
            return None
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            seconds, nanoseconds = _TIMESPEC.unpack(os.pread(memory.fileno(), _TIMESPEC.size, request))
        time.clock_gettime(clock)
    except (OSError, IndexError, ValueError, struct.error, OverflowError):  # it runs, is gone, or is not ours to trace
        return None
    return Wait(_ASLEEP, seconds + nanoseconds / 1e9, clock)


def sure_s(before: Wait | None, after: Wait | None) -> float:
    """Return for how long a process is sure to do nothing, of which two looks saw the same wait.

    >>> sure_s(Wait("stopped"), Wait("stopped")) == FOREVER_S, sure_s(None, Wait("stopped"))
    (True, 0.0)
    """
    return after.left_s if after is not None and before == after else 0.0


def sleeps_less(wait: Wait | None, seconds: float) -> bool:
    """Tell whether a process sleeps, and wakes within a time: from then on nobody knows what it does.

    >>> sleeps_less(Wait("asleep", 0.0), 3.0), sleeps_less(Wait("asleep", 1e12), 3.0), sleeps_less(Wait("stopped"), 3.0)
    (True, False, False)
    """
    return wait is not None and wait.what == _ASLEEP and wait.left_s < seconds


def _target(pid: int, descriptor: int) -> str:
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    for begin, words in _KINDS.items():
        if path.startswith(begin):
            return words
    return path


def of_kernel(pid: int) -> Doing:
    """Say what the kernel knows of a process whose stack cannot be read."""
    state = state_of(pid)
    if not state:
        return Doing("is gone", halted=True)
    try:
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("\0 \n")
    except OSError:
        wchan = ""
    words = {"T": "was stopped by a signal", "t": "is held by a debugger", "Z": "has ended"}
    if state in words:
        return Doing(words[state], halted=True)
    call = call_of(pid)
    inside = f", in the kernel's {wchan}" if wchan not in ("", "0") else ""
    inside += f", in {call}" if call.says_something else ""
    if state == "D":
        where = f"waits for a device or file system, and cannot be interrupted{inside}"
        return Doing(where, halted=True, in_device=True)
    return Doing(f"is in state {state}{inside}")


def worker_that_waits(pid: int) -> str:
    """Say which child of a process (a data loader's worker) waits for a file or device; empty where none does."""
    for child in children(pid):
        call = call_of(child)
        if state_of(child) == "D" or call.target.startswith("/"):
            return f"its process {child} is in {call}" if call.name else f"its process {child} is in state D"
    return ""


def children(pid: int) -> tuple[int, ...]:
    """Return the children of a process; none where the kernel does not list them."""
    found: list[int] = []
    for thread in _threads(pid):
        try:
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except (OSError, ValueError):
            continue
    return tuple(sorted(found)[:CHILDREN_MAX])


def account(pid: int) -> str:
    """Return what the kernel says of each thread of a process and of its children, in lines for a person."""
    lines = [f"What the kernel says of process {pid}:"]
    lines += [_of_thread(pid, thread) for thread in _threads(pid)]
    for child in children(pid):
        lines += [f"What the kernel says of its child {child}:", _of_thread(child, child)]
    return "\n".join(lines) + "\n"


def _of_thread(pid: int, thread: int) -> str:
    place = Path(f"/proc/{pid}/task/{thread}")
    try:
        head, _, tail = (place / "stat").read_text().rpartition(")")
        wchan = (place / "wchan").read_text().strip("\0 \n")
    except OSError:
        return f"    thread {thread} is gone"
    inside = f" in {wchan}" if wchan not in ("", "0") else ""
    call = call_of(pid, thread)
    inside += f", {call}" if call.name else ""
    return f"    thread {thread} {head.partition('(')[2]}: {tail.split()[0]}{inside}{_kernel_stack(place)}"


def _kernel_stack(place: Path) -> str:
    try:
        text = (place / "stack").read_text()
    except OSError:  # for root alone
        return ""
    return "".join(f"\n        {line.rpartition('] ')[2]}" for line in text.splitlines())


def _threads(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:THREADS_MAX]
    except (OSError, ValueError):
        return []


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


def lives(before: Life, after: Life, apart_s: float = 3.0) -> bool:
    """Return whether a process whose stack cannot be read does something: it computes, or reads.

    >>> lives(Life(1.0, 0), Life(3.9, 0)), lives(Life(1.0, 0), Life(1.0, 2**20)), lives(Life(1.0, 7), Life(1.01, 9))
    (True, True, False)
    """
    return after.cpu_s - before.cpu_s >= CPU_SHARE * apart_s or after.bytes_read - before.bytes_read >= READ_LEAST


def rests(before: Life, after: Life, apart_s: float = 3.0) -> bool:
    """Tell whether a process is sure to have done nothing; not so where the kernel does not say enough.

    >>> rests(Life(1.0, 7, 7, 100), Life(1.0, 9, 7, 103)), rests(Life(1.0, 7, 7, 100), Life(1.0, 9, 7, 300))
    (True, False)
    >>> rests(Life(), Life())
    False
    """
    if before.switches is None or after.switches is None or after.in_device:
        return False
    return (
        after.cpu_s - before.cpu_s < IDLE_CPU_SHARE * apart_s
        and after.bytes_read - before.bytes_read < READ_LEAST
        and after.bytes_written - before.bytes_written < READ_LEAST
        and after.switches - before.switches < IDLE_SWITCHES
    )


class Family(NamedTuple):
    """A process, its threads and the processes below it."""

    lives: dict[int, Life]  # of it and each process below it
    waits_for_data: bool  # a thread of theirs is in a device or file system, or waits for a file or one socket


def of_family(pid: int) -> Family | None:
    """Return what a process and those below it have used; None where they are too many."""
    members = [pid]
    for member in members:  # grows meanwhile
        members += [child for child in children(member) if child not in members]
        if len(members) > FAMILY_MAX:
            return None
    waits = any(_waits_for_data(member, thread) for member in members for thread in _threads(member))
    return Family({member: of_life(member) for member in members}, waits)


def _waits_for_data(pid: int, thread: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False  # it has ended
    waits = state == "D" or call_of(pid, thread).target.startswith(("/", "a socket"))
    return waits or _polls_one_socket(pid, thread)


def _polls_one_socket(pid: int, thread: int) -> bool:
    """Tell whether a thread waits for one socket until a time, as Python does where the socket has a timeout.

    Threads of torch, gloo and NCCL always wait: for several at once, by an epoll, or (NCCL's `ncclProxyServiceUDS`)
    for one socket and its end.
    """
    try:
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        number, place, count = int(words[0]), int(words[1], 16), int(words[2], 16)
        if _NAMES.get(number) not in {"poll", "ppoll"} or count != 1:
            return False
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            descriptor, wanted, _ = _POLLED.unpack(os.pread(memory.fileno(), _POLLED.size, place))
    except (OSError, IndexError, ValueError, struct.error, OverflowError):  # it runs, is gone, or is not ours to trace
        return False
    return not wanted & select.POLLHUP and _target(pid, descriptor) == _KINDS["socket:"]


def family_rests(before: Family | None, after: Family | None, apart_s: float, *, traced: int = 0) -> bool:
    """Tell whether a process and all below it are sure to have done nothing, and wait for no data.

    Args:
        before: the first look.
        after: the second one, `apart_s` seconds later.
        apart_s: the seconds between them.
        traced: a process whose system calls are known: tracing itself has it sleep and wake.

    >>> family = Family({7: Life(1.0, 7, 7, 100)}, False)
    >>> family_rests(family, family, 3.0), family_rests(family, family._replace(waits_for_data=True), 3.0)
    (True, False)
    >>> woken = Family({7: Life(1.0, 7, 7, 300)}, False)
    >>> family_rests(family, woken, 3.0), family_rests(family, woken, 3.0, traced=7)
    (False, True)
    """
    if before is None or after is None or before.waits_for_data or after.waits_for_data:
        return False
    if before.lives.keys() != after.lives.keys():
        return False
    if traced in before.lives:
        known = before.lives[traced].switches
        after = after._replace(lives={**after.lives, traced: after.lives[traced]._replace(switches=known)})
    return all(rests(life, after.lives[member], apart_s) for member, life in before.lives.items())
