"""The files of a checkpoint directory, as they lie: names, sizes and times; links, pipes and the like stand apart.

Nothing is followed: each file is opened below the root by `stepkeeper_trainer.formats.plain`, one directory after the
other, so that no link leads out of the checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from stepkeeper_trainer.formats.plain import open_descriptor, read_plain

ENTRIES_MAX = 200_000
DEPTH_MAX = 12
JSON_BYTES_MAX = 64 * 1024 * 1024
QUIET_S = 120.0
"""A directory that is incomplete and was changed later than this is perhaps still being written."""


class TreeError(Exception):
    """The directory is not one of a checkpoint: too large, or too deep."""


class ReadError(Exception):
    """A file is missing, not a plain file, or not what its name says."""


class Tree:
    """What lies below one directory, or one file beside others that are left alone."""

    def __init__(self, path: Path) -> None:
        """Look at names only.

        Raises:
            OSError: it cannot be listed.
            TreeError: there is more than any checkpoint has.
        """
        self.path = path
        self.files: dict[str, os.stat_result] = {}
        self.odd: dict[str, str] = {}  # name to what it is
        self.directories: set[str] = set()
        status = os.stat(path, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            self.root = path.parent
            self.files[path.name] = status
        else:
            self.root = path
            self._scan("", 0)

    def _scan(self, below: str, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise TreeError(f"{self.root / below}: more than {DEPTH_MAX} directories deep")
        with os.scandir(self.root / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if len(self.files) + len(self.odd) + len(self.directories) >= ENTRIES_MAX:
                    raise TreeError(f"{self.root}: more than {ENTRIES_MAX} names")
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed meanwhile
                if stat.S_ISDIR(status.st_mode):
                    self.directories.add(name)
                    self._scan(f"{name}/", depth + 1)
                elif stat.S_ISREG(status.st_mode):
                    self.files[name] = status
                else:
                    self.odd[name] = "a symbolic link, which is not followed" if entry.is_symlink() else "no plain file"

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def size(self, name: str) -> int:
        """Return the bytes of a file that is there."""
        return self.files[name].st_size

    def below(self, directory: str) -> dict[str, int]:
        """Return the files directly in a directory, by their names in it, with their bytes."""
        start = f"{directory}/" if directory else ""
        return {
            name[len(start) :]: status.st_size
            for name, status in self.files.items()
            if name.startswith(start) and "/" not in name[len(start) :]
        }

    def descriptor(self, name: str) -> int:
        """Open a file and return its descriptor.

        Raises:
            ReadError: it cannot be opened, is a link, a pipe or the like, or leads out of the directory.
        """
        try:
            return open_descriptor(self.root / name, within=self.root)
        except (OSError, ValueError) as error:
            raise ReadError(f"{name}: {self.why_missing(name, error)}") from error

    def read(self, name: str, bytes_max: int = JSON_BYTES_MAX) -> bytes:
        """Return the bytes of a small file.  Raises ReadError, as `descriptor`, or where it is too large."""
        try:
            return read_plain(self.root / name, bytes_max, within=self.root)
        except (OSError, ValueError) as error:
            raise ReadError(f"{name}: {self.why_missing(name, error)}") from error

    def json(self, name: str) -> Any:
        """Return the content of a JSON file.  Raises ReadError."""
        data = self.read(name)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ReadError(f"{name}: torn or damaged: no JSON: {str(error)[:120]}") from error

    def why_missing(self, name: str, error: Exception | None = None) -> str:
        """Say why a file cannot be used."""
        if name in self.odd:
            return self.odd[name]
        if isinstance(error, FileNotFoundError) or error is None:
            return "missing"
        return getattr(error, "strerror", None) or str(error)

    def changed_at(self) -> float:
        """Return the Unix time of the last change to any file."""
        times = [max(status.st_mtime, status.st_ctime) for status in self.files.values()]
        return max(times, default=0.0)

    def quiet(self) -> bool:
        """Tell whether nothing was changed for so long that nobody writes here any more."""
        age_s = time.time() - self.changed_at()
        return not 0 <= age_s < QUIET_S if age_s >= -QUIET_S else True
