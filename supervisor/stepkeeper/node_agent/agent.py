"""The node agent's loop: one item at a time from the inbox, through `decide`, to the acts.

Nothing slow happens here: sensors, Slurm, the ledger and the socket have threads of their own.  Only this loop feeds
systemd's watchdog, and deadlines are looked at in every turn, so no flood can put them off.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stepkeeper.log import Log
from stepkeeper.loop_tools import Clock
from stepkeeper.node_agent import evaluate, ledger, nvml, protocol, setup
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.decide import decide
from stepkeeper.node_agent.core.events import (
    Alarm,
    AskNodes,
    Effect,
    Record,
    RecordDrain,
    SetDrain,
    Tell,
)
from stepkeeper.node_agent.core.plan import due_at
from stepkeeper.node_agent.core.state import Incident, Mode, Outcome, State
from stepkeeper.node_agent.evaluate import KERNEL_LOG, SensorHealth
from stepkeeper.node_agent.kernel import Roots, device_addresses
from stepkeeper.node_agent.readings import (
    Evidence,
    GpuHealth,
    KernelGap,
    KernelRecord,
    NvmlStatus,
    NvmlXid,
    Reading,
)
from stepkeeper.node_agent.runtime import Acts, Do, Inbox, Item, Sources, Stop, Systemd, reset_gpus
from stepkeeper.node_agent.setup import SetupWatch
from stepkeeper.node_agent.xid.catalogue import Action, Catalogue
from stepkeeper.node_agent.xid.judge import LISTED_AGAIN_AFTER_S
from stepkeeper.run_store.lines import NewestWriter
from stepkeeper.slurm.nodes import NodeCommands

READINGS = (KernelRecord, KernelGap, NvmlStatus, NvmlXid, GpuHealth, Evidence)
HURRIED = (AskNodes, SetDrain)
"""Begun before anything is noted: the ledger is written meanwhile, and says after a crash what was under way."""
LEDGER_WITHIN_S = 3.0
LOOK_WITHIN_S = 8.0
LISTED_AGAIN_MARGIN_S = 0.5  # the two listings are timed by their own processes
IDLE_S = 60.0
NOT_TO_LEAVE_FOR = (Outcome.RESOLVED, Outcome.NOTED, Outcome.PASSED, Outcome.SUSPECTED, Outcome.DOUBTED)


class Agent:
    """One node's agent.  `run` returns when it was asked to stop."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        state: State,
        book: ledger.Ledger,
        catalogue: Catalogue,
        client: NodeCommands,
        systemd: Systemd,
        log: Log,
    ) -> None:
        self.config = config
        self.policy = config.policy
        self.state = state
        self.log = log
        self.inbox = Inbox(Clock(), self._part_failed)
        self._book = book
        book.on_failure = self.inbox.fail
        self._systemd = systemd
        self._catalogue = catalogue
        self._judging = evaluate.Evaluation(
            catalogue,
            expected_gpus=config.expected_gpus,
            only_pci_prefix=config.test.only_pci_prefix,
            gpus=[*((pci, "") for pci in setup.gpus_on_the_bus()), *state.gpus],
            devices=lambda: device_addresses(Roots()),
        )
        self._acts = Acts(
            config.name,
            client,
            self.inbox,
            check=self._check,
            reset=self._reset,
            noted=self._wait_for_ledger,
            mistaken=setup.mistaken,
        )
        self._look_asked = threading.Event()
        self._sources = Sources(
            config,
            state,
            client=client,
            on_look=self._look_asked.set,
            open_incidents=self._seen,
            inbox=self.inbox,
            log=log,
        )
        self._sensor_health = SensorHealth()
        self._listing: threading.Thread | None = None
        self._stopped = threading.Event()
        self._stopping = ""
        self._verdicts = NewestWriter(
            config.run_path / ledger.VERDICT_NAME,
            on_error=lambda error: log.warning("verdict_not_written", error=str(error)),
            on_failure=lambda error: self.inbox.failed("verdict", error),
        )
        self._shown: ledger.Verdict | None = None
        self._verdict_at = 0.0
        self._ledger_failed = ""
        self._said_gpus = (state.gpus, state.driver)
        self._recorded = {each.id: each.count for each in state.incidents}  # sightings that the ledger holds
        self._setup = SetupWatch(
            config,
            client,
            inbox=self.inbox,
            log=log,
            stopped=self._stopped,
            on_change=lambda: self._systemd.say(STATUS=self._status()),
            on_answer=self._acts.learn_size,
        )

    def run(self) -> None:
        """Take items until asked to stop."""
        self.inbox.watch_threads("other")
        self._record_boot()
        self._feed(on.Started(at=self.inbox.clock.now()))
        self._sources.start()
        if self.config.test.nvml:
            self.inbox.run_optional("look", self._look)
        self._on_clock()
        self._systemd.say(READY="1", STATUS=self._status())
        self._setup.start()
        self.log.info("agent_ready", mode=self.policy.mode.value, incidents=len(self.state.incidents))
        try:
            while not self._stopping:
                item = self.inbox.get(self._wait_s())
                if item is not None:
                    self._take(item)
                self._on_clock()
        finally:
            self._systemd.say(STOPPING="1")
            self._stopped.set()
            self._sources.stop()
            self._record_counts()
            if not self._book.flush(LEDGER_WITHIN_S):
                self.log.warning("ledger_late", error=self._book.failed)
        self.log.info("agent_stopped", why=self._stopping)

    def _part_failed(self, part: str, error: BaseException, trace: str) -> None:
        self.log.error("part_failed", part=part, error=repr(error), traceback=trace)

    # --- for the jobs on the node -------------------------------------------------------------------

    def _seen(self) -> list[protocol.Seen]:
        """Return the open incidents of this boot: what a job gets when it joins.  Safe on any thread."""
        state = self.state  # a frozen record: one look at it is consistent
        return [_seen(each, self.policy.mode) for each in _to_leave_for(state) if each.settled]

    def _look(self) -> None:
        """Take a fresh look whenever a job asks.  What the asker believes has no part in it.

        All who ask during a look share the next one: a stuck NVML makes looks slow, and must not make them many.
        """
        while self._look_asked.wait():
            self._look_asked.clear()
            self.inbox.guard("look", self._look_once)()

    def _look_once(self) -> None:
        found = nvml.once(LOOK_WITHIN_S)
        self.inbox.put(found.status)
        for health in found.health:
            self.inbox.put(health)

    # --- one item ---------------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        if isinstance(item, Stop):
            self._stopping = item.why
        elif isinstance(item, Do):
            item.what()
        elif isinstance(item, READINGS):
            self._log_reading(item)
            self._note_sensor_health(item)
            # one that cannot be judged would be the next agent's first one, and its last
            for event in self.inbox.guard("judging", self._judging.events)(item, self.inbox.clock.now()) or ():
                self._feed(event)
            if self._judging.wants_listing and not (self._listing and self._listing.is_alive()):
                self._listing = self.inbox.run_optional("listing", self._list_again)
        else:
            self._feed(item)

    def _list_again(self) -> None:
        """Have the GPUs listed once more: NVML's process says only once which there are."""
        if not self._stopped.wait(LISTED_AGAIN_AFTER_S + LISTED_AGAIN_MARGIN_S):
            self.inbox.put(nvml.once(LOOK_WITHIN_S).status)

    def _note_sensor_health(self, item: Reading) -> None:
        """Say aloud that a sensor sees nothing: no news of it is no good news then."""
        if not (sensor := self._sensor_health.take(item)):
            return
        if (why := self._sensor_health.blind.get(sensor)) is not None:
            self.log.error("alarm", text=f"{sensor}: {why}; faults that it would show are not seen", incident="")
        else:
            self.log.warning("sensor_sees_again", sensor=sensor)
        self._judging.kernel_log = KERNEL_LOG not in self._sensor_health.blind
        self._systemd.say(STATUS=self._status())

    def _log_reading(self, item: object) -> None:
        if isinstance(item, KernelGap):
            self.log.warning("kernel_log_gap", lost=item.lost)
        elif isinstance(item, Evidence):
            self.log.info("evidence", what=item.what, where=item.where, text=item.text, **item.values)
        elif isinstance(item, NvmlStatus):
            self.log.info("nvml", state=item.state.value, detail=item.detail, driver=item.driver, gpus=len(item.gpus))

    def _feed(self, event: on.Event) -> None:
        decision = decide(self.state, event, self.policy)
        self.state = decision.state
        for urgent in (effect for effect in decision.effects if isinstance(effect, HURRIED)):
            self._perform(urgent)
        if decision.why:
            kinds = [effect.__struct_config__.tag for effect in decision.effects]
            self.log.info("decision", why=decision.why, effects=kinds)
        if isinstance(event, on.JobsListed) and event.error:
            self.log.warning("jobs_unknown", incident=event.incident, error=event.error)
        if isinstance(event, on.GpusListed):
            self._note_gpus()
        for effect in decision.effects:
            if not isinstance(effect, HURRIED):
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Record():
                self._record(effect.incident)
                self._log_incident(effect.incident)
            case RecordDrain():
                self._book.append(ledger.DrainLine(drain=effect.drain))
            case Tell():
                self._sources.socket.publish(_seen(effect.incident, self.policy.mode))
            case Alarm():
                self.log.error("alarm", text=effect.text, incident=effect.incident)
            case _:
                self._acts.perform(effect)

    def _record(self, incident: Incident) -> None:
        self._book.append(ledger.IncidentLine(incident=incident))
        self._recorded[incident.id] = incident.count

    def _record_counts(self) -> None:
        """Bring the ledger's counts up to date: that an incident was seen again is recorded now and then only."""
        for incident in self.state.incidents:
            if self._recorded.get(incident.id) != incident.count:
                self._record(incident)
        self._recorded = {each.id: each.count for each in self.state.incidents}

    def _log_incident(self, incident: Incident) -> None:
        say = self.log.warning if incident.action.drains else self.log.info
        say(
            "incident",
            incident=incident.id,
            name=incident.name,
            action=incident.action.value,
            outcome=incident.outcome.value,
            pci=incident.pci,
            gpu=incident.gpu,
            jobs=incident.jobs,
            why=incident.escalated or incident.why,
            text=incident.text,
        )

    def _note_gpus(self) -> None:
        known = (self.state.gpus, self.state.driver)
        if known != self._said_gpus:
            self._said_gpus = known
            self._record_boot()

    def _record_boot(self) -> None:
        state = self.state
        line = ledger.GpusLine(
            boot_id=state.boot_id, gpus=state.gpus, driver=state.driver, sequence=state.known_sequence
        )
        self._book.append(line)

    # --- on threads -------------------------------------------------------------------------------

    def _wait_for_ledger(self) -> str:
        if self._book.flush(LEDGER_WITHIN_S):
            return ""
        return f"the ledger does not hold it yet ({self._book.failed or 'the disk is slow'})"

    def _check(self) -> evaluate.Fitness:
        if not self.config.test.nvml:
            return evaluate.Fitness(unfit="NVML is switched off in the configuration: nothing can be checked")
        return evaluate.look(self._catalogue, self.config.expected_gpus)

    def _reset(self, pcis: Sequence[str]) -> str:
        self._sources.pause_nvml()  # a process that holds a GPU open prevents its reset
        try:
            return reset_gpus(pcis, self.policy.reset_within_s)
        finally:
            self._sources.resume_nvml()

    # --- time -------------------------------------------------------------------------------------

    def _wait_s(self) -> float:
        now = self.inbox.clock.now()
        waits = [IDLE_S, self._verdict_at + ledger.REFRESH_S - now]
        if (due := due_at(self.state)) is not None:
            waits.append(due - now)
        if self._systemd.watchdog_every_s is not None:
            waits.append(self._systemd.watchdog_every_s)
        return min(waits)

    def _on_clock(self) -> None:
        now = self.inbox.clock.now()
        due = due_at(self.state)
        if due is not None and now >= due:
            self._feed(on.Tick(at=now))
        self._show(now)
        if self._systemd.watchdog_every_s is not None and self._sources.socket.alive:
            self._systemd.say(WATCHDOG="1")
        failed = self._book.failed
        if failed != self._ledger_failed:
            self._ledger_failed = failed
            self.log.error("ledger_not_written", error=failed) if failed else self.log.info("ledger_written_again")

    def _show(self, now: float) -> None:
        """Write the verdict when it changes, and now and then: an old one counts for nothing."""
        new = ledger.verdict(self.state, now, self.policy)
        old = self._shown
        same = old is not None and (old.fit, old.why) == (new.fit, new.why)
        if same and now < self._verdict_at + ledger.REFRESH_S:
            return
        self._verdict_at = now
        self._verdicts.show(new)
        self._record_counts()
        if not same:
            self.log.info("verdict", fit=new.fit, why=new.why)
            self._systemd.say(STATUS=self._status())
        self._shown = new

    def _status(self) -> str:
        bad = len(_to_leave_for(self.state))
        drained = f"; drained: {self.state.drain.reason}" if self.state.drain is not None else ""
        blind = "".join(f"; BLIND: {why}" for why in self._sensor_health.blind.values())
        wrong = f"; WRONG SETUP: {', '.join(self._setup.wrong)}" if self._setup.wrong else ""
        return f"{self.policy.mode.value}: {bad} open faults{blind}{wrong}{drained}"


def _to_leave_for(state: State) -> list[Incident]:
    """Return the faults that ask for a drain and are not over: settled or not, drained or only observed."""
    return [
        each
        for each in state.incidents
        if each.boot_id == state.boot_id and each.action.drains and each.outcome not in NOT_TO_LEAVE_FOR
    ]


def _seen(incident: Incident, mode: Mode) -> protocol.Seen:
    """Return what jobs get of an incident.

    An agent that only observes reports and changes nothing: no watcher, of an older version either, may leave the node.
    """
    why = incident.escalated or incident.why
    action, observed = incident.action, None
    if action.drains and (mode is Mode.OBSERVE or incident.outcome is Outcome.OBSERVED):
        action, observed = Action.LOG, action
        why = f"the node agent only observes, else it would ask for {observed.value}: {why}"
    return protocol.Seen(
        incident=incident.id,
        at=incident.first_at,
        action=action,
        domain=incident.domain,
        name=incident.name,
        pci=incident.pci,
        gpu=incident.gpu,
        why=why[:500],
        drained=incident.outcome is Outcome.DRAINED,
        observed=observed,
    )
