"""What somebody who may write a run directory can put there to hurt who looks into it.

Contents are changed as text, as JSON (sealed again where a digest protects it) and as a pickle; files become links,
pipes, directories, holes of a terabyte, or a stranger's.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal

OWNER, STRANGER = 54321, 54322  # user ids that nobody has
TERABYTE = 10**12
_NUMBERS = (
    -1,
    0,
    1,
    255,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
    10**4000,
    -(10**30),
    0.5,
    1e18,
    1e300,
    -1e300,
    5e-324,
)
_WORDS = (
    "",
    "\0",
    "\x1b[2J\x07",
    "../../../../etc/passwd",
    "/etc/passwd",
    "a" * 100_000,
    "%d{}%s",
    "\u202e",
    "\ud800",
)
_VALUES: tuple[Any, ...] = (*_NUMBERS, *_WORDS, None, True, [], {}, [[]], {"": {}}, [0] * 10_000)
_TEXTS = (
    b"1e999",
    b"-1e999",
    b"NaN",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xff\xfe",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\0",
    b"\n",
)
_OPCODES = (b"\x85", b"\x86", b"]", b"}", b"\x8f", b"(", b"N", b"\x94", b"h\0", b"e", b"s")
_SUM = re.compile(rb',"xxh3":"[0-9a-f]{16}"\}$')


def plant(run: Path, outside: Path, dice: random.Random) -> str:
    """Change one thing in a run directory; return what it was."""
    files = sorted(path for path in run.rglob("*") if not path.is_dir() or path.is_symlink())
    name = dice.choice(sorted({each.name for each in files}))  # logs are many, and all alike
    path = dice.choice([each for each in files if each.name == name])
    if dice.random() < 0.3:
        path = dice.choice(sorted(each for each in path.parents if each.is_relative_to(run) and each != run) or [path])
        kind = dice.choice([_link, _stranger, _pipe, _dangling, _loop])
    else:
        kind = dice.choice([_bytes] * 4 + [_structure] * 8 + [_pickle] * 2 + [_KINDS[dice.randrange(len(_KINDS))]])
    kind(path, outside, dice)
    if os.getuid() == 0 and kind is not _stranger and os.path.lexists(path):  # else root's own, which root may follow
        os.chown(path, OWNER, OWNER, follow_symlinks=False)
    return f"{kind.__name__} {path.relative_to(run)}"


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 10**8


def _bytes(path: Path, _: Path, dice: random.Random) -> None:
    if not _plain(path):
        return
    data = bytearray(path.read_bytes())
    at = dice.randrange(len(data) + 1)
    match dice.randrange(5):
        case 0:
            del data[at:]
        case 1:
            data[at : at + 1] = bytes([dice.randrange(256)])
        case 2:
            data[at:at] = dice.choice(_TEXTS)
        case 3:
            data[at:at] = data[: dice.randrange(2000)]
        case _:
            numbers = list(re.finditer(rb"[0-9]+", data[:50_000]))
            if numbers:
                found = dice.choice(numbers)
                data[found.start() : found.end()] = dice.choice(_TEXTS)
    path.write_bytes(data)


def _structure(path: Path, _: Path, dice: random.Random) -> None:
    """Put another value in the place of one, in JSON, and have all digests right."""
    if not _plain(path) or path.suffix not in {".json", ".jsonl"}:
        return _bytes(path, _, dice)
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    index = dice.randrange(len(lines)) if lines else 0
    try:
        line = _SUM.sub(b"}", lines[index])
        document = json.loads(line)
    except (ValueError, IndexError, RecursionError):
        return None
    for _ in range(dice.randrange(1, 4)):
        _change(document, dice)
    if path.name == "MANIFEST.json":
        data = _sealed(document)
    else:
        data = _encoded(document)
        if line != lines[index]:  # it had a digest
            fields = data[:-1]
            data = fields + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(fields).encode() + b'"}'
    lines[index] = data
    path.write_bytes(b"\n".join(lines) + b"\n" * (path.suffix == ".jsonl"))
    return None


def _encoded(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()


def _sealed(document: dict[str, Any]) -> bytes:
    if not isinstance(document, dict):
        return _encoded(document)
    document.pop("manifest_xxh3_128", None)
    empty = _encoded({**document, "manifest_xxh3_128": ""})
    return empty[:-2] + xxhash.xxh3_128_hexdigest(empty).encode() + b'"}'


def _change(document: Any, dice: random.Random) -> None:
    """Change something somewhere in plain JSON."""
    places: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        for key in keys:
            places.append((node, key))
            stack.append(node[key])
    if not places:
        return
    node, key = dice.choice(places)
    match dice.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[dice.choice(_WORDS)] = node[key]
        case 2:
            other, place = dice.choice(places)
            node[key] = json.loads(json.dumps(other[place])) if place in other or isinstance(other, list) else None
        case _:
            same = [value for value in _VALUES if type(value) is type(node[key])]
            node[key] = dice.choice(same if same and dice.random() < 0.7 else list(_VALUES))


def _pickle(path: Path, _: Path, dice: random.Random) -> None:
    """Change `.metadata`, and seal it again."""
    step = path.parent
    if not (_plain(step / ".metadata") and _plain(step / "MANIFEST.json")):
        return
    data = bytearray((step / ".metadata").read_bytes())
    if data[2:3] == b"\x95":
        del data[2:11]  # the length of its only frame
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(2, len(data))
        match dice.randrange(4):
            case 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                data[at:at] = dice.choice(list(_OPCODES))
            case _:  # one number becomes another
                numbers = [m for m in re.finditer(rb"K.|M..|J....", data, re.DOTALL) if m.start() > 2]
                found = dice.choice(numbers)
                data[found.start() : found.end()] = dice.choice(
                    [
                        b"\x8a\xff" + b"\x7f" * 255,
                        b"\x8a\x09" + b"\xff" * 8 + b"\0",
                        b"J\xff\xff\xff\xff",
                        b"J\xff\xff\xff\x7f",
                    ]
                )
    (step / ".metadata").write_bytes(data)
    reseal_metadata(step)


def reseal_metadata(step: Path) -> None:
    """Make the manifest of a step right of its `.metadata`."""
    data = (step / ".metadata").read_bytes()
    try:
        manifest = msgspec.json.decode((step / "MANIFEST.json").read_bytes(), type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    digest = xxhash.xxh3_128_hexdigest(data)
    entry = FileEntry(bytes=len(data), xxh3_128=digest, chunk_bytes=max(1, len(data)), chunks=(digest,))
    changed = msgspec.structs.replace(manifest, files={**manifest.files, ".metadata": entry})
    (step / "MANIFEST.json").write_bytes(seal(changed))


# What a name stands for -------------------------------------------------------------------------------------


def _away(path: Path) -> None:
    if os.path.lexists(path):
        number = sum(each.name.startswith(f".away-{path.name}") for each in path.parent.iterdir())
        os.rename(path, path.with_name(f".away-{path.name}-{number}"))


def _link(path: Path, outside: Path, dice: random.Random) -> None:
    target = outside / dice.choice(["", "secret", "victims", "run", "run/checkpoints", "run/checkpoints/step_00000012"])
    _away(path)
    path.symlink_to(target)


def _dangling(path: Path, outside: Path, _: random.Random) -> None:
    _away(path)
    path.symlink_to(outside / "made-by-mistake")


def _loop(path: Path, _: Path, __: random.Random) -> None:
    _away(path)
    path.symlink_to(path)


def _pipe(path: Path, _: Path, __: random.Random) -> None:
    _away(path)
    os.mkfifo(path)


def _socket(path: Path, _: Path, __: random.Random) -> None:
    _away(path)
    here = os.getcwd()
    os.chdir(path.parent)  # an address is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _directory(path: Path, _: Path, __: random.Random) -> None:
    _away(path)
    path.mkdir()


def _hole(path: Path, _: Path, __: random.Random) -> None:
    if path.is_file() and not path.is_symlink():
        os.truncate(path, TERABYTE)


def _empty(path: Path, _: Path, __: random.Random) -> None:
    if path.is_file() and not path.is_symlink():
        os.truncate(path, 0)


def _stranger(path: Path, _: Path, __: random.Random) -> None:
    if os.getuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _hole_between(path: Path, _: Path, __: random.Random) -> None:
    if _plain(path):
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(TERABYTE)
            file.write(data)


_KINDS: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    _link, _dangling, _loop, _pipe, _socket, _directory, _hole, _hole_between, _empty, _stranger
)  # fmt: skip
