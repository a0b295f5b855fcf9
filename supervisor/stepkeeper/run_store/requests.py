"""`asks/`: what a person asks of a run that is under way, and what the supervisor answered.

One small file a request, beside the journal: write access to the run directory is the permission to ask, and no port
has to be open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import DecodeError, decode, open_directory, read_plain

T = TypeVar("T")

DIRECTORY = "asks"
ANSWERED = ".answer"
FORMAT = 1
BYTES_MAX = 4096

Kind = Literal["save", "stop"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants."""

    kind: Kind
    job_id: int  # of the job that is meant: an ask that came too late must not stop the next one
    at: float
    by: str = ""
    format: int = FORMAT


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    said: str
    ok: bool
    at: float


def write(run_directory: Path, ask: Request) -> str:
    """Put an ask there, and return its name.

    Raises:
        OSError: the run directory cannot be written, or the directory of asks is not one that its owner made.
    """
    name = f"{ask.kind}-{secrets.token_hex(6)}"
    _make(run_directory)
    # the run's owner reads what root has asked; nobody else comes into this directory
    write_atomically(run_directory / DIRECTORY / name, msgspec.json.encode(ask), mode=0o644, within=run_directory)
    return name


def withdraw(run_directory: Path, name: str) -> bool:
    """Take an ask back that nobody has answered; false where it is answered.  Raises OSError."""
    try:
        with _opened(run_directory) as directory:
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def waiting(run_directory: Path, job_id: int) -> dict[str, Request]:
    """Return the asks of a job that are not answered, by name; those of others than the owner do not count.

    Raises:
        OSError: the directory cannot be listed.
    """
    try:
        with _opened(run_directory) as directory:
            names = sorted(name for name in os.listdir(directory) if name.startswith(("save-", "stop-")))
    except FileNotFoundError:
        return {}
    found = {}
    for name in names:
        if name.endswith(ANSWERED):
            continue
        try:
            ask = _read(run_directory, name, Request)
        except (OSError, DecodeError):
            continue  # withdrawn meanwhile, not an ask, or a stranger's
        if ask.job_id == job_id and ask.format == FORMAT:
            found[name] = ask
    return found


def answer(run_directory: Path, name: str, answered: Answer) -> None:
    """Answer an ask; from then on it does not wait.

    Raises:
        OSError: the answer could not be written.
    """
    path = run_directory / DIRECTORY / f"{name}{ANSWERED}"
    write_atomically(path, msgspec.json.encode(answered), within=run_directory)
    withdraw(run_directory, name)


def read_answer(run_directory: Path, name: str) -> Answer | None:
    """Return the answer and forget it; None before it is there.

    Raises:
        OSError: it is there and cannot be read.
        DecodeError: it is no answer.
    """
    try:
        answered = _read(run_directory, f"{name}{ANSWERED}", Answer)
    except FileNotFoundError:
        return None
    withdraw(run_directory, f"{name}{ANSWERED}")
    return answered


def _read(run_directory: Path, name: str, kind: type[T]) -> T:
    """Read an ask or an answer.  Raises OSError or DecodeError."""
    data = read_plain(run_directory / DIRECTORY / name, BYTES_MAX, within=run_directory)
    return decode(msgspec.json.Decoder(kind), data)


def _make(run_directory: Path) -> None:
    """Make the directory of asks, as the run's owner would.  Raises OSError."""
    try:
        os.mkdir(run_directory / DIRECTORY, mode=0o700)
    except FileExistsError:
        return  # of what kind, and whose, is looked at when it is opened
    owner = os.stat(run_directory)
    if owner.st_uid != os.geteuid():  # root asks
        with _opened(run_directory) as directory:
            if not os.listdir(directory):  # else it is another one by now
                os.fchown(directory, owner.st_uid, owner.st_gid)


@contextlib.contextmanager
def _opened(run_directory: Path) -> Iterator[int]:
    """Give a descriptor of the directory of asks.  Raises OSError."""
    descriptor = open_directory(run_directory / DIRECTORY, within=run_directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
