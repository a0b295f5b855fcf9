"""Bytes that change while they lie there."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Change a bit of one byte of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ bit]))
