"""The numbers that decisions depend on, each named, with its unit and a reason for its value.

`Policy` is what users and administrators set.  `Limits` below it are constants: `decide` compares with them in the same
way, tests and replays give them other values, and no setting changes them.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import causes
from stepkeeper.core.causes import Cause

STOP_SIGNALS = {"TERM": 15, "INT": 2, "HUP": 1, "QUIT": 3, "USR1": 10, "USR2": 12}  # and their numbers on Linux


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants.  Seconds unless the name says otherwise."""

    start_within_s: float = 120.0
    """From start or relaunch to watchers ready and checkpoint chosen; verification counts apart.  `srun` takes seconds,
    with a busy controller half a minute: after two minutes it is no slow start any more."""

    clear_within_s: float = 60.0
    """Watchers confirm that nothing of the launch before is left.  A killed process that is still writing ends within
    seconds; one that a hung file system keeps for a minute holds the node for hours."""

    announce_within_s: float = 600.0
    """From the begin of a launch (of the user's own srun line: from StartLaunch) to the first message of the
    trainer library; then the user is warned at once.  Imports from a shared file system take minutes; the
    warning ends nothing."""

    watcher_back_within_s: float = 30.0
    """A restarted bus answers on every node; else a node is taken for lost.  A Slurm step starts within
    seconds.  Beside training, a node that answered on the bus before gets this time twice."""

    ask_within_s: float = 15.0
    """Slurm answers, or counts as unreachable: the client gives up a call after 6 s, and the next one after 13."""

    time_limit_notice_s: float = 1200.0
    """A user signal with less than this left to the time limit is taken for the notice of it.  Users ask for it ten
    minutes early or less, and Slurm may send it a minute earlier still."""

    commit_grace_s: float = 60.0
    """When a rank died while a save was in flight: how long the survivors may finish the commit.  Files that were
    staged before can still be written; a collective that waits for the dead rank never ends."""

    kill_within_s: float = 30.0
    """From SIGKILL to the end of the training step.  As long as Slurm's default `KillWait`."""

    close_within_s: float = 10.0
    """From the word to the watchers to the end of their Slurm step.  They have nothing to write."""

    hurry_within_s: float = 1.0
    """Closing takes no longer than this once Slurm's limit has passed: the requeue comes first."""

    verify_within_s: float = 120.0
    """Reading back the emergency checkpoint before the requeue, if the deadline allows.  It is read again before it is
    resumed from, so a reading that takes longer loses nothing."""

    requeue_retry_s: float = 2.0
    """After the first try of a requeue that Slurm did not take; doubled from try to try.  A busy controller answers the
    next one."""

    requeue_retry_max_s: float = 30.0
    """The longest pause between two tries: the job waits no longer than this once the controller is back."""

    requeue_tries_max: int = 14
    """About five minutes: a controller that fails over is back by then."""

    exclude_for_s: float = 86_400.0
    """A faulty node that nobody drained is excluded from the job's next attempts for so long: within a day somebody has
    looked at it."""

    slurm_again_s: float = 10.0
    """Between two questions while Slurm is away: six calls a minute do no harm to a controller that starts."""

    requeue_within_s: float = 45.0
    """Slurm takes the requeue, with up to seven calls before and after it, or it is tried again.  Each of them gives up
    after `SlurmCommands`' own patience, about six seconds."""

    unfit_looks_max: int = 4
    """A node that failed so many checks is given back to Slurm: over an hour has passed by then."""

    unfit_retry_s: float = 15.0
    """Most nodes fail the checks before a launch: the cause is common, and the checks are repeated after this."""

    unfit_wait_s: float = 1800.0
    """They are repeated for so long; then the run stops.  A mount or a driver that is restarted everywhere is back
    within half an hour."""

    storage_test_within_s: float = 60.0
    """A dummy save and its reading back, at the start and where the storage is suspect; longer means that it hangs."""

    storage_retry_s: float = 15.0
    """The storage failed its test at the start: it is tested again after this; doubled from try to try."""

    storage_retry_max_s: float = 120.0
    """The longest pause between two tests: the run waits no longer than this once the storage is back."""

    storage_suspect_after: int = 2
    """Committed step directories in a row that are damaged: one may be chance; after two the storage is tested."""

    bus_retry_max_s: float = 10.0
    """The longest pause before the bus is started again: a node is unwatched for that time."""

    bus_restarts_max: int = 20
    """Restarts of a bus that did not last: about three minutes of them, then it is no accident."""

    bus_lasts_s: float = 600.0
    """A bus on which all watchers have answered for so long has lasted: its restart counts as the first."""

    progress_every_s: float = 60.0
    """At most one progress record in this time reaches the journal (100 MB a week is the limit)."""

    judge_within_s: float = 20.0
    """Logs, exits and error files of a failed launch show why it failed, while the next one is prepared; then its
    cause counts as unknown.  The end of each log is read, not all of it."""

    judged_from: float = 0.6
    """A verdict of less confidence (0 to 1) decides as `unknown` does.  Each rule says its own (docs/verdicts.md)."""

    unseen_progress_s: float = 3600.0
    """A launch without the trainer library that ran so long may have progressed: its failure counts as the first one,
    but the same failure `failures_max` times ends the run all the same."""

    notify_within_s: float = 30.0
    """The notify command and Slurm's job comment together: the run has ended, and only they are waited for."""

    hang_steps: float = 20.0
    """Silence of so many usual steps (median and spread of the run's own) has the ranks' stacks looked at.  A slow
    step is a few times the median; a validation or a save is accounted for apart (`pace.silence_s`)."""

    hang_steady_s: float = 30.0
    """Where the last steps were even and it is a hundred of them and more, such a silence is looked at already; it ends
    the launch only if every rank is known to do nothing: it waits for others, or computes, reads and writes nothing."""

    hang_certain_s: float = 2.0
    """So long a silence is looked at first, or one of ten steps (the 99th percentile) where that is longer: it ends
    the launch only if a rank cannot go on before the next look would end it, or does nothing but sleep, and all others
    wait.  Words of steps come once a second, and the look takes 3 s more."""

    loss_words: int = 5
    """Progress messages in a row (at most one a second) until a wrong loss counts: single ones pass."""

    loss_sigmas: float = 8.0
    """A jump is so many times the usual spread of the loss's logarithm above its median.  Far out, because a
    rollback may follow."""

    loss_times: float = 1.5
    """And at least so many times the usual loss: where the spread is tiny, everything is many times it."""

    skip_data_max: int = 3
    """Times that data is left out in a run: what goes wrong more often is not the data's."""

    replay_times: float = 1.02
    """Losses of a run that is not deterministic differ when they are so many times as high or low, and by more than
    half of what neighbouring steps differ by.  Another order of summation moves a
    loss by far less than a fiftieth."""

    slow_node_times: float = 1.3
    """A slow node works at least so many times as long as the others: smaller differences are the
    ordinary spread of nodes and batches."""

    slow_node_for_s: float = 120.0
    """And has done so for so long: a save or a validation on one node alone is over by then."""

    slow_launch_times: float = 1.15
    """A launch whose usual step takes so many times as long as in the launches before it, on as many nodes, is
    reported: nothing else follows, so it may be near."""

    stacks_within_s: float = 30.0
    """The stacks of all ranks, taken twice with seconds between; without them by then, the training counts as hung."""

    excluded_max: int = 8
    """Nodes that a job excludes at a time, the newest faults first, lost nodes last: more would leave it nothing to run
    on.  0: no limit, as a run of 0.1 could choose.

    Where its partition has too few other nodes like its own, a requeue excludes fewer: lost nodes are allowed again
    first, then those with the oldest faults.
    """

    slurm_away_for_s: float = 3600.0
    """A launch that cannot begin because Slurm does not answer waits so long; then it counts as failed.  A controller
    that is moved or upgraded is back by then."""

    storage_wait_s: float = 1800.0
    """The storage failed its test at the start: the test is repeated for so long; then the run stops.  A file server
    that fails over is back within half an hour."""

    stop_within_s: float = 900.0
    """Of a save that a person or the growth of the job asked for, until the ranks are killed: longer than a save takes
    that nothing hurries.  A run whose saves take longer gets three times as long as its longest one."""

    node_losses_max: int = 10
    """The run stops after more than this many losses and faults of nodes without a newly verified step in between: not
    even a thousand nodes lose as many by chance."""

    losses_together_s: float = 60.0
    """Nodes that are lost within this time of each other have one cause, such as the power of their rack: they count as
    one loss."""

    on_configuration: str = "stop"
    """Rows of the recovery ladder for which there is one sensible order.  The program was started wrongly: it fails in
    the same way again."""

    on_version_mismatch: str = "stop"
    """Libraries do not fit each other: the same."""

    on_checkpoint: str = "rollback, stop"
    """A checkpoint could not be loaded: an older one may be.  If not, none will be."""

    on_collective_timeout: str = "relaunch"
    """Ranks waited for others, and nothing says why: as for an unknown cause, the number of failures is the limit."""

    on_node_fault: str = "leave, requeue"
    """The hardware of a node failed: in no budget of the training."""

    on_node_lost: str = "leave, requeue"
    """A node was lost: the same."""

    on_gpu_memory: str = "relaunch, stop"
    """A GPU ran out of memory: another start helps where the memory was fragmented, and only there."""

    on_host_memory: str = "relaunch, leave, stop"
    """A node ran out of memory: something else may use it up there."""

    on_segfault: str = "relaunch, leave, stop"
    """A process crashed in native code: the node may be the cause."""

    on_storage: str = "relaunch after 10 s, relaunch after 30 s, relaunch after 120 s, relaunch after 600 s, stop"
    """A file system was full or failed, and may recover.  These failures do not count for `failures_max`."""

    on_network: str = "relaunch, requeue, stop"
    """The network failed: other nodes have another part of it."""

    on_hang: str = "relaunch, leave, requeue, stop"
    """The training hung: a node may be the cause that no sensor shows."""

    on_unknown: str = "relaunch"
    """The cause is unknown, or has no row of its own: the number of failures is the limit."""


class Policy(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is set, in the group `policy`.  Seconds unless the name says otherwise."""

    choose_within_s: float = 3600.0
    """Time limit of reading the newest step directory byte by byte before a launch.  Large states on slow storage take
    longer."""

    begin_within_s: float = 300.0
    """Time limit from the start of a launch until every task runs; the import of a container counts.  A Slurm step that
    is never created is a failed launch."""

    save_margin_s: float = 4.0
    """Time between the end of a save and the moment at which Slurm kills the job.  The requeue needs it."""

    stop_signal: str = "TERM"
    """The signal by which a script without the trainer library saves and ends.  It is TERM, INT, HUP, QUIT, USR1 or
    USR2.  Its ranks get it at a notice, before the time limit and at `stepkeeper stop`.  They get SIGKILL only when
    the time is over."""

    time_limit_margin: float = 0.0
    """Save and exit this many seconds before the job's time limit, with or without a signal.  0: as long as the
    run's saves take, at least 60 s, at most a fifth of the attempt."""

    leave_within_s: float = 15.0
    """Time limit from the commit (or the end of training) to the exit of the last rank."""

    read_back: str = "off"
    """Verify saves while the training continues, past the page cache.  If possible, a node verifies them that did
    not write them.  `newest`: one at a time, always the newest.  `all`: every save.  `off`: none."""

    failures_max: int = 3
    """The run stops after this many failed launches without a newly verified step in between."""

    exclude_lost_for_s: float = 900.0
    """A lost node is given back before a requeue, and excluded from the job for this time.  Slurm may not have
    noticed the loss yet.  Choose more than the site's `SlurmdTimeout`.  The exclusion ends with the job's next
    requeue after that time."""

    grow_back: str = "launch"
    """How a launch with fewer nodes than wanted grows again.  `off`: no node returns.  `launch`: a node that only
    failed its check is checked again, and used again from the next launch on.  `checkpoint`: also right after a
    checkpoint.  Then the job is also requeued once enough similar nodes have been idle for a while."""

    grow_idle_s: float = 600.0
    """How long other nodes must have been idle before the job is requeued to get them.  A node that failed its
    check waits this long for the next check, then twice as long, and so on.  Slurm is asked for idle nodes every
    half of this time, and only while nodes are missing."""

    hang_watch: bool = True
    """Detect training that has stopped making progress, by its own step times."""

    hang_least_s: float = 120.0
    """The shortest silence that ends a launch, with two exceptions.  Half a minute is enough in a run with even steps,
    if no rank does anything.  Seconds are enough if one rank is stopped or only sleeps, and all others wait."""

    hang_most_s: float = 3600.0
    """A longer silence is checked in any case, also before the run has its first statistics.  A start may count as
    silent too.  It does if the trainer library's first message takes ten times as long as in any earlier launch."""

    loss_not_finite: str = "rollback"
    """What follows if the loss stays NaN or infinite: `off`, `report` (a line in the log) or `rollback`.  A
    rollback ends the launch; the next one resumes from the verified step before it, as `on_numerical` says."""

    loss_spike: str = "report"
    """The same for a loss that jumps and stays high, also after a resume."""

    skip_data_steps: int = 0
    """After a rollback because of a wrong loss: leave out the data of this many steps from that step on.  The
    sampler must be a GlobalSampler, or have its `skip`.  0: leave out nothing."""

    slow_node: str = "report"
    """What follows if the ranks of a node take longer for a step than those of other nodes.  The others wait for
    them.  `report`: log, metrics, run report.  `replace`: by a spare of the allocation, if there is one, after the
    next checkpoint."""

    on_exception: str = "relaunch, stop"
    """The actions for the first, the second, ... failure in the same way, if the program raised an error.  They are
    relaunch, leave (the node), rollback (to an older verified step), requeue and stop.  `relaunch after 30 s`
    waits."""

    on_numerical: str = "rollback, stop"
    """The same if the training went numerically wrong."""

    def row(self, cause: Cause) -> tuple[causes.Try, ...]:
        """Return what failures of a cause lead to, the first one first."""
        text: str = getattr(self, f"on_{cause.value}", self.on_unknown)
        return causes.parse_ladder(text)
