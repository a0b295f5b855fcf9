"""`asks/`: what a person asks of a run that is under way, and what the supervisor answered.

One small file an ask, beside the journal: whoever may write the run directory may ask, and nothing else has to be open.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from stepkeeper.store import lines
from stepkeeper_trainer.formats.durable import write_atomically

DIRECTORY = "asks"
ANSWERED = ".answer"
FORMAT = 1
BYTES_MAX = 4096

Kind = Literal["save", "stop"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
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


def write(run_directory: Path, ask: Ask) -> str:
    """Put an ask there, and return its name.

    Raises:
        OSError: the run directory cannot be written.
    """
    directory = run_directory / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    name = f"{ask.kind}-{secrets.token_hex(6)}"
    write_atomically(directory / name, msgspec.json.encode(ask))
    return name


def withdraw(run_directory: Path, name: str) -> bool:
    """Take an ask back that nobody has answered; false where it is answered."""
    try:
        (run_directory / DIRECTORY / name).unlink()
    except FileNotFoundError:
        return False
    return True


def waiting(run_directory: Path, job_id: int) -> dict[str, Ask]:
    """Return the asks of a job that are not answered, by name; those of others than the owner do not count.

    Raises:
        OSError: the directory cannot be listed.
    """
    directory = run_directory / DIRECTORY
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(("save-", "stop-")))
    except FileNotFoundError:
        return {}
    found = {}
    for name in names:
        if name.endswith(ANSWERED):
            continue
        try:
            with lines.open_plain(directory / name) as file:
                if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):
                    continue
                ask = msgspec.json.decode(file.read(BYTES_MAX), type=Ask)
        except (OSError, msgspec.MsgspecError):
            continue  # withdrawn meanwhile, or not an ask
        if ask.job_id == job_id and ask.format == FORMAT:
            found[name] = ask
    return found


def answer(run_directory: Path, name: str, answered: Answer) -> None:
    """Answer an ask; from then on it does not wait.

    Raises:
        OSError: the answer could not be written.
    """
    directory = run_directory / DIRECTORY
    write_atomically(directory / f"{name}{ANSWERED}", msgspec.json.encode(answered))
    (directory / name).unlink(missing_ok=True)


def read_answer(run_directory: Path, name: str) -> Answer | None:
    """Return the answer and forget it; None before it is there."""
    path = run_directory / DIRECTORY / f"{name}{ANSWERED}"
    try:
        answered = msgspec.json.decode(lines.read_small(path, BYTES_MAX), type=Answer)
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return answered
