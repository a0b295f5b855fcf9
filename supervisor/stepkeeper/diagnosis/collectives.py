"""Where ranks are in their collectives, compared: what each waits in, and who has not come.  Pure.

A collective ends when all ranks of its group have entered it.  Its number counts alike on all of them, so the oldest
open number of a group names the collective that stands still, and the newest number of each rank shows who has not
entered it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis.classify import Evidence, Plane, Role
from stepkeeper.run_store.paths import STACKS_NAME
from stepkeeper_trainer.formats.collectives import (
    NCCL_DUMP_BYTES_MAX,
    NCCL_DUMP_NAME,
    Place,
    expand,
    nccl_dump_file,
    parse_nccl_dump,
    reduce_parsed,
)
from stepkeeper_trainer.formats.plain import DecodeError, open_plain

SHOWN_MAX = 2  # groups in a summary
RANKS_SHOWN_MAX = 6
_DEFAULT = "default_pg"  # what torch calls the group of all ranks
_SAME_SHAPE = ("all_reduce", "allreduce", "broadcast", "reduce")  # on all ranks; others may differ by rank


class Absent(NamedTuple):
    """A rank that has not entered a collective that others wait in."""

    rank: int
    last: int | None  # the newest that it entered in this group; None: none at all, as far as its recorder reaches
    op: str


class Standstill(NamedTuple):
    """A collective of one group that has not ended."""

    group: str  # in words
    number: int
    waiting: Mapping[tuple[str, str], tuple[int, ...]]  # operation and shape -> ranks that wait in it
    queued: tuple[int, ...]  # of those: their GPUs have not begun it, and others' have
    absent: tuple[Absent, ...]
    unheard: tuple[int, ...]  # members that gave no account
    issued: bool = False  # known by NCCL's counts of what was issued alone

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that wait."""
        return tuple(sorted(rank for ranks in self.waiting.values() for rank in ranks))

    @property
    def suspects(self) -> tuple[int, ...]:
        """Those that the others wait for, the surest kind that there is."""
        return tuple(each.rank for each in self.absent) or self.unheard or self.queued


def compare(places: Mapping[int, Sequence[Place]], ranks: Iterable[int] = ()) -> tuple[Standstill, ...]:
    """Return the collectives that stand still, those first that somebody has not come to.

    Args:
        places: by rank; a rank that gave no account is not in it.
        ranks: all that were asked.
    """
    asked = set(ranks) | set(places)
    groups: dict[tuple[str, str, str], dict[int, Place]] = defaultdict(dict)
    for rank, own in places.items():
        for place in own:
            if not place.direct:
                groups[place.group, place.what, place.members][rank] = place
    found = []
    for (group, what, members), known in groups.items():
        of_group = expand(members) & asked or (frozenset(asked) if what == _DEFAULT else frozenset(known))
        still = _standstill(_name(group, what), of_group, known, places)
        if still is not None:
            found.append(still)
    return tuple(sorted(found, key=lambda each: (not each.suspects, -len(each.ranks), each.group)))


def _standstill(
    group: str, members: frozenset[int], known: Mapping[int, Place], places: Mapping[int, Sequence[Place]]
) -> Standstill | None:
    number = min((place.at for place in known.values() if place.at is not None), default=None)
    if number is None:
        return None
    waiting: dict[tuple[str, str], list[int]] = defaultdict(list)
    queued, begun = [], False
    for rank, place in sorted(known.items()):
        if place.at == number:
            waiting[place.op, place.shape if place.op in _SAME_SHAPE else ""].append(rank)
            queued += [rank] if place.queued else []
            begun = begun or not place.queued
    absent = [Absent(rank, place.last, place.last_op) for rank, place in known.items() if place.last < number]
    absent += [Absent(rank, None, "") for rank in members if rank in places and rank not in known]
    return Standstill(
        group=group,
        number=number,
        waiting={key: tuple(ranks) for key, ranks in waiting.items()},
        queued=tuple(queued) if begun else (),
        absent=tuple(sorted(absent)),
        unheard=tuple(sorted(rank for rank in members if rank not in places)),
        issued=any(place.issued for place in known.values()),
    )


def _name(group: str, what: str) -> str:
    if what == _DEFAULT:
        return "the default group"
    return f"group {what} ({group})" if what else f"group {group}"


def find_suspect(standstills: Sequence[Standstill]) -> int | None:
    """Return the one rank that others wait for; None where it is not one, or nobody waits for anybody.

    Ranks that wait in one group may be those that another group waits for: the one that waits nowhere counts.
    """
    waits = {rank for each in standstills for rank in each.ranks}
    suspects = {rank for each in standstills for rank in each.suspects}
    left = suspects - waits or suspects
    return min(left) if len(left) == 1 else None


def in_words(standstills: Sequence[Standstill], places: Mapping[int, Sequence[Place]]) -> str:
    """Say it: an empty text where every collective that was entered has ended."""
    words = [_of_group(each) for each in standstills[:SHOWN_MAX]]
    if len(standstills) > SHOWN_MAX:
        words.append(f"{len(standstills) - SHOWN_MAX} other groups wait too")
    direct: dict[str, list[int]] = defaultdict(list)
    for rank, own in sorted(places.items()):
        for place in own:
            if place.direct and place.at is not None:
                direct[f"{place.op} of {_name(place.group, place.what)}"].append(rank)
    words += [f"{_ranks(ranks)} in {what}" for what, ranks in list(direct.items())[:SHOWN_MAX]]
    return "; ".join(words)


def _of_group(still: Standstill) -> str:
    of = f"#{still.number} of {still.group}"
    kinds = sorted(still.waiting.items(), key=lambda item: (-len(item[1]), item[0]))
    if len(kinds) > 1:
        one_op = len({op for (op, _), _ in kinds}) == 1
        differ = [f"{_ranks(ranks)} in {_op(op, shape if one_op else '')}" for (op, shape), ranks in kinds]
        return f"the ranks disagree at {of}: {', '.join(differ)}"
    (((op, _), ranks),) = kinds
    if not still.suspects:
        return f"all {len(ranks)} known ranks have entered {op} {of}, and it does not end"
    words = [f"{_ranks(ranks)} in {op} {of}"]
    behind: dict[tuple[int | None, str], list[int]] = defaultdict(list)
    for each in still.absent:
        behind[each.last, each.op].append(each.rank)
    for (last, before), late in behind.items():
        has = "has" if len(late) == 1 else "have"
        newest = "it has entered none" if last is None else f"the newest it entered is {before} #{last}"
        words.append(f"{_numbers(late)} {has} not entered it ({newest})")
    if still.unheard:
        words.append(f"{_numbers(still.unheard)} {'does' if len(still.unheard) == 1 else 'do'} not answer")
    if still.queued:
        words.append(f"on {_numbers(still.queued)} the GPU has not begun it")
    return ", ".join(words)


def _op(op: str, shape: str) -> str:
    return f"{op} of {shape}" if shape else op


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_numbers(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _numbers(ranks: Sequence[int]) -> str:
    """Name ranks, neighbours together.

    >>> _numbers([3]), _numbers([0, 1, 3]), _numbers([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0, 1, 3', 'ranks 0 to 3, 7')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = []
    for span in spans:
        words += [f"{span[0]} to {span[1]}"] if span[-1] - span[0] > 1 else [str(each) for each in span]
    if len(words) > RANKS_SHOWN_MAX:
        return f"{len(ranks)} ranks ({', '.join(words[:RANKS_SHOWN_MAX])} ...)"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


# What NCCL's flight recorders wrote when a collective timed out, of all ranks together.

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
    standstills = compare(places)
    text = in_words(standstills, places)
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
            rank=find_suspect(standstills),
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
