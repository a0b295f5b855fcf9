"""The supervisor's loop: one event at a time from the inbox, through `decide`, to the acts.

Nothing slow happens here: acts that take time run on threads and come back as events.  Deadlines are
looked at in every turn, so that no flood of events can put them off.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import assert_never

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.liveness import EVERY_S, GONE_AFTER_S
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.state import Phase, State
from stepkeeper.isolation import flags
from stepkeeper.log import Log
from stepkeeper.loop_tools import Stalls
from stepkeeper.reason_text import tag, text
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.journal import JournalWriter
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.recorder import Recorder
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.slurm.launch import kept, scrub_geometry, watcher_argv, without_python
from stepkeeper.supervisor.actions import checkpoints, diagnosis, launch, notify, slurm, stack_collector, standbys
from stepkeeper.supervisor.actions.foreign import ForeignCheckpoints
from stepkeeper.supervisor.actions.verify_pool import Limits, VerifyPool
from stepkeeper.supervisor.decision_log import DecisionLog
from stepkeeper.supervisor.sources.bus import Bus
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats.lease import Lease
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.integrations import hook

STORAGE_WITHIN_S = 2.0
SILENCE_EVERY_S = 2.0
LATE_EVERY_S = 0.5
OPTIONAL: dict[type, Part] = {  # effects that training can do without
    do.Look: Part.DIAGNOSIS,
    do.CollectStacks: Part.STACKS,
    do.JudgeLaunch: Part.DIAGNOSIS,
    do.ReportSlowNode: Part.LOG,
    do.ReportSlowLaunch: Part.LOG,
    do.ReportReplay: Part.LOG,
    do.NotifyUser: Part.NOTIFY,
    do.AskIdleNodes: Part.ASK_IDLE_NODES,
    do.AnswerRequest: Part.ANSWER,
}
CALL_ENDS_WITHIN_S = 5.0  # after its time limit


def watcher_program() -> list[str]:
    """Return how a watcher is started on a node."""
    return [sys.executable, *flags(), "-m", "stepkeeper.watcher.main"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a supervisor needs to know at its start."""

    directory: RunDirectory
    assignment: Assignment
    job: launch.Job
    lease: Lease
    policy: Policy
    notify_command: str | None = None
    reading: Limits = Limits()
    repair_pointers: bool = False  # of the script's framework, before each launch
    standby_imports: tuple[str, ...] | None = None  # of warm standbys, besides torch; None: there are none
    standby_always: bool = False  # else only where a relaunch is likely


class Supervisor:
    """Runs one attempt.  `run` returns the exit code."""

    def __init__(
        self,
        *,
        setting: Setting,
        client: SlurmCommands,
        inbox: Inbox,
        journal: JournalWriter,
        environment: Mapping[str, str],
        log: Log,
    ) -> None:
        self.setting = setting
        self.client = client
        self.inbox = inbox
        self.environment = environment
        self.log = log
        self.state = State()
        self.bus: Bus | None = None
        self.bus_nodes: tuple[str, ...] = ()  # on which it was started
        self.launch: launch.Launch | None = None
        self.writers: checkpoints.Writers | None = None  # of what the ranks save
        assignment = setting.assignment
        self.note = inbox.guard(Part.LOG, self._note_node)
        self.verify_pool = VerifyPool(setting.lease.node, len(assignment.nodes), setting.reading, self.note)
        self.evidence_buffer = diagnosis.EvidenceBuffer(setting.lease.attempt, setting.lease.restart_count)
        self.stack_collector = stack_collector.StackCollector(inbox)
        self.standbys: standbys.Standbys | None = None
        if setting.standby_imports is not None:
            self.standbys = standbys.Standbys(
                setting.job,
                environment,
                always=setting.standby_always,
                modules=setting.standby_imports,
                inbox=inbox,
                log=log,
            )
        self.foreign: ForeignCheckpoints | None = None
        following = setting.job.following
        if following is not None and following.directory is not None:
            self.foreign = ForeignCheckpoints(
                following,
                environment,
                run_directory=setting.directory.path,
                bytes_per_s=setting.reading.bytes_per_s,
                inbox=inbox,
                log=log,
                repairs=setting.lease if setting.repair_pointers else None,
                command=setting.job.command,
                attached=setting.job.variables.get(hook.VARIABLE) in ("auto", following.framework),
            )
        self.call: threading.Thread | None = None
        self.storage_test: threading.Thread | None = None  # the newest
        self.time_asked: threading.Thread | None = None  # the newest
        self.requests = 0
        self.signaled = -1  # the newest launch whose ranks got the stop signal
        self.exit_code: int | None = None
        self.next_at: dict[str, float] = {}  # what is done every few seconds, and when next
        inbox.report = self._part_failed
        now = inbox.clock.now()
        self.stalls = Stalls(now)
        self.resumed_at = 0.0  # what was put into the inbox before it counts as of then
        status = status_file.Status(
            slurm_name=setting.assignment.slurm_name,
            run_id=setting.assignment.run_id,
            job_id=setting.lease.job_id,
            restart_count=setting.lease.restart_count,
            attempt=setting.lease.attempt,
            launch=0,
            launched=False,
            phase=Phase.STARTING.value,
            nodes=setting.assignment.nodes,
            started_at=now,
            updated_at=now,
            alive_at=now,
        )
        self.decision_log = DecisionLog(
            status=status,
            status_path=setting.directory.status,
            recorder=Recorder(setting.lease, setting.policy),
            journal=journal,
            to_wall=inbox.clock.to_wall,
            log=log,
        )

    def run(self) -> int:
        """Take events until an effect ends the attempt."""
        self.inbox.watch_threads(Part.OTHER)
        while self.exit_code is None:
            wait_s = self._wait_s()
            self.stalls.waits(wait_s)
            event = self.inbox.get(wait_s)
            self._notice_stall(self.inbox.clock.now())
            if event is not None:
                self._feed(event if event.at >= self.resumed_at else msgspec.structs.replace(event, at=self.resumed_at))
            self._on_clock()
        self.inbox.guard(Part.LOG, self.decision_log.close)(STORAGE_WITHIN_S)
        if self.call is not None:
            self.call.join(self.setting.policy.notify_within_s + CALL_ENDS_WITHIN_S)
        return self.exit_code

    def _wait_s(self) -> float:
        # all that is done without an event or a deadline
        due = min(self.next_at.get("lease", 0.0), self.next_at.get("silence", 0.0))
        if self.state.phase is Phase.STARTING:
            due = min(due, self.next_at.get("late", 0.0))
        if self.state.wake_at is not None:
            due = min(due, self.state.wake_at)
        return due - self.inbox.clock.now()

    def _notice_stall(self, now: float) -> None:
        """Before anything is taken for late: did we come late ourselves?"""
        away_s = self.stalls.look(now)
        if not away_s or self.exit_code is not None:
            return
        self.resumed_at = now
        if self.bus is not None:
            self.bus.forgive(away_s)
        self._feed(on.Suspended(at=now, seconds=round(away_s, 1)))

    def _on_clock(self) -> None:
        now = self.inbox.clock.now()
        self._notice_stall(now)
        if self.state.wake_at is not None and now >= self.state.wake_at and self.exit_code is None:
            self._feed(on.Tick(at=now))
        if self._is_due("lease", EVERY_S) and self.bus is not None:
            self._renew()
            if self.standbys is not None:
                self.inbox.guard(Part.STANDBYS, self.standbys.renew)()
            self.inbox.guard(Part.LOG, self.decision_log.look_at_journal)()
        if self._is_due("silence", SILENCE_EVERY_S) and self.bus is not None:
            self.bus.check_silence()
        # beside ranks it would decide nothing
        if self.state.phase is Phase.STARTING and self._is_due("late", LATE_EVERY_S) and self.bus is not None:
            self.inbox.guard(Part.SLURMD, self.bus.look_at_late)()
        if (self.time_asked is None or not self.time_asked.is_alive()) and self.inbox.clock.was_set():
            self.time_asked = self.inbox.guard(Part.SLURMS_TIME, slurm.ask_time)(inbox=self.inbox)
        if self._is_due("alive", status_file.ALIVE_EVERY_S):
            self.inbox.guard(Part.LOG, self.decision_log.alive)(now)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = self.inbox.clock.now()
        if now < self.next_at.get(what, 0.0):
            return False
        self.next_at[what] = now + every_s
        return True

    # --- one event --------------------------------------------------------------------------------

    def _feed(self, event: on.Event) -> None:
        if isinstance(event, on.NodeSignaled) and self.bus is not None:
            self._renew()  # the watcher waits for a message of the loop itself: it proves that we live
        if isinstance(event, on.ClockSet):
            self.inbox.clock.follow_slurm(event.seconds)
        elif isinstance(event, on.SlurmAnswered) and event.job is not None:
            event = msgspec.structs.replace(event, job=self.inbox.clock.from_slurm(event.job))
        if isinstance(event, on.RankExited) and self.launch is not None and event.launch == self.state.launch.number:
            self.launch.note_death(event.code, event.signal)
        before = self.state
        decision = decide(before, event, self.setting.policy)
        self.state = decision.state
        self.inbox.guard(Part.EVIDENCE, self.evidence_buffer.add)(event, decision.effects)
        self.inbox.guard(Part.JOURNAL, self.decision_log.journal)(before, event, decision)
        self.inbox.guard(Part.LOG, self.decision_log.decided)(before, event, decision)
        for effect in decision.effects:
            part = OPTIONAL.get(type(effect))
            if part is None:
                self._perform(effect)
            else:
                self.inbox.guard(part, self._perform)(effect)
        if self.standbys is not None:
            self.inbox.guard(Part.STANDBYS, self.standbys.look)(event, self.state)

    def _perform(self, effect: do.Effect) -> None:  # noqa: C901, PLR0912, PLR0915 - one case an effect
        setting = self.setting
        match effect:
            case do.StartBus():
                self._start_bus(effect)
            case do.StopBus():
                if self.bus is not None:
                    self.bus.close(lost=self._lost_of(self.bus_nodes))
            case do.ChooseCheckpoint():
                directory = setting.directory.checkpoints
                checkpoints.choose(
                    directory, pool=self.verify_pool, inbox=self.inbox, after=self.storage_test, foreign=self.foreign
                )
            case do.VerifyCheckpoint():
                self._verify(effect)
            case do.TestStorage():
                within_s = setting.policy.storage_test_within_s
                directory = setting.directory.checkpoints
                self.storage_test = checkpoints.test_storage(directory, effect, within_s=within_s, inbox=self.inbox)
            case do.ClearNodes():
                if self.bus is not None:
                    self.bus.clear(effect)
            case do.AskUncleared():
                if self.bus is not None:
                    self.bus.report_uncleared(effect.launch)
            case do.StartLaunch():
                self._start_launch(effect)
            case do.RequestSave():
                self._request_save(effect)
            case do.KillRanks():
                self._kill(effect)
            case do.Look():
                if self.bus is not None:
                    self.bus.say(lines.Look(node=effect.node, why=self._in_words(effect.reasons)))
            case do.CollectStacks():
                self._collect_stacks(effect)
            case do.JudgeLaunch():
                within_s = setting.policy.judge_within_s
                diagnosis.diagnose(
                    setting.directory, self.evidence_buffer.launch(effect), within_s=within_s, inbox=self.inbox
                )
            case do.RollBack() if self.foreign is not None and self.foreign.has_chosen(self.state.resume.directory):
                self.foreign.roll_back(effect)
            case do.RollBack():
                checkpoints.roll_back(setting.directory.checkpoints, effect, setting.lease, inbox=self.inbox)
            case do.ReportSlowNode() | do.ReportSlowLaunch() | do.ReportReplay():
                self.decision_log.found(effect)
            case do.NotifyUser():
                self._notify_user(effect)
            case do.ReleaseNodes():
                self._say_who_is_left()
                slurm.release(self.client, setting.assignment.slurm_name, effect.keep, inbox=self.inbox)
            case do.CheckNodes():
                if self.bus is not None:
                    self.bus.check(effect)
            case do.AskIdleNodes():
                slurm.query_idle_nodes(self.client, setting.assignment.slurm_name, effect, inbox=self.inbox)
            case do.AskSlurm():
                slurm.query_job(self.client, setting.assignment.slurm_name, inbox=self.inbox)
            case do.Requeue():
                self._requeue(effect)
            case do.AnswerRequest():
                notify.answer_request(setting.directory.path, effect, inbox=self.inbox, on_error=self._not_answered)
            case do.Exit():
                self.exit_code = effect.code
                self.inbox.guard(Part.LOG, self.decision_log.ended)(effect)
            case _:
                assert_never(effect)

    def _part_failed(self, part: str, error: BaseException, trace: str) -> None:
        self.log.error("part_failed", part=str(part), error=repr(error), traceback=trace)

    def _not_answered(self, error: OSError) -> None:
        self.log.warning("request_not_answered", error=f"{error.filename}: {error.strerror}")

    # --- acts -------------------------------------------------------------------------------------

    def _start_bus(self, effect: do.StartBus) -> None:
        if self.bus is not None:
            self.bus.abandon()
        self.bus_nodes = effect.nodes
        argv = watcher_argv(effect.nodes, watcher_program())
        inherited = scrub_geometry(without_python(self.environment))
        assignment = msgspec.structs.replace(self.setting.assignment, bus=effect.bus)
        environment = {**inherited, **kept(self.environment), **assignment.environment()}
        self.bus = Bus(
            effect.bus,
            argv,
            environment,
            inbox=self.inbox,
            attempt=self.setting.lease.attempt,
            note=self.note,
            on_shard=self.inbox.guard(Part.READERS, self.verify_pool.receive),
            on_stack=self.inbox.guard(Part.STACKS, self.stack_collector.receive),
            on_stop_signal=self._note_stop_signal,
            after_s=effect.after_s,
            size=len(effect.nodes),
        )
        self.inbox.guard(Part.READERS, self.verify_pool.use)(self.bus)
        self._renew()

    def _say_who_is_left(self) -> None:
        """Slurm ends the watchers of nodes that are given back: what those hold in memory goes before."""
        if self.bus is not None:
            for node in sorted(set(self.setting.assignment.nodes).difference(self.state.nodes.usable)):
                self.bus.say(lines.Leave(node=node))

    def _note_node(self, node: str, text: str) -> None:
        self.log.info("watcher", node=node, said=text)

    def _note_stop_signal(self, word: lines.StopSignalSent) -> None:
        self.signaled = word.launch
        self.note(word.node, word.text)

    def _verify(self, effect: do.VerifyCheckpoint) -> None:
        checkpoints.verify_back(
            self.setting.directory.checkpoints,
            effect,
            writers=self.writers,
            patient=self.state.phase is Phase.TRAINING,  # else the job is about to leave
            pool=self.verify_pool,
            inbox=self.inbox,
        )

    def _collect_stacks(self, effect: do.CollectStacks) -> None:
        number = self.stack_collector.begin(effect)
        if self.bus is not None:
            self.bus.say(lines.Stacks(launch=effect.launch, number=number, brief=effect.brief))

    def _notify_user(self, effect: do.NotifyUser) -> None:
        self.call = notify.notify_user(
            effect,
            notify.Call(
                job=self.setting.assignment.slurm_name,
                run_directory=str(self.setting.directory.path),
                command=self.setting.notify_command,
                within_s=self.setting.policy.notify_within_s,
            ),
            client=self.client,
            environment=self.environment,
            inbox=self.inbox,
            log=self.log,
        )

    def _renew(self) -> None:
        if self.bus is not None:
            self.bus.say(lines.Lease(seconds=GONE_AFTER_S, launch=self.state.launch.number))

    def _start_launch(self, effect: do.StartLaunch) -> None:
        self._renew()
        if self.bus is not None:
            self.bus.expect(effect.launch, self.setting.job.tasks(effect.nodes))
        job = self.setting.job
        self.writers = checkpoints.Writers(effect.nodes, job.geometry.tasks_per_node) if job.wrapped else None
        meeting = launch.Meeting(
            launch=effect.launch,
            nodes=effect.nodes,
            in_slurms_order=list(effect.nodes) == sorted(effect.nodes, key=self.setting.assignment.nodes.index),
            address=effect.address,
            port=effect.port,
            resume_from=effect.resume_from,
            arguments=self.foreign.arguments(effect.resume_from) if self.foreign is not None else None,
            answered=self.state.has_library,
            newest=not effect.went_back,
            skipped_data=",".join(f"{each.step}:{each.steps}" for each in effect.skipped_data),
        )
        if self.foreign is not None and (ranks := job.ranks(effect.nodes)) is not None:
            self.inbox.guard(Part.FRAMEWORK, self.foreign.say_world)(effect.resume_from, ranks)
        environment = dict(self.environment)
        if self.standbys is not None:
            environment |= self.inbox.guard(Part.STANDBYS, self.standbys.variables)(effect.launch, effect.nodes) or {}
        self.launch = launch.Launch(job, meeting, environment, inbox=self.inbox, foreign=self.foreign)

    def _request_save(self, effect: do.RequestSave) -> None:
        self.requests += 1
        name = self.setting.policy.stop_signal
        has_it = effect.slurm_sent == name or self.signaled == self.state.launch.number  # a handler must not run twice
        if self.bus is not None:
            self.bus.say(
                lines.Save(
                    launch=self.state.launch.number,
                    request_id=self.requests,
                    stop=effect.stop,
                    why=self._in_words(effect.reasons),
                    deadline_at=None if effect.deadline_at is None else self.inbox.clock.to_wall(effect.deadline_at),
                    signal=name if effect.stop and not has_it else "",
                    library_seen=self.state.launch.library_seen,
                )
            )

    def _in_words(self, reasons: Why) -> str:
        """Return reasons for a message: words that cannot be made must not keep it from being sent."""
        return shorten(self.inbox.guard(Part.LOG, text)(reasons) or tag(reasons))

    def _kill(self, effect: do.KillRanks) -> None:
        if self.bus is not None:
            self.bus.say(lines.Kill(launch=effect.launch))
        if self.launch is not None:
            self.launch.kill(node_lost=bool(self._lost_of(self.state.launch.nodes)))

    def _lost_of(self, nodes: tuple[str, ...]) -> frozenset[str]:
        """Return which of some nodes are lost: srun then waits for the end of a task that nobody reports."""
        return frozenset(node for node, _ in self.state.nodes.lost if node in nodes)

    def _requeue(self, effect: do.Requeue) -> None:
        """Make the journal durable first: Slurm ends us within milliseconds of the requeue."""
        self.inbox.guard(Part.LOG, self.decision_log.flush)(STORAGE_WITHIN_S)
        slurm.requeue(
            self.client,
            self.setting.assignment,
            self.setting.lease,
            effect,
            inbox=self.inbox,
        )
