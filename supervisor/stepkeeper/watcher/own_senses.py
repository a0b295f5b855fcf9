"""What an ordinary user's process can see of its node's hardware: for nodes without an agent.

The kernel log, where it may be read, NVML, and counters.  Judged as the agent does it; only what began with the job
counts, for what the log holds from before may have been repaired since.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from stepkeeper.node.core import events as agent
from stepkeeper.node.core import incidents
from stepkeeper.node.core.policy import Policy
from stepkeeper.node.core.state import Incident, State
from stepkeeper.node.judging import Evaluation, concerns
from stepkeeper.node.sensors.evidence import EvidenceReader, Roots, device_addresses
from stepkeeper.node.sensors.kmsg import KernelLog, boot_id
from stepkeeper.node.sensors.nvml import NvmlProcess
from stepkeeper.node.sensors.readings import Evidence, KernelRecord, Reading
from stepkeeper.node.xid.catalogue import load
from stepkeeper.node.xid.model import Fault
from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import shorten

HEALTH_EVERY_S = 30.0
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
        """`is_ours` tells of a fault's name, PCI address and UUID whether the job leaves the node for it."""
        self._node = node
        self._is_ours = is_ours
        self._say = say
        self._since = (since or time.time()) - CLOCKS_S
        self._readings: queue.Queue[Reading | None] = queue.Queue(READINGS_WAITING_MAX)
        self._judging = Evaluation(load(), devices=lambda: device_addresses(Roots()))
        self._policy = Policy()
        self._state = State(node=node, boot_id=boot_id())
        self._said: dict[str, tuple[object, ...]] = {}
        self._kernel_log = KernelLog(self._take)
        self._nvml = NvmlProcess(self._take, health_every_s=HEALTH_EVERY_S)
        self._evidence = EvidenceReader(self._take)
        threading.Thread(target=self._guarded, name="own-senses", daemon=True).start()
        self._kernel_log.start()
        self._nvml.start()
        self._evidence.start()

    def close(self) -> None:
        """End the sensors."""
        with contextlib.suppress(queue.Full):  # then the thread ends with the process
            self._readings.put_nowait(None)
        self._kernel_log.stop()
        self._nvml.stop()
        self._evidence.stop()

    def _take(self, reading: Reading) -> None:
        """Called on the sensors' threads."""
        old = isinstance(reading, KernelRecord) and reading.at < self._since
        if not old and concerns(reading):
            try:
                self._readings.put_nowait(reading)
            except queue.Full:
                return  # a storm: what drains a node is said again and again

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - told: the job goes on without these senses
            self._say(bus.Note(node=self._node, text=shorten(f"hardware faults are not heard of any more: {error!r}")))

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
