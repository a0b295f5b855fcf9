"""The bytes of a save: our own writer below DCP, which later storage engines replace.

It writes each file once, never over another, and hashes what it writes while it writes it.  What it
promises to `finish` is durable: planned equals written, and every error surfaces (pytorch#191391).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Generator

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

BUFFER_BYTES = 1024 * 1024


class HashingFile:
    """A new file, written front to back; `entry` is known once it is closed, and then it is durable."""

    def __init__(self, path: Path) -> None:
        """Create the file.  Raises FileExistsError where it is there already."""
        self._file: BinaryIO = open(path, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self._bytes = 0
        self.entry: FileEntry | None = None

    def write(self, data: Any) -> int:
        """Write and hash.  Raises OSError."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._whole.update(view)
        rest = view
        while rest:
            room = CHUNK_BYTES - self._bytes % CHUNK_BYTES
            self._chunk.update(rest[:room])
            self._bytes += len(rest[:room])
            rest = rest[room:]
            if self._bytes % CHUNK_BYTES == 0:
                self._close_chunk()
        return len(view)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._bytes

    def flush(self) -> None:
        """Do nothing: `close` flushes, and an item is no reason to."""

    def close(self) -> None:
        """Make the file durable.  Raises OSError."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if self._bytes % CHUNK_BYTES:
            self._close_chunk()
        self.entry = FileEntry(bytes=self._bytes, xxh3_128=self._whole.hexdigest(), chunks=tuple(self._chunks))

    def abandon(self) -> None:
        """Close without a promise, after an error."""
        with contextlib.suppress(OSError):  # the error that brought us here is the one to report
            self._file.close()

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk.reset()


class HashingFileSystem(FileSystem):
    """DCP's door to the disk; remembers the digest of each file, by its name in the step directory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a new file for writing.  Raises OSError."""
        assert mode == "wb", "a save only writes"
        file = HashingFile(Path(path))
        try:
            yield cast("io.IOBase", file)
            file.close()
        except BaseException:
            file.abandon()
            raise
        assert file.entry is not None
        self.entries[Path(path).name] = file.entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written here (`.metadata.tmp`).  Raises OSError."""
        os.rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class StepWriter(FileSystemWriter):
    """Writes one rank's share into a directory of this save alone, then hands over to `on_written`."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        save_id: str,
        prepare: Callable[[], None],
        on_written: Callable[[StepWriter, Metadata, list[WriteResult]], None],
    ) -> None:
        # One thread: stock DCP loses the errors of the others.  The stream itself syncs each file.
        super().__init__(directory, sync_files=False, thread_count=1, overwrite=False)
        self.directory = directory
        self.files = HashingFileSystem()
        self.fs = self.files
        self.problem: str | None = None
        self._own_rank = rank
        self._own_save_id = save_id
        self._prepare = prepare
        self._on_written = on_written
        self._planned = 0

    def storage_meta(self) -> StorageMeta:
        """Name the save in `.metadata`; where it lies is nobody's business there."""
        return StorageMeta(save_id=self._own_save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory.  A failure is told to all ranks by the planner, so that none waits."""
        try:
            self._prepare()
        except OSError as error:
            self.problem = f"{self.directory}: cannot be made: {error.strerror}"
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name this rank's files."""
        [plan] = plans
        return [dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self._own_rank}_"))]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share.  Raises OSError."""
        self._planned = len(plan.items)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand over what was written: each rank calls this with its own results.

        Raises:
            SaveError: fewer items were written than planned.
        """
        [written] = results
        if len({result.index for result in written}) != self._planned:
            raise SaveError(f"{len(written)} of {self._planned} planned items were written")
        self._on_written(self, metadata, written)

    def write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: write `.metadata` over the results of all ranks.  Raises OSError."""
        super().finish(metadata, results)
