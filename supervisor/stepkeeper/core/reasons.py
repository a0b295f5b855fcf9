"""Why something was decided: tagged records with their facts.  Pure.

Rules, reports, metrics and verdicts match on these types, and never on sentences.  `reason_text` words them, for logs,
the status and people; the journal holds both.  Facts are only ever added, with a default: older records stay readable.
"""

from __future__ import annotations

import functools
import operator
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Literal

import msgspec

from stepkeeper.core.causes import Cause, Notice, Rung


def _tag(name: str) -> str:
    """Return the tag of a class.

    >>> _tag("NodesLost")
    'nodes_lost'
    """
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")


class _Reason(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="reason", tag=_tag):
    pass


class Fact(StrEnum):
    """What can be a reason by its name alone; `reason_text` words it."""

    # an attempt starts
    ATTEMPT_STARTS = auto()
    WATCHERS_READY = auto()
    NOTICE_PERHAPS_MISSED = auto()
    NODES_READY = auto()
    # storage
    STORAGE_TEST_BEGINS = auto()
    CHECKPOINT_BEFORE_USED = auto()
    SAVE_AGAIN = auto()
    # ranks
    NO_LIBRARY = auto()
    STOP_SIGNAL_INSTEAD = auto()
    NOTHING_TO_SAVE = auto()
    COMMIT_IN_FLIGHT = auto()
    SIGNAL_UNEXPLAINED = auto()
    ENDED_AS_ASKED = auto()
    END_UNPROVEN = auto()
    COMMAND_GAVE_UP = auto()
    RANKS_ENDED_SILENTLY = auto()
    # why a launch failed
    CAUSE_STAYS = auto()
    START_OVER = auto()
    NEWEST_IS_BEFORE = auto()
    # what Slurm says, and people
    TIME_LIMIT_NEAR = auto()
    WAIT_FOR_SLURM = auto()
    REQUEUE_FORBIDDEN = auto()  # of releases up to 0.1, with `resubmit=never`
    NO_BATCH_SCRIPT = auto()
    SUBMITTED_INSTEAD = auto()
    # nodes
    NODE_STAYS = auto()
    UNFIT_NODES_LEFT = auto()
    MOST_NODES_UNFIT = auto()
    WAIT_OVER = auto()
    SPARE_ONLY = auto()
    WATCHERS_LEFT = auto()
    NOTHING_TO_WATCH = auto()
    NO_WATCHER = auto()


class Plain(_Reason, frozen=True):
    """A reason that has no more facts than its name."""

    fact: Fact


# --- an attempt starts ----------------------------------------------------------------------------


class FaultyNodesGiven(_Reason, frozen=True, kw_only=True):
    """Slurm gave the job nodes that the job excludes."""

    nodes: tuple[str, ...]
    used: bool  # for want of others


class WatchersBack(_Reason, frozen=True, kw_only=True):
    """Watchers answer again, and get an order again that they may have missed."""

    everyone: bool
    sent_again: str = ""  # `save` or `kill`


class NoCheckpoint(_Reason, frozen=True, kw_only=True):
    """There is no verified step directory."""

    script_resumes: bool = False  # no trainer library has answered: where the script goes on is its own affair


class CheckpointFound(_Reason, frozen=True, kw_only=True):
    """The newest verified step directory is known."""

    directory: str


class StepsPassedOver(_Reason, frozen=True, kw_only=True):
    """Newer step directories cannot be used."""

    steps: tuple[tuple[str, str], ...]  # (directory, problem)


class FailuresMax(_Reason, frozen=True, kw_only=True):
    """Too many launches failed, or too many nodes were lost or faulty, without a newly verified step."""

    failures: int
    of_nodes: bool = False
    same: bool = False  # in one way; of launches that may have progressed unseen


class LaunchShrinks(_Reason, frozen=True, kw_only=True):
    """The launch gets fewer nodes than wanted."""

    nodes: int


class SparesLeft(_Reason, frozen=True, kw_only=True):
    """Nodes of the allocation that the launch does not use."""

    nodes: tuple[str, ...]


class SpareUsed(_Reason, frozen=True, kw_only=True):
    """A spare takes the place of a node among the ranks."""

    node: str
    replaces: str
    switches: str = ""  # that both have, the highest first


class Failed(_Reason, frozen=True, kw_only=True):
    """What could not be done, and why not."""

    what: Literal[
        "list_checkpoints",
        "launch",  # the training step could not be started
        "roll_back",  # the lineage cannot be led to an older step
        "requeue",  # Slurm does not allow it: may the job be submitted again?
        "submit",  # Slurm takes neither a requeue nor another submission
    ]
    error: str


class NodesLeft(_Reason, frozen=True, kw_only=True):
    """How many nodes are left, and how many a launch needs."""

    usable: int
    wanted: int
    least: int = 0  # 0: it may not shrink
    counts: tuple[int, ...] = ()
    same_world: bool = False  # the checkpoint can be resumed by as many ranks as saved it alone


# --- storage --------------------------------------------------------------------------------------


class StorageSuspect(_Reason, frozen=True, kw_only=True):
    """Several committed step directories in a row are damaged."""

    damaged: int
    directories: tuple[str, ...] = ()  # the first few


class StorageTestPassed(_Reason, frozen=True, kw_only=True):
    """The storage returned what was written to it."""

    bytes: int
    write_s: float
    read_s: float
    from_disk: bool


class StorageTestFailed(_Reason, frozen=True, kw_only=True):
    """The storage failed its test."""

    problem: str


class StorageTrusted(_Reason, frozen=True, kw_only=True):
    """The thorough test of the storage found no error."""

    directory: str | None


class StorageNotRecovered(_Reason, frozen=True, kw_only=True):
    """The storage has failed its tests for too long."""

    waited_s: float


class StorageTestAgain(_Reason, frozen=True, kw_only=True):
    """No launch starts before the next test of the storage."""

    after_s: float


class CheckpointRead(_Reason, frozen=True, kw_only=True):
    """A step directory was read and compared; `removed`: somebody had removed it before."""

    directory: str
    result: Literal["verified", "damaged", "removed"]
    problem: str = ""


class DamagedInARow(_Reason, frozen=True, kw_only=True):
    """Several step directories in a row are damaged, so the storage is tested."""

    count: int


# --- ranks ----------------------------------------------------------------------------------------


class TasksStarted(_Reason, frozen=True, kw_only=True):
    """Every task of the training's Slurm step has started."""

    warm: int = 0  # by a warm standby
    cold: str = ""  # why one was not


class LibraryAnswers(_Reason, frozen=True, kw_only=True):
    """The trainer library of a rank has connected."""

    framework: str = ""  # that it is attached to


class NotAttached(_Reason, frozen=True, kw_only=True):
    """The trainer library is not attached to the framework, so the ranks cannot save on request."""

    framework: str
    error: str


class ResumedElsewhere(_Reason, frozen=True, kw_only=True):
    """The ranks resume from another step than the one that the supervisor chose."""

    step: int
    chosen: int | None = None  # None: the beginning


class Committed(_Reason, frozen=True, kw_only=True):
    """A step directory is complete."""

    step: int
    framework: str = ""  # whose checkpoint it is; empty: ours


class CopiesDiffer(_Reason, frozen=True, kw_only=True):
    """Tensors that should be equal differ between ranks."""

    tensors: str


class SaveFailed(_Reason, frozen=True, kw_only=True):
    """A save failed; older step directories are untouched."""

    step: int
    error: str


class TrainingFinished(_Reason, frozen=True, kw_only=True):
    """Rank 0, `outcome.json` or the framework's newest checkpoint shows that the training is finished."""

    step: int | None = None
    earlier: bool = False  # an earlier attempt finished it


class RanksLeave(_Reason, frozen=True, kw_only=True):
    """The ranks exit, as they were asked to."""

    step: int


class RanksLeftAlone(_Reason, frozen=True, kw_only=True):
    """The ranks exited with a checkpoint, and nobody had asked them to."""

    step: int | None = None


class RankFailed(_Reason, frozen=True, kw_only=True):
    """A rank ended with an error."""

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None
    faults: tuple[str, ...] = ()  # of its node, in this launch


class RankLeft(_Reason, frozen=True, kw_only=True):
    """A rank is gone, nobody saw a failure, and rank 0 gave no reason."""

    rank: int
    node: str
    seen: bool  # how it ended
    waiting: bool = False  # for the message of rank 0


class OutcomeMissing(_Reason, frozen=True, kw_only=True):
    """Rank 0 said that the training is finished, but `outcome.json` does not."""

    error: str = ""
    code: int = 0


class CommandEnded(_Reason, frozen=True, kw_only=True):
    """A command without the trainer library ended with exit code 0."""


class EndedBeforeTarget(_Reason, frozen=True, kw_only=True):
    """The command ended with exit code 0, but its newest checkpoint is not that of the last step."""

    target: int  # the last step
    step: int | None = None  # of the newest checkpoint; None: there is none


class StepFailed(_Reason, frozen=True, kw_only=True):
    """The training's Slurm step ended with an error."""

    code: int
    error: str = ""


class Relaunch(_Reason, frozen=True, kw_only=True):
    """The next launch is prepared in the same allocation."""


class Late(_Reason, frozen=True, kw_only=True):
    """A deadline passed."""

    timer: str  # `core.state.Timer`
    within_s: float = 0.0  # 0: by an instant that others set


# --- why a launch failed --------------------------------------------------------------------------


class CauseFound(_Reason, frozen=True, kw_only=True):
    """The verdict on a launch that failed."""

    cause: Cause
    rule: str
    confidence: float
    step: int | None = None
    location: str = ""
    rank: int | None = None
    node: str = ""
    second_cause: Cause = Cause.UNKNOWN


class Recovery(_Reason, frozen=True, kw_only=True):
    """The action that the recovery ladder prescribes for the failure."""

    action: Rung
    after_s: float = 0.0


class DataLeftOut(_Reason, frozen=True, kw_only=True):
    """The training leaves out the data of some steps."""

    step: int
    steps: int


class DataNotLeftOut(_Reason, frozen=True, kw_only=True):
    """Data was left out too often already, so no more is left out."""

    times: int


class GoBackBelow(_Reason, frozen=True, kw_only=True):
    """The training goes back to a step before this one."""

    step: int


class RolledBack(_Reason, frozen=True, kw_only=True):
    """The lineage now ends at an older step directory."""

    directory: str | None


# --- what Slurm says, and people ------------------------------------------------------------------


class GotSignal(_Reason, frozen=True, kw_only=True):
    """The supervisor, or the Slurm steps on a node, got a signal."""

    signal: str
    node: str = ""


class AskedAgain(_Reason, frozen=True, kw_only=True):
    """Slurm is asked again, because a signal or a suspension came after the question."""

    suspended: bool = False


class SlurmSaid(_Reason, frozen=True, kw_only=True):
    """What Slurm's answer means."""

    notice: Notice
    slurm_state: str


class SlurmUnreachable(_Reason, frozen=True, kw_only=True):
    """Slurm could not be asked."""

    error: str


class SlurmAsked(_Reason, frozen=True, kw_only=True):
    """Slurm is asked for the state of the job."""

    about: Literal["", "requeue", "save"] = ""  # whether a requeue is right; until when a save may take


class SlurmAway(_Reason, frozen=True, kw_only=True):
    """Slurm has not answered for too long."""

    for_s: float


class EndedByHand(_Reason, frozen=True, kw_only=True):
    """A signal from the terminal ends the run."""

    signal: str
    saves: bool


class NoTimeToSave(_Reason, frozen=True, kw_only=True):
    """Less time is left than the quickest save took."""

    left_s: float
    quickest_s: float


class WithoutNodes(_Reason, frozen=True, kw_only=True):
    """The requeue excludes nodes."""

    nodes: tuple[str, ...]


class Requeued(_Reason, frozen=True, kw_only=True):
    """Slurm requeued the job, or a new job was submitted."""

    job_id: int | None = None  # of the job that was submitted instead
    besides: str = ""  # what did not succeed besides


class RequeueFailed(_Reason, frozen=True, kw_only=True):
    """The requeue failed."""

    error: str
    again_s: float | None = None  # None: it is given up
    tries: int = 0


class RunDirectoryGone(_Reason, frozen=True, kw_only=True):
    """The run directory was removed, so the run can no longer save."""

    path: str


class ClockSet(_Reason, frozen=True, kw_only=True):
    """Slurm's clock was set."""

    seconds: float  # forward


class Superseded(_Reason, frozen=True, kw_only=True):
    """A newer attempt holds the lease."""

    job_id: int
    restart_count: int


class Requested(_Reason, frozen=True, kw_only=True):
    """A person asked for a checkpoint, or to save and end."""

    by: str
    kind: Literal["save", "stop"]


class SaveRefused(_Reason, frozen=True, kw_only=True):
    """The request to save is refused, because no rank can save now."""

    phase: str = ""  # empty: the ranks train, and have no trainer library


# --- nodes ----------------------------------------------------------------------------------------


class NodeFault(_Reason, frozen=True, kw_only=True):
    """The hardware of a node is faulty."""

    node: str
    name: str
    text: str
    gpu: str = ""


class NodeIs(_Reason, frozen=True, kw_only=True):
    """What holds of a node."""

    node: str
    state: Literal[
        "suspect",  # launches fail on it: it is left
        "drained",  # the job need not exclude it
        "not_clear",  # a process of the launch before does not die
        "keeping_up",  # it was slow, and is no more
    ]


class NodesReleased(_Reason, frozen=True, kw_only=True):
    """Unused nodes are given back to Slurm; with `error` they stay in the job."""

    error: str = ""


class Suspected(_Reason, frozen=True, kw_only=True):
    """Nodes are late, or a rank did nothing at a first look: not certain yet."""

    nodes: tuple[str, ...]
    rank: int | None = None


class SlurmdGone(_Reason, frozen=True, kw_only=True):
    """A node refuses connections to slurmd, and its watcher is late."""

    node: str
    silent_s: float


class NodesLost(_Reason, frozen=True, kw_only=True):
    """No watcher answers on these nodes."""

    nodes: tuple[str, ...]
    error: str = ""  # the last lines of their srun


class LostRecently(_Reason, frozen=True, kw_only=True):
    """The node was lost a short time ago, and Slurm may not have noticed yet."""


class NodeUnfit(_Reason, frozen=True, kw_only=True):
    """A node failed its check."""

    node: str
    text: str
    again: bool = False  # it took no part, because it had failed one


class CheckAgain(_Reason, frozen=True, kw_only=True):
    """The nodes are checked again."""

    after_s: float = 0.0


class RestingNodes(_Reason, frozen=True, kw_only=True):
    """What happens to nodes that the launch does not use."""

    nodes: tuple[str, ...]
    are: Literal["checked", "unanswered", "fit", "used", "given_back"]


class IdleNodes(_Reason, frozen=True, kw_only=True):
    """How many similar nodes are idle, and how many the job lacks; with `error` Slurm could not be asked."""

    idle: int = 0
    missing: int = 0
    error: str = ""


class GrowInPlace(_Reason, frozen=True, kw_only=True):
    """A new launch can use more nodes of the allocation."""

    nodes: int


class GrowByRequeue(_Reason, frozen=True, kw_only=True):
    """The job is requeued to get the nodes that it lacks, because as many are idle."""

    missing: int


class WatcherGone(_Reason, frozen=True, kw_only=True):
    """A watcher stopped sending, or ended."""

    node: str
    text: str


class BusEnded(_Reason, frozen=True, kw_only=True):
    """The watchers' Slurm step ended."""

    code: int
    error: str = ""


class BusRestarts(_Reason, frozen=True, kw_only=True):
    """The watchers had to be started again too often."""

    restarts: int


class BusTriedAgain(_Reason, frozen=True, kw_only=True):
    """The watchers are started again."""

    answered: bool
    slurm_state: str = ""
    error: str = ""
    without: tuple[str, ...] = ()


# --- how training goes ----------------------------------------------------------------------------


class Silent(_Reason, frozen=True, kw_only=True):
    """No rank completed a step for unusually long, so the ranks' stacks are collected."""

    step: int | None = None
    starting: bool = False  # the first message of the trainer library is late


class NoStacks(_Reason, frozen=True, kw_only=True):
    """No stacks came in time."""

    again: bool = False  # they are collected again


class StandsStill(_Reason, frozen=True, kw_only=True):
    """The training hangs."""

    step: int | None = None
    stacks: str = ""  # empty: none came in time


class StillMoves(_Reason, frozen=True, kw_only=True):
    """The ranks are slow, but not hanging."""

    stacks: str
    early: bool = False  # a short silence: they may be at work


class SilentStart(_Reason, frozen=True, kw_only=True):
    """What the ranks do before the first message of the trainer library."""

    stacks: str


class PartFailed(_Reason, frozen=True, kw_only=True):
    """An optional part of the supervisor failed, and the training continues."""

    part: str
    error: str


class Suspended(_Reason, frozen=True, kw_only=True):
    """The supervisor did not run for a while, so deadlines are put off by that time."""

    seconds: float


class LossWrong(_Reason, frozen=True, kw_only=True):
    """The loss became NaN, infinite or far too high, and stayed so."""

    rule: str
    step: int  # the first
    loss: float | None = None  # None: no finite number
    baseline: float | None = None


class NodeSlow(_Reason, frozen=True, kw_only=True):
    """A node is slow, and all others wait for it."""

    node: str
    factor: float
    rank: int | None = None
    of_its_place: str = ""  # another node was slow at the same place


class LoaderSlow(_Reason, frozen=True, kw_only=True):
    """A rank loads its data slowly."""

    node: str
    rank: int | None
    loading_s: float
    usual_s: float


class SlowNodeStays(_Reason, frozen=True, kw_only=True):
    """A slow node is not replaced."""

    its_data: bool  # the data loader is slow; else no spare is there


class SpareAtCommit(_Reason, frozen=True, kw_only=True):
    """A spare takes the place of a slow node, at the next checkpoint or now."""

    node: str
    now: bool = False


class LaunchSlow(_Reason, frozen=True, kw_only=True):
    """A launch is slower than those before it."""

    seconds: float
    baseline: float
    launches: int
    new: tuple[str, ...] = ()  # nodes that are new in it
    slowest: str = ""  # else the slowest node
    factor: float = 0.0
    rank: int | None = None  # whose data loader is slow there
    all_new: bool = False


class ReplayEqual(_Reason, frozen=True, kw_only=True):
    """Repeated steps had the same losses."""

    steps: int
    exact: bool = True  # bit for bit; else as near as is usual
    step: int | None = None  # the furthest apart
    then: float | None = None
    now: float | None = None


class ReplayDiffers(_Reason, frozen=True, kw_only=True):
    """A repeated step had another loss."""

    step: int
    then: float | None = None
    now: float | None = None
    deterministic: bool = False
    new: tuple[str, ...] = ()  # nodes
    changed: str = ""


class ComputedWrongly(_Reason, frozen=True, kw_only=True):
    """A rank computed a micro-batch twice with different results."""

    rank: int
    node: str
    step: int
    confirmed: int  # the newest step that was confirmed
    what: str = ""  # differs
    gpu: str = ""


# --- of release 0.1 -------------------------------------------------------------------------------


class Sentence(_Reason, frozen=True, kw_only=True):
    """A reason of release 0.1, which recorded only the words."""

    text: str


if TYPE_CHECKING:
    Reason = _Reason
else:
    Reason = functools.reduce(operator.or_, _Reason.__subclasses__())  # all of the above: a record is decoded by it

Why = tuple[Reason, ...]
"""The reasons of a decision, the first one first.  Empty: nothing changed."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the supervisor itself found out about a launch: a hang, a loss that went wrong."""

    cause: Cause
    rule: str
    reasons: Why = ()
    node: str = ""
    rank: int | None = None
    step: int | None = None  # the step at which it began
    back_to: int | None = None  # the highest step that may be resumed from
