"""`.metadata` is read and never run, and what it promises must be there."""

from __future__ import annotations

import builtins
import collections
import copyreg
import operator
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from stepkeeper_trainer.formats.metadata import Contents, Extent, MetadataError, TensorEntry, check_coverage, parse
from stepkeeper_trainer.formats.metadata import Piece as TensorPiece
from stepkeeper_trainer.formats.verify import verify
from tests.dcp_files import Piece, metadata
from tests.trainer.test_formats import make_step, replace_metadata


def saved(directory: Path, state: dict[str, torch.Tensor]) -> Contents:
    dcp.save(state, checkpoint_id=directory)  # type: ignore[arg-type]
    return parse((directory / ".metadata").read_bytes())


def test_what_stock_torch_wrote_is_read_in_full(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
    state = {str(dtype): torch.zeros(3, 5, dtype=dtype) for dtype in dtypes} | {"number": torch.tensor(1.0)}

    contents = saved(tmp_path, state)

    assert {name: (f"torch.{entry.dtype}", entry.size) for name, entry in contents.tensors.items()} == {
        name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()
    }
    sizes = {name: os.path.getsize(tmp_path / name) for name in os.listdir(tmp_path)}
    assert check_coverage(contents, sizes) == []
    assert not contents.objects
    assert not contents.unclaimed
    for entry in contents.tensors.values():
        [piece] = entry.pieces
        assert piece.extent is not None
        with (tmp_path / piece.extent.file).open("rb") as file:
            file.seek(piece.extent.start)
            assert file.read(4) == b"PK\x03\x04"


def test_a_pickled_item_is_seen_and_not_loaded(tmp_path: Path) -> None:
    contents = saved(tmp_path, {"a": torch.zeros(1), "script": {"x": object}})  # type: ignore[dict-item]

    assert list(contents.objects) == ["script.x"]


class Evil:
    """Pickles itself as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def by_state(attack: Callable[[Path], Any]) -> Callable[[Path], bytes]:
    """Hide an object in the place where torch keeps what nobody looks at."""

    def make(flag: Path) -> bytes:
        whole = pickle.loads(metadata({"a": [Piece((0,), (1,), "x")]}))  # noqa: S301  # our own
        whole.planner_data = {"cached": attack(flag)}
        return pickle.dumps(whole)

    return make


def by_hand(*parts: str) -> Callable[[Path], bytes]:
    """A stream of protocol 0: opcodes written out."""
    return lambda flag: "".join(parts).replace("FLAG", str(flag)).encode()


EXTENSION = 0x7F000001


def by_extension(flag: Path) -> bytes:
    copyreg.add_extension("os", "system", EXTENSION)  # type: ignore[arg-type]
    try:
        return b"\x84" + EXTENSION.to_bytes(4, "little") + f"(Vtouch {flag}\ntR.".encode()
    finally:
        copyreg.remove_extension("os", "system", EXTENSION)  # type: ignore[arg-type]


ATTACKS = {
    "os.system": by_state(lambda flag: Evil(os.system, f"touch {flag}")),
    "subprocess": by_state(lambda flag: Evil(subprocess.call, ["touch", str(flag)])),
    "eval": by_state(lambda flag: Evil(builtins.eval, f"open({str(flag)!r}, 'w')")),
    "exec": by_state(lambda flag: Evil(builtins.exec, f"open({str(flag)!r}, 'w')")),
    "open": by_state(lambda flag: Evil(open, str(flag), "w")),
    "getattr": by_state(lambda flag: Evil(getattr, flag, "touch")),
    "attrgetter": by_state(lambda _flag: Evil(operator.attrgetter, "system.__call__")),
    "unpickler in it": by_state(lambda flag: Evil(pickle.loads, pickle.dumps(Evil(os.system, f"touch {flag}")))),
    "torch.load": by_state(lambda flag: Evil(torch.load, str(flag))),
    "partial": by_state(lambda flag: Evil(__import__("functools").partial, os.system, f"touch {flag}")),
    "a counter": by_state(lambda _flag: collections.Counter([1])),
    "GLOBAL and REDUCE": by_hand("cos\nsystem\n(Vtouch FLAG\ntR."),
    "INST": by_hand("(Vtouch FLAG\nios\nsystem\n."),
    "OBJ": by_hand("(cos\nsystem\nVtouch FLAG\no."),
    "dotted name": by_hand("ctorch.distributed.checkpoint.metadata\nos.system\n(Vtouch FLAG\ntR."),
    "a name of torch that is no type": by_hand("ctorch\nload\n(Vtouch FLAG\ntR."),
    "persistent id": by_hand("Ptouch FLAG\n."),
    "extension code": by_extension,
    "a place in the memo that takes gigabytes": lambda _flag: b"\x80\x04Nr\xff\xff\xff\xff.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_pickle_is_refused_and_not_run(attack: str, tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    data = ATTACKS[attack](flag)
    if attack == "extension code":
        copyreg.add_extension("os", "system", EXTENSION)  # type: ignore[arg-type]
    try:
        with pytest.raises(MetadataError) as caught:
            parse(data)
    finally:
        if attack == "extension code":
            copyreg.remove_extension("os", "system", EXTENSION)  # type: ignore[arg-type]
    assert not flag.exists()
    assert caught.value.args[0]

    step = make_step(tmp_path, 1)
    replace_metadata(step, data)
    for deep in (False, True):
        assert not verify(step, deep=deep).ok
    assert not flag.exists()


def test_stock_torch_runs_what_ours_refuses(tmp_path: Path) -> None:
    """The reason for all this: should it fail one day, torch has learnt it too."""
    state = {"a": torch.zeros(1)}
    dcp.save(state, checkpoint_id=tmp_path / "step")  # type: ignore[arg-type]
    flag = tmp_path / "executed"
    (tmp_path / "step/.metadata").write_bytes(ATTACKS["os.system"](flag))

    with pytest.raises((Exception, dcp.api.CheckpointException)):  # whatever comes after it ran
        dcp.load(state, checkpoint_id=tmp_path / "step")  # type: ignore[arg-type]

    assert flag.exists()


def test_a_pickle_cannot_change_how_the_next_one_is_read() -> None:
    """BUILD sets attributes on what it is given: were that a class of ours, it would lie to all readers after."""
    good = metadata({"a": [Piece((0,), (4,), "f", 0, 4)]})
    for name in ("_Info", "_Tensor", "_Chunk"):
        real = {"_Info": "filesystem\n_StorageInfo", "_Tensor": "metadata\nTensorStorageMetadata"}.get(
            name, "metadata\nChunkStorageMetadata"
        )
        poison = f"ctorch.distributed.checkpoint.{real}\n(N(Voffset\nI7\ndtb.".encode()
        with pytest.raises(MetadataError):
            parse(poison)
    [piece] = parse(good).tensors["a"].pieces
    assert piece.extent is not None
    assert (piece.extent.start, piece.extent.length) == (0, 4)


def test_every_cut_and_every_flipped_byte_of_a_metadata_is_an_error_or_data(tmp_path: Path) -> None:
    whole = metadata({"a": [Piece((0, 0), (2, 3), "f", 0, 6), Piece((2, 0), (2, 3), "f", 6, 6)]})
    for end in range(len(whole)):
        with pytest.raises(MetadataError):
            parse(whole[:end])
    for at in range(len(whole)):
        for bit in (1, 0x10, 0x80):
            changed = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
            try:
                check_coverage(parse(changed), {"f": 12})
            except MetadataError:
                continue
    step = make_step(tmp_path, 1)
    data = bytearray((step / ".metadata").read_bytes())
    for at in range(0, len(data), 7):
        data[at] ^= 4
        (step / ".metadata").write_bytes(data)
        assert not verify(step, deep=False).ok, "its digest stands in the manifest"
        data[at] ^= 4


WHOLE = [Piece((0, 0), (2, 3), "f", 0, 6), Piece((2, 0), (2, 3), "g", 0, 6)]
HOLES = {
    "a piece that nobody wrote (pytorch#191391)": ([WHOLE[0], Piece((2, 0), (2, 3), None)], "stored nowhere"),
    "a piece that nobody planned": ([WHOLE[0]], "hold 6 of its 12 numbers"),
    "the same piece twice": ([WHOLE[0], Piece((0, 0), (2, 3), "g", 0, 6)], "overlap"),
    "a piece outside": ([WHOLE[0], Piece((3, 0), (2, 3), "g", 0, 6)], "sticks out"),
    "a file that is missing": ([WHOLE[0], Piece((2, 0), (2, 3), "h", 0, 6)], "h: holds 1 pieces and is not there"),
    "bytes beyond the end": ([WHOLE[0], Piece((2, 0), (2, 3), "g", 1, 6)], "g: has 6 bytes, its pieces need 7"),
    "shared bytes": ([WHOLE[0], Piece((2, 0), (2, 3), "f", 0, 6)], "two pieces share bytes"),
    "too few bytes": ([WHOLE[0], Piece((2, 0), (2, 3), "g", 0, 5)], "too few bytes"),
    "a place before the file": ([WHOLE[0], Piece((2, 0), (2, 3), "g", -1, 6)], "has no place"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_what_does_not_cover_a_tensor_is_named(hole: str) -> None:
    pieces, words = HOLES[hole]

    [problem, *_] = check_coverage(parse(metadata({"a": pieces}, size=(4, 3))), {"f": 6, "g": 6})

    assert words in problem


def test_pieces_in_two_dimensions_may_touch_and_not_overlap() -> None:
    grid = [Piece((r, c), (2, 2), "f", 4 * (r + c // 2), 4) for r in (0, 2) for c in (0, 2)]
    grid = [piece._replace(start=4 * i) for i, piece in enumerate(grid)]
    assert check_coverage(parse(metadata({"a": grid})), {"f": 16}) == []
    shifted = [*grid[:3], grid[3]._replace(offsets=(1, 2))]
    assert "overlap" in check_coverage(parse(metadata({"a": shifted}, size=(4, 4))), {"f": 16})[0]


def test_a_torn_save_of_thousands_of_pieces_is_said_briefly() -> None:
    lost = {f"w{i}": [Piece((0,), (4,), None)] for i in range(3000)}

    problems = check_coverage(parse(metadata(lost)), {})

    assert len(problems) == 21
    assert problems[-1] == "and more"


def test_no_torch_is_needed(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1)
    code = (
        "import sys, pathlib; from stepkeeper_trainer.formats.verify import verify\n"
        f"assert verify(pathlib.Path({str(step)!r})).ok\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90)


class _Member:
    """The member of an enum, as Python 3.11.0 to 3.11.3 pickles it: Debian 12 has 3.11.2."""

    def __reduce__(self):
        return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")


def test_the_member_of_an_enum_may_be_written_as_older_pythons_do():
    """Without this every checkpoint of such a Python would be refused, and the run start anew."""
    whole = pickle.loads(metadata({"a": [Piece((0,), (1,), "x")]}))  # noqa: S301  # our own
    whole.planner_data = _Member()

    assert set(parse(pickle.dumps(whole, protocol=4)).tensors) == {"a"}


def test_many_pieces_side_by_side_are_compared_in_no_time() -> None:
    """Columns of a matrix: each was compared with each."""
    count = 40_000
    pieces = [TensorPiece((0, at), (4, 1), Extent("f", 4 * at, 4, transformed=False)) for at in range(count)]
    tensor = TensorEntry("uint8", (4, count), tuple(pieces))
    began = time.process_time()
    assert check_coverage(Contents({"w": tensor}, {}, ()), {"f": 4 * count}) == []
    twice = (*pieces[:-1], msgspec.structs.replace(pieces[-1], offsets=(0, 7)))
    found = check_coverage(Contents({"w": TensorEntry("uint8", (4, count), twice)}, {}, ()), {"f": 4 * count})
    assert found == ["w: two of its pieces overlap"]
    assert time.process_time() - began < 10


def test_pieces_that_are_cut_along_too_many_dimensions_are_refused() -> None:
    """Each piece has twice as many corners for each dimension: 8192 pieces along 13 dimensions have 67 million."""
    piece = TensorPiece((0,) * 13, (1,) * 13, Extent("f", 0, 1, transformed=False))
    tensor = TensorEntry("uint8", (2,) * 13, (piece,) * 2**13)

    assert "too many to tell whether they cover it" in check_coverage(Contents({"w": tensor}, {}, ()), {"f": 1})[0]
