"""From readings to events: what the sensors saw, judged by `xid`, with what was known before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepkeeper.node_agent import nvml
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.events import Looked
from stepkeeper.node_agent.kernel import READABLE, Roots, gpu_addresses
from stepkeeper.node_agent.readings import (
    Evidence,
    Gpu,
    GpuHealth,
    KernelRecord,
    NvmlState,
    NvmlStatus,
    NvmlXid,
    Reading,
)
from stepkeeper.node_agent.xid import judge as nvml_health
from stepkeeper.node_agent.xid.catalogue import Action, Catalogue, Fault, Source
from stepkeeper.node_agent.xid.judge import judge, judge_xid_event
from stepkeeper.node_agent.xid.parse import announcement, canonical, driver_loaded, parse

FRESH_S = 60.0


def concerns(reading: Reading) -> bool:
    """Tell whether a reading can make an event: asked by the kernel log's thread, of each line."""
    if not isinstance(reading, KernelRecord):
        return True
    text = reading.text
    return parse(text) is not None or announcement(text) is not None or driver_loaded(text)


class _Silence(msgspec.Struct):
    """The looks in a row at which a GPU did not answer."""

    since: float
    present_at_start: bool  # from the first look on
    looks: int = 0
    reported: bool = False


class Evaluation:
    """Remembers the newest health of each GPU and the driver's version.  Used on the loop's thread only."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        expected_gpus: int = 0,
        only_pci_prefix: str = "",
        gpus: Iterable[tuple[str, str]] = (),
        devices: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        """Begin.

        Args:
            catalogue: what codes mean.
            expected_gpus: that the node should have; 0: unknown.
            only_pci_prefix: of the devices that count, and are taken for there, in a test.
            gpus: address and UUID of those that were there since the boot, or are on the PCI bus.
            devices: asked for the addresses of NVIDIA's devices that are on the PCI bus now.
        """
        self.catalogue = catalogue
        self.health: dict[str, GpuHealth] = {}
        self.driver = ""
        self.kernel_log = True  # somebody reads it: what it reports may come later than NVML's report
        self._silent: dict[str, _Silence] = {}
        self._short_since: float | None = None  # the first of the listings in a row that were too short
        self._short_reported = False
        self._expected_gpus = expected_gpus
        self._prefix = only_pci_prefix
        self._devices = devices
        self._known = {pci: uuid for pci, uuid in gpus if pci.startswith(only_pci_prefix)}

    @property
    def wants_listing(self) -> bool:
        """Whether a listing was too short, and the next one, `LISTED_AGAIN_AFTER_S` later, shall confirm it."""
        return self._short_since is not None and not self._short_reported

    def events(self, reading: Reading, at: float) -> list[on.Event]:
        """Return what a reading means."""
        match reading:
            case KernelRecord():
                return self._of_record(reading, at)
            case NvmlXid():
                return [on.FaultSeen(at=at, fault=self._of_event(reading))]
            case GpuHealth():
                name = reading.pci or f"#{reading.index}"  # NVML's process writes an address as `canonical` does
                before = self.health.get(name)
                self.health[name] = reading
                why = nvml_health.was_reset(reading, before) if before is not None else ""
                reset = [on.GpusReset(at=at, pci=reading.pci, why=why)] if why else []
                return [*reset, *self._of_health(name, reading, before, at)]
            case NvmlStatus():
                return self._of_status(reading, at)
            case _:
                return []  # gaps and evidence are logged, and prove nothing

    def _is_there(self, pci: str) -> bool:
        """Tell whether the node has this device, or had it since the boot.

        Records with the prefix of a netfilter rule, or of another module, look like the driver's: what they name need
        not exist.  A GPU that is lost is known by then.
        """
        if self._prefix:
            return pci.startswith(self._prefix)
        return pci in self._known or pci in self.health or pci in set(self._devices())

    def _of_event(self, event: NvmlXid) -> Fault:
        return judge_xid_event(
            event,
            catalogue=self.catalogue,
            recovery_action=self._recovery_action(event.pci, event.at),
            kernel_log=self.kernel_log,
        )

    def _recovery_action(self, pci: str, at: float) -> int | None:
        """Return what the GPU itself asks for, as far as that was read near the fault: an old one may be mended."""
        health = self.health.get(canonical(pci))
        return health.recovery_action if health is not None and abs(at - health.at) <= FRESH_S else None

    def _of_record(self, record: KernelRecord, at: float) -> list[on.Event]:
        if driver_loaded(record.text):
            loaded = on.GpusReset(at=record.at, why="the driver was loaded again, which resets every GPU")
            return [] if self._prefix else [loaded]
        if (report := parse(record.text)) is None:
            found = announcement(record.text)
            if found is None or not self._is_there(found.pci):
                return []
            return [on.GpusListed(at=at, gpus=(Gpu(index=-1, pci=found.pci, uuid=found.uuid),))]
        if not self._is_there(report.pci):
            return []
        fault = judge(
            report,
            at=record.at,
            source=Source.KERNEL,
            catalogue=self.catalogue,
            recovery_action=self._recovery_action(report.pci, record.at),
            driver=self.driver,
            boot_id=record.boot_id,
            sequence=record.sequence,
        )
        return [on.FaultSeen(at=at, fault=fault)]

    def _of_status(self, status: NvmlStatus, at: float) -> list[on.Event]:
        found: list[on.Event] = [] if status.once else [on.NvmlStands(at=at, state=status.state)]
        faults: list[Fault | None] = []
        if status.state is NvmlState.READY:
            self.driver = status.driver or self.driver
            found.append(on.GpusListed(at=at, gpus=status.gpus, driver=status.driver))
            faults.append(self._of_listing(status.gpus, status.at))
        elif status.state is NvmlState.ABSENT and status.stuck_s >= nvml_health.ABSENT_BELIEVED_AFTER_S:
            faults.append(self._missing((), status.at))
        faults.append(nvml_health.stuck(status))
        return found + [on.FaultSeen(at=at, fault=fault) for fault in faults if fault is not None]

    def _of_health(self, name: str, health: GpuHealth, before: GpuHealth | None, at: float) -> list[on.Event]:
        faults = nvml_health.judge_health(health, before, catalogue=self.catalogue)
        faults += self._of_silence(name, health, present_at_start=before is None)
        return [on.FaultSeen(at=at, fault=fault) for fault in faults]

    def _of_silence(self, name: str, health: GpuHealth, *, present_at_start: bool) -> list[Fault]:
        """Return the fault of a GPU that has been silent for long enough, once."""
        if not health.silent:
            self._silent.pop(name, None)
            return []
        silence = self._silent.setdefault(name, _Silence(since=health.at, present_at_start=present_at_start))
        silence.looks += 1
        long = health.at >= silence.since + nvml_health.SILENT_BELIEVED_AFTER_S
        if silence.reported or not long or silence.looks < nvml_health.SILENT_LOOKS:
            return []
        silence.reported = True
        return [nvml_health.silent(health, present_at_start=silence.present_at_start, catalogue=self.catalogue)]

    def _of_listing(self, gpus: Sequence[Gpu], at: float) -> Fault | None:
        """Return the fault of a list that is too short, and was before."""
        fault = self._missing(gpus, at)
        self._known |= {gpu.pci: gpu.uuid for gpu in gpus if gpu.uuid or gpu.pci not in self._known}
        if fault is None:
            self._short_since, self._short_reported = None, False
        elif self._short_since is None:
            self._short_since = at
            return None
        elif at < self._short_since + nvml_health.LISTED_AGAIN_AFTER_S:
            return None
        self._short_reported = fault is not None
        return fault

    def _missing(self, gpus: Sequence[Gpu], at: float) -> Fault | None:
        listed = {gpu.pci for gpu in gpus}
        gone = [f"{pci} ({uuid})" if uuid else pci for pci, uuid in sorted(self._known.items()) if pci not in listed]
        return nvml_health.missing(self._expected_gpus, len(gpus), at=at, catalogue=self.catalogue, gone=gone)


# What the agent cannot see: an agent without its sensors looks like one whose node is well, so it says so.

KERNEL_LOG = "kernel log"
NVML = "NVML"
DEATHS_MAX = 3
DEATHS_WITHIN_S = 600.0
"""So many deaths of the NVML process in so long are no accident."""
LASTED_S = 300.0
"""An NVML process that has lived this long sees again; the pauses between two deaths are shorter."""


class SensorHealth:
    """Remembers which sensors see nothing, and why."""

    def __init__(self) -> None:
        self.blind: dict[str, str] = {}
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX)

    def take(self, reading: Reading) -> str:
        """Note a reading; return the name of the sensor that has become blind, or sees again; "" where none has."""
        match reading:
            case Evidence(what="sensor") if READABLE in reading.values:
                return self._note(KERNEL_LOG, "" if reading.values[READABLE] else reading.text)
            case NvmlStatus(state=NvmlState.ENDED):
                self._deaths.append(reading.at)
                if len(self._deaths) == DEATHS_MAX and reading.at <= self._deaths[0] + DEATHS_WITHIN_S:
                    return self._note(NVML, f"NVML's process dies again and again: {reading.detail}")
            case NvmlStatus(state=NvmlState.READY) | GpuHealth():
                if NVML in self.blind and reading.at > self._deaths[-1] + LASTED_S:
                    return self._note(NVML, "")
            case _:
                pass
        return ""

    def _note(self, sensor: str, why: str) -> str:
        known = sensor in self.blind
        if why:
            self.blind[sensor] = why
        else:
            self.blind.pop(sensor, None)
        return sensor if known != bool(why) else ""


# Whether the node is fit for jobs again, by one fresh look at its GPUs, and by the very rules that drain it: a returned
# node must not be drained at the next reading.

LOOK_WITHIN_S = 30.0


class Fitness(msgspec.Struct, frozen=True, kw_only=True):
    """What a look has found."""

    unfit: str = ""  # why the node is not fit; "" where every GPU answers and asks for nothing
    looked: Looked | None = None  # None: NVML is not there


def look(catalogue: Catalogue, expected_gpus: int, within_s: float = LOOK_WITHIN_S) -> Fitness:
    """Look at all GPUs, once."""
    look = nvml.once(within_s)
    status = look.status
    if status.state is not NvmlState.READY:
        stuck = Looked(answers=False) if status.state is NvmlState.STUCK else None
        return Fitness(unfit=f"NVML is {status.state.value}: {status.detail}", looked=stuck)
    problems = []
    answering, well = [], []
    listed, on_the_bus = {gpu.pci for gpu in status.gpus}, gpu_addresses(Roots())
    away = [address for address in on_the_bus if address not in listed]
    gone = nvml_health.missing(expected_gpus, len(status.gpus), at=status.at, catalogue=catalogue, gone=away)
    if gone is not None:
        problems.append(gone.why)
    if len(look.health) < len(status.gpus):
        problems.append(f"only {len(look.health)} of {len(status.gpus)} GPUs reported their health")
    for each in look.health:
        if each.silent:
            problems.append(f"GPU {each.pci} does not answer: {'; '.join(each.errors)}")
        found = nvml_health.judge_health(each, None, catalogue=catalogue)
        asks = [f"GPU {each.pci}: {fault.why}" for fault in found if fault.action is not Action.LOG]
        problems += asks
        if not (each.silent or each.lost):
            answering.append(each.pci)
            if not asks:
                well.append(each)
    looked = Looked(
        answering=tuple(answering),
        well=tuple(each.pci for each in well),
        vouched=tuple(each.pci for each in well if each.recovery_action is not None),
        here=tuple(sorted(listed.union(on_the_bus))),
    )
    return Fitness(unfit="; ".join(problems), looked=looked)
