"""What is reported of a launch: the messages of its ranks, their ends, and why it failed.  Pure."""

from __future__ import annotations

from stepkeeper.core.causes import Cause
from stepkeeper.core.events.nodes import Stamped


class OfLaunch(Stamped, frozen=True, kw_only=True):
    """Of one launch: a late message of an older one is recognised by its number."""

    launch: int


class LaunchBegan(OfLaunch, frozen=True, kw_only=True, tag="launch_began"):
    """Every task of the training step has started: all wrappers said so.

    Never of the user's own srun line, which has no wrapper, and not needed where a rank spoke before.
    """

    warm: int = 0  # ranks that a warm standby became
    cold: str = ""  # why one did not, where standbys were looked for


class RankHello(OfLaunch, frozen=True, kw_only=True, tag="rank_hello"):
    """The trainer library of a rank is there: this launch can save and stop; or, with `unable`, it cannot."""

    rank: int
    node: str
    resumed_step: int | None = None  # it goes on from here; None where it has not loaded anything, or not yet
    total_steps: int | None = None  # when the work is done; None where the script does not say it
    framework: str = ""  # whose checkpoints it saves, with its version; empty: our own
    unable: str = ""  # why it saves nothing on request after all


class RankExited(OfLaunch, frozen=True, kw_only=True, tag="rank_exited"):
    """A rank's process ended; `code` and `signal` are both None where its exit status is unknown."""

    rank: int
    node: str
    code: int | None = None
    signal: int | None = None


class Progressed(OfLaunch, frozen=True, kw_only=True, tag="progressed"):
    """Rank 0 completed a step.  Coalesced: at most one in `policy.progress_every_s` reaches the journal.

    Of a script without the trainer library it is what the log of its framework shows.
    """

    step: int
    tokens: int
    loss: float | None = None
    step_seconds: float | None = None
    not_finite: bool = False  # the loss is NaN or infinite: JSON has no word for these
    printed: bool = False  # read in what the ranks print, of a script without the trainer library


class Replayed(OfLaunch, frozen=True, kw_only=True, tag="replayed"):
    """Steps after a resume were done again, and their losses compared with those recorded the first time."""

    step: int  # the last one
    steps: int  # that were compared
    first: int | None = None  # whose loss is another one
    worst: int | None = None  # whose loss is furthest from the recorded one
    then: float | None = None  # the recorded loss of that one; None: no finite number
    now: float | None = None
    deterministic: bool = False  # the run says that it is, and nothing that losses depend on has changed
    changed: str = ""  # what has


class NodesPaced(OfLaunch, frozen=True, kw_only=True, tag="nodes_paced"):
    """How long the slowest rank of each node worked itself for a step, without what it waited for others.

    Every few seconds; one in a while reaches the journal, and each that something followed from.
    """

    step: int  # the newest that a node reported
    step_seconds: float  # median
    own: tuple[tuple[str, float], ...]  # (node, seconds): of the newest steps
    loading: float = 0.0  # of it, seconds that a node takes to load data: the lower median
    slowest: tuple[tuple[str, int, float], ...] = ()  # a few: (node, its slowest rank, seconds that it loads data)


class SaveBegan(OfLaunch, frozen=True, kw_only=True, tag="save_began"):
    """All ranks have agreed to save."""

    step: int
    save_id: str
    emergency: bool = False


class CheckpointCommitted(OfLaunch, frozen=True, kw_only=True, tag="checkpoint_committed"):
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


class SaveFailed(OfLaunch, frozen=True, kw_only=True, tag="save_failed"):
    """A save came to nothing; older step directories are untouched."""

    step: int
    save_id: str
    error: str
    emergency: bool = False


class TrainingFinished(OfLaunch, frozen=True, kw_only=True, tag="training_finished"):
    """Rank 0: the work is done."""

    step: int


class TrainingStopped(OfLaunch, frozen=True, kw_only=True, tag="training_stopped"):
    """Rank 0: all ranks leave because they were asked to, or because nobody answered them."""

    step: int
    save_id: str | None = None


class LaunchEnded(OfLaunch, frozen=True, kw_only=True, tag="launch_ended"):
    """The training step's srun is over: no rank of it runs any more."""

    code: int
    finished: bool = False  # outcome.json of this launch says so, or the newest checkpoint of a framework
    stopped: bool = False
    error: str = ""
    step: int | None = None  # of that checkpoint
    target: int | None = None  # the step at which training ends, where 0 before it is no end
    unproven: bool = False  # 0 alone is no end here, and neither the last step nor a checkpoint is known


class LaunchRefused(OfLaunch, frozen=True, kw_only=True, tag="launch_refused"):
    """The training step could not be started at all."""

    error: str


class StacksCollected(OfLaunch, frozen=True, kw_only=True, tag="stacks_collected"):
    """The answer to `CollectStacks`: what the ranks do, and whether any of them did something else a moment later."""

    moved: bool
    summary: str  # in words: `rank 1 is in load (data.py:7); rank 0 waits in all_reduce`
    rank: int | None = None  # that does not wait for the others, where one is known
    node: str = ""  # its node
    idle: bool = False  # every rank is sure to do nothing: it waits for others, or computes, reads and writes nothing
    sure_s: float = 0.0  # one rank cannot go on for so long, and all others wait: it is stopped, or asleep until then


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
