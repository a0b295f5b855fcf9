"""The memory of the staging arena: one piece, touched before it is used, and pinned where there is a GPU."""

from __future__ import annotations

import mmap
import os

import torch

from stepkeeper_trainer.log import warn
from stepkeeper_trainer.save.streams import allowed_during_capture

PAGE_BYTES = 4096


class Arena:
    """Memory of one size, touched; it grows and never shrinks."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._map: mmap.mmap | None = None
        self._registered: int | None = None
        self.tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """How much memory is held."""
        return self.tensor.numel()

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(b"") if self._map is None else memoryview(self._map)

    def grow(self, size: int, *, pinned: bool) -> None:
        """Hold at least `size` bytes; the content is lost.  `pinned` for copies from the current GPU beside it.

        Raises OSError or MemoryError.
        """
        if size <= self.bytes:
            return
        self.release()
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        descriptor = os.memfd_create("stepkeeper-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            # Without a check first, memory that is not there would be a SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor.zero_()  # the page tables too are made now, and not in the first save
        if pinned:
            self._pin()

    def release(self) -> None:
        """Give the memory back, once nobody looks at it any more."""
        if self._registered is not None:
            with allowed_during_capture():
                torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
            self._registered = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._map = None

    def _pin(self) -> None:
        pointer = self.tensor.data_ptr()
        with allowed_during_capture():
            code = torch.cuda.cudart().cudaHostRegister(pointer, self.bytes, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            self._registered = pointer
        else:
            why = "copies from the GPU hold training up while they run: look at `ulimit -l` and the memory of the node"
            warn("staging_not_pinned", bytes=self.bytes, cuda_error=int(code), why=why)
