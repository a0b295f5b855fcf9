"""What sysfs and /proc say: counters and states that prove nothing, but help to understand a fault.

`read` returns everything, `news` what is worth a line: what has changed for the worse since the last time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from stepkeeper.node_agent.sensors.readings import Evidence, Reading
from stepkeeper.node_agent.sensors.stoppable import Stoppable

ENDS_WITHIN_S = 1.0

NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"  # PCI class of every GPU, with a display or without
AER_FILES = ("correctable", "nonfatal", "fatal")
# of InfiniBand and RoCE: these count what went wrong, the others traffic
PORT_COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
)
ACTIVE = "ACTIVE"
PRESSURE_NEWS = 10.0  # per cent of the last ten seconds in which a process waited for memory
FREE_NEWS = 0.02  # of a file system
BYTES_MAX = 4096
GIB = 1024**3


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    disks: tuple[str, ...] = ("/", "/tmp", "/dev/shm")  # noqa: S108 - whether they are full, no more


def read(roots: Roots) -> tuple[Evidence, ...]:
    """Return everything that is known here."""
    now = time.time()
    return (*aer(roots, now), *infiniband(roots, now), *memory_pressure(roots, now), *disks(roots, now))


def gpu_addresses(roots: Roots) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA's GPUs as the kernel knows them, with or without a driver."""
    devices = roots.sys / "bus/pci/devices"
    return tuple(
        name
        for name in _names(devices)
        if _text(devices / name / "vendor") == NVIDIA and _text(devices / name / "class").startswith(DISPLAY_CLASS)
    )


def device_addresses(roots: Roots) -> tuple[str, ...]:
    """Return the PCI addresses of all of NVIDIA's devices, NVSwitches too, as the kernel knows them."""
    devices = roots.sys / "bus/pci/devices"
    return tuple(name for name in _names(devices) if _text(devices / name / "vendor") == NVIDIA)


def aer(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell how many PCIe errors each GPU has reported since boot."""
    for address in gpu_addresses(roots):
        values = {}
        for kind in AER_FILES:
            text = _text(roots.sys / "bus/pci/devices" / address / f"aer_dev_{kind}")
            total = next((line.split()[1] for line in text.splitlines() if line.startswith("TOTAL_ERR_")), "")
            if total.isdecimal():
                values[kind] = float(total)
        if values:
            text = ", ".join(f"{count:.0f} {kind}" for kind, count in values.items())
            yield Evidence(at=at, what="aer", where=address, text=f"PCIe errors: {text}", values=values)


def infiniband(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell state and error counters of each port."""
    devices = roots.sys / "class/infiniband"
    for device in _names(devices):
        for port in _names(devices / device / "ports"):
            path = devices / device / "ports" / port
            state = _text(path / "state").partition(": ")[2]  # `4: ACTIVE`
            physical = _text(path / "phys_state").partition(": ")[2]
            layer = _text(path / "link_layer")
            if not state:
                continue
            values = {"active": float(state == ACTIVE)}
            for counter in PORT_COUNTERS:
                count = _text(path / "counters" / counter)
                if count.isdecimal():
                    values[counter] = float(count)
            words = f"{layer or 'port'} {state.lower()}, {physical.lower() or 'physical state unknown'}"
            yield Evidence(at=at, what="infiniband", where=f"{device}/{port}", text=words, values=values)


def memory_pressure(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell how much of the last ten seconds processes waited for memory."""
    values = {}
    for line in _text(roots.proc / "pressure/memory").splitlines():
        kind, *pairs = line.split()
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name == "avg10":
                values[kind] = _number(value)
    if values:
        text = f"{values.get('some', 0.0):g} % of the time some process waited for memory"
        yield Evidence(at=at, what="memory_pressure", where="node", text=text, values=values)


def disks(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell how full the node's own file systems are; never ask this of a network's: it may hang."""
    for path in roots.disks:
        try:
            status = os.statvfs(path)
        except OSError:
            continue  # not there
        free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        if size:
            text = f"{free / GIB:.1f} GiB of {size / GIB:.1f} GiB free"
            yield Evidence(at=at, what="disk", where=path, text=text, values={"free": float(free), "size": float(size)})


def news(before: Iterable[Evidence], after: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Return what is worse in `after`; of a first look what is bad as it is.  Pure."""
    known = {(evidence.what, evidence.where): evidence for evidence in before}
    found = []
    for evidence in after:
        old = known.get((evidence.what, evidence.where))
        if old is not None and old.values == evidence.values:
            continue
        if worse := _worse(old, evidence):
            found.append(msgspec.structs.replace(evidence, text=f"{evidence.text}; {worse}"))
    return tuple(found)


def _worse(old: Evidence | None, new: Evidence) -> str:
    """Return in what way; "" where it is not."""
    was = old.values if old is not None else {}
    if new.what == "memory_pressure":
        limit = PRESSURE_NEWS
        above = new.values.get("some", 0.0) >= limit > was.get("some", 0.0)
        return f"above {limit:g} %" if above else ""
    if new.what == "disk":
        full = new.values["free"] < FREE_NEWS * new.values["size"]
        was_full = bool(was) and was["free"] < FREE_NEWS * was["size"]
        return "nearly full" if full and not was_full else ""
    if old is None:
        return ""  # counters since boot: what matters is that they grow
    words = [
        f"{name} grew by {value - was[name]:.0f}"
        for name, value in new.values.items()
        if name != "active" and name in was and value > was[name]
    ]
    if was.get("active", 0.0) > new.values.get("active", 0.0):
        words.insert(0, "the link went down")
    elif was.get("active", 1.0) < new.values.get("active", 1.0):
        words.insert(0, "the link came up")
    return ", ".join(words)


class EvidenceReader(Stoppable):
    """Looks now and then, on a thread of its own (a broken adapter's files can hang); hands news to a callback."""

    def __init__(
        self,
        callback: Callable[[Reading], None],
        *,
        roots: Roots | None = None,
        every_s: float = 60.0,
        on_failure: Callable[[BaseException], object],
    ) -> None:
        super().__init__("evidence", on_failure)
        self._callback = callback
        self._roots = roots or Roots()
        self._every_s = every_s
        self._now: tuple[Evidence, ...] = ()

    @property
    def latest(self) -> tuple[Evidence, ...]:
        """Everything, as of the last look: goes beside a fault."""
        return self._now

    def _run(self) -> None:
        while True:
            before, self._now = self._now, read(self._roots)
            for evidence in news(before, self._now):
                self._callback(evidence)
            if self._stopped(self._every_s):
                return


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []  # not this kind of node


def _text(path: Path) -> str:
    """Return a small file's text; "" where it is missing or cannot be read: then this node does not say."""
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
