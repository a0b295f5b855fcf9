"""Loading a snapshot from the nodes' memory: real ranks, each with a directory of its own that has its files alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, read_manifest
from stepkeeper_trainer.formats.metadata import METADATA_NAME, parse
from stepkeeper_trainer.load.from_memory import EXTENTS_MAX, SENT_BYTES_MAX, agree, why_not
from stepkeeper_trainer.tiers.tier import writer_of
from tests.trainer.flipping import flip
from tests.trainer.test_load import ranks

WORLD = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded") / "step_00000001"
    codes, said = ranks(WORLD, "save", directory)
    assert codes == [0] * WORLD, said
    return directory


@pytest.fixture
def memory(saved: Path, tmp_path: Path) -> Path:
    """Each node's part."""
    for rank in range(WORLD):
        own = tmp_path / f"n{rank}"
        own.mkdir()
        for name in (MANIFEST_NAME, *read_manifest(saved).files):
            if name == MANIFEST_NAME or writer_of(name) == rank:
                shutil.copy(saved / name, own / name)
    return tmp_path


def piece(saved: Path, tensor: str, number: int) -> tuple[str, int]:
    """Return the file of a piece, and a byte within it."""
    extent = parse((saved / METADATA_NAME).read_bytes()).tensors[tensor].pieces[number].extent
    assert extent is not None
    return extent.file, extent.start + extent.length // 2


def test_each_rank_reads_its_own_files_and_is_sent_what_others_wrote(saved: Path, memory: Path) -> None:
    writers = {writer_of(piece(saved, name, 0)[0]) for name in ("replicated", "plain")}
    assert len(writers) < WORLD, "some rank is sent what all have alike"
    codes, said = ranks(WORLD, "load-from-memory", memory)
    assert codes == [0] * WORLD, said


@pytest.mark.parametrize(
    ("tensor", "number"), [("rows", 1), ("plain", 0)], ids=["read by its own rank", "sent to the others"]
)
def test_a_wrong_byte_stops_all_ranks_and_is_named(saved: Path, memory: Path, tensor: str, number: int) -> None:
    file, at = piece(saved, tensor, number)
    flip(memory / f"n{writer_of(file)}" / file, at)
    codes, said = ranks(WORLD, "load-from-memory", memory)
    assert codes == [3] * WORLD, said
    assert all(f"{file}: bytes of chunk" in text for text in said)


@pytest.mark.parametrize("how", ["gone", "cut", "zeros"])
def test_without_what_says_what_it_holds_no_rank_begins(memory: Path, how: str) -> None:
    path = memory / "n0" / METADATA_NAME
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "cut" else bytes(path.stat().st_size))
    codes, said = ranks(WORLD, "load-from-memory", memory)
    assert codes == [3] * WORLD, said
    assert all(METADATA_NAME in text for text in said)


def test_what_is_sent_is_bounded_and_each_range_is_sent_once() -> None:
    half = SENT_BYTES_MAX // 2
    shared, own, other = ("__0_0.distcp", 0, half), ("__1_0.distcp", 0, half), ("__1_0.distcp", half, 1)
    assert agree([[shared], [shared, own]]) == [shared, own]
    refused = "ranks need 64 MiB of other nodes' files, and send each other at most 64 MiB"
    assert agree([[shared, own], [other]]) == refused
    assert why_not([("", 2, 2 * half), ("", 1, half)]) == ""
    assert why_not([("", 2, 2 * half), ("", 3, 2 * half + 1)]) == refused
    assert why_not([("", 1, 1), ("__1_0.distcp: is damaged", 0, 0)]) == "__1_0.distcp: is damaged"
    assert "ask each other for at most" in why_not([("", EXTENTS_MAX, 1), ("", 1, 1)])
