"""Have a rank tell where it is: Python writes all threads' stacks, and a thread where its collectives are.

The watcher's signal writes into a pipe (Python's faulthandler does, in the signal's handler: no Python code runs), and
that wakes a thread here.  A main thread that waits in a collective or for a GPU has given up the interpreter's lock, so
that this thread runs; one that holds it is told of by its stack alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import threading
from typing import IO, TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.plain import DecodeError
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepkeeper_trainer.environment import Environment


GATHER_S = 0.05  # one request comes in several writes
_PIPE_BYTES = 64 * 1024
_RECORDERS = {"nccl": "_dump_nccl_trace_json", "cpu": "_dump_fr_trace_json"}  # two of them: NCCL's is its own

_opened: list[int] = []  # faulthandler keeps a number only


def listen_for_collectives(directory: Path, rank: int) -> None:
    """Answer the watcher's signal from now on, into the logs of the launch.

    Torch's recorders write nothing down where `TORCH_FR_BUFFER_SIZE` is 0 (before 2.6 that was usual): then the
    account is empty.
    """
    recorders = find_recorders()
    if not recorders or _opened:
        return
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)  # a handler must never wait
    _opened.extend((reader, writer))
    threading.Thread(target=_answer, args=(reader, directory, rank, recorders), name="collectives", daemon=True).start()
    # of all threads: one of native code may get the signal, and has no stack of its own to write
    faulthandler.register(collectives.SIGNAL, file=writer, all_threads=True, chain=False)


def find_recorders() -> dict[str, Callable[[bool, bool], bytes | str]]:
    """Return what dumps each recorder that this torch has; none where it is older than 2.5."""
    if not dist.is_available():
        return {}
    module = torch_module()
    found = {name: getattr(module, function, None) for name, function in _RECORDERS.items()}
    return {name: function for name, function in found.items() if function is not None}


def torch_module() -> object:
    """Return the module of torch that has the recorders."""
    from torch._C import _distributed_c10d  # noqa: PLC0415 - not there in a torch without `distributed`

    return _distributed_c10d


def find_members() -> dict[str, str]:
    """Return the ranks of each group by its name: the recorder of CPU groups does not tell them.

    The library's own alone where this torch keeps its groups elsewhere.
    """
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    try:
        torchs = {name: str(sorted(world.pg_group_ranks[group])) for group, name in list(world.pg_names.items())}
    except (AttributeError, KeyError, TypeError):
        torchs = {}
    return torchs | groups.find_members()


def _answer(reader: int, directory: Path, rank: int, recorders: dict[str, Callable[[bool, bool], bytes | str]]) -> None:
    while os.read(reader, _PIPE_BYTES):
        while select.select([reader], [], [], GATHER_S)[0]:
            os.read(reader, _PIPE_BYTES)
        try:
            write(directory, rank, recorders)
        except (OSError, RuntimeError, DecodeError) as error:  # torch's own errors are RuntimeErrors
            warn("collectives_not_told", why=f"{type(error).__name__}: {error}")


def write(directory: Path, rank: int, recorders: dict[str, Callable[[bool, bool], bytes | str]]) -> None:
    """Write the account of this rank, then what each recorder said itself.

    Raises:
        OSError: the logs cannot be written.
        RuntimeError: torch cannot tell.
        DecodeError: it tells something else than what is known of it.
    """
    dumps = {name: _bytes(dump(True, False)) for name, dump in recorders.items()}  # noqa: FBT003 - torch's names vary
    places = collectives.reduce(((data, name == "nccl") for name, data in dumps.items()), find_members())
    path = collectives.file(directory, rank)
    _replace(path, msgspec.json.encode(collectives.Account(rank=rank, places=places)))
    for name, data in dumps.items():
        if b'"entries"' in data and len(data) <= collectives.RAW_BYTES_MAX:
            _replace(collectives.raw_file(directory, rank, name), data)


def _bytes(said: bytes | str) -> bytes:
    return said if isinstance(said, bytes) else said.encode()


def _replace(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all; it need not survive a lost node."""
    part = path.with_suffix(".part")
    with contextlib.suppress(FileNotFoundError):  # of a request before, cut off
        part.unlink()
    part.write_bytes(data)
    part.replace(path)


_stacks_files: list[IO[str]] = []  # faulthandler keeps the descriptor only


def listen(environment: Environment, run_directory: Path, rank: int) -> None:
    """Answer the watcher's signal from now on; where the logs cannot be written, /proc is left to it."""
    if environment.socket is None:
        return
    path = collectives.stacks_file(run_directory, environment.attempt, environment.launch, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError:
        return  # the run goes on without: the watcher sees that the signal is not caught
    _stacks_files.append(file)
    faulthandler.register(collectives.STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    listen_for_collectives(path.parent.parent, rank)
