"""What an ordinary user's process can see of its node's hardware: for nodes without an agent.

The kernel log, where it may be read, NVML, and counters.  Judged as the agent does it; only what began with the job
counts, for what the log holds from before may have been repaired since.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from stepkeeper.loop_tools import thread
from stepkeeper.node_agent.core import events as agent
from stepkeeper.node_agent.core import incidents
from stepkeeper.node_agent.core.state import Incident, Policy, State
from stepkeeper.node_agent.evaluate import Evaluation, concerns
from stepkeeper.node_agent.kernel import ENDS_WITHIN_S, EvidenceReader, KernelLog, Roots, boot_id, device_addresses
from stepkeeper.node_agent.nvml import NvmlProcess, Patience
from stepkeeper.node_agent.readings import Evidence, KernelRecord, Reading
from stepkeeper.node_agent.xid.catalogue import Fault, load
from stepkeeper.node_agent.xid.parse import canonical
from stepkeeper.slurm.client import SlurmError
from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import shorten

HEALTH_EVERY_S = 30.0
NVML_AGAIN_S = 10.0  # where there is no driver: ranks that start take most of their time in imports
READINGS_WAITING_MAX = 1000
CLOCKS_S = 1.0  # between a record's time and our clock


class OwnSensors:
    """Says `Faulted` and `Note`, from a thread of its own."""

    def __init__(
        self,
        node: str,
        say: Callable[[bus.FromWatcher], None],
        *,
        since: float,
        is_ours: Callable[[str, str, str], bool],
    ) -> None:
        """`is_ours` returns, for a fault's name, PCI address and UUID, whether the job leaves the node for it."""
        self._node = node
        self._is_ours = is_ours
        self._say = say
        self._since = (since or time.time()) - CLOCKS_S
        self._readings: queue.Queue[Reading | None] = queue.Queue(READINGS_WAITING_MAX)
        self._judging = Evaluation(load(), devices=lambda: device_addresses(Roots()))
        self._policy = Policy()
        self._state = State(node=node, boot_id=boot_id())
        self._said: dict[str, tuple[object, ...]] = {}
        self._kernel_log = KernelLog(self._take, on_failure=self._failed)
        self._nvml = NvmlProcess(
            self._take,
            health_every_s=HEALTH_EVERY_S,
            patience=Patience(absent_again_s=NVML_AGAIN_S),
            on_failure=self._failed,
        )
        self._evidence = EvidenceReader(self._take, on_failure=self._failed)
        thread("own-senses", self._run, self._failed).start()  # the job continues without these sensors
        self._kernel_log.start()
        self._nvml.start()
        self._evidence.start()

    def close(self) -> None:
        """End the sensors."""
        with contextlib.suppress(queue.Full):  # then the thread ends with the process
            self._readings.put_nowait(None)
        self._kernel_log.stop()
        self._nvml.stop()
        self._evidence.stop(ENDS_WITHIN_S)

    def _take(self, reading: Reading) -> None:
        """Called on the sensors' threads."""
        old = isinstance(reading, KernelRecord) and reading.at < self._since
        if not old and concerns(reading):
            try:
                self._readings.put_nowait(reading)
            except queue.Full:
                return  # a storm: what drains a node is said again and again

    def _failed(self, error: BaseException) -> None:
        self._say(bus.Note(node=self._node, text=shorten(f"hardware faults are not received any more: {error!r}")))

    def _run(self) -> None:
        while True:
            try:
                reading = self._readings.get(timeout=self._wait_s())
            except queue.Empty:
                reading = None
            else:
                if reading is None:
                    return
            now = time.time()
            if isinstance(reading, Evidence) and reading.what != "sensor":  # that a user may not read it is usual
                text = f"{reading.what} {reading.where}: {reading.text}"
                self._say(bus.Note(node=self._node, text=shorten(text)))
            elif reading is not None:
                for event in self._judging.events(reading, now):
                    self._on_event(event)
            self._settle(now)

    def _on_event(self, event: agent.Event) -> None:
        match event:
            case agent.FaultSeen():
                self._on_fault(event.fault, event.at)
            case agent.GpusListed():
                known = {*self._state.gpus, *((gpu.pci, gpu.uuid) for gpu in event.gpus)}
                self._state = incidents.replace(self._state, gpus=tuple(sorted(known)), driver=event.driver)
            case _:
                pass  # Slurm's answers: nobody asks it here

    def _on_fault(self, fault: Fault, at: float) -> None:
        fault = incidents.place(self._state, fault)
        known = incidents.find(self._state, fault, self._policy)
        incident = incidents.joined(known, fault) if known else incidents.opened(self._state, fault, at, self._policy)
        self._state = incidents.forget(incidents.put(self._state, incident), at, self._policy)

    def _wait_s(self) -> float | None:
        due = [each.settle_at for each in self._state.incidents if not each.settled]
        return max(0.0, min(due) - time.time()) if due else None

    def _settle(self, now: float) -> None:
        """Say what has become certain, and what was raised since."""
        for incident in self._state.incidents:
            settled = incident.settled or incident.settle_at <= now
            if not settled:
                continue
            if not incident.settled:
                incident = incidents.replace(incident, settled=True)  # noqa: PLW2901 - the newer one
                self._state = incidents.put(self._state, incident)
            word = (incident.action, incident.name, incident.why)
            if self._said.get(incident.id) != word:
                self._said[incident.id] = word
                if not incident.action.drains or self._is_ours(incident.name, incident.pci, incident.gpu):
                    self._say(self._faulted(incident))

    def _faulted(self, incident: Incident) -> bus.Faulted:
        return bus.Faulted(
            node=self._node,
            incident=incident.id,
            name=incident.name,
            action=incident.action.value,
            leave=incident.action.drains,
            why=shorten(incident.why),
            gpu=incident.gpu_label.removeprefix("GPU "),
        )


# Which GPUs of its node a job holds: a fault of any other is no reason for the job to leave.
#
# Slurm numbers GPUs as the driver does (`/dev/nvidia3` is 3), and names those of each Slurm step; the driver
# says where each one sits.  Where that is not enough, every GPU fault of the node counts, and the log says why.

_OF_STEP = "SLURM_STEP_GPUS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ANY = (_OF_STEP, "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_SHARDS_ON_NODE", _VISIBLE)
_NO_DEVICES = ("", "NoDevFiles")  # what older versions of Slurm call none
_DEVICE = re.compile(r"/dev/nvidia[0-9]+")
_OLD_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/")  # `MIG-GPU-.../1/0`: with the GPU that it is a slice of


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of the node, as the driver knows it."""

    pci: str
    uuid: str = ""
    minor: str = ""  # the number in the name of its device


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a GPU's fault counts for the job, and why not."""

    counts: bool
    why: str = ""


class OwnGpus:
    """Decided once: what a job holds does not change while its watcher runs."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        counted: Callable[[], bool],
        proc: Path = Path("/proc"),
    ) -> None:
        """`counted` asks Slurm whether it knows of GPUs on this node; raises SlurmError, ValueError."""
        self._cards = cards(proc)
        self._counted = counted
        self._proc = proc
        self._unknown = ""
        self._held: frozenset[Card] | None = None
        self.holds_none = all(environment.get(name, "") in _NO_DEVICES for name in _ANY)  # as Slurm says
        if not self.holds_none:
            self._held, self._unknown = _held(environment, self._cards)

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """Return where the job's GPUs sit; None where that is not known."""
        return None if self._held is None else tuple(sorted(card.pci for card in self._held))

    def concern(self, pci: str, uuid: str, processes: Iterable[int]) -> Concern:
        """Tell whether a fault of a GPU counts; with neither name it is the whole node's.

        Args:
            pci: where the GPU sits; or a switch, which serves all GPUs.
            uuid: which GPU it is.
            processes: of the job on this node.
        """
        if self.holds_none:
            return self._without_gpus(processes)
        if self._held is None:
            return Concern(counts=True, why=self._unknown)
        of = next((card for card in self._cards if card.pci == pci or (uuid and card.uuid == uuid)), None)
        if of is None or of in self._held:
            return Concern(counts=True)
        return Concern(counts=False, why=f"the job holds {', '.join(self.addresses or ()) or 'none'}")

    def _without_gpus(self, processes: Iterable[int]) -> Concern:
        try:
            if not self._counted():
                return Concern(counts=True, why="Slurm does not count the GPUs of this node: any may be the job's")
        except (SlurmError, ValueError) as error:
            return Concern(counts=True, why=f"whether Slurm counts the GPUs of this node is not known: {error}")
        if any(_has_gpu_open(self._proc / str(pid)) for pid in processes):
            return Concern(counts=True, why="the job was given no GPU, and a process of it uses one")
        return Concern(counts=False, why="the job holds no GPU")


def cards(proc: Path) -> tuple[Card, ...]:
    """Return the GPUs that the driver has; none where it names none."""
    found = []
    try:
        places = sorted((proc / "driver/nvidia/gpus").iterdir())
    except OSError:
        return ()
    for place in places:
        try:
            text = (place / "information").read_text(errors="replace")
        except OSError:
            continue
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        pci = canonical(fields.get("Bus Location", place.name))
        found.append(Card(pci=pci, uuid=fields.get("GPU UUID", ""), minor=fields.get("Device Minor", "")))
    return tuple(found)


def _held(environment: Mapping[str, str], known: tuple[Card, ...]) -> tuple[frozenset[Card] | None, str]:
    """Return the job's GPUs, or None and why they are not known."""
    visible = [word for word in environment.get(_VISIBLE, "").split(",") if word]
    slices = [word for word in visible if word.startswith("MIG-")]
    if slices:
        parents = [match[1] for word in slices if (match := _OLD_SLICE.match(word))]
        if len(parents) < len(slices):
            return None, "slices of GPUs do not name their GPU"
        visible = parents
    if visible and all(word.startswith("GPU-") for word in visible):
        return _all_of(visible, lambda card, word: bool(card.uuid) and card.uuid.startswith(word), known)
    numbers = [word for word in environment.get(_OF_STEP, "").split(",") if word]
    if not numbers:
        return None, f"Slurm has not set {_OF_STEP}, which names the GPUs of this Slurm step"
    return _all_of(numbers, lambda card, word: card.minor == word, known)


def _all_of(
    words: list[str], matches: Callable[[Card, str], bool], known: tuple[Card, ...]
) -> tuple[frozenset[Card] | None, str]:
    found = {word: card for word in words for card in known if matches(card, word)}
    missing = [word for word in words if word not in found]
    if missing:
        return None, f"the driver does not say where GPU {', '.join(missing)} sits"
    return frozenset(found.values()), ""


def _has_gpu_open(process: Path) -> bool:
    try:
        return any(_DEVICE.fullmatch(os.readlink(link)) for link in (process / "fd").iterdir())
    except OSError:
        return False  # it has ended
