"""`rescues.jsonl`: watchers that had the job run again because its supervisor was gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stepkeeper.store import lines
from stepkeeper_trainer.formats.plain import open_plain

RESCUES_NAME = "rescues.jsonl"


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    at: float  # Unix seconds
    job_id: int
    restart_count: int
    node: str


def read(run_directory: Path) -> Iterator[Rescued]:
    """Return the rescues of a run, oldest first; a line torn by a crash is passed over.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        file = open_plain(run_directory / RESCUES_NAME, within=run_directory)
    except FileNotFoundError:
        return
    with file:
        for line in lines.forwards(file):
            try:
                yield msgspec.json.decode(line, type=Rescued)
            except (ValueError, RecursionError):
                continue
