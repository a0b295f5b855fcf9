"""The step directories of a run: list, verify, choose the newest that is whole.

Reads only; a torn directory is reported, never removed.  Needs no torch.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ManifestError,
    unseal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:\.([0-9a-f]{8}))?")


@dataclass(frozen=True, slots=True)
class StepDirectory:
    """One directory whose name says that it is a committed step."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None  # why there is no manifest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found; no problems means that every byte that was looked at is right."""

    path: Path
    problems: tuple[str, ...]
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest verified step directory, and those that were passed over, newest first."""

    chosen: StepDirectory | None
    skipped: tuple[tuple[StepDirectory, tuple[str, ...]], ...]


def step_name(step: int) -> str:
    """Return the name of the directory of a step, as long as it is not taken.

    >>> step_name(100)
    'step_00000100'
    """
    return f"step_{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step number of a directory name; None if it is no step directory's.

    >>> parse_step_name("step_00000100"), parse_step_name("step_00000100.0a1b2c3d")
    (100, 100)
    >>> parse_step_name(".tmp-step_00000100") is None
    True
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def read_manifest(directory: Path) -> Manifest:
    """Read and check `MANIFEST.json` of a step directory.

    Raises:
        ManifestError: it is missing, torn, of a newer format, too large, or leads outside.
        OSError: it is there and cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing: the save was never committed") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ManifestError(f"{path}: not a plain file")
        if status.st_size > MANIFEST_BYTES_MAX:
            raise ManifestError(f"{path}: {status.st_size} bytes is more than a manifest can have")
        return unseal(file.read(), source=str(path))


def open_step(path: Path) -> StepDirectory:
    """Read one step directory.  Never raises for what is wrong inside it: that is its `problem`."""
    step = parse_step_name(path.name)
    try:
        manifest = read_manifest(path)
    except (ManifestError, OSError) as error:
        return StepDirectory(path, step if step is not None else -1, None, str(error))
    if step is not None and manifest.step != step:
        return StepDirectory(path, step, None, f"{path}: its manifest is of step {manifest.step}")
    return StepDirectory(path, manifest.step, manifest, None)


def list_steps(checkpoints: Path) -> list[StepDirectory]:
    """Return all step directories, newest first (by step, then by time of creation).

    Raises:
        OSError: the directory is there and cannot be listed.  A missing one is an empty list.
    """
    try:
        with os.scandir(checkpoints) as entries:
            names = [e.name for e in entries if parse_step_name(e.name) is not None and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    steps = [open_step(checkpoints / name) for name in names]
    return sorted(steps, key=lambda s: (s.step, s.manifest.created_at if s.manifest else "", s.path.name), reverse=True)


def current_lineage(steps: list[StepDirectory], lineage: lineages.Lineage | None) -> list[StepDirectory]:
    """Keep the directories that lead to the state training is in now, newest first.

    Without a lineage file every directory counts.  A directory that was renamed into place when its
    writer died before it could record the commit counts too, if its manifest's parent does.
    A directory whose manifest cannot be read is kept: it is passed over later, with its problem.
    """
    if lineage is None:
        return steps
    manifests = {entry.path: entry.manifest for entry in steps if entry.manifest is not None}
    parents = {manifest.save_id: manifest.parent for manifest in manifests.values()}
    chain = lineage.chain(parents)
    counted = set(chain)
    # where the chain breaks off at an unknown ancestor, whatever is older than its known part may be one
    broken = (lineage.parent(chain[-1], parents) if chain else lineage.head) is not None
    oldest = min((m.step for m in manifests.values() if m.save_id in counted), default=None)

    def counts(entry: StepDirectory) -> bool:
        manifest = entry.manifest
        if manifest is None or manifest.save_id in counted:
            return True
        if manifest.save_id not in lineage.commits and manifest.parent == lineage.head:
            return True
        return broken and (oldest is None or entry.step < oldest)

    return [entry for entry in steps if counts(entry)]


def newest_verified(
    checkpoints: Path,
    *,
    deep: bool = True,
    below_step: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Choice:
    """Choose the newest step directory of the current lineage that is whole.

    Args:
        checkpoints: the `checkpoints/` directory of a run.
        deep: read every byte; otherwise files and sizes only.
        below_step: pass over this step and newer ones.
        should_stop: asked between chunks; true ends the search with nothing chosen.

    Raises:
        OSError: the directory cannot be listed or the lineage not read.
    """
    steps = current_lineage(list_steps(checkpoints), lineages.read(checkpoints))
    skipped: list[tuple[StepDirectory, tuple[str, ...]]] = []
    for entry in steps:
        if below_step is not None and entry.step >= below_step:
            continue
        if entry.manifest is None:
            skipped.append((entry, (entry.problem or "no manifest",)))
            continue
        verdict = verify(entry.path, deep=deep, should_stop=should_stop)
        if should_stop():
            return Choice(None, tuple(skipped))
        if verdict.ok:
            return Choice(entry, tuple(skipped))
        skipped.append((entry, verdict.problems))
    return Choice(None, tuple(skipped))


def verify(directory: Path, *, deep: bool = True, should_stop: Callable[[], bool] = lambda: False) -> Verdict:
    """Compare a step directory with its manifest: missing, extra and changed files, and every byte.

    Never raises for what is wrong inside the directory: each thing is one line of `problems`.
    """
    try:
        manifest = read_manifest(directory)
    except (ManifestError, OSError) as error:
        return Verdict(directory, (str(error),), 0)
    problems: list[str] = []
    step = parse_step_name(directory.name)
    if step is not None and manifest.step != step:
        problems.append(f"{directory}: its manifest is of step {manifest.step}")
    found = set(_files_below(directory, problems))
    extras = sorted(found - manifest.files.keys() - {MANIFEST_NAME})
    problems.extend(f"{directory / extra}: not in the manifest" for extra in extras)
    bytes_read = 0
    for name, entry in manifest.files.items():
        if name not in found:
            problems.append(f"{directory / name}: missing")
            continue
        problem, count = _verify_file(directory / name, entry, deep=deep, should_stop=should_stop)
        bytes_read += count
        if problem:
            problems.append(problem)
    return Verdict(directory, tuple(problems), bytes_read)


def _files_below(directory: Path, problems: list[str]) -> Iterator[str]:
    """Yield the relative names of plain files; anything else (a link, a socket) is a problem."""
    stack = [directory]
    while stack:
        at = stack.pop()
        try:
            with os.scandir(at) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        yield str(Path(entry.path).relative_to(directory))
                    else:
                        problems.append(f"{entry.path}: not a plain file (links are not followed)")
        except OSError as error:
            problems.append(f"{at}: cannot be listed: {error.strerror}")


def _verify_file(
    path: Path, entry: FileEntry, *, deep: bool, should_stop: Callable[[], bool]
) -> tuple[str | None, int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"{path}: cannot be opened: {error.strerror}", 0
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            return f"{path}: has {size} bytes, the manifest says {entry.bytes}", 0
        if not deep:
            return None, 0
        return _verify_bytes(file, path, entry, should_stop)


def _verify_bytes(
    file: FileIO, path: Path, entry: FileEntry, should_stop: Callable[[], bool]
) -> tuple[str | None, int]:
    if entry.chunk_bytes <= 0 or len(entry.chunks) != -(-entry.bytes // entry.chunk_bytes):
        return f"{path}: the manifest does not list its chunks", 0
    whole = xxhash.xxh3_128()
    done = 0
    buffer = memoryview(bytearray(min(entry.chunk_bytes, max(1, entry.bytes), CHUNK_READ_MAX)))
    for index, expected in enumerate(entry.chunks):
        if should_stop():
            return f"{path}: verification was stopped at byte {done}", done
        chunk = xxhash.xxh3_128()
        remaining = min(entry.chunk_bytes, entry.bytes - done)
        while remaining:
            try:
                count = file.readinto(buffer[:remaining])
            except OSError as error:
                return f"{path}: cannot be read at byte {done}: {error.strerror}", done
            if not count:
                return f"{path}: ends at byte {done} of {entry.bytes}", done
            chunk.update(buffer[:count])
            whole.update(buffer[:count])
            done += count
            remaining -= count
        if chunk.hexdigest() != expected:
            return (
                f"{path}: bytes of chunk {index} (from byte {index * entry.chunk_bytes}) are wrong",
                done,
            )
    if whole.hexdigest() != entry.xxh3_128:
        return f"{path}: its digest does not match the manifest", done
    return None, done


CHUNK_READ_MAX = 4 * 1024 * 1024
