"""Step directories of small random files, for tests of tiers; and ranks that are threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal
from stepkeeper_trainer.tiers import Held

CHUNK = 1000
LATE_S = 90.0


def entry(data: bytes) -> FileEntry:
    """Return what a manifest says of a file."""
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return FileEntry(
        bytes=len(data),
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
        chunk_bytes=CHUNK,
        chunks=tuple(map(xxhash.xxh3_128_hexdigest, chunks)),
    )


def content(step: int, ranks: int = 2) -> dict[str, bytes]:
    """Return the files of a step: one of each rank, and the metadata."""
    dice = random.Random(step)  # noqa: S311
    files = {f"__{rank}_0.distcp": dice.randbytes(7 * CHUNK + 100 * rank + 1) for rank in range(ranks)}
    return {".metadata": dice.randbytes(300)} | files


def make(
    step: int,
    files: dict[str, bytes],
    *,
    parent: str | None = None,
    save_id: str | None = None,
    ancestors: tuple[str | None, ...] = (None,),
    created_at: str | None = None,
) -> Held:
    """Return a manifest of files."""
    save_id = save_id or f"{step:08x}" + "ab" * 12
    raw = seal(
        Manifest(
            step=step,
            tokens=step,
            world_size=2,
            framework="a test's",
            created_at=created_at or f"2026-09-21T00:00:{step // 100:02d}+00:00",
            save_id=save_id,
            parent=parent,
            files={name: entry(data) for name, data in files.items()},
            state={"ancestors": ancestors},
        )
    )
    return Held.read("", raw, source="a test")


class Together:
    """What ranks do together, for ranks that are threads of one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size

    def of(self, rank: int) -> _Together:
        """Return the end of one rank."""
        return _Together(self, rank)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return all values."""
        self._values[rank] = value
        self._barrier.wait(LATE_S)
        found = list(self._values)
        self._barrier.wait(LATE_S)
        return found

    def abort(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._barrier.abort()


class _Together:
    def __init__(self, all_ranks: Together, rank: int) -> None:
        self._all, self._rank = all_ranks, rank

    def gather(self, value: Any) -> list[Any]:
        return self._all.exchange(self._rank, value)

    def share(self, value: Any) -> Any:
        return self._all.exchange(self._rank, value)[0]


def on_ranks(world_size: int, work: Callable[[int, _Together], Any]) -> list[Any]:
    """Run `work` on a thread for each rank, and return what each returned; the first error is raised."""
    together = Together(world_size)
    found: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, together.of(rank))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LATE_S)
        assert not thread.is_alive()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return found


def lay(directory: Path, files: dict[str, bytes]) -> None:
    """Write files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
