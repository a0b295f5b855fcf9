"""The attempt itself, its clock, and who may end it.  Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepkeeper.core.baseline import Baseline
from stepkeeper.core.causes import SkippedData, Tried
from stepkeeper.core.events.nodes import Exclusion, Stamped


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
    batch: bool = True  # false: in the allocation of `salloc` or a bare `srun`, which nobody can requeue


class Tick(Stamped, frozen=True, kw_only=True, tag="tick"):
    """The deadline of the state has come."""


class Suspended(Stamped, frozen=True, kw_only=True, tag="suspended"):
    """This process did not run for `seconds`: the job was suspended, or its batch host stood still."""

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


# What the storage holds, and whether it can be trusted.  Pure.


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
