"""What ranks do that stand still: the watchers' words about stacks and collectives, put together."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.diagnosis import collectives
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.frames import LOADS, says_it_all
from stepkeeper_trainer.formats.collectives import Place, expand

SHOWN_MAX = 4  # kinds of what ranks do, in the summary
RANKS_SHOWN_MAX = 4


class StackCollector:
    """Collects the answers to one request; `StacksCollected` comes when every node has answered, or time is up.

    `Suspected` comes before, where a rank does nothing at the first of the two looks.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._number = 0
        self._wanted: do.CollectStacks | None = None
        self._missing: set[str] = set()
        self._stood: list[lines.Stood] = []
        self._below: dict[int, str] = {}  # by rank
        self._suspected = False  # that the launch hangs, by its first look
        self._places: dict[int, list[Place]] = defaultdict(list)

    def begin(self, wanted: do.CollectStacks) -> int:
        """Begin a request and return its number, for the watchers."""
        with self._lock:
            self._number += 1
            self._wanted, self._missing, self._stood, self._below = wanted, set(wanted.nodes), [], {}
            self._places, self._suspected = defaultdict(list), False
            number = self._number
        timer = threading.Timer(wanted.within_s, lambda: self._end(number))
        timer.daemon = True
        timer.start()
        return number

    def receive(self, word: lines.OfStacks) -> None:
        """Take in a watcher's word, on a thread of the bus."""
        with self._lock:
            if word.number != self._number:
                return
            if isinstance(word, lines.Stood):
                self._stood.append(word)
                return
            if isinstance(word, lines.DoesNothing):
                suspected, self._suspected = not self._suspected, True
                if suspected:
                    self._inbox.put(on.Suspected(at=self._inbox.clock.now(), nodes=(word.node,), rank=word.rank))
                return
            if isinstance(word, lines.StoodBelow):
                self._below[word.rank] = word.where
                return
            if isinstance(word, lines.Entered):
                for rank in expand(word.ranks) | {word.rank}:
                    self._places[rank].append(word.place)
                return
            self._missing.discard(word.node)
            complete = not self._missing
        if complete:
            self._end(word.number)

    def _end(self, number: int) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None or number != self._number:
                return
            self._wanted = None
            said = sorted(self._stood, key=lambda each: each.rank)
            stood, missing = [with_below(each, self._below.get(each.rank, "")) for each in said], sorted(self._missing)
            places = dict(self._places)
        standstills = collectives.compare(places, (each.rank for each in stood)) if places else ()
        standstills = recorded_first(standstills)
        trusted = trust(standstills, stood)
        suspect = find_suspect(stood, collectives.find_suspect(trusted))
        unanswered = [node for node in missing if node not in {each.node for each in stood}]
        known = bool(stood) and not missing
        words = (summarise(stood, unanswered), collectives.in_words(standstills, places))
        self._inbox.put(
            on.StacksCollected(
                at=self._inbox.clock.now(),
                launch=wanted.launch,
                moved=any(each.moved for each in stood),
                idle=known and all(each.idle or each.waits for each in stood),
                summary="; ".join(word for word in words if word),
                rank=suspect.rank if suspect is not None else None,
                node=suspect.node if suspect is not None else "",
                sure_s=find_sure_s(stood, trusted) if known else 0.0,
                awaited=known and is_awaited(stood, trusted),
            )
        )


def recorded_first(standstills: Sequence[collectives.Standstill]) -> tuple[collectives.Standstill, ...]:
    """Return what the flight recorders know; NCCL's own counts only where they know nothing."""
    return tuple(each for each in standstills if not each.issued) or tuple(standstills)


def trust(
    standstills: Sequence[collectives.Standstill], stood: Sequence[lines.Stood]
) -> tuple[collectives.Standstill, ...]:
    """Return what tells who is late: NCCL's own counts only of ranks that are known not to wait for their GPU.

    NCCL counts what a rank has issued.  One that waits for its GPU in `loss.item()` has issued less than those that
    have queued more.  Its Python stack does not show that: it ends in the user's code.
    """
    free = {
        each.rank for each in stood if not each.waits and (each.halted or each.sleeps or each.sure_s or loads(each))
    }
    return tuple(each for each in standstills if not each.issued or set(each.suspects) <= free)


def loads(stood: lines.Stood) -> bool:
    """Tell whether a rank waits for data."""
    return stood.where.startswith(LOADS)


def find_sure_s(stood: Sequence[lines.Stood], standstills: Sequence[collectives.Standstill] = ()) -> float:
    """Return for how long the training is sure to stand still: a rank cannot go on, and all others wait for ranks.

    Where a rank is stopped, the others need only do nothing: a script without the trainer library says no more.
    """
    sure = [each for each in stood if each.sure_s and not each.moved]
    others = [each for each in stood if each not in sure]
    if not sure:
        return 0.0
    waiting = _find_waiting({each.rank for each in sure}, others, standstills)
    stopped = any(each.halted for each in sure)
    if any(each.moved or not (each.rank in waiting or (stopped and each.idle)) for each in others):
        return 0.0
    # all of them sleep: a script that waits for its hour; all are stopped: by who goes on with all
    if not others and (not stopped or len(sure) > 1):
        return 0.0
    return max(each.sure_s for each in sure)


def is_awaited(stood: Sequence[lines.Stood], standstills: Sequence[collectives.Standstill] = ()) -> bool:
    """Tell whether one rank only sleeps, and each of the others waits in a collective that it has not come to."""
    asleep = [each for each in stood if each.sleeps and not each.moved]
    others = [each for each in stood if each not in asleep]
    if len(asleep) != 1 or not others or any(each.moved for each in others):
        return False
    late = asleep[0].rank
    if standstills and collectives.find_suspect(standstills) != late:  # the recorders know of somebody else, or nothing
        return False
    return _find_waiting({late}, others, standstills) == {each.rank for each in others}


def _find_waiting(
    late: set[int], others: Sequence[lines.Stood], standstills: Sequence[collectives.Standstill]
) -> set[int]:
    """Return which others wait for ranks: by their stacks, or for those that are late by the flight recorders."""
    waiting = {rank for still in standstills if late & set(still.suspects) for rank in still.ranks}
    by_stack = {each.rank for each in others if each.waits and (each.idle or says_it_all(each.where))}
    return {each.rank for each in others} & (waiting | by_stack)


def with_below(stood: lines.Stood, below: str) -> lines.Stood:
    """Add what native code and the kernel do for a rank."""
    return msgspec.structs.replace(stood, where=f"{stood.where}, {below}") if below else stood


def find_suspect(stood: list[lines.Stood], by_collectives: int | None = None) -> lines.Stood | None:
    """Return the rank that others wait for; None where that is not known.

    What the collectives say comes first: on a GPU a stack shows where the program is, which is ahead of its work.
    """
    kinds = (
        [each for each in stood if each.rank == by_collectives],
        [each for each in stood if each.halted],
        [each for each in stood if not each.waits],
    )
    suspects = next((kind for kind in kinds if kind), [])
    return suspects[0] if suspects and len(suspects) < max(2, len(stood)) else None


def summarise(stood: list[lines.Stood], missing: list[str]) -> str:
    """Say what the ranks do, those first that do not wait for others.

    >>> word = lines.Stood(node="a", number=1, rank=0, where="waits in all_reduce", waits=True)
    >>> summarise([word, lines.Stood(node="b", number=1, rank=1, where="is in load (data.py:7)")], [])
    'rank 1 is in load (data.py:7); rank 0 waits in all_reduce'
    """
    groups: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for each in stood:
        groups[each.waits, each.where].append(each.rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1])))
    words = [f"{_ranks(ranks)} {where}" for (_, where), ranks in ordered[:SHOWN_MAX]]
    if len(ordered) > SHOWN_MAX:
        words.append(f"{sum(len(ranks) for _, ranks in ordered[SHOWN_MAX:])} ranks do other things")
    if missing:
        words.append(f"nothing is known about the ranks on {', '.join(missing[:RANKS_SHOWN_MAX])}")
    return "; ".join(words)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > RANKS_SHOWN_MAX:
        return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}: each"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}: each"
