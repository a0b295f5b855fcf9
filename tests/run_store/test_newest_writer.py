"""A small file of which the newest version counts, such as `status.json`."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from stepkeeper.run_store.lines import NewestWriter

WITHIN_S = 60.0


class Version(msgspec.Struct):
    number: int


def test_versions_that_are_replaced_soon_cost_shared_storage_no_sync_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    wrote = threading.Semaphore(0)
    fsync, close = os.fsync, os.close

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def note_end(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        close(descriptor)
        if is_directory:
            wrote.release()

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "close", note_end)
    failed: list[BaseException] = []
    writer = NewestWriter(tmp_path / "status.json", on_error=failed.append, on_failure=failed.append)
    for number in range(2):
        writer.show(Version(number))
        while msgspec.json.decode(_read(tmp_path / "status.json") or b'{"number":-1}', type=Version).number != number:
            assert wrote.acquire(timeout=WITHIN_S)
    assert "directory" not in synced

    writer.close(Version(2), WITHIN_S)

    assert synced[-2:] == ["file", "directory"], "the last one is to stay"
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=Version).number == 2
    assert failed == []


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
