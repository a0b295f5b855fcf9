"""Why a launch ended, and what was decided then, from single records of the journal.  Pure."""

from __future__ import annotations

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.seeing.model import Ending, Launch
from stepkeeper.store.journal import Record

_NOTICES = {
    Notice.PREEMPTED: Ending.PREEMPTED,
    Notice.TIME_LIMIT: Ending.TIME_LIMIT,
    Notice.REQUEUED: Ending.REQUEUED,
    Notice.CANCELLED: Ending.CANCELLED,
}
_FOUND = {Cause.HANG: Ending.HANG, Cause.NUMERICAL: Ending.LOSS}  # what the rules themselves see of a launch
# a later, stronger reason takes the place of an earlier one: a rank that failed since its node did
_STRENGTH = (
    Ending.RUNNING,
    Ending.NO_WORD,
    Ending.STOPPED,
    Ending.RESTARTED,
    Ending.FAILURE,
    Ending.LOSS,
    Ending.HANG,
    Ending.NODE,
    Ending.REQUEUED,
    Ending.TIME_LIMIT,
    Ending.PREEMPTED,
    Ending.CANCELLED,
    Ending.SUPERSEDED,
    Ending.FINISHED,
)


def outweighs(one: Ending, other: Ending) -> bool:
    """Tell whether one reason takes the place of another."""
    return _STRENGTH.index(one) > _STRENGTH.index(other)


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
        case on.Tick() | on.WatcherReady() if _leaves_node(record):
            return Ending.NODE
        case _ if record.phase in (Phase.SAVING, Phase.STOPPING) and record.reasons and launch.ending is Ending.RUNNING:
            told = isinstance(event, on.Requested | on.SignalReceived | on.NodeSignaled)
            return Ending.STOPPED if told else Ending.RESTARTED  # `reasons` tell more
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


def _leaves_node(record: Record) -> bool:
    return any(isinstance(each, because.NodesLost) for each in record.reasons)


def decide(launch: Launch, record: Record) -> None:
    """Note what was decided for the time after a launch that ended; the newest decision counts."""
    if launch.ending is Ending.RUNNING:
        return
    for effect in record.effects:
        match effect:
            case do.Requeue():
                launch.decided = "requeue"
            case do.RollBack():
                launch.decided = f"go back to a step before {effect.below_step:,}, and relaunch"
            case do.ChooseCheckpoint() if not launch.decided:
                launch.decided = "relaunch in the allocation"
            case do.Exit(code=ExitCode.FINISHED):
                launch.decided = "end"
            case do.Exit(code=ExitCode.REQUEUED):
                launch.decided = launch.decided if launch.decided == "requeue" else "requeued"
            case do.Exit(code=code):
                launch.decided = f"the run ends with exit code {code}"
            case _:
                pass  # it orders nothing that a reader of the report asks for
