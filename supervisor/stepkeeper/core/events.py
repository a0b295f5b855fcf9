"""What happened: the only input of `decide`.

Each is stamped by its source with `at`, in Unix seconds that never go backwards (`loop_tools`).  Events are written to
the journal as they are, so a field is only ever added, with a default.

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
    """A node on which this job shall not run, and until when (Unix seconds)."""

    node: str
    reasons: Why = ()
    until: float


class AttemptStarted(Stamped, frozen=True, kw_only=True, tag="attempt_started"):
    """The supervisor runs, holds the lease, and knows its allocation."""

    job_id: int
    restart_count: int
    attempt: int
    nodes: tuple[str, ...]
    batch_node: str
    kill_wait_s: float
    finished_step: int | None = None  # an earlier attempt said that the work is done
    failures: int = 0  # launches that failed since the last verified progress, carried over
    best_step: int | None = None  # the furthest verified step so far, carried over
    node_losses: int = 0  # nodes lost since the last verified progress, carried over
    previous: str = ""  # how the attempt before ended, in words
    wrapped: bool = True  # our wrapper is around each rank: `LaunchBegan` will come (not of own srun lines)
    nodes_wanted: int = 0  # by a launch; the others are spares.  0: all
    nodes_min: int = 0  # that a launch may shrink to.  0: never
    node_counts: tuple[int, ...] = ()  # a launch has one of these numbers of nodes; empty: any
    excluded: tuple[Exclusion, ...] = ()  # carried over
    tried: tuple[Tried, ...] = ()  # carried over
    baseline: Baseline = Baseline()  # carried over
    skipped_data: tuple[SkippedData, ...] = ()  # carried over: data that the ranks do not take
    losses: tuple[tuple[int, float], ...] = ()  # carried over: (step, loss) of the newest state, oldest first
    nodes_before: tuple[str, ...] = ()  # that the attempt before used at last
    gpus_per_node: int | None = None  # that Slurm gave the job; None where it says nothing
    end_at: float | None = None  # the job's time limit, Unix seconds
    batch: bool = True  # false: in the allocation of `salloc` or a bare `srun`, which Slurm cannot requeue


class Tick(Stamped, frozen=True, kw_only=True, tag="tick"):
    """The deadline of the state has come."""


class Suspended(Stamped, frozen=True, kw_only=True, tag="suspended"):
    """This process did not run for `seconds`: the job was suspended, or its batch host did not run."""

    seconds: float


class PartFailed(Stamped, frozen=True, kw_only=True, tag="part_failed"):
    """A part of the supervisor failed that training can do without: reported once for each kind of error."""

    part: str
    error: str


class ClockSet(Stamped, frozen=True, kw_only=True, tag="clock_set"):
    """Slurm's clock has moved forward by `seconds` among our instants, as where somebody set the clocks of a site."""

    seconds: float


class Requested(Stamped, frozen=True, kw_only=True, tag="requested"):
    """A person asks for a checkpoint, or for the end of the run.  It comes again until it is answered."""

    name: str  # of the ask
    kind: Literal["save", "stop"]
    by: str = ""  # the account


class RunDirectoryGone(Stamped, frozen=True, kw_only=True, tag="run_directory_gone"):
    """The run directory has not been there for a while: nothing can be saved or resumed any more."""

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
    """What Slurm says of our job, in our words.  Instants are Unix seconds."""

    state: JobState
    slurm_state: str  # as Slurm prints it, for people
    restarts: int
    reason: str = ""
    preempt_at: float | None = None
    end_at: float | None = None
    requeue_allowed: bool = True
    batch: bool = True  # it has a batch script; else nothing of it can be started again
    excluded: str = ""  # node list: where the job may not run
    required: str = ""  # node list: that the job wants by name


class SignalReceived(Stamped, frozen=True, kw_only=True, tag="signal_received"):
    """The batch process (we) got a signal: TERM, INT, USR1 or USR2."""

    signal: str


class NodeSignaled(Stamped, frozen=True, kw_only=True, tag="node_signaled"):
    """A watcher got SIGTERM: at a preemption, Slurm signals the steps long before the batch process."""

    node: str
    signal: str


class SlurmAnswered(Stamped, frozen=True, kw_only=True, tag="slurm_answered"):
    """The answer to `AskSlurm`; `job` is None when Slurm could not be asked, and `error` says why."""

    job: JobFacts | None = None
    error: str = ""


class RequeueAnswered(Stamped, frozen=True, kw_only=True, tag="requeue_answered"):
    """The answer to `Requeue`."""

    ok: bool
    error: str = ""  # where it is ok: what did not succeed besides
    job_id: int | None = None  # of the job that was submitted in its place
    forbidden: bool = False  # the site does not allow it: to try again is of no use


class NodesReleased(Stamped, frozen=True, kw_only=True, tag="nodes_released"):
    """The answer to `ReleaseNodes`."""

    ok: bool
    error: str = ""


class IdleNodes(Stamped, frozen=True, kw_only=True, tag="idle_nodes"):
    """The answer to `AskIdleNodes`: nodes like ours that nobody uses."""

    nodes: tuple[str, ...] = ()
    error: str = ""  # Slurm could not be asked


# --- the nodes: their watchers, their checks, their hardware ---------------------------------------


class Unfit(msgspec.Struct, frozen=True, kw_only=True):
    """A node on which no launch should start, and why."""

    node: str
    why: str
    shared: bool = False  # the cause may be common to all nodes: storage, clock


class WatcherReady(Stamped, frozen=True, kw_only=True, tag="watcher_ready"):
    """The watcher of a node answers."""

    node: str
    bus: int
    switches: str = ""  # above the node, the highest first: `core.leaf3`; empty where Slurm knows none


class WatcherLost(Stamped, frozen=True, kw_only=True, tag="watcher_lost"):
    """A watcher fell silent or its process ended."""

    node: str
    bus: int
    why: str


class SlurmdGone(Stamped, frozen=True, kw_only=True, tag="slurmd_gone"):
    """A node's watcher is late, and the node refuses connections to slurmd, for seconds: nothing of Slurm runs there.

    Slurmd of another node takes them.  Told again every few seconds while it is so.
    """

    node: str
    bus: int
    silent_s: float  # of the watcher


class BusEnded(Stamped, frozen=True, kw_only=True, tag="bus_ended"):
    """The Slurm step of the watchers is over."""

    bus: int
    code: int
    error: str = ""


class NodesCleared(Stamped, frozen=True, kw_only=True, tag="nodes_cleared"):
    """Every watcher confirms: no process of an earlier launch is left on its node."""

    launch: int
    address: str  # of the node of rank 0: where the ranks of the next launch meet
    port: int  # free there
    unfit: tuple[Unfit, ...] = ()  # nodes that failed the checks before a launch
    nodes: tuple[str, ...] = ()  # that confirmed


class NodesNotCleared(Stamped, frozen=True, kw_only=True, tag="nodes_not_cleared"):
    """The answer to `AskUncleared`: nodes that have not confirmed."""

    launch: int
    nodes: tuple[str, ...]


class NodeFaulted(Stamped, frozen=True, kw_only=True, tag="node_faulted"):
    """A fault of a node's hardware was seen; the same `incident` again means that it was raised."""

    node: str
    incident: str
    name: str  # `XID 79`
    action: str  # of `xid.catalogue.Action`
    leave: bool  # no job should run on this node any more
    why: str
    gpu: str = ""  # PCI address and UUID, for people
    drained: bool = False  # the agent has drained the node


class NodesChecked(Stamped, frozen=True, kw_only=True, tag="nodes_checked"):
    """The answer to `CheckNodes`: of the nodes that answered, those that are still not fit."""

    nodes: tuple[str, ...]  # that answered
    unfit: tuple[Unfit, ...] = ()


# --- the storage: what it holds, and whether it can be trusted -------------------------------------


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A step directory that was passed over, and why."""

    directory: str
    problem: str
    damaged: bool = False  # it was committed, and is not what it was


class CheckpointChosen(Stamped, frozen=True, kw_only=True, tag="checkpoint_chosen"):
    """The answer to `ChooseCheckpoint`: the newest verified step directory, or None on a fresh start."""

    directory: str | None
    step: int | None
    skipped: tuple[Skipped, ...] = ()
    bytes_read: int = 0  # what was found right before, and is unchanged, is not read again
    seconds: float = 0.0
    readers: tuple[str, ...] = ()  # nodes that read
    same_world: bool = False  # as many ranks as saved it can resume from it, and no other number


class ChoiceFailed(Stamped, frozen=True, kw_only=True, tag="choice_failed"):
    """The step directories could not even be listed: the storage does not answer as it should."""

    error: str


class CheckpointVerified(Stamped, frozen=True, kw_only=True, tag="checkpoint_verified"):
    """The answer to `VerifyCheckpoint`: every byte was read and compared."""

    directory: str
    ok: bool
    problem: str = ""
    seconds: float = 0.0
    bytes_read: int = 0
    readers: tuple[str, ...] = ()  # nodes that read
    gone: bool = False  # it was removed meanwhile: that says nothing


class StorageTested(Stamped, frozen=True, kw_only=True, tag="storage_tested"):
    """The answer to `TestStorage`: whether bytes that were written came back."""

    ok: bool
    problem: str = ""  # what is wrong, and in which act
    untrue: bool = False  # it gave back other bytes than it was given
    thorough: bool = False
    bytes: int = 0
    write_s: float = 0.0  # written and durable
    read_s: float = 0.0
    from_disk: bool = False  # read past the page cache


# --- a launch: the messages of its ranks, their ends, and why it failed ----------------------------


class OfLaunch(Stamped, frozen=True, kw_only=True):
    """Of one launch: a late message of an older one is recognised by its number."""

    launch: int


class OfRanks(OfLaunch, frozen=True, kw_only=True):
    """Of a launch whose ranks may run: once they are gone, `decide` takes it for late."""


class LaunchBegan(OfRanks, frozen=True, kw_only=True, tag="launch_began"):
    """Every task of the training step has started: all wrappers said so.

    Never of the user's own srun line, which has no wrapper, and not needed where a rank spoke before.
    """

    warm: int = 0  # ranks that a warm standby became
    cold: str = ""  # why one did not, where standbys were looked for


class RankHello(OfRanks, frozen=True, kw_only=True, tag="rank_hello"):
    """The trainer library of a rank is there: this launch can save and stop; or, with `unable`, it cannot."""

    rank: int
    node: str
    resumed_step: int | None = None  # it resumes from here; None where it has not loaded anything, or not yet
    total_steps: int | None = None  # when the work is done; None where the script does not say it
    framework: str = ""  # whose checkpoints it saves, with its version; empty: our own
    unable: str = ""  # why it saves nothing on request after all


class RankExited(OfRanks, frozen=True, kw_only=True, tag="rank_exited"):
    """A rank's process ended; `code` and `signal` are both None where its exit status is unknown."""

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None


class Progressed(OfRanks, frozen=True, kw_only=True, tag="progressed"):
    """Rank 0 completed a step.  Coalesced: at most one in `policy.progress_every_s` reaches the journal.

    Of a script without the trainer library it is what the log of its framework shows.
    """

    step: int
    tokens: int
    loss: float | None = None
    step_seconds: float | None = None
    not_finite: bool = False  # the loss is NaN or infinite: JSON has no word for these
    printed: bool = False  # read in what the ranks print, of a script without the trainer library
    held_step: int | None = None  # the newest snapshot that the memory of all nodes holds


class Replayed(OfRanks, frozen=True, kw_only=True, tag="replayed"):
    """Steps after a resume were done again, and their losses compared with those recorded the first time."""

    step: int  # the last one
    steps: int  # that were compared
    first: int | None = None  # whose loss is another one
    worst: int | None = None  # whose loss is furthest from the recorded one
    then: float | None = None  # the recorded loss of that one; None: no finite number
    now: float | None = None
    deterministic: bool = False  # the run says that it is, and nothing that losses depend on has changed
    changed: str = ""  # what has


class Corrupted(OfRanks, frozen=True, kw_only=True, tag="corrupted"):
    """A rank came to other bits where it computed a micro-batch again: its device computes wrongly."""

    rank: int
    node: str
    step: int  # that was done before it
    confirmed: int  # the newest step at which all ranks came to the same bits
    what: str = ""  # differs: the loss, names of gradients
    gpu: str = ""


class NodesPaced(OfRanks, frozen=True, kw_only=True, tag="nodes_paced"):
    """How long the slowest rank of each node worked itself for a step, without what it waited for others.

    Every few seconds; one in a while reaches the journal, and each that something followed from.
    """

    step: int  # the newest that a node reported
    step_seconds: float  # median
    own: tuple[tuple[str, float], ...]  # (node, seconds): of the newest steps
    loading: float = 0.0  # of it, seconds that a node takes to load data: the lower median
    slowest: tuple[tuple[str, int, float], ...] = ()  # a few: (node, its slowest rank, seconds that it loads data)


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
    by_disk: bool = False  # it came by way of the nodes' own disks
    framework: str = ""  # it is a checkpoint of this framework, and `directory` its path


class SaveFailed(OfRanks, frozen=True, kw_only=True, tag="save_failed"):
    """A save came to nothing; older step directories are untouched."""

    step: int
    save_id: str
    error: str
    emergency: bool = False


class TrainingFinished(OfRanks, frozen=True, kw_only=True, tag="training_finished"):
    """Rank 0: the work is done."""

    step: int


class TrainingStopped(OfRanks, frozen=True, kw_only=True, tag="training_stopped"):
    """Rank 0: all ranks leave because they were asked to, or because nobody answered them."""

    step: int
    save_id: str | None = None


class LaunchEnded(OfRanks, frozen=True, kw_only=True, tag="launch_ended"):
    """The training step's srun is over: no rank of it runs any more."""

    code: int
    finished: bool = False  # outcome.json of this launch says so, or the newest checkpoint of a framework
    stopped: bool = False
    error: str = ""
    step: int | None = None  # of that checkpoint
    target: int | None = None  # the step at which training ends, where 0 before it is no end
    unproven: bool = False  # 0 alone is no end here, and neither the last step nor a checkpoint is known


class LaunchRefused(OfRanks, frozen=True, kw_only=True, tag="launch_refused"):
    """The training step could not be started at all."""

    error: str


class StacksCollected(OfRanks, frozen=True, kw_only=True, tag="stacks_collected"):
    """The answer to `CollectStacks`: what the ranks do, and whether any of them did something else a moment later."""

    moved: bool
    summary: str  # in words: `rank 1 is in load (data.py:7); rank 0 waits in all_reduce`
    rank: int | None = None  # that does not wait for the others, where one is known
    node: str = ""  # its node
    idle: bool = False  # every rank is sure to do nothing: it waits for others, or computes, reads and writes nothing
    sure_s: float = 0.0  # one rank cannot continue for so long, and all others wait: it is stopped or asleep until then
    awaited: bool = False  # one rank only slept, in three looks, and all others wait in a collective for it


class Judged(OfLaunch, frozen=True, kw_only=True, tag="judged"):
    """The answer to `JudgeLaunch`: why the launch failed, as far as the evidence shows."""

    cause: Cause
    rule: str  # `no-evidence` where there is none
    confidence: float  # 0 to 1
    text: str = ""  # the strongest piece of evidence, shortened
    location: str = ""  # `ValueError at train.py:61 in main`
    rank: int | None = None  # that failed first, where that is known
    node: str = ""
    step: int | None = None  # the last one of the launch; where a loss went wrong, the first such
    second_cause: Cause = Cause.UNKNOWN  # what it would be without the strongest piece


class RolledBack(OfLaunch, frozen=True, kw_only=True, tag="rolled_back"):
    """The answer to `RollBack`: the lineage leads to an older step now, or `error` says why not."""

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
