"""A deep verification in shares: each reader its own, and what all of them found put together."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from stepkeeper_trainer.formats.cache import Cache, Fact, fact
from stepkeeper_trainer.formats.looking import Look, lists_chunks, look_at
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.reading import Reading, read, share_of, tasks_of
from stepkeeper_trainer.formats.verify import Verdict


@dataclass(frozen=True, slots=True)
class ShareVerdict:
    """What one of several readers found in its share of the bytes."""

    index: int
    of: int
    problems: tuple[str, ...]
    bytes_read: int
    manifest: str  # its digest: equal for all shares of one step directory
    seen: str  # digest over the state of its files; nodes may number the inodes of one file differently
    began_at: float  # Unix seconds


def verify_share(directory: Path, index: int, of: int, *, reading: Reading | None = None) -> ShareVerdict:
    """Read share `index` (from 0) of `of` nearly equal ones; all of them together are a deep verification.

    A share looks at its own files only, so that many readers do not ask the file system for all files each;
    `join_shares` looks at the whole directory.
    """
    assert 0 <= index < of, f"share {index} of {of}"
    began_at = time.time()
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return ShareVerdict(index, of, (str(error),), 0, "", "", began_at)
    how = reading or Reading()
    # a file without a list of chunks cannot be read: `join_shares` says so
    files = {name: entry for name, entry in manifest.files.items() if lists_chunks(entry)}
    tasks = share_of(tasks_of(files, list(files), of * how.count_threads()), index, of)
    names = list(dict.fromkeys(task.name for task in tasks))
    before, problems = _facts_of(directory, files, names)
    found = read(directory, [task for task in tasks if task.name in before], how)
    problems += found.lines(names)
    after, _ = _facts_of(directory, files, names)
    if after != before:
        problems.append(f"{directory}: its files changed while they were read")
    digest = manifest.manifest_xxh3_128
    return ShareVerdict(index, of, tuple(problems), found.bytes_read, digest, _seen(before), began_at)


def join_shares(directory: Path, shares: list[ShareVerdict], *, cache: Cache | None = None) -> Verdict:
    """Put together what the readers of all shares found; with no problem, every byte was read and is right."""
    look = look_at(directory)
    problems = list(dict.fromkeys([*look.problems, *(problem for share in shares for problem in share.problems)]))
    bytes_read = sum(share.bytes_read for share in shares)
    manifest = look.manifest
    if manifest is not None:
        if any(share.manifest != manifest.manifest_xxh3_128 for share in shares):
            problems.append(f"{directory}: the readers did not see the same manifest as there is now")
        whole = [(index, len(shares)) for index in range(len(shares))]
        expected = sum(entry.bytes for entry in manifest.files.values())
        if not problems and (sorted((s.index, s.of) for s in shares) != whole or bytes_read != expected):
            problems.append(f"{directory}: {bytes_read} of {expected} bytes were read: a share is missing")
        if cache is not None and not problems and _saw_these_files(look, shares):
            began_at = min(share.began_at for share in shares)
            cache.remember(manifest.manifest_xxh3_128, look.facts(), read_at=began_at)
    return Verdict(directory, tuple(problems), bytes_read)


def names_of_share(manifest: Manifest, index: int, of: int) -> tuple[str, ...]:
    """Return the files that a share has bytes of."""
    tasks = share_of(tasks_of(manifest.files, list(manifest.files)), index, of)
    return tuple(dict.fromkeys(task.name for task in tasks))


def _facts_of(directory: Path, files: dict[str, FileEntry], names: list[str]) -> tuple[dict[str, Fact], list[str]]:
    """Return the state of some files that have the right size, and what is wrong with the others."""
    facts, problems = {}, []
    for name in names:
        try:
            status = os.stat(directory / name, follow_symlinks=False)
        except OSError as error:
            problems.append(f"{directory / name}: {'missing' if error.errno == errno.ENOENT else error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{directory / name}: not a plain file (links are not followed)")
        elif status.st_size != files[name].bytes:
            said = files[name].bytes
            problems.append(f"{directory / name}: has {status.st_size} bytes, the manifest says {said}")
        else:
            facts[name] = fact(status, files[name])
    return facts, problems


def _saw_these_files(look: Look, shares: list[ShareVerdict]) -> bool:
    """Whether each reader saw the files that are there now, by inode, size and times."""
    assert look.manifest is not None
    facts = look.facts()
    return all(
        share.seen == _seen({name: facts[name] for name in names_of_share(look.manifest, share.index, share.of)})
        for share in shares
    )


def _seen(facts: dict[str, Fact]) -> str:
    """Digest the state of files."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(facts.items())))
