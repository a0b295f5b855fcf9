"""What NCCL's flight recorders wrote when a collective timed out, of all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stepkeeper.store.logs import STACKS_NAME
from stepkeeper.verdict import collectives
from stepkeeper.verdict.causes import Cause, Evidence, Plane, Role
from stepkeeper_trainer.formats.collectives import (
    NCCL_DUMP_BYTES_MAX,
    NCCL_DUMP_NAME,
    Place,
    nccl_dump_file,
    parse_nccl_dump,
    reduce_parsed,
)
from stepkeeper_trainer.formats.decoding import DecodeError
from stepkeeper_trainer.formats.plain import open_plain

FILES_MAX = 256  # of a launch: of a thousand ranks most say the same
RULE = "nccl-flight-recorder"
CONFIDENCE = 0.4


def recorded_evidence(directory: Path, enough: Callable[[], bool]) -> list[Evidence]:
    """Return who waited for whom, where the ranks of a launch have written dumps.

    Args:
        directory: of the launch's logs.
        enough: asked before each file; true ends the reading.

    Raises:
        OSError: one of them is there and cannot be read.
    """
    places: dict[int, tuple[Place, ...]] = {}
    for rank, path in _files(directory / STACKS_NAME):
        if enough():
            break
        with open_plain(path, within=directory) as file:
            data = file.read(NCCL_DUMP_BYTES_MAX + 1)
        try:
            places[rank] = reduce_parsed(parse_nccl_dump(data))
        except DecodeError:
            continue  # a rank that was killed while it wrote, or what is no dump
    standstills = collectives.compare(places)
    text = collectives.in_words(standstills, places)
    if not text:
        return []
    return [
        Evidence(
            plane=Plane.APPLICATION,
            rule=RULE,
            cause=Cause.COLLECTIVE_TIMEOUT,
            role=Role.CONFIRMATION,
            confidence=CONFIDENCE,
            text=text,
            rank=collectives.find_suspect(standstills),
        )
    ]


def _files(directory: Path) -> Iterator[tuple[int, Path]]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return
    ranks = [name.removeprefix(NCCL_DUMP_NAME) for name in names if name.startswith(NCCL_DUMP_NAME)]
    for rank in sorted(int(each) for each in ranks if each.isdecimal())[:FILES_MAX]:
        yield rank, nccl_dump_file(directory, rank)
