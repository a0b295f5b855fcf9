"""What to do: the only output of `decide` besides the next state.  Imperative; each is one act.

They stand in the journal, so a field is only ever added, with a default: older records must stay readable.
There `run_store.journal` adds the text of `reasons`, as `why`, `reason` or `said`.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core.causes import Cause, SkippedData
from stepkeeper.core.reasons import Finding, Why


class _Effect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="effect"):
    pass


class StartBus(_Effect, frozen=True, kw_only=True, tag="start_bus"):
    """Start one watcher on every node, in a moment; an older bus is ended now."""

    bus: int
    nodes: tuple[str, ...] = ()
    after_s: float = 0.0


class StopBus(_Effect, frozen=True, kw_only=True, tag="stop_bus"):
    """Ask the watchers to leave; answered by `BusEnded`."""


class ChooseCheckpoint(_Effect, frozen=True, kw_only=True, tag="choose_checkpoint"):
    """Find the newest verified step directory."""


class VerifyCheckpoint(_Effect, frozen=True, kw_only=True, tag="verify_checkpoint"):
    """Read every byte of a step directory and compare; one under way is given up for a newer one."""

    directory: str
    from_disk: bool = False  # past the page cache


class TestStorage(_Effect, frozen=True, kw_only=True, tag="test_storage"):
    """Save bytes that nobody needs as a checkpoint is saved, and read them back; answered by `StorageTested`.

    A `CheckpointChosen` that was ordered after it does not come before the answer.
    """

    thorough: bool = False  # many bytes: the storage is suspect


class ClearNodes(_Effect, frozen=True, kw_only=True, tag="clear_nodes"):
    """Have every watcher end what is left of earlier launches, look whether its node is fit, and confirm."""

    launch: int
    nodes: tuple[str, ...] = ()  # that are waited for
    first: str = ""  # of them: where rank 0 will run


class AskUncleared(_Effect, frozen=True, kw_only=True, tag="ask_uncleared"):
    """Tell which nodes have not confirmed; answered by `NodesNotCleared` at once."""

    launch: int


class StartLaunch(_Effect, frozen=True, kw_only=True, tag="start_launch"):
    """Start the training step."""

    launch: int
    resume_from: str | None
    address: str
    port: int
    nodes: tuple[str, ...] = ()
    skipped_data: tuple[SkippedData, ...] = ()  # data that the ranks do not take
    went_back: bool | None = None  # true: on purpose, and the ranks take nothing newer from a tier


class RequestSave(_Effect, frozen=True, kw_only=True, tag="request_save"):
    """Ask all ranks to save at their next common step boundary, and to leave if `stop`.

    With `stop`, ranks without the trainer library get `policy.stop_signal` instead, once a launch.
    """

    stop: bool
    reasons: Why = ()
    deadline_at: float | None = None
    slurm_sent: str | None = None  # a signal that the ranks have from Slurm itself: they do not get it twice


class KillRanks(_Effect, frozen=True, kw_only=True, tag="kill_ranks"):
    """SIGKILL what runs of a launch, through the watchers, and through Slurm where they are gone."""

    launch: int
    reasons: Why = ()


class Look(_Effect, frozen=True, kw_only=True, tag="look"):
    """Have the node's agent look at its hardware: a rank failed there.  It believes only what it then sees."""

    node: str
    reasons: Why = ()


class CollectStacks(_Effect, frozen=True, kw_only=True, tag="collect_stacks"):
    """Have every watcher take the stacks of its ranks, twice, into the launch's logs; answered by `StacksCollected`."""

    launch: int
    nodes: tuple[str, ...]
    within_s: float
    brief: bool = False  # without native stacks: seconds count


class JudgeLaunch(_Effect, frozen=True, kw_only=True, tag="judge_launch"):
    """Gather the evidence of a launch that failed; answered by `Judged`, or its time runs out."""

    launch: int
    found: Finding | None = None  # what the rules themselves saw


class RollBack(_Effect, frozen=True, kw_only=True, tag="roll_back"):
    """Have the lineage lead to the newest verified step below one; later commits no longer count.

    Where no step at all is whole, it leads to the very start: a launch would begin there anyway.

    Answered by `RolledBack`.
    """

    launch: int
    below_step: int
    reasons: Why = ()
    suspect: bool = False  # mark the commits that are left behind: a loss had gone wrong
    quick: bool = False  # the job leaves: a look at names and sizes has to do, and who resumes reads the bytes
    skipped_data: tuple[SkippedData, ...] = ()  # all data that the ranks do not take from then on, for the lineage


class ReportSlowNode(_Effect, frozen=True, kw_only=True, tag="report_slow_node"):
    """Report that a node slows the others down, or no longer does: in the log, the counters and the report."""

    node: str
    factor: float  # times as long as the others' own work for a step
    since: float  # Unix seconds
    over: bool = False  # it keeps up again
    rank: int | None = None  # the slowest there
    loading: bool = False  # its data loader is slow, and not the node
    reasons: Why = ()


class ReportSlowLaunch(_Effect, frozen=True, kw_only=True, tag="report_slow_launch"):
    """Tell that a launch steps slower than those before it, on as many nodes."""

    seconds: float  # its median step
    baseline: float  # the median of theirs
    nodes: tuple[str, ...] = ()  # that may be why
    reasons: Why = ()


class ReportReplay(_Effect, frozen=True, kw_only=True, tag="report_replay"):
    """Tell what came of the steps that were done again after a resume."""

    equal: bool  # the same bits, or within what is usual for the run
    steps: int
    step: int | None = None  # whose loss differs most; all of it is left out where the bits are equal
    then: float | None = None
    now: float | None = None
    nodes: tuple[str, ...] = ()  # that are new in this launch
    reasons: Why = ()


class NotifyUser(_Effect, frozen=True, kw_only=True, tag="notify_user"):
    """The run stops and a person is needed: Slurm's job comment, and the user's notify command.  Never fatal."""

    code: int
    reasons: Why = ()
    cause: Cause | None = None


class ReleaseNodes(_Effect, frozen=True, kw_only=True, tag="release_nodes"):
    """Give the other nodes of the allocation back, so that they can be repaired; answered by `NodesReleased`."""

    keep: tuple[str, ...]


class CheckNodes(_Effect, frozen=True, kw_only=True, tag="check_nodes"):
    """Look beside training whether nodes that take no part are fit again; `NodesChecked` comes, or nobody answers."""

    nodes: tuple[str, ...]


class AskIdleNodes(_Effect, frozen=True, kw_only=True, tag="ask_idle_nodes"):
    """Ask Slurm, seldom, for idle nodes like ours: the job could grow back; answered by `IdleNodes`."""

    like: tuple[str, ...]  # nodes of ours


class AskSlurm(_Effect, frozen=True, kw_only=True, tag="ask_slurm"):
    """Ask Slurm for the facts of our job; always answered by `SlurmAnswered`, within the client's time limit.

    `decide` asks no second question before the answer.  In TRAINING, with all watchers there, it has no deadline
    for it.  An action that could end without an answer would leave every later signal unasked.
    """

    reasons: Why = ()


class Requeue(_Effect, frozen=True, kw_only=True, tag="requeue"):
    """Have Slurm requeue our own job; with an agent on this node, eligible again at once."""

    keep: tuple[str, ...] = ()  # first give back all nodes but these: Slurm would wait for those that are lost
    exclude: tuple[str, ...] = ()  # nodes to add to the job's list of excluded ones, the weakest reason first
    readmit: tuple[str, ...] = ()  # that we excluded earlier, and whose time is over
    resubmit: bool = False  # Slurm may not requeue it: submit another job in its place, once


class AnswerRequest(_Effect, frozen=True, kw_only=True, tag="answer_request"):
    """Tell a person what becomes of what was asked."""

    name: str
    reasons: Why = ()
    ok: bool = True  # false: it cannot be done


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
