"""What happened: the only input of `decide`.

The modules of this package declare them, by what they are about.  Each is stamped by its source with `at`, in Unix
seconds that never go backwards (`loop_tools`).  Events are written to the journal as they are, so a field is
only ever added, with a default.

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

from stepkeeper.core.events.attempt import (
    AttemptStarted,
    CheckpointChosen,
    CheckpointVerified,
    ChoiceFailed,
    ClockSet,
    PartFailed,
    Requested,
    RunDirectoryGone,
    Skipped,
    StorageTested,
    Superseded,
    Suspended,
    Tick,
)
from stepkeeper.core.events.launches import (
    CheckpointCommitted,
    Judged,
    LaunchBegan,
    LaunchEnded,
    LaunchRefused,
    NodesPaced,
    Progressed,
    RankExited,
    RankHello,
    Replayed,
    RolledBack,
    SaveBegan,
    SaveFailed,
    StacksCollected,
    TrainingFinished,
    TrainingStopped,
)
from stepkeeper.core.events.nodes import (
    BusEnded,
    Exclusion,
    NodeFaulted,
    NodesChecked,
    NodesCleared,
    NodesNotCleared,
    SlurmdGone,
    Unfit,
    WatcherLost,
    WatcherReady,
)
from stepkeeper.core.events.slurm import (
    IdleNodes,
    JobFacts,
    JobState,
    NodeSignaled,
    NodesReleased,
    RequeueAnswered,
    SignalReceived,
    SlurmAnswered,
)

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

__all__ = [
    "AttemptStarted",
    "BusEnded",
    "CheckpointChosen",
    "CheckpointCommitted",
    "CheckpointVerified",
    "ChoiceFailed",
    "ClockSet",
    "Event",
    "Exclusion",
    "IdleNodes",
    "JobFacts",
    "JobState",
    "Judged",
    "LaunchBegan",
    "LaunchEnded",
    "LaunchRefused",
    "NodeFaulted",
    "NodeSignaled",
    "NodesChecked",
    "NodesCleared",
    "NodesNotCleared",
    "NodesPaced",
    "NodesReleased",
    "PartFailed",
    "Progressed",
    "RankExited",
    "RankHello",
    "Replayed",
    "Requested",
    "RequeueAnswered",
    "RolledBack",
    "RunDirectoryGone",
    "SaveBegan",
    "SaveFailed",
    "SignalReceived",
    "Skipped",
    "SlurmAnswered",
    "SlurmdGone",
    "StacksCollected",
    "StorageTested",
    "Superseded",
    "Suspended",
    "Tick",
    "TrainingFinished",
    "TrainingStopped",
    "Unfit",
    "WatcherLost",
    "WatcherReady",
]
