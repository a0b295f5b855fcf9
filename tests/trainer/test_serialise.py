"""Our frames are torch's own bytes; what they rest on in torch is pinned here."""

from __future__ import annotations

import io
import random
import zipfile
import zlib
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from stepkeeper_trainer import buffers as checksums
from stepkeeper_trainer.save.serialise import ALIGNMENT, Frame, frame

NEWEST = hasattr(filesystem, "CURRENT_DCP_VERSION")
"""An older torch writes fewer entries into an archive, and reads those with more."""
ID = "archive/.data/serialization_id"  # drawn by torch from the content, and read back by nobody
TYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (2, 0, 3), (1,), (3,), (2, 3), (1, 300, 1), (5000,), (70000, 2)]


def filled(one: Frame, data: bytes) -> bytes:
    buffer = bytearray(one.head + data + one.tail)
    tail = len(one.head) + len(data)
    checksums.put_crc(memoryview(buffer), tail + one.crc_at[0], tail + one.crc_at[1], zlib.crc32(data))
    return bytes(buffer)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def without_id(archive: bytes) -> bytes:
    """Blank torch's telemetry: 40 digits and their CRC."""
    info = zipfile.ZipFile(io.BytesIO(archive)).getinfo(ID)
    blank = bytearray(archive)
    start = info.header_offset + 30 + len(ID) + int.from_bytes(archive[info.header_offset + 28 :][:2], "little")
    blank[start : start + 40] = b"x" * 40
    return bytes(blank).replace(info.CRC.to_bytes(4, "little"), b"CRC ")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_filled_frame_is_what_torch_save_writes(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = torch.randint(0, 2, shape).to(dtype)
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        one = frame(dtype, shape)

        ours = filled(one, bytes_of(tensor))

        if NEWEST:
            assert without_id(ours) == without_id(buffer.getvalue()), shape
        assert len(one.head) % ALIGNMENT == 0
        assert zipfile.ZipFile(io.BytesIO(ours)).testzip() in (None, ID)
        assert torch.equal(torch.load(io.BytesIO(ours), weights_only=True), tensor)


def test_every_flipped_byte_of_the_data_is_seen_by_the_archives_own_crc() -> None:
    """torch.load never looks; zipfile does."""
    tensor = torch.rand(1000)
    one = frame(tensor.dtype, tuple(tensor.shape))
    ours = bytearray(filled(one, bytes_of(tensor)))
    for at in random.sample(range(one.data_bytes), 20):
        ours[len(one.head) + at] ^= 8
        assert zipfile.ZipFile(io.BytesIO(bytes(ours))).testzip() == "archive/data/0"
        ours[len(one.head) + at] ^= 8


def test_a_tensor_of_more_than_four_gib_gets_the_fields_of_zip64() -> None:
    """The frame only: its bytes would be too many for a test."""
    count = (1 << 30) + 7
    one = frame(torch.float32, (count,))

    def read(start: int, size: int) -> bytes:
        """The archive with zeros for data."""
        data_end = len(one.head) + one.data_bytes
        if start >= data_end:
            return one.tail[start - data_end :][:size]
        return (one.head + bytes(1 << 16))[start : start + size]

    file = _Sparse(read, len(one.head) + one.data_bytes + len(one.tail))
    archive = zipfile.ZipFile(file)

    info = archive.getinfo("archive/data/0")
    assert (info.file_size, info.compress_size) == (4 * count, 4 * count)
    assert archive.getinfo("archive/version").header_offset > 1 << 32
    assert archive.read("archive/version") == b"3\n"
    assert zlib.crc32(archive.read("archive/data.pkl")) == archive.getinfo("archive/data.pkl").CRC


class _Sparse(io.RawIOBase):
    """A file that is far larger than what it holds."""

    def __init__(self, read, size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = min(self._size - self._at, size if size >= 0 else self._size)
        data = self._read(self._at, size)
        self._at += size
        return data


def test_the_private_names_of_torch_are_what_we_take_them_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One test to read when a new torch breaks the save path."""
    assert getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0") == "1.0.0"
    info = filesystem._StorageInfo("a", 1, 2)
    assert (info.relative_path, info.offset, info.length) == ("a", 1, 2)
    assert getattr(info, "transform_descriptors", None) is None
    assert torch.storage._dtype_to_storage_type_map()[torch.float32] == "FloatStorage"
    assert torch.float8_e4m3fn in torch.storage._new_dtypes()
    assert torch.float32 not in torch.storage._new_dtypes()
    tensors = {"a": torch.rand(2, 3), "b": torch.tensor(1)}
    plan = replace(create_default_local_save_plan(tensors, is_coordinator=True), planner_data={})
    [shares], whole = DefaultSavePlanner().create_global_plan([plan])
    assert [item.index.fqn for item in shares.items] == ["a", "b"]
    assert isinstance(whole.state_dict_metadata["a"], metadata.TensorStorageMetadata)
    target = [torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]
    torch._foreach_copy_(target, list(tensors.values()))
    assert torch.equal(target[0], tensors["a"])
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = DTensor.from_local(torch.rand(3), DeviceMesh("cpu", [0]), [Replicate()])
        assert torch.equal(sharded._local_tensor, sharded.to_local())
        assert sharded._spec == DTensor.from_local(torch.rand(3), sharded.device_mesh, [Replicate()])._spec
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [0, 1, 5120, 5121, 65536, 100_000])
def test_a_checksum_goes_on_from_one_part_to_the_next(size: int) -> None:
    data = bytes(n * n % 251 for n in range(size))

    first = checksums.crc32(memoryview(data)[: size // 3])

    assert checksums.crc32(memoryview(data)[size // 3 :], first) == zlib.crc32(data)
