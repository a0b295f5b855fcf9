"""Which system calls a process's main thread makes, for a moment: traced as debuggers do.

Only a rank that was seen to sleep is traced.  It goes on as before once it is let go.  The kernel lets it go by itself
when the thread that traces it ends, however that comes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time

from stepkeeper.watcher.kernel import name_of_call

POLL_S = 0.005
CALLS_MAX = 64
LET_GO_WITHIN_S = 1.0
_SYSCALL, _DETACH, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 17, 0x4206, 0x4207, 0x420E
_SYSGOOD = 1  # the option: stops at system calls can be told from SIGTRAP
_AT_CALL = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_INFO = struct.Struct("=B3xIQQQ")  # op, architecture, instruction and stack pointers, number: linux/ptrace.h
_ENTRY = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def calls_made(pid: int, seconds: float) -> tuple[str, ...] | None:
    """Return the names of the system calls that a process's main thread begins in a time, the newest last.

    The first one may be the call that it was in, begun anew.  Who makes many is let go early.

    None where that cannot be told: the site does not allow it, the kernel is older than 5.3, a debugger has the
    process, it was stopped, or it ended.
    """
    if _libc.ptrace(_SEIZE, pid, None, _SYSGOOD) < 0:
        return None
    until = time.monotonic() + seconds
    seen: list[str] = []
    passed_on = 0
    _libc.ptrace(_INTERRUPT, pid, None, None)
    while len(seen) < CALLS_MAX and (status := _next_stop(pid, until)) is not None:
        if not os.WIFSTOPPED(status):
            return None
        number, event = os.WSTOPSIG(status), status >> 16
        if event and number != signal.SIGTRAP:  # it was stopped by a signal, for all to see
            _let_go(pid, 0)
            return None
        passed_on = 0 if event or number == _AT_CALL else number
        if number == _AT_CALL and not _take_in(pid, seen):
            _let_go(pid, 0)
            return None
        _libc.ptrace(_SYSCALL, pid, None, passed_on)
    _libc.ptrace(_INTERRUPT, pid, None, None)
    status = _next_stop(pid, time.monotonic() + LET_GO_WITHIN_S)
    if status is None or not os.WIFSTOPPED(status):
        return None
    number = os.WSTOPSIG(status)
    _let_go(pid, 0 if status >> 16 or number == _AT_CALL else number)
    return tuple(seen)


def _next_stop(pid: int, until: float) -> int | None:
    """Return the status of a process that has stopped for us, or ended; None where it has not by then."""
    while time.monotonic() < until:
        try:
            done, status = os.waitpid(pid, os.WNOHANG | _WALL)
        except ChildProcessError:  # it is gone, and its parent knows
            return 0
        if done:
            return status
        time.sleep(POLL_S)
    return None


def _take_in(pid: int, seen: list[str]) -> bool:
    info = ctypes.create_string_buffer(_INFO.size)
    if _libc.ptrace(_GET_SYSCALL_INFO, pid, _INFO.size, info) < _INFO.size:
        return False
    operation, _, _, _, number = _INFO.unpack(info.raw)
    if operation == _ENTRY:
        seen.append(name_of_call(number))
    return True


def _let_go(pid: int, passed_on: int) -> None:
    """Have a process that has stopped for us go on, with the signal that it is about to get."""
    _libc.ptrace(_DETACH, pid, None, passed_on)
