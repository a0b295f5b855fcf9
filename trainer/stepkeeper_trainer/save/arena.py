"""The memory of the staging arena: one piece, touched before it is used, and pinned where there is a GPU.

Lists of tensors are copied to their places in it at the speed of memory, many small ones too.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import torch

from stepkeeper_trainer.log import warn
from stepkeeper_trainer.save.streams import allowed_during_capture

if TYPE_CHECKING:
    from collections.abc import Callable


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


MANY = 1000  # tensors, from which on several threads go through the small ones
SMALL_NUMEL = 32768  # torch's own limit for going through a tensor with one thread
THREADS_MAX = 8
PARTS_A_THREAD = 4  # of the small tensors: none waits long for another
Part = tuple[list[torch.Tensor], list[int]]  # places, and which tensors of a state belong there


class Copier:
    """Copies lists of tensors to their places, within the memory of the host.

    torch spreads a large tensor over its threads, and goes through small ones with a single one: those are
    given to several threads here.
    """

    def __init__(self, places: list[torch.Tensor], order: list[int]) -> None:
        """Prepare; `order` says which tensor of a state belongs to each place."""
        self._places, self._order = places, order
        threads = self._threads()
        self._parts = {threads: self._divide(threads)}  # made now: a save is waited for

    def _threads(self) -> int:
        return min(THREADS_MAX, torch.get_num_threads()) if len(self._places) >= MANY else 1

    def copy(self, tensors: list[torch.Tensor], meanwhile: Callable[[], bool] = lambda: True) -> bool:
        """Copy each tensor of a state to its place.  Gradients must be off.

        `meanwhile` is asked while other threads begin: where it says no, it says so here, and the places hold nothing
        of use.
        """
        threads = self._threads()
        if threads not in self._parts:
            self._parts[threads] = self._divide(threads)
        *small, large = self._parts[threads]
        if not self._copy_small(small, tensors, meanwhile, threads - 1):
            return False
        if large[0]:
            torch._foreach_copy_(large[0], [tensors[number] for number in large[1]])
        return True

    @staticmethod
    def _copy_small(parts: list[Part], tensors: list[torch.Tensor], meanwhile: Callable[[], bool], others: int) -> bool:
        queue = iter(parts)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with torch.no_grad():
                    for places, order in queue:
                        torch._foreach_copy_(places, [tensors[number] for number in order])
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)

        helpers = [threading.Thread(target=work, daemon=True) for _ in range(others)]
        for helper in helpers:
            helper.start()
        try:
            wanted = meanwhile()
            if wanted:
                work()
        finally:
            for helper in helpers:
                helper.join()
        if wanted and errors:
            raise errors[0]
        return wanted

    def _divide(self, threads: int) -> list[Part]:
        """Return parts of about as many bytes for the threads to take, and last what torch spreads itself."""
        pairs = list(zip(self._places, self._order, strict=True))
        small = [pair for pair in pairs if threads > 1 and pair[0].numel() < SMALL_NUMEL]
        large = [pair for pair in pairs if threads == 1 or pair[0].numel() >= SMALL_NUMEL]
        total = sum(place.nbytes for place, _ in small)
        count = PARTS_A_THREAD * threads if small else 0
        parts: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(count)]
        at = 0
        for pair in small:
            parts[min(count - 1, at * count // max(1, total))].append(pair)
            at += pair[0].nbytes
        filled = [part for part in parts if part]
        return [([place for place, _ in part], [number for _, number in part]) for part in [*filled, large]]
