"""`.metadata` as stock torch writes it, for files made by hand."""

from __future__ import annotations

import math
import pickle
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


class Piece(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None  # None: planned and never written
    start: int = 0
    length: int = 0


def metadata(tensors: dict[str, list[Piece]], *, size: tuple[int, ...] | None = None) -> bytes:
    """Return the bytes for tensors of uint8; `size` where the pieces do not add up to it."""
    entries, stored = {}, {}
    for name, pieces in tensors.items():
        ends = [[o + s for o, s in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces]
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.uint8),
            torch.Size(size if size is not None else [max(end) for end in zip(*ends, strict=True)]),
            [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces],
        )
        for piece in pieces:
            if piece.file is not None:
                index = MetadataIndex(name, torch.Size(piece.offsets))
                length = piece.length or math.prod(piece.sizes)
                stored[index] = _StorageInfo(piece.file, piece.start, length)
    return pickle.dumps(Metadata(entries, storage_data=stored, storage_meta=StorageMeta(save_id="x")))
