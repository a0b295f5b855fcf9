"""The heads of stored tensors, recognised: archives of one type and size have the same."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats.items import HEAD_BYTES, Layout, read_head

if TYPE_CHECKING:
    from stepkeeper_trainer.loading.wanted import Wanted


class Layouts:
    """Of one step directory, for all threads of a load."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, Layout]] = {}

    def of(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        """Read the head of an archive, or recognise it.

        Raises:
            ItemError: it is of an unusual kind, which torch must read.
            DamagedError: it is not the tensor that `.metadata` says.
        """
        with self._lock:
            return self._of(item, data)

    def _of(self, item: Wanted, data: bytes | bytearray | memoryview) -> Layout:
        key = (item.dtype, item.sizes)
        known = self._known.get(key)
        if known is not None and data[: len(known[0])] == known[0]:
            return known[1]
        begin = bytes(data[:HEAD_BYTES])
        layout = read_head(begin)
        if layout.dtype != str(item.dtype).removeprefix("torch.") or layout.size != item.sizes:
            raise DamagedError(
                f"{self._directory / item.file}: {item.name} is stored as {layout.dtype} {list(layout.size)}, "
                f"`.metadata` says {item.dtype} {list(item.sizes)}"
            )
        short = layout.contiguous and layout.storage_bytes < math.prod(item.sizes) * item.dtype.itemsize
        if short or layout.head_bytes + layout.storage_bytes > item.length:
            raise DamagedError(f"{self._directory / item.file}: the data of {item.name} has another size")
        self._known[key] = (begin[: layout.head_bytes], layout)
        return layout
