"""What happened: the only input of `decide`.

The source of an event stamps it with `at`, in Unix seconds that never go backwards (`loop_tools`).  The journal gets
events as they are, so a field is only ever added, with a default.

Where each comes from, and what may be concluded from it:

    AttemptStarted      ourselves at the start: lease, allocation, the journal of the attempt before (`cli.run`)
    Tick                the clock (the loop)
    Suspended          the clock (the loop): a turn came late by seconds, as after `scontrol suspend`
    ClockSet            slurmctld's clock, asked for where the wall clock was set (`actions.slurm`)
    SignalReceived      Slurm, to the batch process: a user signal, a cancel, a requeue, the end of grace or of the
                        time limit look alike (`sources.process`)
    NodeSignaled        Slurm, to the steps, early in a preemption: a notice only together with PreemptTime (watcher)
    SlurmAnswered       slurmctld, or the time limit of our client (`actions.slurm`); RequeueAnswered likewise
    WatcherReady        a watcher's first line (`sources.bus`)
    WatcherLost         nobody: silence, or a line of srun about one task (`sources.bus`)
    Suspected           the first of two looks at a rank (`actions.stack_collector`), or a late watcher (`sources.bus`)
    SlurmdGone          the node's kernel: it refuses connections while the watcher is late (`sources.slurmd`)
    BusEnded            the watchers' srun: its status, and the last line of its stderr (`sources.bus`)
    NodesCleared        every watcher: it has ended what was left, and looked whether its node is fit
    NodesNotCleared     the bus: which watchers have not answered
    NodeFaulted         the node agent or, without one, the watcher itself: kernel log and NVML, never a rank's word
    NodesReleased       slurmctld (`actions.slurm`); IdleNodes likewise
    NodesChecked        the watchers of nodes that take no part (`sources.bus`)
    CheckpointChosen, ChoiceFailed, CheckpointVerified
                        the file system (`actions.checkpoints`), read by this process and the watchers
                        (`actions.verify_pool`)
    StorageTested       the file system (`actions.checkpoints`)
    LaunchBegan         the wrappers of all tasks, counted by `sources.bus`
    RankHello           the trainer library of any rank
    RankExited          the wrapper (`code` or `signal`); else a watcher that saw the process vanish (neither)
    Progressed, SaveBegan, CheckpointCommitted, SaveFailed, TrainingFinished, TrainingStopped
                        the trainer library, for all ranks; Progressed also what a script without it prints
                        (`actions.log_progress`)
    Replayed            the trainer library of rank 0, from `metrics.csv`
    Corrupted           the trainer library of the rank that computed wrongly
    NodesPaced          the trainer library of every rank, reduced by the watchers and put together by `sources.bus`
    LaunchEnded         the training step's srun and `outcome.json` (`actions.launch`): it outweighs every word
    LaunchRefused       the operating system: srun could not be executed (`actions.launch`)
    Judged              logs, error files, exits, faults and Slurm's answers, joined (`actions.diagnosis`): an opinion
    StacksCollected     the watchers: faulthandler or py-spy, and /proc (`actions.stack_collector`)
    RolledBack          the lineage file (`actions.checkpoints`)
    Requested           a person, by a file in the run directory (`sources.run_directory`)
    PartFailed          ourselves: an optional part, such as the diagnosis or the metrics (`sources.process`)
    RunDirectoryGone    the file system (`sources.run_directory`)
    Superseded          the lease file (`sources.run_directory`, and `actions.slurm` before a requeue)

Messages of ranks are datagrams through a watcher, the bus and a pipe: they come late, twice (the library repeats
its hello to a new watcher), or never (a watcher or the bus died in between).  So nothing depends on one alone:
each has a deadline behind it, and `LaunchEnded` behind all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from stepkeeper.core.baseline import Baseline
from stepkeeper.core.causes import Cause, SkippedData, Tried
from stepkeeper.core.reasons import Why


class Stamped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Something that happened; its source says when, in Unix seconds that never go backwards."""

    at: float


# --- the attempt itself, its clock, and who may end it ---------------------------------------------


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A node on which this job must not run."""

    node: str
    reasons: Why = ()
    until: float  # Unix seconds


class AttemptStarted(Stamped, frozen=True, kw_only=True, tag="attempt_started"):
    """The supervisor runs, holds the lease, and knows its allocation."""

    job_id: int
    restart_count: int
    attempt: int
    nodes: tuple[str, ...]
    batch_node: str
    kill_wait_s: float
    finished_step: int | None = None  # the last step, where an earlier attempt finished the training
    failures: int = 0  # from the attempt before: launches that failed since the last verified progress
    best_step: int | None = None  # from the attempt before: the highest verified step
    node_losses: int = 0  # from the attempt before: nodes lost since the last verified progress
    previous: str = ""  # how the attempt before ended, in words
    wrapped: bool = True  # Stepkeeper's wrapper starts each rank; false for a user's own srun line
    nodes_wanted: int = 0  # nodes that a launch uses; the others are spares.  0: all
    nodes_min: int = 0  # the fewest nodes of a launch.  0: it never shrinks
    node_counts: tuple[int, ...] = ()  # allowed numbers of nodes of a launch; empty: any
    excluded: tuple[Exclusion, ...] = ()  # from the attempt before
    tried: tuple[Tried, ...] = ()  # from the attempt before
    baseline: Baseline = Baseline()  # from the attempt before
    skipped_data: tuple[SkippedData, ...] = ()  # from the attempt before: data that the training leaves out
    losses: tuple[tuple[int, float], ...] = ()  # from the attempt before: (step, loss) pairs, oldest first
    nodes_before: tuple[str, ...] = ()  # nodes of the last launch of the attempt before
    gpus_per_node: int | None = None  # GPUs that Slurm gave the job on each node; None where Slurm does not show it
    end_at: float | None = None  # the job's time limit, Unix seconds
    batch: bool = True  # false: inside `salloc` or a bare `srun`, which Slurm cannot requeue


class Tick(Stamped, frozen=True, kw_only=True, tag="tick"):
    """A deadline of the supervisor has passed."""


class Suspended(Stamped, frozen=True, kw_only=True, tag="suspended"):
    """The supervisor did not run for `seconds`: the job was suspended, or its batch host was halted."""

    seconds: float


class PartFailed(Stamped, frozen=True, kw_only=True, tag="part_failed"):
    """An optional part of the supervisor failed, and the training continues.  Recorded once for each kind of error."""

    part: str
    error: str


class ClockSet(Stamped, frozen=True, kw_only=True, tag="clock_set"):
    """Slurm's clock jumped by `seconds` (negative: back), for example because an administrator set the clocks."""

    seconds: float


class Requested(Stamped, frozen=True, kw_only=True, tag="requested"):
    """A person asked for a checkpoint or for the end of the run.  The event repeats until it is answered."""

    name: str  # the file name of the request
    kind: Literal["save", "stop"]
    by: str = ""  # the person's account


class RunDirectoryGone(Stamped, frozen=True, kw_only=True, tag="run_directory_gone"):
    """The run directory is gone, and did not come back: the run can no longer save or resume."""

    path: str


class Superseded(Stamped, frozen=True, kw_only=True, tag="superseded"):
    """A newer attempt holds the lease: this one must stop its ranks and leave."""

    by_job_id: int
    by_restart_count: int


# --- Slurm -----------------------------------------------------------------------------------------


class JobState(StrEnum):
    """The states of a Slurm job that decisions depend on."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    OTHER = "other"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says about the job.  Times are Unix seconds."""

    state: JobState
    slurm_state: str  # the state as Slurm prints it, for people
    restarts: int  # Slurm's restart count
    reason: str = ""  # Slurm's reason for the state
    preempt_at: float | None = None  # `PreemptTime`
    end_at: float | None = None  # `EndTime`
    requeue_allowed: bool = True  # `Requeue=1`
    batch: bool = True  # the job has a batch script; without one Slurm cannot start it again
    excluded: str = ""  # node list: nodes on which the job may not run
    required: str = ""  # node list: nodes that the job requests by name


class SignalReceived(Stamped, frozen=True, kw_only=True, tag="signal_received"):
    """The supervisor, which is the batch process, got a signal: TERM, INT, USR1 or USR2."""

    signal: str


class NodeSignaled(Stamped, frozen=True, kw_only=True, tag="node_signaled"):
    """A watcher got SIGTERM.  At a preemption, Slurm signals the job's Slurm steps long before the batch process."""

    node: str
    signal: str


class SlurmAnswered(Stamped, frozen=True, kw_only=True, tag="slurm_answered"):
    """The answer to `AskSlurm`.  If Slurm could not be asked, `job` is None and `error` says why."""

    job: JobFacts | None = None
    error: str = ""


class RequeueAnswered(Stamped, frozen=True, kw_only=True, tag="requeue_answered"):
    """The answer to `Requeue`."""

    ok: bool
    error: str = ""  # what failed; with `ok`, a lesser failure on the way, such as excluding nodes
    job_id: int | None = None  # id of the new job, if one was submitted in place of a requeue
    forbidden: bool = False  # the site does not allow requeues, so another try is useless


class NodesReleased(Stamped, frozen=True, kw_only=True, tag="nodes_released"):
    """The answer to `ReleaseNodes`."""

    ok: bool
    error: str = ""


class IdleNodes(Stamped, frozen=True, kw_only=True, tag="idle_nodes"):
    """The answer to `AskIdleNodes`: idle nodes that are similar to those of the job."""

    nodes: tuple[str, ...] = ()
    error: str = ""  # why Slurm could not be asked


# --- the nodes: their watchers, their checks, their hardware ---------------------------------------


class Unfit(msgspec.Struct, frozen=True, kw_only=True):
    """A node that failed its checks, so that no launch should use it."""

    node: str
    why: str
    shared: bool = False  # the cause may affect all nodes: storage, clock


class WatcherReady(Stamped, frozen=True, kw_only=True, tag="watcher_ready"):
    """The watcher of a node has connected."""

    node: str
    bus: int
    switches: str = ""  # network switches above the node, highest first: `core.leaf3`; empty where Slurm knows none


class WatcherLost(Stamped, frozen=True, kw_only=True, tag="watcher_lost"):
    """A watcher stopped sending, or its process ended."""

    node: str
    bus: int
    why: str


class Suspected(Stamped, frozen=True, kw_only=True, tag="suspected"):
    """A launch may hang, or nodes may be lost: nothing is decided by it, but standbys start."""

    nodes: tuple[str, ...]
    rank: int | None = None  # it did nothing at the first of two looks; None: the nodes' watchers are late


class SlurmdGone(Stamped, frozen=True, kw_only=True, tag="slurmd_gone"):
    """A node's watcher is silent, and the node refuses connections to slurmd: no Slurm daemon runs there.

    Meanwhile slurmd of another node accepts connections.  The event repeats every few seconds while this lasts.
    """

    node: str
    bus: int
    silent_s: float  # how long the watcher has been silent


class BusEnded(Stamped, frozen=True, kw_only=True, tag="bus_ended"):
    """The Slurm step of the watchers ended."""

    bus: int
    code: int
    error: str = ""


class NodesCleared(Stamped, frozen=True, kw_only=True, tag="nodes_cleared"):
    """Every watcher has confirmed that no process of an earlier launch is left on its node."""

    launch: int
    address: str  # address of rank 0's node: where the ranks of the next launch meet
    port: int  # a free port there
    unfit: tuple[Unfit, ...] = ()  # nodes that failed the checks before a launch
    nodes: tuple[str, ...] = ()  # nodes that confirmed


class NodesNotCleared(Stamped, frozen=True, kw_only=True, tag="nodes_not_cleared"):
    """The answer to `AskUncleared`: nodes that have not yet confirmed."""

    launch: int
    nodes: tuple[str, ...]


class NodeFaulted(Stamped, frozen=True, kw_only=True, tag="node_faulted"):
    """A hardware fault of a node was found.  The same `incident` again means that the fault became more severe."""

    node: str
    incident: str  # id of the incident
    name: str  # for example `XID 79`
    action: str  # what the fault needs: an action of the XID catalogue
    leave: bool  # true: no job should use this node
    why: str
    gpu: str = ""  # PCI address and UUID, for people
    drained: bool = False  # the agent has drained the node


class NodesChecked(Stamped, frozen=True, kw_only=True, tag="nodes_checked"):
    """The answer to `CheckNodes`."""

    nodes: tuple[str, ...]  # nodes that answered
    unfit: tuple[Unfit, ...] = ()  # those of them that are still not fit


# --- the storage: what it holds, and whether it can be trusted -------------------------------------


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A step directory that cannot be used, and why."""

    directory: str
    problem: str
    damaged: bool = False  # true: it was committed, and its bytes have changed since


class CheckpointChosen(Stamped, frozen=True, kw_only=True, tag="checkpoint_chosen"):
    """The answer to `ChooseCheckpoint`: the newest verified step directory, or None if there is none."""

    directory: str | None
    step: int | None
    skipped: tuple[Skipped, ...] = ()  # newer step directories that cannot be used
    bytes_read: int = 0  # 0 also if it was verified before and has not changed
    seconds: float = 0.0
    readers: tuple[str, ...] = ()  # nodes that read it
    same_world: bool = False  # true: only the number of ranks that saved it can resume from it


class ChoiceFailed(Stamped, frozen=True, kw_only=True, tag="choice_failed"):
    """The step directories could not be listed: the storage fails."""

    error: str


class CheckpointVerified(Stamped, frozen=True, kw_only=True, tag="checkpoint_verified"):
    """The answer to `VerifyCheckpoint`: every byte was read and compared with the manifest."""

    directory: str
    ok: bool
    problem: str = ""
    seconds: float = 0.0
    bytes_read: int = 0
    readers: tuple[str, ...] = ()  # nodes that read it
    gone: bool = False  # true: it was removed meanwhile, so the result has no meaning


class StorageTested(Stamped, frozen=True, kw_only=True, tag="storage_tested"):
    """The answer to `TestStorage`: whether the storage returned the bytes that were written."""

    ok: bool
    problem: str = ""  # which operation failed, and how
    untrue: bool = False  # true: the storage returned other bytes than were written
    thorough: bool = False  # true: the test with many bytes
    bytes: int = 0
    write_s: float = 0.0  # time until the bytes were written and durable
    read_s: float = 0.0
    from_disk: bool = False  # true: read past the page cache


# --- a launch: the messages of its ranks, their ends, and why it failed ----------------------------


class OfLaunch(Stamped, frozen=True, kw_only=True):
    """Of one launch: a late message of an older one is recognised by its number."""

    launch: int


class OfRanks(OfLaunch, frozen=True, kw_only=True):
    """Of a launch whose ranks may run: once they are gone, `decide` takes it for late."""


class LaunchBegan(OfRanks, frozen=True, kw_only=True, tag="launch_began"):
    """Every task of the training's Slurm step has started: all wrappers have reported.

    It never comes for a user's own srun line, which has no wrappers.
    """

    warm: int = 0  # ranks that were started from a warm standby
    cold: str = ""  # why a rank was not, although standbys are on


class RankHello(OfRanks, frozen=True, kw_only=True, tag="rank_hello"):
    """The trainer library of a rank has connected, so this launch can save and stop on request."""

    rank: int
    node: str
    resumed_step: int | None = None  # the step it resumes from; None: it has loaded nothing, or not yet
    in_memory: bool = False  # the nodes alone hold that step, as a snapshot
    total_steps: int | None = None  # the last step of the training; None: the script does not say it
    framework: str = ""  # framework, with version, whose checkpoints it saves; empty: the library's own
    unable: str = ""  # why it cannot save on request; empty: it can


class RankExited(OfRanks, frozen=True, kw_only=True, tag="rank_exited"):
    """A rank's process ended.  If its exit status is unknown, `code` and `signal` are both None."""

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None


class Progressed(OfRanks, frozen=True, kw_only=True, tag="progressed"):
    """Rank 0 completed a step.  The journal gets at most one of these a minute, unless one changed something.

    For a script without the trainer library, the step is read from what its framework prints.
    """

    step: int
    tokens: int
    loss: float | None = None
    step_seconds: float | None = None
    not_finite: bool = False  # true: the loss is NaN or infinite, which JSON cannot express
    printed: bool = False  # true: read from the ranks' output
    late_s: float = 0.0  # so long before `at` the rank said it: watchers pass on one step a second
    held_step: int | None = None  # step of the newest snapshot that all nodes hold in memory


class Replayed(OfRanks, frozen=True, kw_only=True, tag="replayed"):
    """After a resume the ranks repeated steps, and their losses were compared with those recorded the first time."""

    step: int  # the last repeated step
    steps: int  # how many steps were compared
    first: int | None = None  # the first step with another loss
    worst: int | None = None  # the step whose loss differs most
    then: float | None = None  # the recorded loss of `worst`; None: no finite number
    now: float | None = None  # its new loss
    deterministic: bool = False  # the run declares itself deterministic, and nothing that losses depend on has changed
    changed: str = ""  # what has changed


class Corrupted(OfRanks, frozen=True, kw_only=True, tag="corrupted"):
    """A rank computed a micro-batch twice with different results: its device computes wrongly."""

    rank: int
    node: str
    step: int  # the last step before the check
    confirmed: int  # the newest step at which the check found equal results on all ranks
    what: str = ""  # what differs: the loss, names of gradients
    gpu: str = ""


class NodesPaced(OfRanks, frozen=True, kw_only=True, tag="nodes_paced"):
    """How long the slowest rank of each node worked for a step, without its waits for other ranks.

    It comes every few seconds.  The journal gets one an hour, and each that changed something.
    """

    step: int  # the newest step that a node reported
    step_seconds: float  # median over the nodes
    own: tuple[tuple[str, float], ...]  # (node, seconds of own work a step)
    loading: float = 0.0  # the part of it that loads data: the lower median over the nodes
    slowest: tuple[tuple[str, int, float], ...] = ()  # the slowest few: (node, slowest rank, its seconds to load data)


class SaveBegan(OfRanks, frozen=True, kw_only=True, tag="save_began"):
    """All ranks have agreed to save."""

    step: int
    save_id: str
    emergency: bool = False


class CheckpointCommitted(OfRanks, frozen=True, kw_only=True, tag="checkpoint_committed"):
    """A step directory is complete and durable."""

    step: int
    save_id: str
    directory: str
    bytes: int
    seconds: float
    emergency: bool = False
    drift: str = ""  # tensors whose copies differ between ranks: a device may compute wrongly
    by_disk: bool = False  # true: it was written to the nodes' own disks first
    framework: str = ""  # the framework that wrote it; `directory` is then its path


class SaveFailed(OfRanks, frozen=True, kw_only=True, tag="save_failed"):
    """A save failed; older step directories are untouched."""

    step: int
    save_id: str
    error: str
    emergency: bool = False


class TrainingFinished(OfRanks, frozen=True, kw_only=True, tag="training_finished"):
    """Rank 0 reports that the training is finished."""

    step: int


class TrainingStopped(OfRanks, frozen=True, kw_only=True, tag="training_stopped"):
    """Rank 0 reports that all ranks exit, because they were asked to or because the supervisor did not answer."""

    step: int
    save_id: str | None = None


class LaunchEnded(OfRanks, frozen=True, kw_only=True, tag="launch_ended"):
    """The srun of the training ended: none of its ranks runs any more."""

    code: int
    finished: bool = False  # `outcome.json` or the framework's newest checkpoint shows that the training is finished
    stopped: bool = False  # `outcome.json` shows that the ranks saved and stopped
    error: str = ""
    step: int | None = None  # step of the framework's newest checkpoint
    target: int | None = None  # the last step of the training, if exit code 0 came before it
    unproven: bool = False  # exit code 0 does not prove the end here, and no checkpoint shows it


class LaunchRefused(OfRanks, frozen=True, kw_only=True, tag="launch_refused"):
    """The training's Slurm step could not be started."""

    error: str


class StacksCollected(OfRanks, frozen=True, kw_only=True, tag="stacks_collected"):
    """The answer to `CollectStacks`: what the ranks do."""

    moved: bool  # true: a rank did something else a moment later
    summary: str  # in words: `rank 1 is in load (data.py:7); rank 0 waits in all_reduce`
    rank: int | None = None  # the rank that does not wait for others, if one is known
    node: str = ""  # its node
    idle: bool = False  # true: no rank computes, reads or writes
    sure_s: float = 0.0  # for so many seconds one rank is sure to be stopped or asleep, while all others wait
    awaited: bool = False  # true: one rank only sleeps, and all others wait for it in a collective


class Judged(OfLaunch, frozen=True, kw_only=True, tag="judged"):
    """The answer to `JudgeLaunch`: why the launch failed, as far as the evidence shows."""

    cause: Cause
    rule: str  # `no-evidence` where there is none
    confidence: float  # 0 to 1
    text: str = ""  # the strongest piece of evidence, shortened
    location: str = ""  # for example `ValueError at train.py:61 in main`
    rank: int | None = None  # the rank that failed first, if known
    node: str = ""
    step: int | None = None  # the launch's last step; if a loss went wrong, the first wrong step
    second_cause: Cause = Cause.UNKNOWN  # the verdict without the strongest piece of evidence


class RolledBack(OfLaunch, frozen=True, kw_only=True, tag="rolled_back"):
    """The answer to `RollBack`: the lineage now ends at an older step, or `error` says why not."""

    directory: str | None = None
    step: int | None = None
    error: str = ""


Event = (
    AttemptStarted
    | Tick
    | Suspended
    | ClockSet
    | SignalReceived
    | NodeSignaled
    | SlurmAnswered
    | RequeueAnswered
    | WatcherReady
    | WatcherLost
    | Suspected
    | SlurmdGone
    | BusEnded
    | NodesCleared
    | NodesNotCleared
    | NodeFaulted
    | NodesReleased
    | NodesChecked
    | IdleNodes
    | CheckpointChosen
    | ChoiceFailed
    | CheckpointVerified
    | StorageTested
    | LaunchBegan
    | RankHello
    | RankExited
    | Progressed
    | NodesPaced
    | Replayed
    | Corrupted
    | SaveBegan
    | CheckpointCommitted
    | SaveFailed
    | TrainingFinished
    | TrainingStopped
    | LaunchEnded
    | LaunchRefused
    | StacksCollected
    | Judged
    | RolledBack
    | Requested
    | PartFailed
    | RunDirectoryGone
    | Superseded
)
