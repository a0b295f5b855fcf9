"""The tier on a node's own disk: the files of its own ranks, and the manifest of all.

A step directory here is a part of a step: it counts only together with those of the other nodes, and with what is on
shared storage.  The rules are those of every tier: a rename makes it a step, and its files never change.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from stepkeeper_trainer.formats.durable import fsync_directory, make_directories, naming, write_all
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, FileEntry, ManifestError, parse_step_name, step_name
from stepkeeper_trainer.tiers.directory import TRASH, DirectoryTier, write_file
from stepkeeper_trainer.tiers.tier import Held, writer_of

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
        path = directory / MANIFEST_NAME
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with naming(path):
                write_all(descriptor, held.raw)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_directory(directory)
        final = self.checkpoints / step_name(held.manifest.step)
        if os.path.lexists(final):  # of before a rollback
            final = final.with_name(f"{final.name}.{held.manifest.save_id[:8]}")
        os.rename(directory, final)
        fsync_directory(self.checkpoints)
        return final.name

    def find(self, held: Held) -> str | None:
        """Return the directory in which this very save is a step here."""
        step, save_id = step_name(held.manifest.step), held.manifest.save_id
        for name in (step, f"{step}.{save_id[:8]}"):
            with suppress(ManifestError, OSError):  # another save's, or damaged: not this one
                if self.tier.held(name).manifest.save_id == save_id:
                    return name
        return None

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

        It comes into a directory of its own until the step is committed here, and never replaces a file.
        Raises OSError, or what `chunks` does.
        """
        found = self.find(held)
        if found is None:
            raise OSError(errno.ENOENT, "the step is not committed on this node", str(self.checkpoints))
        path = self.checkpoints / found / name
        if not os.path.lexists(path):
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
            trash = self.checkpoints / f"{TRASH}{held.directory}"
            with suppress(OSError):  # the next time then
                os.rename(self.checkpoints / held.directory, trash)
                shutil.rmtree(trash, ignore_errors=True)
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
