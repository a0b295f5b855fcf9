"""What a load is asked for: boxes of stored tensors, and where they go."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A box of a stored piece of a tensor, and where it is to go."""

    name: str
    file: str
    start: int  # of the archive in the file
    length: int
    sizes: tuple[int, ...]  # of the stored piece
    dtype: torch.dtype  # of the stored piece
    box_offsets: tuple[int, ...]  # within the stored piece
    box_sizes: tuple[int, ...]
    target: torch.Tensor  # of `box_sizes`, and perhaps of another type or device

    @property
    def end(self) -> int:
        """Where the archive ends in the file."""
        return self.start + self.length

    def run(self) -> tuple[int, int] | None:
        """Return the bytes of the box in the data, row by row, if they are in a row; first byte and count."""
        full = len(self.sizes)
        while full and self.box_sizes[full - 1] == self.sizes[full - 1]:
            full -= 1
        if any(size != 1 for size in self.box_sizes[: max(0, full - 1)]):
            return None
        first = 0
        for offset, size in zip(self.box_offsets, self.sizes, strict=True):
            first = first * size + offset
        return first * self.dtype.itemsize, math.prod(self.box_sizes) * self.dtype.itemsize

    def takes_bytes(self) -> bool:
        """Whether stored bytes can go to the target as they are."""
        target = self.target
        return target.dtype == self.dtype and target.is_contiguous() and sys.byteorder == "little"
