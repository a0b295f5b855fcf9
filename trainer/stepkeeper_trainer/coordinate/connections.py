"""Connections between ranks: the kernel looks after them, and there must be room for them.

Connections end when the node at their other end is gone.  The kernel closes what a dead process had open.  A node
without power, or without a network, closes nothing, and a rank that waits for its message waits for good.  `probe` has
our kernel ask for an answer from each peer's kernel, which also answers for a process that stands still.  A connection
that stays silent for `LOST_AFTER_S` is closed, and the rank that waits on it gets an error.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_S = 20  # without a word, then the other end is asked
ASK_EVERY_S = 8
QUESTIONS = 5
LOST_AFTER_S = IDLE_S + QUESTIONS * ASK_EVERY_S
"""Silence of a peer's kernel until its connections are closed; a switch that restarts is back by then."""

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_ours: dict[int, str] = {}  # descriptor to what it was: a number may be another's by now


@contextmanager
def noted() -> Iterator[None]:
    """Take note of the connections that are made within: those that `probe` is about."""
    before = _sockets()
    yield
    made = {number: name for number, name in _sockets().items() if before.get(number) != name}
    with _lock:
        _ours.update(made)


def probe() -> int:
    """Have the kernel look after the connections that were noted and are still open; return how many these are."""
    now = _sockets()
    with _lock:
        for number in [number for number, name in _ours.items() if now.get(number) != name]:
            del _ours[number]
        return sum(_probe(number) for number in _ours)


def _probe(number: int) -> bool:
    """Ask for probes of an idle connection, and for an end to one whose words are not taken; false for no TCP."""
    return (
        _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS)
        and _set(number, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)
        and _set(number, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    )


def _set(number: int, level: int, option: int, value: int) -> bool:
    """Set an option of a socket by its number: Python's own object would change whether it blocks."""
    data = ctypes.c_int(value)
    return not _libc.setsockopt(number, level, option, ctypes.byref(data), ctypes.sizeof(data))


def _sockets() -> dict[int, str]:
    """Return every socket of this process: its descriptor, and what the kernel calls it."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            found[int(entry.name)] = name
    return found


def make_room(descriptors: int) -> None:
    """Raise this process's soft limit of open files where fewer than so many more would fit, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # none is free to look
        used = max(0, soft)
    wanted = used + descriptors
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
