"""What sensors report: facts without a judgement.  Sent as JSON lines between the NVML child and its parent too."""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum

import msgspec


class _Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="reading"):
    at: float  # Unix seconds


class KernelRecord(_Reading, frozen=True, kw_only=True, tag="kernel_record"):
    """One record of the kernel's own log, never of a user-space writer unless injection is allowed."""

    boot_id: str
    sequence: int
    text: str  # whole record; what the kernel escaped is unescaped, so it may hold line feeds


class KernelGap(_Reading, frozen=True, kw_only=True, tag="kernel_gap"):
    """The ring buffer went round before we had read it."""

    lost: int  # records


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU as NVML lists it."""

    index: int
    pci: str  # `0000:3b:00.0`
    uuid: str = ""
    name: str = ""


class NvmlState(StrEnum):
    """How NVML is doing."""

    READY = "ready"
    ABSENT = "absent"  # no library or no driver: not a GPU node, as far as anyone knows
    STUCK = "stuck"  # a call has not come back in its time limit
    ENDED = "ended"  # the child process died; it is started again


class NvmlStatus(_Reading, frozen=True, kw_only=True, tag="nvml_status"):
    """NVML is ready, absent or stuck."""

    state: NvmlState
    detail: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    stuck_s: float = 0.0  # or absent, for so long
    call: str = ""  # that is stuck
    once: bool = False  # of a single look: nobody listens for events


class NvmlXid(_Reading, frozen=True, kw_only=True, tag="nvml_xid"):
    """An XID event.  It has no text; the kernel log has it."""

    code: int
    pci: str
    uuid: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None


LISTING = "listing"
TEMPERATURE = "temperature"


class GpuHealth(_Reading, frozen=True, kw_only=True, tag="gpu_health"):
    """What NVML says of one GPU; None where this GPU or driver does not say."""

    pci: str
    uuid: str = ""
    index: int = -1
    lost: bool = False  # NVML_ERROR_GPU_IS_LOST
    recovery_action: int | None = None  # field 230
    rows_pending: bool | None = None  # a remapped row waits for a reset
    rows_failed: bool | None = None  # remapping has failed
    pages_pending: bool | None = None  # before Ampere: a page waits for a reset to be retired
    ecc_uncorrected: int | None = None  # volatile: since the last reset
    sram_threshold_exceeded: bool | None = None
    temperature_c: int | None = None
    errors: tuple[str, ...] = ()  # calls that failed, and how

    @property
    def silent(self) -> bool:
        """Whether the GPU does not answer: it cannot be listed, or not even its temperature read.

        Some drivers say "unknown error" of a GPU that is gone.
        """
        mute = any(error.partition(":")[0] in (LISTING, TEMPERATURE) for error in self.errors)
        return mute and not self.lost and not self.recovery_action


class Evidence(_Reading, frozen=True, kw_only=True, tag="evidence"):
    """A counter or state that says something and proves nothing: AER, InfiniBand, NVLink, disks, pressure."""

    what: (
        str  # `aer`, `infiniband`, `disk`, `memory_pressure`, `nvlink`, `nvml_events`, `sensor`: it cannot do its work
    )
    where: str  # PCI address, port, mount
    text: str  # for people
    values: dict[str, float] = {}


Reading = KernelRecord | KernelGap | NvmlStatus | NvmlXid | GpuHealth | Evidence


# What the NVML child says to its parent: readings, and which call it begins.  One JSON line each.

LINE_BYTES_MAX = 65536
HEALTH = "health"  # the thread that asks every GPU, again and again,
REST = "rest"  # and what it says when it has done so
ENDS_ABSENT = 3  # the child's exit code: no library or no driver here; look again later
ENDS_TO_BEGIN_ANEW = 4  # the GPUs are not those that it listed: a new process sees what is there now


class Begins(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="reading", tag="begins"):
    """A thread of the child begins a call.  It says something again when the call is over."""

    lane: str  # the thread: `events` or `health`
    call: str  # `nvmlDeviceGetRemappedRows of 0000:3b:00.0`
    takes_s: float = 0.0  # as long as this is no sign of trouble: it waits on purpose


FromChild = Reading | Begins

_encoder = msgspec.json.Encoder()
decoder: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


def encode(message: FromChild) -> bytes:
    """Return the line."""
    return _encoder.encode(message) + b"\n"


# A sensor on a thread of its own, which a pipe wakes to stop: it waits for that beside whatever else it waits for.


class Stoppable(ABC):
    """Runs `_run` from `start` on, until `_stopped`."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], object]) -> None:
        """Prepare a thread of that name; `on_failure` gets a mistake of ours, with which the thread ends."""
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, within_s: float = 3.0) -> bool:
        """End the thread, and what it has started, once; return in time, and whether it has ended."""
        os.write(self._stop_write, b"x")
        if self._thread.ident is not None:  # it was started
            self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        os.close(self._stop_read)
        os.close(self._stop_write)
        return True

    # --- on the thread ----------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - handed over: a sensor that has ended must not look healthy
            self._on_failure(error)

    @abstractmethod
    def _run(self) -> None:
        """Sense until asked to stop."""

    def _stopped(self, wait_s: float) -> bool:
        """Wait for so long; return at once, and true, where it is asked to stop."""
        return bool(select.select([self._stop_read], [], [], wait_s)[0])
