"""Reading back what a save has written, from the disk, before the save counts: each rank its own files.

Storage that says "durable" and has other bytes is found while the state is still in memory and older steps are there.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.reading import Reading, read, tasks_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import FileEntry
    from stepkeeper_trainer.saves import Save

THREADS = 2  # a rank: training has the other cores


def read_back(save: Save, directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare what the disk gives with what was written, past the page cache where the file system can do that.

    Only where the save asks for it.

    Raises:
        SaveError: the save is over, or the disk gives other bytes; the cause is an OSError then, for that is storage.
    """
    if not save.read_back:
        return

    def over() -> bool:
        return save.cancelled is not None or time.time() >= save.limit_at

    how = Reading(threads=THREADS, from_disk=True, first_only=True, should_stop=over)
    found = read(directory, tasks_of(dict(files), list(files), how.count_threads()), how)
    save.check()
    if problems := found.lines(list(files)):
        text = f"read back from the disk: {problems[0]}"
        raise SaveError(text) from OSError(errno.EIO, text)
