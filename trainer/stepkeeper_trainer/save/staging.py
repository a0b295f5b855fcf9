"""The staging arena: where a save's bytes wait for the disk while training goes on.

It is laid out as the files will be: each tensor lies within the frame of its archive, so that staging is
one copy of a list of tensors at the speed of memory, and writing hands whole stretches to the kernel.
Allocated and touched before the first save, pinned where there is a GPU; there is only this one.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from stepkeeper_trainer.errors import StateError
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.save.replicas import IN_PLACE_BYTES, Hash, InPlace, hash_bytes
from stepkeeper_trainer.save.serialise import ALIGNMENT, Frame, frame
from stepkeeper_trainer.save.snapshot import Copier, Devices, allowed_during_capture, cuda_lane
from stepkeeper_trainer.state.tree import check_dense, local

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from stepkeeper_trainer.save.writer import Extent


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


_look = attrgetter("shape", "dtype")


@dataclass(frozen=True, slots=True)
class Signature:
    """What the layout of a state depends on: names, types, shapes and how each tensor is sharded."""

    names: list[str]
    kinds: list[tuple[torch.Size, torch.dtype]]
    specs: list[Any] | None  # None: no tensor is a DTensor

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Signature:
        """Return the signature of a state."""
        seen: dict[Any, Any] = {}  # few kinds: each is kept once, and not a shape of its own for each tensor
        with collection_paused():
            kinds = [seen.setdefault(kind, kind) for kind in map(_look, tensors.values())]
            return Signature(list(tensors), kinds, _specs(tensors))

    def is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether it is that of a state.  Each tensor is looked at once: that it is not in the cache is the cost."""
        return (
            list(tensors) == self.names
            and all(map(eq, map(_look, tensors.values()), self.kinds))
            and _specs(tensors) == self.specs
        )


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[Any] | None:
    if DTensor not in set(map(type, tensors.values())):
        return None
    return [tensor._spec if type(tensor) is DTensor else None for tensor in tensors.values()]  # noqa: SLF001  # pinned by a test


class Piece(NamedTuple):
    """One tensor in the arena: its archive is `[start, end)`, and its data `[data, tail)`."""

    name: str
    frame: Frame
    start: int
    data: int
    tail: int
    end: int

    @property
    def extent(self) -> Extent:
        """All that writing it needs to know."""
        first, second = self.frame.crc_at
        return (self.start, self.data, self.tail, self.tail + first, self.tail + second, self.end)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each staged tensor lies; `groups` are names that lie together, in the order of the arena."""

    groups: tuple[tuple[Piece, ...], ...]
    bytes: int
    pieces: dict[str, Piece] = field(compare=False)


Kind = tuple[torch.dtype, tuple[int, ...]]  # of what this rank holds of a tensor


def lay_out(kinds: Mapping[str, Kind], groups: Iterable[Sequence[str]]) -> Layout:
    """Place tensors; each group begins on a page."""
    at = 0
    placed: list[tuple[Piece, ...]] = []
    for group in groups:
        at = -(-at // PAGE_BYTES) * PAGE_BYTES
        pieces: list[Piece] = []
        for name in group:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            own = frame(*kinds[name])
            data = at + len(own.head)
            tail = data + own.data_bytes
            end = tail + len(own.tail)
            pieces.append(Piece(name, own, at, data, tail, end))
            at = end
        placed.append(tuple(pieces))
    return Layout(tuple(placed), at, {piece.name: piece for group in placed for piece in group})


class Staging:
    """Copies a state into the arena.  Its memory belongs to one save at a time."""

    def __init__(self, *, device: bool | None = None, overlap: bool = False) -> None:
        """Prepare.

        Args:
            device: whether tensors may live on a GPU (None: if there is one).
            overlap: what a GPU holds is copied beside training, which must not change it before it has called
                `wait_before_change`; else no later change reaches the copies.
        """
        self._device = torch.cuda.is_available() if device is None else device
        self._devices = Devices(cuda_lane, overlap=overlap)
        self._gpu: torch.device | None = None  # the first that holds tensors
        self.arena = Arena()
        self._in_place = InPlace()
        self.layout: Layout | None = None
        self.signature: Signature | None = None
        self._kinds: dict[str, Kind] = {}
        self._taken: Signature | None = None
        self._whole = False  # no tensor is a DTensor
        self._place([], [])

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the state is laid out as the one before."""
        return self.signature is not None and self.signature.is_of(tensors)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Learn the layout of a state; `regroup` then places it.

        Raises:
            StateError: a tensor cannot be saved.
        """
        self.signature = None
        kinds: dict[str, Kind] = {}
        for name, tensor in tensors.items():
            own = check_dense(name, tensor)
            kinds[name] = (own.dtype, tuple(own.shape))
        self._kinds = kinds
        gpus = (own.device for own in map(local, tensors.values()) if own.is_cuda and self._device)
        self._gpu = next(gpus, None)
        self._taken = Signature.of(tensors)

    def size_of(self, name: str) -> int:
        """Return how many bytes this rank holds of a tensor."""
        dtype, shape = self._kinds[name]
        return math.prod(shape) * dtype.itemsize

    def large(self, names: Collection[str]) -> frozenset[str]:
        """Return those that are better hashed where they are than staged, where they are only compared."""
        return frozenset(name for name in names if name in self._kinds and self.size_of(name) >= IN_PLACE_BYTES)

    def regroup(self, groups: Iterable[Sequence[str]], compared: Collection[str] = ()) -> None:
        """Place the state that was taken, group by group; names that no group has are not staged.

        `hash_of` then knows each of `compared` that is staged or `large`.  Call it while no save uses the arena.
        Raises OSError where there is not enough memory.
        """
        self.signature = None
        self.finish()  # of a save that came to nothing: the device may still write
        layout = lay_out(self._kinds, groups)
        self.layout = None
        self._place([], [])
        self._in_place = InPlace(self.large(compared), layout.pieces)
        # a thread has a current GPU of its own, the first: each rank of a node would make a context there
        with nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
            self.arena.grow(layout.bytes, pinned=self._gpu is not None)
        flat, view = self.arena.tensor, self.arena.view
        places: list[torch.Tensor] = []
        names: list[str] = []
        end = 0
        for group in layout.groups:
            for piece in group:
                view[end : piece.start] = bytes(piece.start - end)  # gaps are written too: nothing old in them
                end = piece.end
                view[piece.start : piece.data] = piece.frame.head
                view[piece.tail : piece.end] = piece.frame.tail
                if piece.frame.data_bytes:
                    dtype, shape = self._kinds[piece.name]
                    names.append(piece.name)
                    places.append(flat[piece.data : piece.tail].view(dtype).view(shape))
        self._place(names, places)
        self.layout, self.signature = layout, self._taken
        self._whole = self._taken is not None and self._taken.specs is None

    def copy(self, tensors: Mapping[str, torch.Tensor], early: frozenset[str] = frozenset()) -> None:
        """Copy the state as it is now; call `finish` before the arena is read.

        What the host holds is copied when this returns.  What a GPU holds is copied in the order of training's stream:
        whatever that is given next does not reach the copies.  With `overlap` only changes after `wait_before_change`
        do not, and for `early` any.

        Raises:
            StateError: a CUDA graph is being captured.
            RuntimeError: a device has failed.
        """
        assert self.layout is not None
        with torch.no_grad():
            if self._has_gpu(tensors):
                self._copy_from_gpus(tensors, early)
            else:
                self.finish()
                self._copier.copy(self._local(tensors))
                self._in_place.look(self._compared(tensors))

    def copy_if_it_fits(self, tensors: Mapping[str, torch.Tensor], early: frozenset[str] = frozenset()) -> bool:
        """Copy the state if it is laid out as the one before, and say so; otherwise the arena holds nothing of use.

        With many tensors the look at each and the copying go on beside each other.
        """
        if self.signature is None or len(tensors) != len(self.signature.names):
            return False
        if self._has_gpu(tensors):
            if not self.fits(tensors):
                return False
            self.copy(tensors, early)
            return True
        with torch.no_grad():
            self.finish()
            if not self._copier.copy(self._local(tensors), lambda: self.fits(tensors)):
                return False
            self._in_place.look(self._compared(tensors))
            return True

    def wait_before_change(self) -> None:
        """Have devices finish copying before what training gives them next.  Without `overlap` that is so anyway."""
        self._devices.hold_training()

    def finish(self) -> None:
        """Wait until the arena holds everything (in the save's thread).

        Raises:
            RuntimeError: a device has failed.
        """
        self._devices.finish()

    def hash_of(self, name: str) -> Hash | None:
        """Return the hash of a tensor as it was copied, after `finish`; None where nobody looked at it."""
        found = self._in_place.of(name)
        if found is None and self.layout is not None and name in self.layout.pieces:
            piece = self.layout.pieces[name]
            found = hash_bytes(self.arena.view[piece.data : piece.tail])
        return found

    def _compared(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: local(tensors[name]) for name in self._in_place.names}

    def _local(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        values = list(tensors.values())
        return values if self._whole else [local(tensor) for tensor in values]

    def _has_gpu(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return self._device and any(local(tensor).is_cuda for tensor in tensors.values())

    def _place(self, names: list[str], places: list[torch.Tensor]) -> None:
        """Know where each tensor is copied to."""
        number = {name: n for n, name in enumerate(self._kinds)}
        self._places, self._order = places, [number[name] for name in names]
        self._copier = Copier(places, self._order)
        self._devices.place(names, places)

    def _copy_from_gpus(self, tensors: Mapping[str, torch.Tensor], early: frozenset[str]) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise StateError("a save began while a CUDA graph is captured: call step_done() and save() outside of it")
        values = self._local(tensors)
        self._devices.copy([values[n] for n in self._order], self._in_place, self._compared(tensors), early)
