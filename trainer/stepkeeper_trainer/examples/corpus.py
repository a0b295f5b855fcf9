"""The text that the reference script learns: the Python standard library, which is always there."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import xxhash

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class Corpus:
    """Bytes cut into overlapping pieces of `length` + 1: the input, and the same one byte on."""

    def __init__(self, length: int, *, bytes_max: int) -> None:
        """Read sorted `*.py` files until there are `bytes_max` bytes."""
        data = _read(bytes_max)
        self.fingerprint = f"{xxhash.xxh3_128_hexdigest(data)}/{length}"
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._length

    def batch(self, indices: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these pieces, each (len(indices), length)."""
        pieces = [self._data[i * self._length : (i + 1) * self._length + 1] for i in indices]
        batch = torch.stack(pieces).long().to(device)
        return batch[:, :-1], batch[:, 1:]


def _read(bytes_max: int) -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            parts.append(path.read_bytes())
        except OSError:
            continue  # not readable for this user: the fingerprint tells one set of files from another
        size += len(parts[-1])
        if size >= bytes_max:
            break
    return b"".join(parts)[:bytes_max]
