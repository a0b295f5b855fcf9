"""Process groups of the library itself, and connections that end when the node at their other end is gone.

The kernel closes what a dead process had open.  A node without power, or without a network, closes nothing, and
whoever waits for its word waits for good.  `probe` has our kernel ask for an answer from each peer's kernel, which also
answers for a process that stands still: what stays silent for `LOST_AFTER_S` is closed, and who waits on it is told.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from stepkeeper_trainer.environment import find_place
from stepkeeper_trainer.errors import UsageError

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


def find_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        UsageError: it is one of several, and torch.distributed is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = find_place()
    if place is not None and place.world_size > 1:
        raise UsageError(
            f"this is rank {place.rank} of {place.world_size}, and torch.distributed is not initialised: "
            "call stepkeeper_trainer.start_distributed() first"
        )
    return 0, 1


USUAL_LIMIT_S = 1800.0  # torch's own for gloo
CONNECT_WITHIN_S = 60.0  # ranks that are slow to come make no launch fail, however short a save may be


def hang_limit_s() -> float:
    """Return how long torch itself lets a collective of the script wait, in seconds."""
    if dist.is_available() and dist.is_initialized():
        for device in ("cuda", "cpu"):
            with suppress(AttributeError, RuntimeError):  # no backend for it, or one without options
                backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device))  # noqa: SLF001
                return float(backend.options._timeout.total_seconds())  # noqa: SLF001
    return USUAL_LIMIT_S


def close(*own: Any | None) -> None:
    """End groups of the library: torch's threads would else outlive the interpreter, and abort the process."""
    for group in own:
        if group is not None:
            dist.destroy_process_group(group)


def new_group(within_s: float) -> Any | None:
    """Make a gloo group of all ranks; None without torch.distributed.  All ranks call it in one order."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    with noted():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=max(within_s, CONNECT_WITHIN_S)))
