"""The state of each step directory, from the journal, the lineage and what is on disk.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stepkeeper.seeing.history import History
from stepkeeper.seeing.model import Checkpoint, Saved, micro
from stepkeeper_trainer.formats.lineage import PINNED, PRUNED, SUSPECT, Lineage
from stepkeeper_trainer.formats.manifest import parse_step_name
from stepkeeper_trainer.formats.steps import COMMITTED, DAMAGED, VERIFIED

CLOCKS_DIFFER_S = 5.0  # at most, those of the storage and of the supervisor's host
MARKS = (PINNED, SUSPECT, PRUNED)


class OnDisk(NamedTuple):
    """One step directory that is there now."""

    step: int
    save_id: str = ""  # empty: no readable manifest
    problem: str = ""
    verified: bool = False  # every byte was compared, and no file has changed since, by the cache of verifications
    changed_at: float = 0.0  # Unix seconds: the newest change of its files


def checkpoints(told: History, lineage: Lineage | None, disk: Mapping[str, OnDisk] | None) -> list[Checkpoint]:
    """Return every step directory that anything tells of, oldest step first.

    Args:
        told: the journal.
        lineage: of the run, if there is one.
        disk: by name, what is there; None where nobody looked.
    """
    saves = _by_directory(save for attempt in told.attempts for launch in attempt.launches for save in launch.saves)
    commits = {commit.directory: commit for commit in lineage.commits.values()} if lineage is not None else {}
    names = dict.fromkeys((*saves, *commits, *told.verified, *(disk or ())))
    chain = set(lineage.chain()) if lineage is not None and lineage.tells_steps else None
    found = []
    for name in names:
        save, commit, there = saves.get(name), commits.get(name), (disk or {}).get(name)
        step = _step(name, save, commit.step if commit is not None else None, there)
        if step is None:
            continue
        save_id = commit.save_id if commit is not None else there.save_id if there is not None else ""
        marks = lineage.marks.get(save_id, frozenset()) if lineage is not None else frozenset()
        problem, verified = judged(name, told, there)
        states = [condition(problem, verified=verified)]
        states += [mark for mark in MARKS if mark in marks]
        if disk is not None and there is None and PRUNED not in marks:
            states.append("gone")
        if chain is not None and commit is not None and save_id not in chain:
            states.append("rolled back")
        at = save.durable if save is not None else micro(commit.at) if commit is not None else None
        found.append(
            Checkpoint(
                step=step,
                directory=name,
                at=at,
                bytes=save.bytes if save is not None else 0,
                seconds=(save.durable - save.requested) / 1e6 if save is not None else 0.0,
                emergency=save.emergency if save is not None else False,
                states=tuple(states),
                problem=problem,
                resumed=told.chosen.get(name, 0),
            )
        )
    return sorted(found, key=lambda each: (each.step, each.at or 0, each.directory))


def judged(name: str, told: History, there: OnDisk | None) -> tuple[str, bool]:
    """Return what is wrong with a step directory, and whether it is known that nothing is.

    The journal's newest word counts for the files that it spoke of: not for those that were written to since.
    """
    word = told.verified.get(name)
    if there is None:
        return word or "", word is not None
    if there.changed_at > told.verified_at.get(name, 0.0) + CLOCKS_DIFFER_S:
        word = None
    if there.verified or there.problem:
        return there.problem, not there.problem
    return word or "", word is not None


def condition(problem: str, *, verified: bool) -> str:
    """Return one of the three words for a step directory.

    >>> condition("", verified=False)
    'committed, not yet verified'
    """
    return DAMAGED if problem else VERIFIED if verified else COMMITTED


def _by_directory(saves: Iterable[Saved]) -> dict[str, Saved]:
    return {save.directory: save for save in saves if save.directory}


def _step(name: str, save: Saved | None, recorded: int | None, there: OnDisk | None) -> int | None:
    if save is not None:
        return save.step
    if recorded is not None:
        return recorded
    return there.step if there is not None else parse_step_name(name)
