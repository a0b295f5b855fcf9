"""A look at a step directory: names, sizes, and that `.metadata` covers every tensor, compared with the manifest."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from stepkeeper_trainer.formats.cache import Cache, Fact, fact
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, FileEntry, Manifest, ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import (
    METADATA_BYTES_MAX,
    METADATA_NAME,
    MetadataError,
    check_coverage,
    parse_of,
)
from stepkeeper_trainer.formats.names import parse_step_name
from stepkeeper_trainer.formats.plain import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

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
