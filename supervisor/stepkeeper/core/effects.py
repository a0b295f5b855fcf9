"""What to do: the only output of `decide` besides the next state.  Imperative; each is one act.

The journal has them, so a field is only ever added, with a default: older records must stay readable.
There `run_store.journal` adds the text of `reasons`, as `why`, `reason` or `said`.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core.causes import Cause, SkippedData
from stepkeeper.core.reasons import Finding, Why


class _Effect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="effect"):
    pass


class StartBus(_Effect, frozen=True, kw_only=True, tag="start_bus"):
    """Start one watcher on every node, in one Slurm step (the bus), and end the watchers of an older bus."""

    bus: int  # number of the bus
    nodes: tuple[str, ...] = ()
    after_s: float = 0.0  # how long to wait before the start


class StopBus(_Effect, frozen=True, kw_only=True, tag="stop_bus"):
    """Ask the watchers to exit; answered by `BusEnded`."""


class ChooseCheckpoint(_Effect, frozen=True, kw_only=True, tag="choose_checkpoint"):
    """Find the newest verified step directory; answered by `CheckpointChosen`."""


class VerifyCheckpoint(_Effect, frozen=True, kw_only=True, tag="verify_checkpoint"):
    """Read every byte of a step directory and compare it; answered by `CheckpointVerified`.

    A verification of a newer step directory replaces one that is running.
    """

    directory: str
    from_disk: bool = False  # true: past the page cache


class TestStorage(_Effect, frozen=True, kw_only=True, tag="test_storage"):
    """Write test bytes as a save does, and read them back; answered by `StorageTested`.

    A `ChooseCheckpoint` that is ordered later is answered later.
    """

    thorough: bool = False  # true: with many bytes, because the storage is suspect


class ClearNodes(_Effect, frozen=True, kw_only=True, tag="clear_nodes"):
    """Have every watcher end what is left of earlier launches and check its node; answered by `NodesCleared`."""

    launch: int
    nodes: tuple[str, ...] = ()  # nodes that have to confirm
    first: str = ""  # the node of them where rank 0 will run


class AskUncleared(_Effect, frozen=True, kw_only=True, tag="ask_uncleared"):
    """Find out which nodes have not confirmed; answered by `NodesNotCleared` at once."""

    launch: int


class StartLaunch(_Effect, frozen=True, kw_only=True, tag="start_launch"):
    """Start the ranks, as one Slurm step."""

    launch: int
    resume_from: str | None
    address: str
    port: int
    nodes: tuple[str, ...] = ()
    skipped_data: tuple[SkippedData, ...] = ()  # data that the training leaves out
    went_back: bool | None = None  # true: after a rollback, so the ranks use no newer step of any tier


class RequestSave(_Effect, frozen=True, kw_only=True, tag="request_save"):
    """Ask all ranks to save at the end of a common step, and with `stop` to exit then.

    With `stop`, ranks without the trainer library get `policy.stop_signal` instead, once a launch.
    """

    stop: bool
    reasons: Why = ()
    deadline_at: float | None = None
    slurm_sent: str | None = None  # signal that Slurm itself sent to the ranks: they do not get it twice


class KillRanks(_Effect, frozen=True, kw_only=True, tag="kill_ranks"):
    """Send SIGKILL to all processes of a launch: through the watchers, and through Slurm where a watcher is gone."""

    launch: int
    reasons: Why = ()


class Look(_Effect, frozen=True, kw_only=True, tag="look"):
    """Have the node's agent check its hardware, because a rank failed there."""

    node: str
    reasons: Why = ()


class CollectStacks(_Effect, frozen=True, kw_only=True, tag="collect_stacks"):
    """Have every watcher write the stacks of its ranks to the launch's logs, twice; answered by `StacksCollected`."""

    launch: int
    nodes: tuple[str, ...]
    within_s: float
    brief: bool = False  # true: without native stacks, which take seconds


class JudgeLaunch(_Effect, frozen=True, kw_only=True, tag="judge_launch"):
    """Find out why a launch failed; answered by `Judged`, unless the deadline passes first."""

    launch: int
    found: Finding | None = None  # what the supervisor itself found


class RollBack(_Effect, frozen=True, kw_only=True, tag="roll_back"):
    """Go back to the newest verified step before `below_step`; answered by `RolledBack`.

    Later commits no longer belong to the lineage.  Without a whole step before it, the run goes back to its start.
    """

    launch: int
    below_step: int
    reasons: Why = ()
    suspect: bool = False  # true: mark the discarded commits as suspect, because a loss had gone wrong
    quick: bool = False  # true: the job is leaving, so names and sizes suffice; the next launch reads the bytes
    skipped_data: tuple[SkippedData, ...] = ()  # all data that the training leaves out from then on


class ReportSlowNode(_Effect, frozen=True, kw_only=True, tag="report_slow_node"):
    """Report that a node slows the others down, or no longer does: in the log, the metrics and the report."""

    node: str
    factor: float  # its own work for a step, as a multiple of that of the other nodes
    since: float  # Unix seconds
    over: bool = False  # true: it is no longer slow
    rank: int | None = None  # its slowest rank
    loading: bool = False  # true: the data loader is slow, not the node
    reasons: Why = ()


class ReportSlowLaunch(_Effect, frozen=True, kw_only=True, tag="report_slow_launch"):
    """Report that a launch is slower than earlier launches on the same number of nodes."""

    seconds: float  # its median time for a step
    baseline: float  # the median of the earlier launches
    nodes: tuple[str, ...] = ()  # nodes that may be the cause
    reasons: Why = ()


class ReportReplay(_Effect, frozen=True, kw_only=True, tag="report_replay"):
    """Report whether the steps that were repeated after a resume had the same losses."""

    equal: bool  # true: equal to the last bit, or as close as is usual for the run
    steps: int  # how many steps were repeated
    step: int | None = None  # the step whose loss differs most; None: all are equal to the last bit
    then: float | None = None  # its recorded loss
    now: float | None = None  # its new loss
    nodes: tuple[str, ...] = ()  # nodes that are new in this launch
    reasons: Why = ()


class NotifyUser(_Effect, frozen=True, kw_only=True, tag="notify_user"):
    """Tell the user that the run stopped and needs them: set the job's comment, run the notify command."""

    code: int  # the supervisor's exit code
    reasons: Why = ()
    cause: Cause | None = None


class ReleaseNodes(_Effect, frozen=True, kw_only=True, tag="release_nodes"):
    """Give all other nodes of the allocation back to Slurm; answered by `NodesReleased`."""

    keep: tuple[str, ...]  # nodes that the job keeps


class CheckNodes(_Effect, frozen=True, kw_only=True, tag="check_nodes"):
    """Check unused nodes of the allocation while the training runs; answered by `NodesChecked`, if a node answers."""

    nodes: tuple[str, ...]


class AskIdleNodes(_Effect, frozen=True, kw_only=True, tag="ask_idle_nodes"):
    """Ask Slurm for idle nodes with which a job that was shrunk could grow again; answered by `IdleNodes`."""

    like: tuple[str, ...]  # nodes of the job, to which they have to be similar


class AskSlurm(_Effect, frozen=True, kw_only=True, tag="ask_slurm"):
    """Ask Slurm for the state of the job; always answered by `SlurmAnswered`, also where Slurm does not answer."""

    # `decide` asks no second question before the answer.  In TRAINING, with all watchers there, it has no deadline for
    # it.  An action that could end without an answer would leave every later signal unasked.
    reasons: Why = ()


class Requeue(_Effect, frozen=True, kw_only=True, tag="requeue"):
    """Have Slurm requeue the job, eligible at once where the node agent runs; answered by `RequeueAnswered`."""

    keep: tuple[str, ...] = ()  # first give back all nodes but these, since Slurm would wait for lost nodes
    exclude: tuple[str, ...] = ()  # nodes to exclude from the job, those with the weakest reason first
    readmit: tuple[str, ...] = ()  # nodes that were excluded earlier and are allowed again
    resubmit: bool = False  # true: Slurm cannot requeue the job, so submit a new one in its place


class AnswerRequest(_Effect, frozen=True, kw_only=True, tag="answer_request"):
    """Answer a person's request."""

    name: str  # the file name of the request
    reasons: Why = ()
    ok: bool = True  # false: refused


class Exit(_Effect, frozen=True, kw_only=True, tag="exit"):
    """End the supervisor."""

    code: int
    reasons: Why = ()


Effect = (
    StartBus
    | StopBus
    | ChooseCheckpoint
    | VerifyCheckpoint
    | TestStorage
    | ClearNodes
    | AskUncleared
    | StartLaunch
    | RequestSave
    | KillRanks
    | Look
    | CollectStacks
    | JudgeLaunch
    | RollBack
    | ReportSlowNode
    | ReportSlowLaunch
    | ReportReplay
    | NotifyUser
    | ReleaseNodes
    | CheckNodes
    | AskIdleNodes
    | AskSlurm
    | Requeue
    | AnswerRequest
    | Exit
)
