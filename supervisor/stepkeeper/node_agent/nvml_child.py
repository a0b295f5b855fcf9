"""The only process that calls NVML, and the only module that imports pynvml.

Started by `nvml` as `python -I -m stepkeeper.node_agent.nvml_child
[--once] [--health-every-s N]`.  A call
into the driver can block for 45 s and more (XID 119), so this process does nothing else: two threads call, each says
before each call what it begins, and the parent keeps the time.  It ends when its standard input does.

What an old library or driver does not know is left out, not an error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from stepkeeper.node_agent.readings import (
    ENDS_ABSENT,
    ENDS_TO_BEGIN_ANEW,
    HEALTH,
    LISTING,
    REST,
    Begins,
    Evidence,
    FromChild,
    Gpu,
    GpuHealth,
    NvmlState,
    NvmlStatus,
    NvmlXid,
    encode,
)

# by number: older versions of pynvml lack the names
FIELD_RECOVERY_ACTION = 230
EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENT_UNAVAILABLE = 0x4000
EVENT_RECOVERY_ACTION = 0x8000
EVENTS = EVENT_XID | EVENT_DOUBLE_BIT_ECC | EVENT_UNAVAILABLE | EVENT_RECOVERY_ACTION
NO_INSTANCE = 0xFFFFFFFF

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
RECOVERY_RESET = 1  # what field 230 would say then, and this GPU cannot be asked
UNSUPPORTED = (NOT_SUPPORTED, FUNCTION_NOT_FOUND)

EVENT_WORDS = {
    EVENT_DOUBLE_BIT_ECC: "uncorrectable ECC error",
    EVENT_UNAVAILABLE: "GPU unavailable",
    EVENT_RECOVERY_ACTION: "recovery action changed",
}
WAIT_S = 10.0  # for an event: also how often the events thread says that it lives
FOR_EVER_S = 1e12
LINKS_MAX = 64  # more than any GPU has
FAILED_WAITS_MAX = 10  # in a row
PAUSE_S = 1.0  # after a failed wait, and between looks that events ask for


class Speaker:
    """Writes lines whole, from both threads; without a reader the process has no purpose and ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def say(self, message: FromChild) -> None:
        """Write one line."""
        line = encode(message)
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except BrokenPipeError:
                os._exit(0)


class Lane:
    """One thread's calls."""

    def __init__(self, name: str, say: Callable[[FromChild], None]) -> None:
        self.name = name
        self.say = say
        self.newest = ""  # function that was called

    def call(self, function: str, *arguments: Any, of: str = "", takes_s: float = 0.0) -> Any:
        """Call one of pynvml's functions, said before.  Raises pynvml.NVMLError."""
        self.newest = function
        self.say(Begins(lane=self.name, call=f"{function} of {of}" if of else function, takes_s=takes_s))
        return getattr(pynvml, function)(*arguments)

    def rest(self, wake: threading.Event, seconds: float) -> bool:
        """Wait, said before; return whether someone woke us."""
        self.say(Begins(lane=self.name, call=REST, takes_s=seconds))
        return wake.wait(seconds)

    def over(self) -> None:
        """Say that this thread calls no more: else its last call would seem to hang."""
        self.say(Begins(lane=self.name, call="nothing more", takes_s=FOR_EVER_S))


class Device:
    """One GPU: its handle, and what it is called."""

    def __init__(self, handle: Any, gpu: Gpu) -> None:
        self.handle = handle
        self.gpu = gpu


class Listing:
    """The GPUs that NVML counts: those that answer, and the indexes of the others."""

    def __init__(self, lane: Lane) -> None:
        """Ask for all.  Raises pynvml.NVMLError when there is not even a count."""
        self.counted: int = lane.call("nvmlDeviceGetCount")
        self.devices: list[Device] = []
        self.silent: dict[int, pynvml.NVMLError] = {}
        for index in range(self.counted):
            try:
                self.devices.append(_device(lane, index))
            except pynvml.NVMLError as error:
                if error.value != NO_PERMISSION:  # then it is another job's: Slurm's device cgroup hides it
                    self.silent[index] = error

    def sad_news(self) -> list[GpuHealth]:
        """Return one reading for each GPU that did not answer, with its address where that can be found out."""
        if not self.silent:
            return []
        from stepkeeper.node_agent.kernel import Roots, gpu_addresses  # noqa: PLC0415 - launches wait for our start

        now = time.time()
        listed = {device.gpu.index: device.gpu.pci for device in self.devices}
        where = addresses_of_silent(self.counted, listed, gpu_addresses(Roots()))
        return [
            GpuHealth(
                at=now,
                pci=where.get(index, ""),
                index=index,
                lost=error.value == GPU_IS_LOST,
                recovery_action=RECOVERY_RESET if error.value == RESET_REQUIRED else None,
                errors=(f"{LISTING}: {error}",),
            )
            for index, error in self.silent.items()
        ]

    def is_stale(self, lane: Lane) -> bool:
        """Tell whether a new process would list other GPUs."""
        try:
            if lane.call("nvmlDeviceGetCount") != self.counted:
                return True
        except pynvml.NVMLError:
            return True
        for index in self.silent:
            with contextlib.suppress(pynvml.NVMLError):  # still silent
                lane.call("nvmlDeviceGetHandleByIndex", index, of=f"GPU {index}")
                return True
        return False


def addresses_of_silent(counted: int, listed: dict[int, str], known: Iterable[str]) -> dict[int, str]:
    """Return the addresses of the GPUs that NVML counts and cannot list, from those that the kernel knows.

    NVML numbers GPUs in the order of their addresses.  Where the kernel knows other GPUs than NVML counts, nothing can
    be told.
    """
    ordered = sorted(known)
    fits = len(ordered) == counted and all(ordered[index] == pci for index, pci in listed.items())
    return {index: pci for index, pci in enumerate(ordered) if index not in listed} if fits else {}


def _device(lane: Lane, index: int) -> Device:
    of = f"GPU {index}"
    handle = lane.call("nvmlDeviceGetHandleByIndex", index, of=of)
    pci = lane.call("nvmlDeviceGetPciInfo", handle, of=of)
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    names = {}
    for key, function in (("uuid", "nvmlDeviceGetUUID"), ("name", "nvmlDeviceGetName")):
        try:
            names[key] = _text(lane.call(function, handle, of=address))
        except pynvml.NVMLError as error:
            if error.value not in UNSUPPORTED:
                raise
    return Device(handle, Gpu(index=index, pci=address, **names))


def _text(value: str | bytes) -> str:
    """Return what older versions of pynvml give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def ready(lane: Lane, devices: list[Device]) -> NvmlStatus:
    """Return the status with the driver's version."""
    driver = ""
    with contextlib.suppress(pynvml.NVMLError):  # nice to know, no more
        driver = _text(lane.call("nvmlSystemGetDriverVersion"))
    gpus = tuple(device.gpu for device in devices)
    return NvmlStatus(at=time.time(), state=NvmlState.READY, driver=driver, gpus=gpus)


# --- health ---------------------------------------------------------------------------------------


class _Lost(Exception):  # noqa: N818 - the GPU's state, not a mistake
    """The GPU is lost: nothing more to ask."""


def look(lane: Lane, device: Device) -> GpuHealth:
    """Ask one GPU everything."""
    values: dict[str, Any] = {}
    errors: list[str] = []
    lost = False
    try:
        for question in QUESTIONS:
            answer = _ask(lane, device, question, errors)
            if values.get("recovery_action"):
                answer.pop("recovery_action", None)  # what the GPU itself asks for says more than an error
            values.update(answer)
    except _Lost:
        lost = True
    gpu = device.gpu
    return GpuHealth(
        at=time.time(), pci=gpu.pci, uuid=gpu.uuid, index=gpu.index, lost=lost, errors=tuple(errors), **values
    )


def _ask(
    lane: Lane, device: Device, question: Callable[[Lane, Device], dict[str, Any]], errors: list[str]
) -> dict[str, Any]:
    try:
        return question(lane, device)
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return {}
        errors.append(f"{question.__name__.strip('_')}: {error}")
        if error.value == GPU_IS_LOST:
            raise _Lost from error
        return {"recovery_action": RECOVERY_RESET} if error.value == RESET_REQUIRED else {}
    except AttributeError:
        return {}  # this version of pynvml does not have the function


def _recovery_action(lane: Lane, device: Device) -> dict[str, Any]:
    field = lane.call("nvmlDeviceGetFieldValues", device.handle, [FIELD_RECOVERY_ACTION], of=device.gpu.pci)[0]
    if field.nvmlReturn == 0:
        return {"recovery_action": int(field.value.uiVal)}
    if field.nvmlReturn == GPU_IS_LOST:
        raise pynvml.NVMLError(GPU_IS_LOST)
    return {}


def _remapped_rows(lane: Lane, device: Device) -> dict[str, Any]:
    _, _, pending, failed = lane.call("nvmlDeviceGetRemappedRows", device.handle, of=device.gpu.pci)
    return {"rows_pending": bool(pending), "rows_failed": bool(failed)}


def _retired_pages(lane: Lane, device: Device) -> dict[str, Any]:
    """Ask what GPUs before Ampere do about broken memory: they retire pages, where newer ones remap rows."""
    pending = lane.call("nvmlDeviceGetRetiredPagesPendingStatus", device.handle, of=device.gpu.pci)
    return {"pages_pending": bool(pending)}


def _ecc(lane: Lane, device: Device) -> dict[str, Any]:
    uncorrected, volatile = 1, 0
    count = lane.call("nvmlDeviceGetTotalEccErrors", device.handle, uncorrected, volatile, of=device.gpu.pci)
    return {"ecc_uncorrected": count}


def _sram(lane: Lane, device: Device) -> dict[str, Any]:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    lane.call("nvmlDeviceGetSramEccErrorStatus", device.handle, ctypes.byref(status), of=device.gpu.pci)
    return {"sram_threshold_exceeded": bool(status.bThresholdExceeded)}


def _temperature(lane: Lane, device: Device) -> dict[str, Any]:
    of_the_chip = 0
    return {"temperature_c": lane.call("nvmlDeviceGetTemperature", device.handle, of_the_chip, of=device.gpu.pci)}


QUESTIONS = (_recovery_action, _remapped_rows, _retired_pages, _ecc, _sram, _temperature)


class Links:
    """The NVLinks of the GPUs: a state that changed is evidence, and reported once."""

    def __init__(self) -> None:
        self._up: dict[str, frozenset[int]] = {}

    def look(self, lane: Lane, device: Device) -> Evidence | None:
        """Return what has changed since the last look."""
        pci = device.gpu.pci
        up, count = set(), 0
        lane.say(Begins(lane=lane.name, call=f"nvmlDeviceGetNvLinkState of {pci}"))  # once for all links
        try:
            for link in range(LINKS_MAX):
                if pynvml.nvmlDeviceGetNvLinkState(device.handle, link):
                    up.add(link)
                count += 1
        except pynvml.NVMLError as error:
            if error.value != INVALID_ARGUMENT:  # there is no such link: those before it are all
                return None
        before = self._up.get(pci, frozenset(up))
        self._up[pci] = frozenset(up)
        changes = [
            f"{_numbers(links)} went {direction}"
            for links, direction in ((before - up, "down"), (up - before, "up"))
            if links
        ]
        if not changes:
            return None
        values = {"links": float(count), "up": float(len(up))}
        return Evidence(at=time.time(), what="nvlink", where=pci, text=", ".join(changes), values=values)


def _numbers(links: Iterable[int]) -> str:
    return "link " + ", ".join(str(link) for link in sorted(links))


# --- the process ----------------------------------------------------------------------------------


def watch_health(lane: Lane, listing: Listing, wake: threading.Event, every_s: float) -> None:
    """Look at every GPU, again and again, and at once when an event came."""
    links = Links()
    while True:
        for device in listing.devices:
            health = look(lane, device)
            lane.say(health)
            if not health.lost and (changed := links.look(lane, device)) is not None:
                lane.say(changed)
        for reading in listing.sad_news():
            lane.say(reading)
        rest_until = time.monotonic() + every_s
        lane.rest(threading.Event(), min(PAUSE_S, every_s))  # a burst of events is one look
        while (left := rest_until - time.monotonic()) > 0 and not lane.rest(wake, min(left, WAIT_S)):
            pass
        wake.clear()
        if listing.is_stale(lane):
            os._exit(ENDS_TO_BEGIN_ANEW)


def watch_events(lane: Lane, devices: list[Device], wake: threading.Event) -> None:
    """Report every XID event; let the other thread look at the GPUs after any event."""
    by_handle = {_address(device.handle): device.gpu for device in devices}
    events, watched = _register(lane, devices)
    if not watched:
        lane.over()
        return  # no GPU here can say; checking now and then is all there is
    failed = 0
    while failed < FAILED_WAITS_MAX:
        try:
            event = lane.call("nvmlEventSetWait_v2", events, round(WAIT_S * 1000), takes_s=WAIT_S)
        except pynvml.NVMLError as error:
            if error.value == TIMEOUT:
                failed = 0
                continue
            failed += 1
            wake.set()
            lane.rest(threading.Event(), PAUSE_S)
            if error.value == GPU_IS_LOST:  # the set as a whole fails then: leave that GPU out
                with contextlib.suppress(pynvml.NVMLError):
                    lane.call("nvmlEventSetFree", events)
                events, watched = _register(lane, devices)
                if not watched:
                    lane.over()
                    return
            continue
        failed = 0
        _report(lane, event, by_handle.get(_address(event.device)))
        wake.set()
    os._exit(ENDS_TO_BEGIN_ANEW)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _register(lane: Lane, devices: list[Device]) -> tuple[Any, int]:
    """Return an event set, and how many GPUs it covers."""
    try:
        events = lane.call("nvmlEventSetCreate")
    except pynvml.NVMLError as error:
        lane.say(Evidence(at=time.time(), what="nvml_events", where="", text=f"nvmlEventSetCreate: {error}"))
        return None, 0
    watched = 0
    for device in devices:
        pci = device.gpu.pci
        try:
            supported = lane.call("nvmlDeviceGetSupportedEventTypes", device.handle, of=pci)
            lane.call("nvmlDeviceRegisterEvents", device.handle, EVENTS & supported, events, of=pci)
        except pynvml.NVMLError as error:
            lane.say(Evidence(at=time.time(), what="nvml_events", where=pci, text=f"no events of this GPU: {error}"))
        else:
            watched += bool(EVENTS & supported)
    return events, watched


def _report(lane: Lane, event: Any, gpu: Gpu | None) -> None:
    pci, uuid = (gpu.pci, gpu.uuid) if gpu else ("", "")
    if event.eventType != EVENT_XID:
        words = EVENT_WORDS.get(event.eventType, f"event {event.eventType:#x}")
        lane.say(Evidence(at=time.time(), what="nvml_events", where=pci, text=words))
        return
    lane.say(
        NvmlXid(
            at=time.time(),
            code=event.eventData,
            pci=pci,
            uuid=uuid,
            gpu_instance=_instance(event.gpuInstanceId),
            compute_instance=_instance(event.computeInstanceId),
        )
    )


def _instance(number: int) -> int | None:
    return None if number == NO_INSTANCE else number


def main(argv: list[str] | None = None) -> int:
    """Serve until standard input ends, or look once."""
    parser = argparse.ArgumentParser(prog="nvml_child")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--health-every-s", type=float, default=10.0)
    arguments = parser.parse_args(argv)
    speaker = Speaker(sys.stdout.fileno())
    health = Lane(HEALTH, speaker.say)
    if not arguments.once:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        health.call("nvmlInit")
        listing = Listing(health)
    except pynvml.NVMLError as error:
        speaker.say(NvmlStatus(at=time.time(), state=NvmlState.ABSENT, detail=f"{health.newest}: {error}"))
        return ENDS_ABSENT
    speaker.say(ready(health, listing.devices))
    if arguments.once:
        for reading in listing.sad_news():
            speaker.say(reading)
        for device in listing.devices:
            speaker.say(look(health, device))
        return 0
    wake = threading.Event()
    events = Lane("events", speaker.say)
    threading.Thread(target=watch_events, args=(events, listing.devices, wake), daemon=True).start()
    watch_health(health, listing, wake, arguments.health_every_s)
    return 0


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
