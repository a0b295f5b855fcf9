"""A tier that is a directory: shared storage, or a node's own disk.  `open_tier` opens any tier by its name.

On a node's own disk (`LocalTier`) are the files of its own ranks, and the manifest of all.  A step directory there is a
part of a step: it counts only together with those of the other nodes, and with what is on shared storage.  The rules
are those of every tier: a rename makes it a step, and its files never change.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.durable import (
    fsync_directory,
    make_directories,
    write_all,
    write_atomically,
    write_new,
)
from stepkeeper_trainer.formats.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    FileEntry,
    ManifestError,
    parse_step_name,
    step_name,
)
from stepkeeper_trainer.formats.plain import naming, open_descriptor, read_plain
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.tiers.tier import (
    DamagedCopyError,
    Held,
    Staging,
    Tier,
    TierError,
    check_file,
    is_right,
    writer_of,
)

PARTIAL = ".part"
_STAGING = ".copy-"
TRASH = ".trash-"
FAILED = "failed-"  # and a rank: it has given up
REMOVALS = 3  # another rank may make a file between the listing of a directory and its removal


class DirectoryTier:
    """The `checkpoints/` directory of a run, or one like it elsewhere."""

    def __init__(self, checkpoints: Path, *, attempt: int = 0, read_back: bool = True) -> None:
        """Make nothing yet.

        With `read_back` what was written is read before it counts, from the disk and not from memory.
        """
        self.checkpoints = checkpoints
        self.attempt = attempt
        self.read_back = read_back

    @property
    def name(self) -> str:
        """The path."""
        return str(self.checkpoints)

    def steps(self) -> list[Held]:
        """Return the committed steps of the current lineage, newest first.  Raises OSError."""
        found = []
        for entry in steps.current_lineage(steps.list_steps(self.checkpoints), lineages.read(self.checkpoints)):
            with suppress(
                ManifestError, FileNotFoundError
            ):  # torn, or pruned meanwhile: another tier may have it whole
                found.append(self.held(entry.path.name))
        return found

    def held(self, directory: str) -> Held:
        """Return one step by its directory's name.  Raises ManifestError or OSError."""
        path = self.checkpoints / directory / MANIFEST_NAME
        return Held.read(directory, read_plain(path, MANIFEST_BYTES_MAX, within=self.checkpoints), source=str(path))

    def find(self, held: Held, *, despite: Collection[str] = ()) -> str | None:
        """Return the directory in which this very save is a step here; `despite` are damaged ones."""
        found = self.committed(held.manifest.step, held.manifest.save_id, despite=despite)
        return found.directory if found is not None else None

    def committed(self, step: int, save_id: str, *, despite: Collection[str] = ()) -> Held | None:
        """Return a save that is a step here; `despite` are damaged directories."""
        usual = step_name(step)
        for name in {usual, f"{usual}.{save_id[:8]}"}.difference(despite):
            with suppress(ManifestError, OSError):  # another save's, or damaged: not this one
                if (held := self.held(name)).manifest.save_id == save_id:
                    return held
        return None

    def problems(self, held: Held, *, deep: bool) -> list[str]:
        """Say what is wrong with a step."""
        return list(verify(self.checkpoints / held.directory, deep=deep, reading=Reading(first_only=True)).problems)

    def has_file(self, held: Held, name: str, entry: FileEntry) -> bool:
        """Whether a file of a step is here with its full size."""
        return file_size(self.checkpoints / held.directory / name) == entry.bytes

    def chunks(self, held: Held, name: str, entry: FileEntry, first: int) -> Iterator[bytes]:
        """Yield the chunks of a file.  Raises TierError or OSError."""
        yield from _read_chunks(self.checkpoints / held.directory / name, entry, first)

    def staging(self, held: Held, *, despite: Collection[str] = ()) -> Staging:
        """Begin to take in a step, or go on."""
        return _DirectoryStaging(self, held, frozenset(despite))

    def remove(self, held: Held) -> None:
        """Remove a step: it has another name at once, and its bytes go afterwards.  Raises OSError."""
        trash = self.checkpoints / f"{TRASH}{held.directory}"
        os.rename(self.checkpoints / held.directory, trash)
        fsync_directory(self.checkpoints)
        shutil.rmtree(trash, ignore_errors=True)

    def clear(self, keep: Callable[[str], bool]) -> list[str]:
        """Remove steps that were never copied in full, unless `keep` says so of their save_id; return their names."""
        removed = []
        with suppress(FileNotFoundError):  # nothing was ever copied here
            for entry in list(os.scandir(self.checkpoints)):
                if entry.name.startswith(_STAGING) and not keep(entry.name.rpartition(".")[2]):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    removed.append(entry.name)
        return removed

    def sweep(self, steps: Sequence[Held]) -> list[str]:
        """Remove what is left of steps older than the newest of `steps` that are none of them.  Raises OSError."""
        removed = []
        for entry in list(os.scandir(self.checkpoints)) if steps else []:
            prefix = next((each for each in (_STAGING, TRASH) if entry.name.startswith(each)), None)
            number = parse_step_name(entry.name.removeprefix(prefix).partition(".")[0]) if prefix else None
            if number is not None and number < steps[0].manifest.step:
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.name)
        return removed


def staging_directory(checkpoints: Path, step: int, save_id: str) -> Path:
    """Return where a step stands on its way into a directory tier."""
    return checkpoints / f"{_STAGING}{step_name(step)}.{save_id}"


def give_up(directory: Path) -> None:
    """Remove a step that will never be finished.

    It has another name first: who still writes to it by its own makes no file there any more, but for one that is
    being made just now.  What cannot be removed now is cleared at the next start.
    """
    trash = directory.with_name(f"{TRASH}{directory.name}")
    try:
        os.rename(directory, trash)
    except FileNotFoundError:
        return
    except OSError:
        trash = directory  # a disk that takes no name may still let go of files
    for _ in range(REMOVALS):
        shutil.rmtree(trash, ignore_errors=True)
        if not trash.exists():
            return


def mark_failed(directory: Path, rank: int, why: str) -> None:
    """Say in a directory of all ranks that one has given up, and why; where the reason cannot be written, that only.

    Raises:
        OSError: nothing is said.
    """
    mark = directory / f"{FAILED}{rank}"
    try:
        write_atomically(mark, why.encode(), name_durable=False)
    except OSError:
        mark.touch()


def require_none_failed(directory: Path, names: Collection[str], do: str) -> None:
    """Raise TierError if a rank has given up, by the names in the directory; `do`: what it could not do."""
    for name in names:
        if name.startswith(FAILED):
            why = read_plain(directory / name, within=directory).decode(errors="replace")
            raise TierError(
                f"rank {name.removeprefix(FAILED)} could not {do}: {why or 'the reason could not be written'}"
            )


def write_file(path: Path, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
    """Write a file from chunk `first` on; what has its name is durable.  Raises OSError, or what `chunks` does."""
    partial = path.with_name(path.name + PARTIAL)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.lseek(descriptor, first * entry.chunk_bytes, os.SEEK_SET)
        for chunk in chunks:  # an error of theirs is of another file
            with naming(path):
                write_all(descriptor, chunk)
        with naming(path):
            os.ftruncate(descriptor, entry.bytes)  # an earlier try may have left more
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(partial, path)


def forget_pages(path: Path) -> None:
    """Let the kernel forget a file's clean pages, so that it is read from the disk next.  Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def right_chunks(path: Path, entry: FileEntry) -> int:
    """Return how many chunks, from its first, of a file that is not finished are there and right."""
    right = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # nothing of it is there
        for chunk in _read_chunks(path.with_name(path.name + PARTIAL), entry, 0):
            if not is_right(chunk, entry, right):
                break
            right += 1
    return right


def file_size(path: Path) -> int:
    """Return the size of a file; -1 where there is none."""
    try:
        return path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


class InFlight:
    """A directory that files of a step are copied into."""

    def __init__(self, directory: Path) -> None:
        """Make nothing: one that was given up is gone."""
        self._directory = directory

    def done(self, name: str, entry: FileEntry) -> bool:
        """Whether a file is there in full."""
        return file_size(self._directory / name) == entry.bytes

    def present(self, name: str, entry: FileEntry) -> int:
        """Return how many chunks of a file, from its first, are there already and right."""
        return right_chunks(self._directory / name, entry)

    def write(self, name: str, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        """Write a file from chunk `first` on.  Raises OSError, or what `chunks` does."""
        write_file(self._directory / name, entry, first, chunks)


class _DirectoryStaging(InFlight):
    def __init__(self, tier: DirectoryTier, held: Held, despite: frozenset[str]) -> None:
        super().__init__(staging_directory(tier.checkpoints, held.manifest.step, held.manifest.save_id))
        self._tier, self._held, self._despite = tier, held, despite
        self._there = tier.find(held, despite=despite)

    def done(self, name: str, entry: FileEntry) -> bool:
        return self._there is not None or super().done(name, entry)

    def write(self, name: str, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        make_directories((self._directory / name).parent)
        super().write(name, entry, first, chunks)

    def missing(self) -> list[str]:
        return [name for name, entry in self._held.manifest.files.items() if not self.done(name, entry)]

    def check(self, name: str, entry: FileEntry, should_stop: Callable[[], bool]) -> None:
        path = (self._tier.checkpoints / self._there if self._there is not None else self._directory) / name
        with suppress(OSError):  # a file system without it: the pages may be read from memory then
            forget_pages(path)
        held = Held(str(path.parent.relative_to(self._tier.checkpoints)), self._held.manifest, self._held.raw)
        try:
            check_file(self._tier, held, name, entry, should_stop)
        except DamagedCopyError:
            if self._there is None:  # a step's files never change, whatever is wrong with them
                path.unlink(missing_ok=True)
            raise

    def commit(self) -> str:
        if (there := self._tier.find(self._held, despite=self._despite)) is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            return there
        if missing := self.missing():
            raise TierError(f"{self._directory}: {len(missing)} files are missing, such as {missing[0]}")
        parents = {parent for name in self._held.manifest.files for parent in PurePosixPath(name).parents}
        for parent in parents:
            fsync_directory(self._directory / parent)
        self._remove_strangers()
        manifest = self._directory / MANIFEST_NAME
        manifest.unlink(missing_ok=True)  # of a try that was killed before the rename
        write_new(manifest, self._held.raw)
        fsync_directory(self._directory)
        if self._tier.read_back:
            self._read_back()
        final = self._final()
        os.rename(self._directory, final)
        fsync_directory(final.parent)
        self._record(final.name)
        return final.name

    def _remove_strangers(self) -> None:
        """Remove what the manifest does not name: parts of files, and what the writers of a save told each other."""
        for directory, _, names in os.walk(self._directory):
            for name in names:
                path = Path(directory, name)
                if str(path.relative_to(self._directory)) not in self._held.manifest.files:
                    path.unlink(missing_ok=True)

    def _read_back(self) -> None:
        verdict = verify(self._directory, reading=Reading(from_disk=True))
        if verdict.ok:
            return
        shutil.rmtree(self._directory, ignore_errors=True)  # the next try sends all of it again
        raise DamagedCopyError(
            f"{self._tier.name}: what was written reads back otherwise: {'; '.join(verdict.problems)}"
        )

    def _final(self) -> Path:
        manifest = self._held.manifest
        final = self._tier.checkpoints / step_name(manifest.step)
        if os.path.lexists(final):  # a replay after a rollback, or a damaged copy: the older one stays as it is
            final = final.with_name(f"{final.name}.{manifest.save_id[:8]}")
            if os.path.lexists(final):
                raise TierError(f"{final}: is there already, and damaged: move it away")
        return final

    def _record(self, directory: str) -> None:
        """Make the step the head of the tier's lineage, unless the head was saved later.

        One that is not recorded counts by its manifest, if it leads to the head.
        """
        manifest, checkpoints = self._held.manifest, self._tier.checkpoints
        lineage = lineages.read(checkpoints)
        if lineage is not None:
            head = lineage.commits.get(lineage.head or "")
            if manifest.save_id in lineage.commits or (head and self._saved_at(head) > manifest.created_at):
                return
        lineages.append(
            checkpoints,
            lineages.Commit(
                at=time.time(),
                attempt=max(self._tier.attempt, lineage.attempt if lineage is not None else 0),
                step=manifest.step,
                save_id=manifest.save_id,
                parent=manifest.parent,
                directory=directory,
            ),
        )

    def _saved_at(self, commit: lineages.Commit) -> str:
        try:
            return self._tier.held(commit.directory).manifest.created_at
        except (ManifestError, OSError):  # damaged or pruned: it leads nowhere
            return ""


def _read_chunks(path: Path, entry: FileEntry, first: int) -> Iterator[bytes]:
    with open(open_descriptor(path), "rb", buffering=0) as file:
        file.seek(first * entry.chunk_bytes)
        for index in range(first, len(entry.chunks)):
            wanted = min(entry.chunk_bytes, entry.bytes - index * entry.chunk_bytes)
            with naming(path):
                chunk = file.read(wanted)
                while len(chunk) < wanted and (more := file.read(wanted - len(chunk))):
                    chunk += more
            if not chunk:
                return
            yield chunk


def open_tier(where: str, **config: Any) -> Tier:
    """Return the tier at a path or URL; `config` is for `DirectoryTier` or `ObjectTier`.

    Raises:
        TierError: the URL makes no sense, or the library for object stores is missing.
    """
    if "://" not in where:
        return DirectoryTier(Path(where), **config)
    try:
        from stepkeeper_trainer.tiers.objects import ObjectTier  # noqa: PLC0415 - for those who have one
    except ImportError as error:
        raise TierError(f"{where}: an object store needs a library: pip install 'stepkeeper[object]'") from error
    return ObjectTier(where, **config)


ROOM_FACTOR = 1.05  # of what the save before took: manifests and what has grown
_IN_FLIGHT = ".tmp-step_"


class LocalTier:
    """The steps of one run on this node's disk."""

    def __init__(self, checkpoints: Path, *, keep: int) -> None:
        """Make nothing yet; `keep` is how many of the newest steps stay."""
        self.tier = DirectoryTier(checkpoints, read_back=False)
        self._keep = keep

    @property
    def checkpoints(self) -> Path:
        """Where the steps are."""
        return self.tier.checkpoints

    def in_flight(self, step: int, save_id: str) -> Path:
        """Return where the ranks of this node write a save."""
        return self.checkpoints / f"{_IN_FLIGHT}{step:08d}.{save_id}"

    def begin(self, step: int, save_id: str, size: int) -> Path:
        """Make the directory of a save, if there is room for `size` bytes: what all ranks of this node write.

        Raises:
            OSError: there is not, or the disk refuses.
        """
        make_directories(self.checkpoints, mode=0o700)
        directory = self.in_flight(step, save_id)
        written = 0
        with suppress(FileNotFoundError):  # this rank is the first
            written = sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
        status = os.statvfs(self.checkpoints)
        if status.f_bavail * status.f_frsize < size * ROOM_FACTOR - written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.checkpoints))
        os.makedirs(directory, exist_ok=True)
        return directory

    def forget(self, step: int, save_id: str, rank: int) -> None:
        """Give back what one rank has written of a save that is not wanted here; the node's last one ends it."""
        directory = self.in_flight(step, save_id)
        with suppress(OSError):  # others have files there still; or the disk has failed: the next start clears it
            for name in os.listdir(directory):
                if writer_of(name) == rank:
                    (directory / name).unlink()
            directory.rmdir()

    def commit(self, held: Held) -> str | None:
        """Turn what this node's ranks have written into a step directory; None where they wrote nothing here.

        Raises:
            OSError: the disk refuses; nothing is a step by that.
        """
        directory = self.in_flight(held.manifest.step, held.manifest.save_id)
        if not directory.is_dir():
            return self.find(held)
        try:
            return self._commit(directory, held)
        except OSError:
            with suppress(OSError):  # the next start clears it
                (directory / MANIFEST_NAME).unlink(missing_ok=True)
                directory.rmdir()  # where the ranks have taken their files back
            raise

    def _commit(self, directory: Path, held: Held) -> str:
        write_new(directory / MANIFEST_NAME, held.raw, mode=0o600)
        fsync_directory(directory)
        final = self.checkpoints / step_name(held.manifest.step)
        if os.path.lexists(final):  # of before a rollback
            final = final.with_name(f"{final.name}.{held.manifest.save_id[:8]}")
        os.rename(directory, final)
        fsync_directory(self.checkpoints)
        return final.name

    def adopt(self, held: Held) -> None:
        """Make a step of which nothing is here yet but its manifest: `receive` takes in files.  Raises OSError."""
        directory = self.in_flight(held.manifest.step, held.manifest.save_id)
        make_directories(directory, mode=0o700)
        self._commit(directory, held)

    def find(self, held: Held) -> str | None:
        """Return the directory in which this very save is a step here."""
        return self.tier.find(held)

    def committed(self, step: int, save_id: str) -> Held | None:
        """Return a save that is a step here, as far as the ranks of this node wrote it."""
        return self.tier.committed(step, save_id)

    def steps(self) -> list[Held]:
        """Return the steps of which something is here, newest first.  Raises OSError."""
        found = []
        with suppress(FileNotFoundError):  # nothing was ever saved here
            for name in os.listdir(self.checkpoints):
                if parse_step_name(name) is not None:
                    with suppress(ManifestError, OSError):  # damaged: another tier may have it whole
                        found.append(self.tier.held(name))
        return sorted(found, key=lambda held: (held.manifest.created_at, held.manifest.step), reverse=True)

    def files(self, held: Held) -> list[str]:
        """Return the files of a step that are here with their full size."""
        return [name for name, entry in held.manifest.files.items() if self.tier.has_file(held, name, entry)]

    def receive(self, held: Held, name: str, entry: FileEntry, chunks: Iterator[bytes]) -> None:
        """Keep a file of another node's beside our own.

        It comes into a directory of its own until the step is committed here, and never replaces a whole file.
        Raises OSError, or what `chunks` does.
        """
        found = self.find(held)
        if found is None:
            raise OSError(errno.ENOENT, "the step is not committed on this node", str(self.checkpoints))
        path = self.checkpoints / found / name
        if file_size(path) != entry.bytes:  # a part of one is of no use
            path.unlink(missing_ok=True)
            write_file(path, entry, 0, chunks)
            fsync_directory(path.parent)

    def prune(self, on_shared: Collection[str], given_up: Collection[str] = ()) -> list[str]:
        """Remove all but the newest, as far as nobody waits for them; return their names.

        What is on its way to shared storage stays, until that has it or a newer one.

        Args:
            on_shared: save_ids of what was committed there.
            given_up: save_ids of what will not get there: newer ones here stand in for them.
        """
        steps = self.steps()
        safe_from = next((at for at, held in enumerate(steps) if held.manifest.save_id in on_shared), len(steps))
        removed = []
        for at, held in enumerate(steps):
            if at < self._keep or (at < safe_from and held.manifest.save_id not in given_up):
                continue
            with suppress(OSError):  # the next time then
                self.tier.remove(held)
                removed.append(held.directory)
        return removed

    def clear(self) -> list[str]:
        """Remove what an earlier launch left unfinished: its processes are gone.  Returns the names."""
        removed = []
        with suppress(FileNotFoundError):  # nothing was ever saved here
            for name in os.listdir(self.checkpoints):
                if name.startswith((_IN_FLIGHT, TRASH)):
                    shutil.rmtree(self.checkpoints / name, ignore_errors=True)
                    removed.append(name)
        return removed
