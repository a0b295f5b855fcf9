"""A save whose bytes are read back from the disk counts only if the disk has them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.steps import verify
from stepkeeper_trainer.save import commit as committing
from stepkeeper_trainer.save import persist
from stepkeeper_trainer.save.writer import Written
from tests.trainer.test_keeper import Loop, names

MIB = 1024 * 1024
SEEN_BYTES = 48  # of a file, which are there once on its disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system whose disk is a file: `image` beside it."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no disk can be made here: mkfs.ext4 is not on the PATH")
    at, image = tmp_path / "disk", tmp_path / "image"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(192 * MIB)
    done = subprocess.run(
        ["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True, timeout=60, check=False
    )
    if not done.returncode:
        done = subprocess.run(
            ["mount", "-o", "loop", str(image), str(at)], capture_output=True, text=True, timeout=60, check=False
        )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True, timeout=60)


def spoil(image: Path, path: Path) -> None:
    """Change a byte of a file on the disk below it; who reads it through the page cache sees nothing of that."""
    data = path.read_bytes()
    pieces = [data[at : at + SEEN_BYTES] for at in range(0, len(data) - SEEN_BYTES, SEEN_BYTES)]
    wanted = max(pieces, key=lambda piece: len(set(piece)))  # numbers of the model, and no zeros
    with image.open("r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
        at = whole.find(wanted)
        assert at >= 0, "it is on the disk"
        assert whole.find(wanted, at + 1) < 0, "and nowhere else"
        whole[at] ^= 1
        whole.flush()


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        [value] = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([value ^ 1]))


def bad(monkeypatch: pytest.MonkeyPatch, which: str, harm: Callable[[Path], object]) -> list[str]:
    """Have the files of the first save come to harm once they are durable; their names are in the list then."""
    harmed: list[str] = []

    def data(directory: Path, *arguments: object, **options: object) -> Written:
        written = write_file(directory, *arguments, **options)  # type: ignore[arg-type]
        if not harmed and which == "data":
            harm(directory / written.plan.name)
            harmed.append(written.plan.name)
        return written

    class File(committing.HashingFile):
        def close(self) -> None:
            super().close()
            if not harmed and which == "metadata" and self._path.name == ".metadata":
                harm(self._path)
                harmed.append(self._path.name)

    write_file = persist.write_file
    monkeypatch.setattr(persist, "write_file", data)
    monkeypatch.setattr(committing, "HashingFile", File)
    return harmed


def saved(loop: Loop) -> None:
    loop.step()
    loop.manager.save()
    assert loop.manager._saver is not None
    loop.manager._saver.wait(time.time() + 90)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("which", ["data", "metadata"])
def test_a_save_that_the_disk_gives_back_wrongly_comes_to_nothing_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    run_dir = tmp_path / "run"
    loop = Loop(run_dir, read_back=True, storage_test="off", retention="all")
    loop.manager.resume()
    harmed = bad(monkeypatch, which, flip)

    saved(loop)
    assert names(run_dir) == []
    assert harmed
    assert "save_failed step=1" in caplog.text
    assert "read back from the disk: " in caplog.text
    assert f"{harmed[0]}: bytes of chunk 0" in caplog.text
    assert "storage_alarm" in caplog.text

    saved(loop)
    assert names(run_dir) == ["step_00000002"]
    assert verify(run_dir / "checkpoints/step_00000002").ok


@pytest.mark.usefixtures("one_process")
def test_without_it_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    loop = Loop(run_dir, storage_test="off", retention="all")
    loop.manager.resume()
    bad(monkeypatch, "data", flip)

    saved(loop)

    assert not verify(run_dir / "checkpoints/step_00000001").ok


@pytest.mark.usefixtures("one_process")
def test_what_the_page_cache_has_is_not_taken_for_what_the_disk_has(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    image, run_dir = disk.with_name("image"), disk / "run"
    right: list[bool] = []

    def harm(path: Path) -> None:
        before = path.read_bytes()
        spoil(image, path)
        right.append(path.read_bytes() == before)

    loop = Loop(run_dir, read_back=True, storage_test="off", retention="all")
    loop.manager.resume()
    bad(monkeypatch, "data", harm)

    saved(loop)

    assert right == [True], "the page cache has what was written"
    assert names(run_dir) == []
    assert "read back from the disk: " in caplog.text
