"""Whatever happens to the files of a committed step is found; much of it stock DCP loads without a word.

Each `silent` damage is shown to do that: should a later torch notice it, the test says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.manifest import ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import parse
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.steps import newest_verified
from stepkeeper_trainer.formats.verify import CACHE_NAME, Cache, verify
from stepkeeper_trainer.load.reader import CheckedReader, load
from tests.trainer.flipping import flip
from tests.trainer.steps_by_dcp import commit, save, stock_load

CHUNK = 16 * 1024


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "weights": torch.randn(60, 200),
        "moments": torch.randn(60, 200),
        "bias": torch.randn(60),
        "more": torch.randn(60, 200),
        "step": torch.tensor(float(seed)),
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in state(0).items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two committed steps; the newer one is `step_00000002`."""
    for step in (1, 2):
        directory = tmp_path / f"step_0000000{step}"
        parent = f"{step - 1:032x}" if step > 1 else None
        save(directory, state(step), threads=2, step=step, save_id=f"{step:032x}", parent=parent, chunk_bytes=CHUNK)
        record = lineage.Commit(at=1.0, step=step, save_id=f"{step:032x}", parent=parent, directory=directory.name)
        lineage.append(tmp_path, record)
    return tmp_path


def place(step: Path, name: str) -> tuple[Path, int, int]:
    """Return the file of a tensor, and where its archive begins and ends."""
    extent = parse((step / ".metadata").read_bytes()).tensors[name].pieces[0].extent
    assert extent is not None
    return step / extent.file, extent.start, extent.start + extent.length


# What stock does not notice ---------------------------------------------------------------------------------------


def a_flipped_bit(step: Path, _older: Path) -> None:
    path, start, end = place(step, "moments")
    flip(path, (start + end) // 2, 0x40)


def a_page_of_zeros(step: Path, _older: Path) -> None:
    """As after a power cut, where data were never synced."""
    path, start, end = place(step, "weights")
    with path.open("r+b") as file:
        file.seek((start + end) // 2 // 4096 * 4096)
        file.write(bytes(4096))


def swapped_tensors(step: Path, _older: Path) -> None:
    """Two archives of one size change places in one file or two."""
    (one, at, end), (other, there, _) = place(step, "weights"), place(step, "moments")
    first, second = one.read_bytes()[at:end], other.read_bytes()[there : there + end - at]
    for path, begin, data in ((one, at, second), (other, there, first)):
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(data)


def a_chimera(step: Path, older: Path) -> None:
    """One rank's file is of another save, as after a rank died while a directory was overwritten."""
    path, _, _ = place(step, "weights")
    shutil.copyfile(older / path.name, path)


def a_file_of_before(step: Path, older: Path) -> None:
    """All data of another save, with this one's plan: a restore that took the wrong day."""
    for path in older.glob("*.distcp"):
        shutil.copyfile(path, step / path.name)


SILENT = [a_flipped_bit, a_page_of_zeros, swapped_tensors, a_chimera, a_file_of_before]


@pytest.mark.parametrize("damage", SILENT, ids=lambda damage: damage.__name__)
def test_what_stock_loads_without_a_word_is_found(run: Path, damage: Callable[[Path, Path], None]) -> None:
    newer, older = run / "step_00000002", run / "step_00000001"
    damage(newer, older)

    stock = empty()
    stock_load(newer, stock)
    wrong = [name for name, value in stock.items() if not torch.equal(value, state(2)[name])]
    assert wrong, "stock DCP loads it, and the model is not what was saved"

    manifest = read_manifest(newer)
    with pytest.raises(DamagedError, match="are wrong"):
        load(CheckedReader(newer, manifest), empty(), None)
    assert not verify(newer).ok
    assert newest_verified(run).chosen.path == older  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_whose_writer_failed_is_never_whole(tmp_path: Path) -> None:
    """Stock swallows what goes wrong in a thread that writes, and says that the save has succeeded (pytorch#191391)."""

    main, failed = threading.current_thread(), threading.Event()

    class Failing(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[object]:  # type: ignore[override]
            if str(path).endswith(".distcp") and threading.current_thread() is not main:
                failed.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            assert failed.wait(90), "the other thread takes its share first"
            with super().create_stream(path, mode) as stream:
                yield stream

    writer = dcp.FileSystemWriter(tmp_path / "step_00000001", thread_count=2)
    writer.fs = Failing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(state(1), storage_writer=writer)  # type: ignore[arg-type]
        except (Exception, dcp.api.CheckpointException):  # noqa: BLE001  # whatever it tells
            pytest.skip("this torch tells of the error: it has been mended")
    assert (tmp_path / "step_00000001/.metadata").exists()
    commit(tmp_path / "step_00000001", chunk_bytes=CHUNK)

    verdict = verify(tmp_path / "step_00000001", deep=False)

    assert any("stored nowhere" in problem for problem in verdict.problems)


# Single bytes -----------------------------------------------------------------------------------------------------


def test_a_flip_of_any_byte_of_any_file_is_found(run: Path) -> None:
    """Sampled: all of the small places of an archive, and some of each kind of file."""
    step = run / "step_00000002"
    dice = random.Random(4)  # noqa: S311  # the same places each time
    data, start, end = place(step, "bias")
    places = [(data, at) for at in range(start, end, 31)]  # heads, pickles, fillers, sums, directory of one archive
    for name in sorted(os.listdir(step)):  # in the same order on every file system
        size = os.path.getsize(step / name)
        places += [(step / name, at) for at in {0, size - 1, *(dice.randrange(size) for _ in range(60))}]
    harmless = 0
    for path, at in places:
        bit = 1 << dice.randrange(8)
        flip(path, at, bit)

        assert not verify(step).ok, f"byte {at} of {path.name}"
        found = empty()
        with contextlib.suppress(DamagedError, ManifestError):
            load(CheckedReader(step, read_manifest(step)), found, None)
            right = all(torch.equal(value, state(2)[name]) for name, value in found.items())
            assert right, "only a chunk of which nothing is needed may be damaged"
            harmless += 1

        flip(path, at, bit)
    assert verify(step).ok
    assert harmless < len(places) / 10
    assert {path.name for path, _ in places} == {"MANIFEST.json", ".metadata", "__0_0.distcp", "__0_1.distcp"}


def test_a_flip_in_the_lineage_neither_hides_a_step_nor_brings_back_an_abandoned_one(run: Path) -> None:
    """The chosen step is right whichever byte is flipped; a line that is not what was written is counted."""
    path = run / "lineage.jsonl"
    damaged = 0
    for at in range(os.path.getsize(path)):
        flip(path, at)
        assert newest_verified(run).chosen.step == 2, f"byte {at}"  # type: ignore[union-attr]
        found = lineage.read(run)
        assert found is not None
        damaged += found.damaged
        flip(path, at)
    assert damaged > os.path.getsize(path) * 0.7


def test_a_flip_in_what_is_remembered_never_makes_a_bad_step_good(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", -1e9)
    step = run / "step_00000002"
    for path in step.iterdir():
        os.utime(path, (1, 1))  # else a change within a tick of the kernel's clock would not show
    assert verify(step, cache=Cache(run)).ok
    a_flipped_bit(step, step)
    [record] = (run / CACHE_NAME).iterdir()
    whole = record.read_bytes()
    for at in range(0, len(whole), 3):
        for bit in (1, 0x10):
            record.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            assert not verify(step, cache=Cache(run), reading=Reading(threads=1)).ok, f"byte {at}"


# Whole files ------------------------------------------------------------------------------------------------------


def truncated(step: Path) -> None:
    path = step / "__0_1.distcp"
    os.truncate(path, os.path.getsize(path) - 1)


def emptied(step: Path) -> None:
    os.truncate(step / "__0_0.distcp", 0)


def longer(step: Path) -> None:
    with (step / "__0_0.distcp").open("ab") as file:
        file.write(b"\0")


def missing(step: Path) -> None:
    (step / "__0_1.distcp").unlink()


def missing_plan(step: Path) -> None:
    (step / ".metadata").unlink()


def extra(step: Path) -> None:
    """Left over from a save of more ranks."""
    (step / "__1_0.distcp").write_bytes(b"")


def extra_below(step: Path) -> None:
    (step / "below").mkdir()
    (step / "below" / "file").write_bytes(b"x")


def swapped(step: Path) -> None:
    (step / "__0_0.distcp").rename(step / "aside")
    (step / "__0_1.distcp").rename(step / "__0_0.distcp")
    (step / "aside").rename(step / "__0_1.distcp")


def renamed(step: Path) -> None:
    (step / "__0_1.distcp").rename(step / "__0_7.distcp")


def plan_of_another_save(step: Path) -> None:
    """Of the same layout: only its own bytes tell."""
    older = step.parent / "step_00000001"
    shutil.copyfile(older / ".metadata", step / ".metadata")
    flip(step / ".metadata", 40)


def stale_manifest(step: Path) -> None:
    shutil.copyfile(step.parent / "step_00000001/MANIFEST.json", step / "MANIFEST.json")


def no_manifest(step: Path) -> None:
    (step / "MANIFEST.json").unlink()


def torn_manifest(step: Path) -> None:
    os.truncate(step / "MANIFEST.json", os.path.getsize(step / "MANIFEST.json") // 2)


def directory_in_place_of_a_file(step: Path) -> None:
    missing(step)
    (step / "__0_1.distcp").mkdir()


FILES = [
    truncated,
    emptied,
    longer,
    missing,
    missing_plan,
    extra,
    extra_below,
    swapped,
    renamed,
    plan_of_another_save,
    stale_manifest,
    no_manifest,
    torn_manifest,
    directory_in_place_of_a_file,
]


@pytest.mark.parametrize("damage", FILES, ids=lambda damage: damage.__name__)
def test_what_happens_to_whole_files_is_found_without_reading_them(run: Path, damage: Callable[[Path], None]) -> None:
    step = run / "step_00000002"
    damage(step)

    shallow = verify(step, deep=False)

    # two files of one size that change places, or a plan of the same size, are found by their bytes
    assert not shallow.ok or damage is swapped
    assert not verify(step).ok
    assert newest_verified(run).chosen.step == 1  # type: ignore[union-attr]


def test_thousands_of_files_are_looked_at_without_opening_them(tmp_path: Path) -> None:
    """A look costs one listing: files that cannot even be opened are no obstacle."""
    step = tmp_path / "step_00000001"
    save(step, state(1), step=1, chunk_bytes=CHUNK)
    for rank in range(2000):
        (step / f"__{rank + 1}_0.distcp").write_bytes(b"x" * rank)
    (step / "MANIFEST.json").unlink()
    commit(step, chunk_bytes=CHUNK)

    assert verify(step, deep=False).ok
    os.truncate(step / "__1700_0.distcp", 5)
    [problem] = verify(step, deep=False).problems
    assert problem.endswith("__1700_0.distcp: has 5 bytes, the manifest says 1699")
