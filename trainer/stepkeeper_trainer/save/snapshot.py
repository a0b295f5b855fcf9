"""A snapshot of what one device holds, as it is when training gives the device what comes next.

The copies are ordered in training's own stream, so that no later change reaches them, whatever makes it: the optimizer,
a swap of the weights, a CUDA graph.  As much as fits is copied within the device, which takes little of its time, and
goes to the host beside training; the rest goes to the host at once.

Each device has a stream and an order of its own (`Devices`); what the host holds is copied at once.

The two streams of a GPU that a snapshot uses: the one that training uses, and one beside it.

All that knows CUDA is here, so that everything else of a snapshot runs on any device.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepkeeper_trainer.save.replicas import InPlace


MARGIN_BYTES = 1024**3  # left free, or a twentieth where that is more: for NCCL, libraries, and a longer batch
MARGIN_PART = 20
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Mark(Protocol):
    """A point in the stream beside training."""

    def hold_training(self) -> None:
        """Let the device do what it is given next by training only after this point."""

    def wait(self) -> None:
        """Wait in this thread until the device has come here.  Raises RuntimeError for an error of the device."""


class Lane(Protocol):
    """The streams of one device."""

    def current(self) -> AbstractContextManager[object]:
        """Make the device the current one."""

    def beside(self) -> AbstractContextManager[object]:
        """Have what is issued go to the stream beside training."""

    def follow_training(self) -> None:
        """Let the stream beside wait for what training was given until now."""

    def spare_bytes(self) -> int:
        """Return how much memory of the device a snapshot may take for a while."""

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that training fills and the stream beside reads; it is free again once both have.

        Raises torch.cuda.OutOfMemoryError.
        """

    def mark(self) -> Mark:
        """Return the point that the stream beside has reached when all that it was given is done."""


def spare(*, free: int, total: int, kept: int) -> int:
    """Return how much of a device's memory a snapshot may take for a while.

    `free` is what no process has, and `kept` what the allocator keeps of the snapshot before.  The rest of the
    allocator's unused memory is left alone: training had it at its peak, and needs it again in the next step.
    """
    return max(0, free + kept - max(MARGIN_BYTES, total // MARGIN_PART))


class CudaLane:
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream beside; once for each GPU."""
        self._device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._taken = self._flushes = 0  # bytes of the snapshot before, and the allocator's count then

    def current(self) -> AbstractContextManager[object]:
        """Make the GPU the current one."""
        return torch.cuda.device(self._device)

    def beside(self) -> AbstractContextManager[object]:
        """Have what is issued go to the stream beside."""
        return torch.cuda.stream(self._beside)

    def follow_training(self) -> None:
        """Let the stream beside wait for what the GPU's current stream was given until now."""
        self._beside.wait_stream(torch.cuda.current_stream(self._device))

    def spare_bytes(self) -> int:
        """Return how much memory a snapshot may take: see `spare`."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        unused = stats["reserved_bytes"]["all"]["current"] - stats["active_bytes"]["all"]["current"]
        flushes = stats["num_alloc_retries"]  # each gave all unused memory back to the device, ours too
        kept = min(self._taken, unused) if flushes == self._flushes else 0
        self._taken, self._flushes = 0, flushes
        return spare(free=free, total=total, kept=kept)

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the stream beside: no block that training reuses is split for it.

        Where training runs out of memory before the buffer is free again, the allocator waits for it, and takes it.
        """
        training = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._beside):
            buffer = torch.empty(count, dtype=dtype, device=self._device)
        training.wait_stream(self._beside)  # torch has 32 streams: this may be another one's too, and so may the block
        buffer.record_stream(training)
        self._taken += buffer.nbytes
        return buffer

    def mark(self) -> Mark:
        """Record an event in the stream beside."""
        return CudaMark(self._device, self._beside)


def cuda_lane(device: torch.device) -> Lane | None:
    """Return the streams of a device, if it is a GPU."""
    return CudaLane(device) if device.type == "cuda" else None


class CudaMark:
    """An event of a GPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Record it in a stream."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits takes no core
        self._event.record(stream)

    def hold_training(self) -> None:
        """Let training's current stream wait, unless a graph is captured there: what is captured is not run now."""
        with torch.cuda.device(self._device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Wait for it in this thread."""
        with allowed_during_capture(), torch.cuda.device(self._device):  # else a context on the first GPU is made
            self._event.synchronize()


@contextmanager
def allowed_during_capture() -> Iterator[None]:
    """Let this thread wait for events and register memory while another one captures a CUDA graph.

    In torch's usual (global) mode of a capture such a call of any thread fails, and breaks the capture.  No graph
    depends on these calls, so CUDA need not check them: the relaxed mode counts for the calling thread alone.
    """
    exchange = _find_exchange()
    mode = ctypes.c_int(_RELAXED)
    exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0  # `mode` is now what it was before
    try:
        yield
    finally:
        if exchange is not None and exchanged:
            exchange(ctypes.byref(mode))


@cache
def _find_exchange() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None  # no driver of NVIDIA, or one before CUDA 10.1


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


CHUNK_BYTES = 256 * 1024**2
GRAIN_BYTES = 2 * 1024**2  # the device's memory is given in multiples
PIECE_BYTES = 16 * 1024**2  # of a tensor that lies otherwise than its place: gathered by the device first
# what torch copies many tensors of with one kernel; others one by one
_TOGETHER = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tensors of one type that are copied within the device to one buffer."""

    dtype: torch.dtype
    numbers: tuple[int, ...]
    count: int  # elements of all

    @property
    def bytes(self) -> int:
        """How much memory of the device the buffer takes."""
        return -(-self.count * self.dtype.itemsize // GRAIN_BYTES) * GRAIN_BYTES


def divide(kinds: Sequence[tuple[torch.dtype, int]], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Divide tensors, given by type and number of elements, into chunks: the smallest first.

    A small tensor costs the device as much time on the way to the host as a larger one, so it is copied within the
    device first.  One that is larger than a chunk is one of its own.
    """
    found: list[list[int]] = []
    newest: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}
    for number in sorted(range(len(kinds)), key=lambda n: kinds[n][0].itemsize * kinds[n][1]):
        dtype, count = kinds[number]
        size = dtype.itemsize * count
        if dtype not in newest or size > room[dtype]:
            newest[dtype], room[dtype] = [], chunk_bytes
            found.append(newest[dtype])
        newest[dtype].append(number)
        room[dtype] -= size
    return [Chunk(kinds[ns[0]][0], tuple(ns), sum(kinds[n][1] for n in ns)) for ns in found]


def choose(chunks: Sequence[Chunk], spare_bytes: int) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks that are copied within the device, and those that go to the host at once."""
    beside: list[Chunk] = []
    directly: list[Chunk] = []
    for chunk in chunks:
        fits = chunk.bytes <= spare_bytes
        (beside if fits else directly).append(chunk)
        spare_bytes -= chunk.bytes if fits else 0
    return beside, directly


class Snapshot:
    """Copies what one device holds to its places in the host's memory."""

    def __init__(self, lane: Lane, places: Sequence[torch.Tensor]) -> None:
        """Plan it; `places` are in the order of the tensors."""
        self._lane, self._places = lane, places
        self._chunks = divide([(place.dtype, place.numel()) for place in places])

    def take(self, tensors: Sequence[torch.Tensor], look: Callable[[], object]) -> Mark:
        """Copy tensors as they are now, and `look` at others; the places are filled when the device reaches the mark.

        Raises:
            RuntimeError: the device has failed, or has no memory to gather what lies otherwise than its place.
        """
        lane = self._lane
        with lane.current(), self._at_rest_on_error():
            copies, directly = self._copy_within(tensors)
            for chunk in directly:
                _copy_to_host(self._places_of(chunk), [tensors[n] for n in chunk.numbers])
            look()
            lane.follow_training()  # the way to the host was training's alone until now
            with lane.beside():
                for chunk, copy in copies:
                    _copy_to_host(self._places_of(chunk), copy)
                return lane.mark()

    def take_overlapping(
        self, tensors: Sequence[torch.Tensor], early: Collection[int], look: Callable[[bool], object]
    ) -> Mark:
        """Copy tensors beside training, which must not change them before the mark; first the numbers in `early`.

        Those training's stream waits for at once.  `look` is called twice: for early ones (True), and for the rest.
        """
        lane = self._lane
        with lane.current(), self._at_rest_on_error():
            lane.follow_training()
            marks: list[Mark] = []
            with lane.beside():
                for is_early in (True, False):
                    numbers = [n for n in range(len(tensors)) if (n in early) is is_early]
                    _copy_to_host([self._places[n] for n in numbers], [tensors[n] for n in numbers])
                    look(is_early)
                    marks.append(lane.mark())
            marks[0].hold_training()
            return marks[1]

    def _copy_within(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[Chunk, list[torch.Tensor]]], list[Chunk]]:
        """Copy within the device what fits there; return the copies, and the chunks that were not copied."""
        beside, directly = choose(self._chunks, self._lane.spare_bytes())
        copies: list[tuple[Chunk, list[torch.Tensor]]] = []
        for chunk in beside:
            try:
                buffer = self._lane.buffer(chunk.count, chunk.dtype)
            except torch.cuda.OutOfMemoryError:  # another process took it, or the free memory is in pieces
                directly += beside[len(copies) :]
                break
            own = [tensors[n] for n in chunk.numbers]
            copy = torch._C._nn.unflatten_dense_tensors(buffer, own)  # noqa: SLF001  # views, made without Python
            if chunk.dtype in _TOGETHER:
                torch._foreach_copy_(copy, own)
            else:
                for one, tensor in zip(copy, own, strict=True):
                    one.copy_(tensor)
            copies.append((chunk, copy))
        return copies, directly

    def _places_of(self, chunk: Chunk) -> list[torch.Tensor]:
        return [self._places[n] for n in chunk.numbers]

    @contextmanager
    def _at_rest_on_error(self) -> Iterator[None]:
        """Let no copy go on to places that are used for something else after an error."""
        try:
            yield
        except BaseException:
            self._lane.follow_training()
            self._lane.mark().wait()
            raise


def _copy_to_host(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Issue copies to the host on the current stream."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        pairs = [pair for place, tensor in zip(places, tensors, strict=True) for pair in _pieces(place, tensor)]
        places, tensors = [place for place, _ in pairs], [tensor for _, tensor in pairs]
    if tensors:
        torch._foreach_copy_(list(places), list(tensors), non_blocking=True)


def _pieces(place: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split a tensor that lies otherwise than its place: the device gathers one piece at a time, in spare memory."""
    if tensor.is_contiguous() or tensor.nbytes <= PIECE_BYTES:
        return iter([(place, tensor)])
    rows = max(1, PIECE_BYTES * tensor.shape[0] // tensor.nbytes)
    return zip(torch.split(place, rows), torch.split(tensor, rows), strict=True)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device holds."""

    numbers: list[int]  # of the places
    snapshot: Snapshot


class Devices:
    """Copies tensors from wherever they are to their places, one state at a time."""

    def __init__(self, lane_of: Callable[[torch.device], Lane | None], *, overlap: bool = False) -> None:
        """Prepare; `lane_of` returns the streams of a device, and None for the host.

        With `overlap` the copies run beside training, which must call `hold_training` before it changes anything.
        """
        self._lane_of, self._overlap = lane_of, overlap
        self._lanes: dict[torch.device, Lane | None] = {}
        self._marks: tuple[Mark, ...] = ()  # when all have been reached, the places hold everything
        self._held: list[torch.UntypedStorage] = []  # of what is copied beside training: `.data =` must not free it
        self.place([], [])

    def place(self, names: list[str], places: list[torch.Tensor]) -> None:
        """Know where each tensor is copied to."""
        self._names, self._places = names, places
        self._seen: list[torch.device] = []  # where the tensors were when `_parts` was made
        self._parts: dict[torch.device, _Part] = {}
        self._host = Copier([], [])

    def copy(
        self,
        tensors: list[torch.Tensor],
        in_place: InPlace,
        compared: Mapping[str, torch.Tensor],
        early: frozenset[str] = frozenset(),
    ) -> None:
        """Copy tensors, in the order of their places, and look at what is only compared.

        With `overlap` those of `early` may change as soon as this returns.

        Raises:
            RuntimeError: a device has failed.
        """
        self.finish()
        self._divide([tensor.device for tensor in tensors], {tensor.device for tensor in compared.values()})
        in_place.look(compared)
        for device, part in self._parts.items():
            own = [tensors[n] for n in part.numbers]
            looked = {name: tensor for name, tensor in compared.items() if tensor.device == device}
            if self._overlap:
                self._held += [tensor.untyped_storage() for tensor in (*own, *looked.values())]
            self._marks += (self._take(part, own, in_place, looked, early),)
        self._host.copy(tensors)

    def hold_training(self) -> None:
        """Let each device finish its copies before what training gives it next, where they run beside training."""
        if self._overlap:
            for mark in self._marks:
                mark.hold_training()

    def finish(self) -> None:
        """Wait until the places hold everything, and let go of what was copied.

        Raises:
            RuntimeError: a device has failed.
        """
        try:
            for mark in self._marks:
                mark.wait()
        finally:
            self._marks, self._held = (), []

    def _take(
        self,
        part: _Part,
        tensors: list[torch.Tensor],
        in_place: InPlace,
        looked: dict[str, torch.Tensor],
        early: frozenset[str],
    ) -> Mark:
        if not self._overlap:
            return part.snapshot.take(tensors, lambda: in_place.issue(looked))
        return part.snapshot.take_overlapping(
            tensors,
            {at for at, number in enumerate(part.numbers) if self._names[number] in early},
            lambda is_early: in_place.issue({n: t for n, t in looked.items() if (n in early) is is_early}),
        )

    def _divide(self, devices: list[torch.device], others: Iterable[torch.device]) -> None:
        """Know which tensors each device holds: a script may move them between two saves."""
        if devices != self._seen:
            numbers: dict[torch.device, list[int]] = {}
            for number, device in enumerate(devices):
                numbers.setdefault(device, []).append(number)
            host = [n for device, each in numbers.items() if self._lane(device) is None for n in each]
            self._host = Copier([self._places[n] for n in host], host)
            self._parts = {}
            for device, each in numbers.items():
                self._add_part(device, each)
            self._seen = devices
        for device in others:
            if device not in self._parts:
                self._add_part(device, [])

    def _add_part(self, device: torch.device, numbers: list[int]) -> None:
        lane = self._lane(device)
        if lane is not None:
            self._parts[device] = _Part(numbers, Snapshot(lane, [self._places[n] for n in numbers]))

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]
