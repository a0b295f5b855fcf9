"""What the kernel says: its log, sysfs and /proc.

Of /dev/kmsg no record is missed or repeated, from the oldest one on that is still there.  A record says who wrote it:
facility 0 is the kernel itself, and what user space wrote has another facility, whatever its text claims.  Only the
kernel's own records are passed on.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from stepkeeper.node_agent.readings import Evidence, KernelGap, KernelRecord, Reading, Stoppable
from stepkeeper.node_agent.xid.parse import SYSCTL, unescape

DEVICE = "/dev/kmsg"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
NETFILTER_OF_ALL = Path("/proc/sys") / SYSCTL.replace(".", "/")
RECORD_BYTES_MAX = 16384  # the kernel writes at most 8192
FACILITY_SHIFT = 3
KERNEL = 0
READABLE = "readable"  # in the values of `Evidence` about the device itself
TRY_AGAIN_S = 60.0  # a device that is missing or not ours to read: that may change
RECORDS_AT_ONCE = 1000  # then look whether to stop


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record as the device gives it."""

    facility: int
    sequence: int
    usec: int  # of the kernel's clock, which starts at boot
    text: bytes  # still escaped


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The last record that was dealt with: reading goes on behind it."""

    boot_id: str
    sequence: int  # -1: none yet


def parse_record(data: bytes) -> Record | None:
    r"""Take one record apart; None where it is none.

    >>> parse(b"6,339,5140900,-;NVRM: loading\n SUBSYSTEM=pci\n").text
    b'NVRM: loading'
    """
    head, found, rest = data.partition(b";")
    fields = head.split(b",")
    if not found or len(fields) < 3:  # noqa: PLR2004 - priority, sequence, time; more may follow
        return None
    try:
        priority, sequence, usec = (int(field) for field in fields[:3])
    except ValueError:
        return None
    # what follows the first line feed are ` KEY=value` lines; one in the text itself is written as \x0a
    text = rest.partition(b"\n")[0]
    return Record(facility=priority >> FACILITY_SHIFT, sequence=sequence, usec=usec, text=text)


def boot_id(path: str = BOOT_ID) -> str:
    """Return the id of this boot.  Raises OSError."""
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def users_may_write(path: Path = NETFILTER_OF_ALL) -> bool:
    """Tell whether any user can have netfilter begin records of the kernel log with a text of his choice."""
    try:
        return path.read_text(encoding="ascii").strip() not in ("", "0")
    except OSError:
        return False  # no netfilter, or no log of it


class KernelLog(Stoppable):
    """Reads on a thread of its own and hands `KernelRecord`, `KernelGap` and `Evidence` to a callback.

    `Evidence` with `what="sensor"` says that the log cannot be read, and why, and when it can again.  The callback must
    not raise.  `read` stands for os.read; a test's device may answer as the kernel does on an overrun.
    """

    def __init__(
        self,
        callback: Callable[[Reading], None],
        *,
        path: str = DEVICE,
        resume: Position | None = None,
        allow_injected: bool = False,
        boot: str | None = None,
        read: Callable[[int, int], bytes] = os.read,
        on_failure: Callable[[BaseException], object],
    ) -> None:
        """Prepare.  `allow_injected` believes what user space wrote too: only ever for acceptance tests."""
        super().__init__("kmsg", on_failure)
        self._callback = callback
        self._path = path
        self._boot = boot if boot is not None else boot_id()
        same_boot = resume is not None and resume.boot_id == self._boot and resume.sequence >= 0
        self._expected = resume.sequence + 1 if resume is not None and same_boot else None
        self._allow_injected = allow_injected
        self._read = read
        self._overrun = False
        self._problem = ""
        self.caught_up = threading.Event()  # everything that was there at the start has been handed over

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                descriptor = self._open()
            except OSError as error:
                self._report(error)
            else:
                try:
                    self._follow(descriptor)
                except OSError as error:
                    self._report(error)
                finally:
                    os.close(descriptor)
            self.caught_up.set()  # as far as it goes
            if self._stopped(TRY_AGAIN_S if self._problem else 0.0):
                return

    def _open(self) -> int:
        flags = os.O_RDONLY
        if stat.S_ISFIFO(os.stat(self._path).st_mode):
            flags = os.O_RDWR  # a test's stand-in: its end must not come when a writer leaves
        return os.open(self._path, flags | os.O_NONBLOCK | os.O_CLOEXEC)

    def _follow(self, descriptor: int) -> None:
        """Read until asked to stop.  Raises OSError where the device fails."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        stopping = False
        while not stopping:
            if self._read_some(descriptor):
                self.caught_up.set()
                stopping = any(found == self._stop_read for found, _ in poll.poll())
            else:
                stopping = self._stopped(0.0)

    def _read_some(self, descriptor: int) -> bool:
        """Read what is there, but not for ever; return whether that was all."""
        for _ in range(RECORDS_AT_ONCE):
            try:
                data = self._read(descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                self._recovered()
                return True
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring went round; the next read gives the oldest record left
                    self._overrun = True
                elif error.errno != errno.EINVAL:  # one that is too long was passed over: the sequence shows it
                    raise
                continue
            if not data:
                raise OSError(errno.ENODATA, "the device has ended")
            record = parse_record(data)
            if record is not None:
                self._take(record)
        return False

    def _take(self, record: Record) -> None:
        now = time.time()
        if self._expected is not None and record.sequence < self._expected:
            return  # dealt with before
        lost = record.sequence - self._expected if self._expected is not None else int(self._overrun)
        if lost > 0:
            self._callback(KernelGap(at=now, lost=lost))
        self._overrun = False
        self._expected = record.sequence + 1
        if record.facility != KERNEL and not self._allow_injected:
            return
        self._callback(
            KernelRecord(
                at=min(now, now - (time.monotonic() - record.usec / 1e6)),
                boot_id=self._boot,
                sequence=record.sequence,
                text=unescape(record.text),
            )
        )

    # --- whether it can be read -------------------------------------------------------------------

    def _report(self, error: OSError) -> None:
        problem = f"cannot read {self._path}: {error.strerror or error}"
        if error.errno == errno.EPERM:
            problem += " (kernel.dmesg_restrict is on: CAP_SYSLOG is needed)"
        if problem != self._problem:
            self._tell(problem, readable=False)
        self._problem = problem

    def _recovered(self) -> None:
        if self._problem:
            self._problem = ""
            self._tell("can be read again", readable=True)

    def _tell(self, text: str, *, readable: bool) -> None:
        values = {READABLE: float(readable)}
        self._callback(Evidence(at=time.time(), what="sensor", where=self._path, text=text, values=values))


# What sysfs and /proc say: counters and states that prove nothing, but help to understand a fault.
#
# `read_counters` returns everything, `news` what is worth a line: what has changed for the worse since the last time.

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
FILE_BYTES_MAX = 4096
ENDS_WITHIN_S = 1.0  # a look that does not is left behind: it hangs in the kernel
GIB = 1024**3


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    disks: tuple[str, ...] = ("/", "/tmp", "/dev/shm")  # noqa: S108 - whether they are full, no more


def read_counters(roots: Roots) -> tuple[Evidence, ...]:
    """Return everything that is known here."""
    now = time.time()
    return (*aer(roots, now), *infiniband(roots, now), *memory_pressure(roots, now), *disks(roots, now))


def gpu_addresses(roots: Roots) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA's GPUs as the kernel knows them, with or without a driver."""
    devices = roots.sys / "bus/pci/devices"
    found = device_addresses(roots)
    return tuple(name for name in found if _file_text(devices / name / "class").startswith(DISPLAY_CLASS))


def device_addresses(roots: Roots) -> tuple[str, ...]:
    """Return the PCI addresses of all of NVIDIA's devices, NVSwitches too, as the kernel knows them."""
    devices = roots.sys / "bus/pci/devices"
    return tuple(name for name in _names(devices) if _file_text(devices / name / "vendor") == NVIDIA)


def aer(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell how many PCIe errors each GPU has reported since boot."""
    for address in gpu_addresses(roots):
        values = {}
        for kind in AER_FILES:
            text = _file_text(roots.sys / "bus/pci/devices" / address / f"aer_dev_{kind}")
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
            state = _file_text(path / "state").partition(": ")[2]  # `4: ACTIVE`
            physical = _file_text(path / "phys_state").partition(": ")[2]
            layer = _file_text(path / "link_layer")
            if not state:
                continue
            values = {"active": float(state == ACTIVE)}
            for counter in PORT_COUNTERS:
                count = _file_text(path / "counters" / counter)
                if count.isdecimal():
                    values[counter] = float(count)
            words = f"{layer or 'port'} {state.lower()}, {physical.lower() or 'physical state unknown'}"
            yield Evidence(at=at, what="infiniband", where=f"{device}/{port}", text=words, values=values)


def memory_pressure(roots: Roots, at: float) -> Iterator[Evidence]:
    """Tell how much of the last ten seconds processes waited for memory."""
    values = {}
    for line in _file_text(roots.proc / "pressure/memory").splitlines():
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

    def _run(self) -> None:
        while True:
            before, self._now = self._now, read_counters(self._roots)
            for evidence in news(before, self._now):
                self._callback(evidence)
            if self._stopped(self._every_s):
                return


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []  # not this kind of node


def _file_text(path: Path) -> str:
    """Return a small file's text; "" where it is missing or cannot be read: then this node does not say."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
