"""Journal records -> attempts, launches and saves.  Pure; one pass, and small whatever the journal's size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.reason_text import tag, text
from stepkeeper.run_analytics.model import Attempt, Ending, Incident, Key, Launch, Rows, Saved, left_out_in_words, micro
from stepkeeper.run_store.journal import Record

# Why a launch ended, and what was decided then, from single records of the journal.  Pure.

_NOTICES = {
    Notice.PREEMPTED: Ending.PREEMPTED,
    Notice.TIME_LIMIT: Ending.TIME_LIMIT,
    Notice.REQUEUED: Ending.REQUEUED,
    Notice.CANCELLED: Ending.CANCELLED,
}
_FOUND = {Cause.HANG: Ending.HANG, Cause.NUMERICAL: Ending.LOSS}  # what the rules themselves see of a launch
_STRENGTH = {each: strength for strength, each in enumerate(Ending)}


def ending(record: Record, launch: Launch) -> Ending | None:  # noqa: C901, PLR0912 - one case an event
    """Return what a record says about the end of the newest launch; None where it says nothing."""
    event = record.event
    found = next((each.found for each in record.effects if isinstance(each, do.JudgeLaunch) and each.found), None)
    if found is not None and found.cause in _FOUND:
        return _FOUND[found.cause]
    if launch.decided and record.phase is Phase.STARTING:
        return _of_judged(event, launch)
    match event:
        case on.TrainingFinished() if record.phase is not Phase.TRAINING:
            return Ending.FINISHED
        case on.LaunchEnded():
            left = Ending.STOPPED if event.stopped else Ending.FAILURE  # why they were to leave may outweigh it
            return Ending.FINISHED if event.finished or _ends_well(record) else left
        case on.LaunchRefused():
            return Ending.FAILURE
        case on.Suspended() | on.ClockSet():
            return None
        case on.Superseded():
            return Ending.SUPERSEDED
        case on.SlurmAnswered() if record.phase is not Phase.TRAINING:
            said = record.reasons[0] if record.reasons else None
            return _NOTICES.get(said.notice) if isinstance(said, because.SlurmSaid) else None
        case on.NodeFaulted() if event.leave and record.phase is not Phase.TRAINING:
            return Ending.NODE
        case on.TrainingStopped():
            return Ending.STOPPED
        case on.RankExited() if record.phase is not Phase.TRAINING:
            failed = event.signal is not None or event.code not in (0, 75)
            return Ending.FAILURE if failed else Ending.STOPPED
        case on.Tick() | on.WatcherReady() if any(isinstance(each, because.NodesLost) for each in record.reasons):
            return Ending.NODE
        case _ if record.phase in (Phase.SAVING, Phase.STOPPING) and record.reasons and launch.ending is Ending.RUNNING:
            asked = isinstance(event, on.Requested | on.SignalReceived | on.NodeSignaled)
            return Ending.STOPPED if asked else Ending.RESTARTED  # `reasons` say more
        case _:
            return None


def _of_judged(event: on.Event, launch: Launch) -> Ending | None:
    """Return what the verdict says of a launch that we ended ourselves; of an older journal, it alone knows."""
    if not isinstance(event, on.Judged) or event.launch != launch.number or launch.ending is not Ending.RESTARTED:
        return None
    return _FOUND.get(event.cause)


def _ends_well(record: Record) -> bool:
    """Tell whether this end was that of a command without the library, with 0: then it counts as finished."""
    exits = [effect for effect in record.effects if isinstance(effect, do.Exit)]
    ended = any(isinstance(each, because.CommandEnded) for each in record.reasons)
    return ended or any(effect.code == 0 for effect in exits)


def decide(launch: Launch, record: Record) -> None:
    """Note what was decided for the time after a launch that ended; the newest decision counts."""
    if launch.ending is Ending.RUNNING:
        return
    for effect in record.effects:
        match effect:
            case do.Requeue() | do.Exit(code=ExitCode.REQUEUED):
                launch.decided = "requeue"
            case do.RollBack():
                launch.decided = f"go back to a step before {effect.below_step:,}, and relaunch"
            case do.ChooseCheckpoint() if not launch.decided:
                launch.decided = "relaunch in the allocation"
            case do.Exit(code=ExitCode.FINISHED):
                launch.decided = "end"
            case do.Exit(code=code):
                launch.decided = f"the run ends with exit code {code}"
            case _:
                pass  # it orders nothing that a reader of the report asks for


# What went wrong in a run, or nearly: the journal's records that a person wants to know of.  Pure.

INCIDENTS_MAX = 5_000  # the oldest are left out beyond it, and counted


class Incidents(msgspec.Struct, kw_only=True):
    """Collects them, bounded."""

    found: list[Incident] = msgspec.field(default_factory=list)
    left_out: int = 0
    losses: dict[int, int] = msgspec.field(default_factory=dict)  # by attempt: nodes lost so far
    windows: int = 0  # of data that is left out, so far

    def take(self, record: Record, at: int, launch: int | None) -> None:
        """Look at one record, which came at `at` (microseconds) in a launch."""
        lost = record.node_losses > self.losses.get(record.attempt, record.node_losses)
        self.losses[record.attempt] = record.node_losses
        new = record.skipped_data[self.windows :]  # an attempt takes over those of the one before
        self.windows = max(self.windows, len(record.skipped_data))
        left_out = [("data left out", left_out_in_words(each.step, each.steps), "") for each in new]
        others = ((*each, None) for each in (*_of(record, lost=lost), *left_out))
        for kind, what, node, reasons in (*_reported(record), *others):
            if len(self.found) >= INCIDENTS_MAX:
                del self.found[0]
                self.left_out += 1
            decided = record.why
            if reasons == record.reasons:  # it says no more than the incident itself
                ended = any(isinstance(each, do.KillRanks) for each in record.effects)
                decided = "the launch was ended" if ended else "reported"
            self.found.append(
                Incident(at=at, attempt=record.attempt, launch=launch, kind=kind, what=what, decided=decided, node=node)
            )


def _of(record: Record, *, lost: bool) -> Iterator[tuple[str, str, str]]:  # noqa: C901, PLR0912 - one case an event
    """Yield (kind, what, node)."""
    event = record.event
    match event:
        case on.NodeFaulted():
            gpu = f" ({event.gpu})" if event.gpu else ""
            drained = "; drained by the agent" if event.drained else ""
            yield "node fault", f"{event.name}{gpu}: {event.why}{drained}", event.node
        case on.NodesCleared() if event.unfit:
            yield from (("not fit", unfit.why, unfit.node) for unfit in event.unfit)
        case on.SaveFailed():
            yield "save failed", f"step {event.step}: {event.error}", ""
        case on.CheckpointCommitted() if event.drift:
            yield "copies differ", f"step {event.step}: {event.drift}", ""
        case on.Corrupted():
            gpu = f" ({event.gpu})" if event.gpu else ""
            what = f"step {event.step}, rank {event.rank}{gpu}: {event.what}; confirmed is step {event.confirmed}"
            yield "computed wrongly", what, event.node
        case on.CheckpointChosen():
            for skipped in event.skipped:
                yield "step damaged", f"{name_of(skipped.directory)}: {skipped.problem}", ""
        case on.CheckpointVerified() if not event.ok:
            yield "step damaged", f"{name_of(event.directory)}: {event.problem}", ""
        case on.RolledBack():
            yield "rolled back", event.error or f"to step {event.step or 0}", ""
        case on.ChoiceFailed():
            yield "storage", event.error, ""
        case on.PartFailed():
            yield "part failed", f"{event.part}: {event.error}", ""
        case on.RunDirectoryGone():
            yield "storage", f"the run directory is gone: {event.path}", ""
        case on.Superseded():
            yield "superseded", f"job {event.by_job_id}, restart {event.by_restart_count}, holds the lease", ""
        case _ if lost:
            yield "node lost", record.why, ""
        case _:
            return


def _reported(record: Record) -> Iterator[tuple[str, str, str, because.Why | None]]:
    """Yield (kind, what, node, reasons) of what observers have found."""
    for reason in record.reasons if isinstance(record.event, on.Progressed) else ():
        if isinstance(reason, because.LossWrong):
            yield "loss", text((reason,)), "", (reason,)
    for effect in record.effects:
        match effect:
            case do.ReportSlowNode(loading=True):
                yield "slow data loader", text(effect.reasons), effect.node, effect.reasons
            case do.ReportSlowNode(over=False):
                yield "slow node", f"{effect.factor:.2f} times as long for a step as the others", effect.node, None
            case do.ReportSlowLaunch():
                yield "slow launch", text(effect.reasons), effect.nodes[0] if effect.nodes else "", effect.reasons
            case do.ReportReplay(equal=False):
                yield "replay differs", text(effect.reasons), effect.nodes[0] if effect.nodes else "", effect.reasons
            case _:
                pass  # an order, and no finding


def name_of(directory: str) -> str:
    """Return the last part of a step directory's path."""
    return directory.rstrip("/").rpartition("/")[2]


class History(msgspec.Struct, kw_only=True):
    """What a journal holds, before the rows of the steps are known."""

    attempts: list[Attempt] = msgspec.field(default_factory=list)
    incidents: Incidents = msgspec.field(default_factory=Incidents)
    progress: dict[Key, Rows] = msgspec.field(default_factory=dict)  # coarse, for launches without rows
    verified: dict[str, str] = msgspec.field(default_factory=dict)  # directory -> problem; empty: it is verified
    verified_at: dict[str, float] = msgspec.field(default_factory=dict)  # when that was found out
    chosen: dict[str, int] = msgspec.field(default_factory=dict)  # directory -> launches that started from it
    elsewhere: dict[str, str] = msgspec.field(default_factory=dict)  # checkpoints of frameworks: name -> path


def read_history(records: Iterable[Record]) -> History:
    """Read the records, oldest first; those of a superseded attempt may stand between the newer one's."""
    builder = HistoryBuilder()
    for record in records:
        builder.take(record)
    return builder.history()


class HistoryBuilder:
    """Takes the records one after the other, oldest first; `history` can be asked for at any time."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[int, int, int], Attempt] = {}
        self._saving: dict[Key, int] = {}  # since when
        self._seen = History()

    def history(self) -> History:
        """Return what the records say so far.  A timeline that is built from it changes nothing here."""
        copy = msgspec.structs.replace
        attempts = [copy(each, launches=[copy(launch) for launch in each.launches]) for each in self._attempts.values()]
        incidents = copy(self._seen.incidents, found=list(self._seen.incidents.found))
        return copy(self._seen, attempts=sorted(attempts, key=lambda each: each.began), incidents=incidents)

    def take(self, record: Record) -> None:
        """Take the next record."""
        number, job_id, restart_count = key = (record.attempt, record.job_id, record.restart_count)
        at = micro(record.event.at)
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = Attempt(number=number, job_id=job_id, restart_count=restart_count, began=at, ended=at)
            self._attempts[key] = attempt
        at = attempt.ended = max(attempt.ended, at)
        if attempt.said_end:
            return  # nothing counts after its final record
        _notice_time(attempt, record, at)
        _notice_nodes(attempt, record, at)
        if attempt.launches:
            self._follow(attempt.launches[-1], record, at)
        self._notice_checkpoints(attempt, record.event)
        for effect in record.effects:
            if isinstance(effect, do.StartLaunch):
                self._start(attempt, effect, record, at)
        self._seen.incidents.take(record, at, attempt.launches[-1].number if attempt.launches else None)
        for effect in record.effects:
            if isinstance(effect, do.Exit):
                attempt.said_end, attempt.exit_code, attempt.why = True, effect.code, text(effect.reasons)
        if record.phase is Phase.DONE and not attempt.said_end:
            attempt.said_end, attempt.why = True, record.why

    def _notice_checkpoints(self, attempt: Attempt, event: on.Event) -> None:
        if isinstance(event, on.CheckpointVerified):
            self._found_out(event.directory, "" if event.ok else event.problem or "damaged", event.at)
        if isinstance(event, on.CheckpointChosen):
            attempt.resume = (event.step or 0, name_of(event.directory or ""))
            if event.directory:
                self._found_out(event.directory, "", event.at)
            for skipped in event.skipped:
                self._found_out(skipped.directory, skipped.problem, event.at)

    def _found_out(self, directory: str, problem: str, at: float) -> None:
        self._seen.verified[name_of(directory)] = problem
        self._seen.verified_at[name_of(directory)] = at

    def _start(self, attempt: Attempt, effect: do.StartLaunch, record: Record, at: int) -> None:
        step, directory = attempt.resume
        if directory:
            self._seen.chosen[directory] = self._seen.chosen.get(directory, 0) + 1
        attempt.launches.append(
            Launch(
                attempt=attempt.number,
                number=effect.launch,
                began=at,
                nodes=effect.nodes or record.nodes or attempt.nodes,
                resumed_step=step,
                resumed_from=directory,
            )
        )

    def _follow(self, launch: Launch, record: Record, at: int) -> None:  # noqa: C901 - one case an event
        """Let the newest launch of an attempt know what happened."""
        _end(launch, record)
        event = record.event
        key = launch.key
        if getattr(event, "launch", launch.number) != launch.number:
            return  # a late message of an earlier one
        match event:
            case on.LaunchBegan():
                launch.all_tasks_started = True
            case on.RankHello():
                launch.library_seen = launch.all_tasks_started = True
                if event.resumed_step not in (None, launch.resumed_step):  # a tier had something newer
                    launch.resumed_step, launch.resumed_from = event.resumed_step or 0, ""
                    launch.in_memory = event.in_memory
            case on.Progressed():
                rows = self._seen.progress.setdefault(key, Rows())
                rows.add(event.at, event.step, math.inf if event.not_finite else event.loss, event.tokens)
            case on.SaveBegan():
                self._saving[key] = at
            case on.CheckpointCommitted():
                self._saving.pop(key, None)
                save = Saved(
                    requested=max(launch.began, at - max(0, micro(event.seconds))),
                    durable=at,
                    step=event.step,
                    directory=name_of(event.directory),
                    bytes=event.bytes,
                    emergency=event.emergency,
                )
                launch.saves.append(save)
                if event.framework:
                    self._seen.elsewhere[save.directory] = event.directory
            case on.SaveFailed():
                began = self._saving.pop(key, at)
                launch.saves.append(Saved(requested=began, durable=at, step=event.step, error=event.error))
            case on.LaunchEnded() | on.LaunchRefused():
                launch.ended = at if launch.ended is None else launch.ended
            case on.Judged():
                launch.cause, launch.evidence = event.cause.value, event.text
            case _:
                pass  # it says nothing of the launch itself


def _notice_time(attempt: Attempt, record: Record, at: int) -> None:
    if not attempt.phases or attempt.phases[-1][1] != record.phase.value:
        attempt.phases.append((at, record.phase.value))
    if isinstance(record.event, on.Suspended):
        free = max(attempt.began, attempt.still[-1][1] if attempt.still else attempt.began)
        since = max(free, at - max(0, micro(record.event.seconds)))
        if since < at:
            attempt.still.append((since, at))


def _notice_nodes(attempt: Attempt, record: Record, at: int) -> None:
    nodes = record.nodes or ()
    if isinstance(record.event, on.AttemptStarted):
        attempt.nodes = record.event.nodes
        attempt.gpus_per_node = record.event.gpus_per_node or 0
        nodes = nodes or attempt.nodes
    if nodes and (not attempt.held or attempt.held[-1][1] != len(nodes)):
        attempt.held.append((at, len(nodes)))
        for node in set(attempt.nodes) - set(nodes):
            attempt.left.setdefault(node, at)


def _end(launch: Launch, record: Record) -> None:
    """Find out why it ended, and what was decided; what is known later may be stronger."""
    decide(launch, record)
    found = ending(record, launch)
    if found is not None and _STRENGTH[found] > _STRENGTH[launch.ending]:
        known_better = found in (Ending.HANG, Ending.LOSS) and launch.why
        launch.ending = found
        if record.reasons and not known_better:
            launch.why, launch.reason = record.why, tag(record.reasons)
        decide(launch, record)
