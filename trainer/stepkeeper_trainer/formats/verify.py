"""Whether a step directory is what its manifest says: by a look at its names and sizes, and by reading every byte.

    manifest -> a look at names, sizes, `.metadata` -> what no cache knows to be right
    -> read on threads (reading) -> verdict

Several nodes can read a shard each.  Needs no torch, and runs nothing that it reads.

A deep verification in shards: each reader its own, and what all of them found put together.

What deep verification has found right, remembered outside of the step directories.

One small file a step below `checkpoints/.verified/`, written by the process that read the bytes.  It remembers single
files: (inode, size, mtime, ctime) and what the manifest says of the bytes.  The kernel sets the ctime and nobody
can set it back, so a file that was written to, replaced or restored is read again; one whose manifest says
something else is too.  Files that were found wrong are remembered likewise, for people who list the steps: they are
read again all the same.  A record never says that a step is verified: names, sizes, manifest and `.metadata` are looked
at each time.  What it cannot see is a disk that forgets bytes by itself; `checkpoints verify` therefore reads
everything, unless asked not to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from stepkeeper_trainer.formats.durable import clear_temporaries, write_atomically
from stepkeeper_trainer.formats.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ManifestError,
    parse_step_name,
    read_manifest,
)
from stepkeeper_trainer.formats.metadata import (
    METADATA_BYTES_MAX,
    METADATA_NAME,
    MetadataError,
    check_coverage,
    parse_of,
)
from stepkeeper_trainer.formats.plain import DecodeError, decode_format, open_plain
from stepkeeper_trainer.formats.reading import Reading, never, read, share_of, tasks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stepkeeper_trainer.formats.manifest import FileEntry


CACHE_NAME = ".verified"
FORMAT = 1
SETTLED_S = 2.0  # a file changed later than this before it was read may change again within one tick of its ctime
RECORD_BYTES_MAX = 256 * 1024 * 1024
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

Fact = tuple[int, int, int, int, str]  # inode, bytes, mtime in ns, ctime in ns, digest of the manifest's entry


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What was found right in one step directory."""

    format: int = FORMAT
    at: float  # Unix seconds
    files: dict[str, Fact]
    wrong: dict[str, tuple[str, Fact]] = {}  # what is wrong with a file, and the file that it was then


_decoder = msgspec.json.Decoder(Record)


def fact(status: os.stat_result, entry: FileEntry) -> Fact:
    """Name a file as it is now, together with what its bytes should be."""
    said = xxhash.xxh3_128_hexdigest(msgspec.json.encode(entry))
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, said)


class Cache:
    """The records of one `checkpoints/` directory.  A record that is not there or not to be trusted is no record."""

    def __init__(self, checkpoints: Path, *, knows: bool = True) -> None:
        """Nothing is made until something is remembered; `knows` false only remembers."""
        self._directory = checkpoints / CACHE_NAME
        self._knows = knows

    def known(self, manifest_digest: str, wanted: Iterable[Fact], *, own_only: bool = False) -> set[Fact]:
        """Return which of `wanted` were found right once.

        Args:
            manifest_digest: of the step, which names its record.
            wanted: facts of files as they are now.
            own_only: by this step's record; otherwise by any, for steps can share files by links.
        """
        if not self._knows:
            return set()
        own = self._record(f"{manifest_digest}.json")
        missing = set(wanted).difference(fact for _, fact in own.wrong.values())
        found = missing.intersection(own.files.values())
        if found == missing or own_only:
            return found
        for name in self._names():
            found |= missing.intersection(self._record(name).files.values())
        return found

    def known_wrong(self, manifest_digest: str, facts: Mapping[str, Fact]) -> list[str]:
        """Return what was found wrong once in the files of a step that are as they were then."""
        wrong = self._record(f"{manifest_digest}.json").wrong if self._knows else {}
        return [problem for name, (problem, fact) in sorted(wrong.items()) if facts.get(name) == fact]

    def remember(
        self,
        manifest_digest: str,
        facts: Mapping[str, Fact],
        *,
        read_at: float,
        wrong: Mapping[str, tuple[str, Fact]] | None = None,
    ) -> bool:
        """Record files whose every byte was read and right, and those that are wrong; false where that is impossible.

        Args:
            manifest_digest: of the step's manifest.
            facts: by name, taken before the bytes were read and unchanged after.
            read_at: Unix seconds, before the first byte was read.
            wrong: by name, what is wrong with a file, and its fact.
        """
        settled = {name: fact for name, fact in facts.items() if fact[3] / 1e9 < read_at - SETTLED_S}
        if not (settled or wrong) or not self._ours():
            return False
        record = Record(at=time.time(), files=settled, wrong=dict(wrong or {}))
        try:
            os.makedirs(self._directory, mode=0o755, exist_ok=True)
            write_atomically(self._directory / f"{manifest_digest}.json", msgspec.json.encode(record), mode=0o644)
        except OSError:  # somebody else's run, or no space: it is read again next time
            return False
        return True

    def forget_others(self, manifest_digests: Iterable[str]) -> None:
        """Remove the records of steps that are gone."""
        kept = {f"{digest}.json" for digest in manifest_digests}
        for name in self._names():
            if name not in kept:
                with contextlib.suppress(OSError):  # a record too many does no harm
                    os.unlink(self._directory / name)
        clear_temporaries(self._directory)

    def _ours(self) -> bool:
        """Say whether the steps are ours: an admin who looks leaves nothing that their owner could not write to."""
        try:
            return os.stat(self._directory.parent).st_uid == os.geteuid()
        except OSError:
            return False

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        except OSError:  # there is none, or it is not for us
            return []

    def _record(self, name: str) -> Record:
        """Read a record that only its owner may write, who must be the one that may change the steps too."""
        none = Record(at=0.0, files={})
        try:
            with open_plain(self._directory / name, within=self._directory.parent) as file:
                status = os.fstat(file.fileno())
                if status.st_mode & _OTHERS_MAY_WRITE or status.st_size > RECORD_BYTES_MAX:
                    return none
                if status.st_uid not in self._trusted():
                    return none
                return decode_format(_decoder, file.read(status.st_size), newest=FORMAT)
        except (OSError, DecodeError):
            return none

    def _trusted(self) -> set[int]:
        trusted = {os.geteuid(), 0}
        with contextlib.suppress(OSError):  # then our own and root's records count
            trusted.add(os.stat(self._directory.parent).st_uid)
        return trusted


DCP = "torch.distributed.checkpoint"


@dataclass(slots=True)
class Look:
    """A step directory as it is now, without reading its data."""

    directory: Path
    manifest: Manifest | None
    problems: list[str]
    files: dict[str, os.stat_result]  # those of the manifest that are there with the right size
    covered: bool = True  # by `.metadata`

    def facts(self) -> dict[str, Fact]:
        """Return the state of its files as a cache knows it."""
        assert self.manifest is not None
        return {name: fact(status, self.manifest.files[name]) for name, status in self.files.items()}


def look_at(directory: Path, cache: Cache | None = None) -> Look:
    """Look at a step directory; a `.metadata` that `cache` remembers of this very manifest is not parsed again."""
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return Look(directory, None, [str(error)], {})
    problems: list[str] = []
    step = parse_step_name(directory.name)
    if step is not None and manifest.step != step:
        problems.append(f"{directory}: its manifest is of step {manifest.step}")
    files = look_at_files(directory, manifest, problems)
    uncovered: list[str] = []
    if manifest.framework == DCP and not _covered_before(manifest, files, cache):
        uncovered = _metadata_problems(directory, manifest)
    return Look(directory, manifest, problems + uncovered, files, not uncovered)


def _covered_before(manifest: Manifest, files: dict[str, os.stat_result], cache: Cache | None) -> bool:
    status = files.get(METADATA_NAME)
    if cache is None or status is None:
        return False
    own = fact(status, manifest.files[METADATA_NAME])
    return bool(cache.known(manifest.manifest_xxh3_128, [own], own_only=True))


def look_at_files(directory: Path, manifest: Manifest, problems: list[str]) -> dict[str, os.stat_result]:
    """Return the state of the manifest's files that have the right size; whatever else is there is a problem."""
    found = dict(_files_below(directory, problems))
    extras = sorted(found.keys() - manifest.files.keys() - {MANIFEST_NAME})
    problems.extend(f"{directory / extra}: not in the manifest" for extra in extras)
    files = {}
    for name, entry in manifest.files.items():
        status = found.get(name)
        if status is None:
            problems.append(f"{directory / name}: missing")
        elif status.st_size != entry.bytes:
            problems.append(f"{directory / name}: has {status.st_size} bytes, the manifest says {entry.bytes}")
        elif not lists_chunks(entry):
            problems.append(f"{directory / name}: the manifest does not list its chunks")
        else:
            files[name] = status
    return files


def lists_chunks(entry: FileEntry) -> bool:
    """Whether the manifest has a digest for each chunk of a file; one without cannot be read by chunks."""
    return entry.chunk_bytes > 0 and len(entry.chunks) == -(-entry.bytes // entry.chunk_bytes)


def _files_below(directory: Path, problems: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative names of plain files; anything else (a link, a socket) is a problem."""
    stack = [(str(directory), "")]
    while stack:
        at, prefix = stack.pop()
        try:
            with os.scandir(at) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        stack.append((entry.path, f"{prefix}{entry.name}/"))
                    elif stat.S_ISREG(status.st_mode):
                        yield prefix + entry.name, status
                    else:
                        problems.append(f"{entry.path}: not a plain file (links are not followed)")
        except OSError as error:
            problems.append(f"{at}: cannot be listed: {error.strerror}")


def _metadata_problems(directory: Path, manifest: Manifest) -> list[str]:
    """Check that `.metadata` is the one that was saved, and that all it promises is in the files."""
    path = directory / METADATA_NAME
    entry = manifest.files.get(METADATA_NAME)
    if entry is None:
        return [f"{path}: not in the manifest: no tensor can be found without it"]
    if entry.bytes > METADATA_BYTES_MAX:
        return [f"{path}: {entry.bytes} bytes is more than we read at once"]
    try:
        with open_plain(path, within=directory) as file:
            data = file.read(entry.bytes)
    except OSError as error:
        # one that is missing, or no plain file, is named by the look at the files
        unseen = error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL)
        return [f"{path}: cannot be read: {error.strerror}"] if unseen else []
    if len(data) != entry.bytes or xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        return [] if len(data) != entry.bytes else [f"{path}: its bytes are not what the manifest says"]
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    try:
        return [f"{directory}: {problem}" for problem in check_coverage(parse_of(directory, data), sizes)]
    except (MetadataError, OSError) as error:
        return [f"{path}: {error}"]


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


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What one of several readers found in its shard of the bytes."""

    index: int
    of: int
    problems: tuple[str, ...]
    bytes_read: int
    manifest: str  # its digest: equal for all shards of one step directory
    seen: str  # digest over the state of its files; nodes may number the inodes of one file differently
    began_at: float  # Unix seconds


def verify_shard(directory: Path, index: int, of: int, *, reading: Reading | None = None) -> ShardVerdict:
    """Read shard `index` (from 0) of `of` nearly equal ones; all of them together are a deep verification.

    A shard looks at its own files only, so that many readers do not ask the file system for all files each;
    `join_shards` looks at the whole directory.
    """
    assert 0 <= index < of, f"shard {index} of {of}"
    began_at = time.time()
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return ShardVerdict(index, of, (str(error),), 0, "", "", began_at)
    how = reading or Reading()
    # a file without a list of chunks cannot be read: `join_shards` says so
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
    return ShardVerdict(index, of, tuple(problems), found.bytes_read, digest, _seen(before), began_at)


def join_shards(directory: Path, shards: list[ShardVerdict], *, cache: Cache | None = None) -> Verdict:
    """Put together what the readers of all shards found; with no problem, every byte was read and is right."""
    look = look_at(directory)
    problems = list(dict.fromkeys([*look.problems, *(problem for shard in shards for problem in shard.problems)]))
    bytes_read = sum(shard.bytes_read for shard in shards)
    manifest = look.manifest
    if manifest is not None:
        if any(shard.manifest != manifest.manifest_xxh3_128 for shard in shards):
            problems.append(f"{directory}: the readers did not see the same manifest as there is now")
        whole = [(index, len(shards)) for index in range(len(shards))]
        expected = sum(entry.bytes for entry in manifest.files.values())
        if not problems and (sorted((s.index, s.of) for s in shards) != whole or bytes_read != expected):
            problems.append(f"{directory}: {bytes_read} of {expected} bytes were read: a shard is missing")
        if cache is not None and not problems and _saw_these_files(look, shards):
            began_at = min(shard.began_at for shard in shards)
            cache.remember(manifest.manifest_xxh3_128, look.facts(), read_at=began_at)
    return Verdict(directory, tuple(problems), bytes_read)


def names_of_shard(manifest: Manifest, index: int, of: int) -> tuple[str, ...]:
    """Return the files that a shard has bytes of."""
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


def _saw_these_files(look: Look, shards: list[ShardVerdict]) -> bool:
    """Whether each reader saw the files that are there now, by inode, size and times."""
    assert look.manifest is not None
    facts = look.facts()
    return all(
        shard.seen == _seen({name: facts[name] for name in names_of_shard(look.manifest, shard.index, shard.of)})
        for shard in shards
    )


def _seen(facts: dict[str, Fact]) -> str:
    """Digest the state of files."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(facts.items())))
