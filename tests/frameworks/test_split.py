"""A large file is read by several threads: nothing of what one pass finds is missed, and digests of before count."""

from __future__ import annotations

import dataclasses
import os
import zlib
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepkeeper.frameworks import choosing, recognise, verify
from stepkeeper.frameworks.choosing import How, Judged, State
from stepkeeper.frameworks.first_sight import Record
from stepkeeper.frameworks.framework import Step
from stepkeeper_trainer.formats.reading import Reading

SPLIT = 4096


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of Lightning with records of many sizes, most of them across the bounds of pieces."""
    monkeypatch.setattr(verify, "SPLIT_BYTES", SPLIT)
    monkeypatch.setattr(verify, "PIECE_BYTES", 1000)
    sizes = (1, 700, 3000, 40, 9000, 0, 1024)
    state = {str(size): torch.arange(size, dtype=torch.float32) for size in sizes}
    whole = {"state_dict": state, "optimizer_states": [state], "lr_schedulers": [], "loops": {}, "epoch": 0}
    found = tmp_path / "step=10.ckpt"
    torch.save({**whole, "global_step": 10, "pytorch-lightning_version": "2.6.6"}, found)
    assert found.stat().st_size > 5 * SPLIT
    return found


def judged(path: Path, *, cached: bool = False) -> Judged:
    home = {"HOME": str(path.parent / "home")}
    how = How(environment=home, deep=True, cached=cached, world_size=None, reading=Reading())
    return choosing.judge(recognise.known()["lightning"], Step(path, 10), how)


def test_each_byte_of_a_record_counts_whatever_thread_reads_it(path: Path) -> None:
    assert judged(path).state is State.VERIFIED
    data, status = path.read_bytes(), path.stat()
    directory = data.rindex(b"PK\x01\x02", 0, data.index(b"PK\x01\x02") + 4)  # what is behind it is read by itself
    first = data.index(b"/data/0") + 64
    places = {*range(first, directory, 997), SPLIT - 1, SPLIT, 2 * SPLIT - 1, 2 * SPLIT}
    for place in sorted(each for each in places if first <= each < directory):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as rot leaves it
        found = judged(path)
        assert found.state is State.TORN, f"byte {place} of {len(data)}"
    path.write_bytes(data)
    assert judged(path).state is State.VERIFIED


def test_a_record_across_pieces_is_named_as_damaged(path: Path) -> None:
    data = path.read_bytes()
    tensor = torch.arange(9000, dtype=torch.float32).numpy().tobytes()
    place = data.index(tensor) + len(tensor) - 10
    path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])

    [problem] = judged(path).problems

    assert "its CRC32 is wrong" in problem, problem


def test_digests_of_one_pass_are_compared_with_one_pass(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of an earlier release: the digest of a large file was that of all its bytes in a row."""
    with monkeypatch.context() as patch:
        patch.setattr(verify, "SPLIT_BYTES", 2**40)
        assert judged(path).state is State.VERIFIED
    [kept] = (path.parent / "home").rglob("*.json")
    before = msgspec.json.decode(kept.read_bytes(), type=Record)
    assert not any(seen.is_split for seen in before.files.values())

    assert judged(path).state is State.VERIFIED, "a checkpoint that nobody touched"

    data, status = path.read_bytes(), path.stat()
    place = data.rindex(b"PK\x01\x02", 0, data.index(b"PK\x01\x02") + 4) - 1  # padding, or the last record
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert judged(path).state is State.TORN


def test_a_split_file_is_known_again_and_its_digest_is_the_same_with_any_threads(path: Path) -> None:
    first = judged(path)
    [kept] = (path.parent / "home").rglob("*.json")
    digests = {name: seen.xxh3_128 for name, seen in msgspec.json.decode(kept.read_bytes(), type=Record).files.items()}
    assert all(digest.startswith(f"{SPLIT}:") for digest in digests.values())
    how = How(
        environment={"HOME": str(path.parent / "home")}, deep=True, cached=False, world_size=None,
        reading=Reading(threads=1),
    )  # fmt: skip
    again = choosing.judge(recognise.known()["lightning"], Step(path, 10), dataclasses.replace(how))
    assert again.state is State.VERIFIED, again.problems
    assert first.deep is not None
    assert again.deep is not None
    assert first.deep.bytes_read == again.deep.bytes_read == path.stat().st_size


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_crc32s_of_two_texts_make_that_of_both(first: bytes, second: bytes) -> None:
    found = verify.combined(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)
