"""`worlds.jsonl` of the run directory: how many ranks each launch has, for checkpoints that do not say it.

Only launches of a script with another framework are noted: our own manifests say how many ranks saved them.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stepkeeper_trainer.formats.durable import append_line
from stepkeeper_trainer.formats.plain import open_descriptor

NAME = "worlds.jsonl"
BYTES_MAX = 256 * 1024  # that are read: some thousand launches, the newest


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a launch; what was written since it began, and before the next one, is by them."""

    at: float  # Unix seconds
    attempt: int
    launch: int
    ranks: int | None  # None: CMD chooses their number


def note(run: Path, world: World) -> None:
    """Note a launch that begins.  Raises OSError."""
    append_line(run / NAME, msgspec.json.encode(world))


def read(run: Path) -> tuple[World, ...]:
    """Return the newest launches, the oldest of them first; lines that do not parse are passed over.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        descriptor = open_descriptor(run / NAME, within=run)
    except FileNotFoundError:
        return ()
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, BYTES_MAX, max(0, size - BYTES_MAX))
    finally:
        os.close(descriptor)
    found = []
    for line in data.split(b"\n"):
        try:
            found.append(msgspec.json.decode(line, type=World))
        except msgspec.MsgspecError:
            continue  # torn, or the beginning of it was not read
    return tuple(sorted(found, key=lambda world: world.at))
