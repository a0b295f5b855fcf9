"""What somebody can put into a checkpoint to hurt who only looks at it: real hostile files, one change each."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from tests import dcp_files
from tests.frameworks import layouts

CANARY = "executed"
Attack = Callable[[Path], None]


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _call(module: str, name: str, argument: bytes) -> bytes:
    """Return a pickle of protocol 2 that calls a name with one argument."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + argument + b"\x85R."


def payloads(canary: Path) -> dict[str, bytes]:
    """Return pickles that run something, or never end, where a usual reader meets them."""
    shell = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w')"
    doubling = b"\x80\x02K\x01q\x00" + b"0h\x00h\x00\x86q\x00" * 200 + b"}(h\x00K\x01u."
    colliding = b"\x80\x02}(" + b"".join(
        b"\x8a\x14" + (k * (2**61 - 1)).to_bytes(20, "little") + b"K\x01" for k in range(20_000)
    ) + b"u."  # fmt: skip
    ordered = b"\x80\x02](" + (b"K\x01K\x02\x86" * 100_000) + b"eq\x000" + (
        b"ccollections\nOrderedDict\nh\x00\x85R0" * 20_000
    ) + b"N."  # fmt: skip
    return {
        "os.system": _call("os", "system", _text(shell)),
        "posix.system": _call("posix", "system", _text(shell)),
        "subprocess.Popen": _call("subprocess", "Popen", b"](" + _text("touch") + _text(str(canary)) + b"e"),
        "subprocess.call": _call("subprocess", "call", b"](" + _text("touch") + _text(str(canary)) + b"e"),
        "builtins.eval": _call("builtins", "eval", _text(code)),
        "builtins.exec": _call("builtins", "exec", _text(code)),
        "builtins.open": b"\x80\x02cbuiltins\nopen\n" + _text(str(canary)) + _text("w") + b"\x86R.",
        "__builtin__.eval": _call("__builtin__", "eval", _text(code)),
        "builtins.__import__": _call("builtins", "__import__", _text("antigravity")),
        "runpy": _call("runpy", "_run_code", _text(code)),
        "instance": b"(" + _text(shell) + b"ios\nsystem\n.",
        "object": b"(cos\nsystem\n" + _text(shell) + b"o.",
        "stack global": b"\x80\x04" + _text("os") + _text("system") + b"\x93" + _text(shell) + b"\x85R.",
        "dotted name": b"\x80\x04" + _text("json") + _text("codecs.builtins.eval") + b"\x93" + _text(code) + b"\x85R.",
        "new object with names": b"\x80\x04" + _text("os") + _text("system") + b"\x93" + _text(shell) + b"\x85}\x92.",
        "partial": b"\x80\x02cfunctools\npartial\ncos\nsystem\n" + _text(shell) + b"\x86R)R.",
        "torch.load": _call("torch", "load", _text(str(canary))),
        "torch.hub.load": _call("torch.hub", "load", _text("x/y")),
        "numpy runstring": b"\x80\x02cnumpy.testing._private.utils\nrunstring\n" + _text(code) + b"}\x86R.",
        "pickle in a pickle": b"\x80\x03cpickle\nloads\nC\x10" + b"cos\nsystem\n.    "[:16] + b"\x85R.",
        "types.FunctionType": _call("types", "FunctionType", b"N"),
        "socket": _call("socket", "create_connection", _text("localhost")),
        "torn": b"\x80\x02}(K\x01",
        "no stop": b"\x80\x02" + b"N0" * 1000,
        "empty": b"",
        "text of 2^60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
        "number of 2^31 bytes": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
        "items into a number": b"\x80\x02K\x01(K\x01K\x02u.",
        "memo that was never set": b"\x80\x02h\x07.",
        "mark that is missing": b"\x80\x02K\x01u.",
        "the same list again and again": ordered,
        "more than any pickle has": b"\x80\x02" + b"N0" * (17 * 1024 * 1024) + b"N.",
        # ends, and is harmless where nothing is hashed or walked
        "doubling tuples as a key": doubling,
        "keys that collide": colliding,
        "nested 100,000 deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "far place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "class that is changed": b"\x80\x02cargparse\nNamespace\n}" + _text("__reduce__") + b"Nsb.",
    }


HARMLESS = (
    "doubling tuples as a key",
    "keys that collide",
    "nested 100,000 deep",
    "far place in the memo",
    "class that is changed",
)
"""Read as data they do nothing at all: the checkpoint is right, and whoever loads it with torch meets them."""


def repack(path: Path, data: bytes | None = None, *, compress: int = zipfile.ZIP_STORED, **more: bytes) -> None:
    """Write an archive of torch anew, with another pickle and more records."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    top = next(iter(records)).partition("/")[0]
    if data is not None:
        records[f"{top}/data.pkl"] = data
    records |= {f"{top}/{name}": content for name, content in more.items()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def _edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _end(data: bytearray) -> int:
    return data.rindex(b"PK\x05\x06")


def _put(data: bytearray, at: int, value: bytes) -> None:
    data[at : at + len(value)] = value


def _plain(path: Path) -> None:
    """Write an archive without 64-bit fields, which are easier to change."""
    repack(path)


def _archive(change: Callable[[bytearray], None]) -> Attack:
    def attack(step: Path) -> None:
        path = step / "optimizer.pt"
        _plain(path)
        _edit(path, change)

    return attack


def _bomb(step: Path) -> None:
    repack(step / "optimizer.pt", compress=zipfile.ZIP_DEFLATED, **{"data/9": bytes(200_000_000)})


def _twins(step: Path) -> None:
    path = step / "optimizer.pt"
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        name = archive.infolist()[0].filename
        archive.writestr(name, b"another")


def _overlap(data: bytearray) -> None:
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    _put(data, second + 42, bytes(data[first + 42 : first + 46]))


def _old_format(canary: Path) -> Attack:
    def attack(step: Path) -> None:
        (step / "optimizer.pt").write_bytes(payloads(canary)["os.system"])

    return attack


def _sparse(step: Path) -> None:
    with open(step / "optimizer.pt", "r+b") as file:
        file.truncate(10**12)


def _link(target: str) -> Attack:
    def attack(step: Path) -> None:
        (step / "optimizer.pt").unlink()
        (step / "optimizer.pt").symlink_to(target)

    return attack


def _fifo(step: Path) -> None:
    (step / "optimizer.pt").unlink()
    os.mkfifo(step / "optimizer.pt")


def _socket(step: Path) -> None:
    (step / "optimizer.pt").unlink()
    here = os.getcwd()
    os.chdir(step)  # a socket's whole path may be too long
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("optimizer.pt")
    os.chdir(here)


def _directory(step: Path) -> None:
    (step / "optimizer.pt").unlink()
    (step / "optimizer.pt").mkdir()


def _deep(step: Path) -> None:
    (step / "/".join("d" * 20)).mkdir(parents=True)


def _index(name: object) -> Attack:
    def attack(step: Path) -> None:
        index = {"a": name, "b": "model-00002-of-00002.safetensors"}
        (step / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    return attack


def _json(text: str) -> Attack:
    return lambda step: (step / "trainer_state.json").write_text(text) and None


def _header(data: bytes) -> Attack:
    return lambda step: (step / "model-00001-of-00002.safetensors").write_bytes(data) and None


def _linked_weights(step: Path) -> None:
    path = step / "model-00001-of-00002.safetensors"
    path.rename(step.parent / "kept")
    path.symlink_to(step.parent / "kept")


def trainer_attacks(canary: Path) -> dict[str, Attack]:
    """Attacks on a checkpoint of Hugging Face."""
    big = struct.pack("<Q", 2**60)
    return {
        "pickle of the old format": _old_format(canary),
        "bomb in an archive": _bomb,
        "two records of one name": _twins,
        "records that overlap": _archive(_overlap),
        "more records than bytes": _archive(lambda data: _put(data, _end(data) + 10, b"\xff\xfe")),
        "directory of 4 GiB": _archive(lambda data: _put(data, _end(data) + 12, b"\xfe\xff\xff\xff")),
        "directory outside": _archive(lambda data: _put(data, _end(data) + 16, b"\xfe\xff\xff\x7f")),
        "comment beyond the end": _archive(lambda data: _put(data, _end(data) + 20, b"\xff\xff")),
        "encrypted record": _archive(lambda data: _put(data, data.index(b"PK\x01\x02") + 8, b"\x01")),
        "record of another size": _archive(lambda data: _put(data, data.index(b"PK\x01\x02") + 24, b"\xff" * 3)),
        "64-bit sizes that are missing": _archive(
            lambda data: _put(data, data.index(b"PK\x01\x02") + 20, b"\xff\xff\xff\xff" * 2)
        ),
        "something after the archive": _archive(lambda data: data.extend(b"x" * 100)),
        "empty archive": lambda step: (step / "optimizer.pt").write_bytes(b"") and None,
        "a terabyte of nothing": _sparse,
        "link to a secret": _link("/etc/passwd"),
        "link to nothing": _link("nowhere"),
        "link to itself": _link("optimizer.pt"),
        "pipe": _fifo,
        "socket": _socket,
        "directory for a file": _directory,
        "directories too deep": _deep,
        "index that leads out": _index("../../../etc/passwd"),
        "index with an absolute name": _index("/etc/passwd"),
        "index with a NUL": _index("a\0b"),
        "index that names no text": _index([1]),
        "weights through a link": _linked_weights,
        "JSON that is nested": _json("[" * 200_000),
        "JSON with a huge number": _json('{"global_step": ' + "9" * 100_000 + "}"),
        "JSON that is a list": _json("[]"),
        "JSON with a truth value for a step": _json('{"global_step": true}'),
        "header of 2^60 bytes": _header(big + b"{}"),
        "header that is nested": _header(struct.pack("<Q", 100_000) + b"[" * 100_000),
        "header with a tensor outside": _header(
            struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[64],"data_offsets":[0,99999999]}}'.ljust(64)
        ),
    }


def metadata_attacks(canary: Path) -> dict[str, Attack]:
    """Attacks on the `.metadata` of DCP."""

    def pickled(name: str) -> Attack:
        return lambda step: (step / ".metadata").write_bytes(payloads(canary)[name]) and None

    def extents(*pieces: dcp_files.Piece) -> Attack:
        return lambda step: (step / ".metadata").write_bytes(dcp_files.metadata({"a": list(pieces)})) and None

    names = ("os.system", "builtins.eval", "instance", "stack global", "torn", "empty", "text of 2^60 bytes")
    bombs = ("doubling tuples as a key", "nested 100,000 deep", "far place in the memo")
    piece = dcp_files.Piece
    return {
        **{f".metadata: {name}": pickled(name) for name in (*names, *bombs)},
        ".metadata: file outside": extents(piece((0,), (8,), "../../../etc/passwd")),
        ".metadata: absolute file": extents(piece((0,), (8,), "/etc/passwd")),
        ".metadata: extent of 2^62 bytes": extents(piece((0,), (8,), "__0_0.distcp", 0, 2**62)),
        ".metadata: negative place": extents(piece((0,), (8,), "__0_0.distcp", -8, 8)),
        ".metadata: two pieces in one": extents(piece((0,), (8,), "__0_0.distcp"), piece((8,), (8,), "__0_0.distcp")),
        ".metadata: a reduce of real pickle": lambda step: (
            (step / ".metadata").write_bytes(pickle.dumps(_Touch(str(canary)))) and None
        ),
    }


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def engine_attacks() -> dict[str, Attack]:
    """Attacks on a checkpoint of DeepSpeed."""

    def state(**changes: object) -> Attack:
        def attack(step: Path) -> None:
            value = {"dp_world_size": 2, "mp_world_size": 1, "global_steps": 200, "module": torch.zeros(2), **changes}
            layouts.save(step / "mp_rank_00_model_states.pt", value)

        return attack

    return {
        "a billion ranks": state(dp_world_size=10**9),
        "ranks that are a text": state(dp_world_size="x" * 100, mp_world_size=[[[]]], ds_config=3, global_steps=None),
        "a crc of another record": lambda step: _edit(
            step / "mp_rank_00_model_states.pt",
            lambda data: _put(data, data.index(b"PK\x01\x02") + 16, struct.pack("<I", zlib.crc32(b"other"))),
        ),
    }
