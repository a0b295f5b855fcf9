"""Whether a step directory is what its manifest says: by a look at its names and sizes, and by reading every byte.

    manifest -> a look (looking) -> what no cache knows to be right -> read on threads (reading) -> verdict

Several nodes can read a share each (shares).  Needs no torch, and runs nothing that it reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepkeeper_trainer.formats.cache import Cache, fact
from stepkeeper_trainer.formats.looking import look_at, look_at_files
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.formats.reading import Reading, never, read, tasks_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found; no problems means that every byte that was looked at is right."""

    path: Path
    problems: tuple[str, ...]
    bytes_read: int
    bytes_known: int = 0  # not read now: found right before, and unchanged since

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def verify(
    directory: Path,
    *,
    deep: bool = True,
    should_stop: Callable[[], bool] = never,
    reading: Reading | None = None,
    cache: Cache | None = None,
) -> Verdict:
    """Compare a step directory with its manifest: missing, extra and changed files, and every byte.

    Never raises for what is wrong inside the directory: each thing is one line of `problems`.

    Args:
        directory: a step directory.
        deep: read every byte; otherwise names, sizes and coverage only.
        should_stop: asked while reading; true ends it with a problem that says so.
        reading: how to read.
        cache: what need not be read again; what is read and right goes into it.
    """
    how = reading or Reading()
    if should_stop is not never:
        how = dataclasses.replace(how, should_stop=should_stop)
    started_at = time.time()
    look = look_at(directory, cache)
    manifest = look.manifest
    if manifest is None or not deep or (how.first_only and look.problems):
        return Verdict(directory, tuple(look.problems), 0)
    facts = look.facts()
    digest = manifest.manifest_xxh3_128
    known = cache.known(digest, facts.values()) if cache is not None else set()
    unread = [name for name in look.files if facts[name] not in known]
    found = read(directory, tasks_of(manifest.files, unread, how.count_threads()), how)
    problems = look.problems + found.lines(list(manifest.files))
    if cache is not None and unread and not how.should_stop():
        after = look_at_files(directory, manifest, [])
        right = {
            name: facts[name]
            for name in facts
            if name not in found.problems and name in after and fact(after[name], manifest.files[name]) == facts[name]
        }
        if not look.covered:
            right.pop(METADATA_NAME, None)  # its bytes are right, and what they promise is not there
        if how.first_only and problems:  # some were not read at all
            right = {name: fact for name, fact in right.items() if fact in known}
        wrong = {
            name: (found.lines([name])[0], facts[name])
            for name in facts
            if name in found.problems and name in after and fact(after[name], manifest.files[name]) == facts[name]
        }
        cache.remember(digest, right, read_at=started_at, wrong=wrong)
    bytes_known = sum(look.files[name].st_size for name in facts if facts[name] in known)
    return Verdict(directory, tuple(problems), found.bytes_read, bytes_known)


def known_right(directory: Path, cache: Cache) -> bool:
    """Whether a step directory is complete and each of its files was found right before, and is unchanged since."""
    return look_again(directory, cache)[1]


def look_again(directory: Path, cache: Cache) -> tuple[tuple[str, ...], bool]:
    """Look at a step directory without reading its data.

    Returns:
        What is wrong by names and sizes, or was found wrong in files that are unchanged since; and whether each file
        was found right before, and is unchanged since.
    """
    look = look_at(directory, cache)
    if look.manifest is None or look.problems:
        return tuple(look.problems), False
    facts = look.facts()
    digest = look.manifest.manifest_xxh3_128
    if wrong := cache.known_wrong(digest, facts):
        return tuple(wrong), False
    wanted = set(facts.values())
    return (), cache.known(digest, wanted) == wanted


def unread(directory: Path, cache: Cache) -> tuple[int, int]:
    """Return how many bytes a step directory has, and how many of them `cache` does not know to be right."""
    look = look_at(directory, cache)
    if look.manifest is None:
        return 0, 0
    facts = look.facts()
    known = cache.known(look.manifest.manifest_xxh3_128, facts.values())
    sizes = {name: status.st_size for name, status in look.files.items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if facts[name] not in known)
