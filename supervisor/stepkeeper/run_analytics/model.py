"""The words of a timeline.  Instants and spans are whole microseconds: sums are exact."""

from __future__ import annotations

import math
import statistics
from array import array
from enum import StrEnum
from itertools import pairwise
from typing import Self

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper_trainer.formats.steps import COMMITTED

SECOND = 1_000_000  # microseconds
Key = tuple[int, int]  # attempt, launch
SILENT_S = 120.0  # each step reaches the supervisor; what writes nothing for longer is pointed out
SILENT_STEPS = 10


def micro(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return round(seconds * SECOND)


def left_out_in_words(step: int, steps: int) -> str:
    """Say what a window of data is that training leaves out.

    >>> left_out_in_words(18, 1), left_out_in_words(25, 1000)
    ('the data of 1 step, at step 18', 'the data of 1,000 steps, at step 25')
    """
    return f"the data of {steps:,} {'step' if steps == 1 else 'steps'}, at step {step:,}"


def exit_meaning(code: int) -> str:
    """Say what an exit code of a supervisor means, that of a newer version included."""
    return next((each.meaning for each in ExitCode if each == code), "a code that this Stepkeeper does not know")


def patience(step: int) -> int:
    """Return how long a run that lives may say nothing; both in microseconds, `step` the usual time of one."""
    return max(micro(SILENT_S), SILENT_STEPS * step)


class Use(StrEnum):
    """What a span of time went into.  Every microsecond of a run goes into exactly one."""

    meaning: str  # what is counted

    PRODUCTIVE = "productive", "steps that count: no later launch did them again"
    LOST = "lost", "steps that were redone, or would have to be, and the step that an end cut off"
    SAVING = "saving", "training waited, or was slowed, for a checkpoint"
    STARTING = "starting", "watchers, checkpoint, nodes, processes, loading, up to the first step"
    STOPPING = "stopping", "ranks leave, the checkpoint is read back, the job is requeued"
    HUNG = "hung", "no step, no save, and nobody had acted yet"
    SUSPENDED = (
        "suspended",
        "nothing of the run ran: Slurm, an admin or a gang had suspended it, or its batch host did not run",
    )
    QUEUE = "queue", "between two attempts: in Slurm's queue, or no supervisor ran"
    UNKNOWN = "unknown", "a command without the trainer library ran: its steps are not known"
    SPARE = "spare", "nodes that were held and took no part: no time of the clock"

    def __new__(cls, value: str, meaning: str) -> Self:
        """Attach the meaning to the word."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


class Ending(StrEnum):
    """Why a launch ended, in one word.

    A later one here takes the place of an earlier one: a rank that failed did so since its node did.
    """

    RUNNING = "running"
    NO_UPDATE = "no update"
    STOPPED = "stopped"  # a person or the training asked for it
    RESTARTED = "restarted"  # Stepkeeper ended it to go on otherwise: without a slow node, on more nodes
    FAILURE = "failure"
    LOSS = "bad loss"
    HANG = "hang"
    NODE = "node"
    REQUEUED = "requeued"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    FINISHED = "finished"


class Span(msgspec.Struct, frozen=True):
    """A stretch of the run's time, from `begin` up to `end`, with one use."""

    begin: int
    end: int
    use: Use
    attempt: int
    launch: int | None = None
    held: int = 0  # nodes that the run had
    working: int = 0  # of them, those of the launch

    @property
    def length(self) -> int:
        """Microseconds."""
        return self.end - self.begin


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A save that came to an end."""

    requested: int
    durable: int
    step: int
    directory: str = ""  # empty where it came to nothing
    bytes: int = 0
    emergency: bool = False
    error: str = ""


class Launch(msgspec.Struct, kw_only=True):
    """One start of the training step."""

    attempt: int
    number: int
    began: int
    ended: int | None = None  # the end of its Slurm step
    nodes: tuple[str, ...] = ()
    resumed_step: int = 0  # 0: from the beginning
    in_memory: bool = False  # that step was a snapshot, and no checkpoint
    resumed_from: str = ""
    all_tasks_started: bool = False  # every task started
    library_seen: bool = False  # a rank with the trainer library sent a message
    saves: list[Saved] = msgspec.field(default_factory=list)
    ending: Ending = Ending.RUNNING
    why: str = ""  # what ended it, in words
    reason: str = ""  # the tag of the first reason
    cause: str = ""  # the verdict on a failure (docs/verdicts.md)
    evidence: str = ""  # its strongest piece
    decided: str = ""  # what came then, in words
    last_step: int | None = None  # from its rows

    @property
    def key(self) -> Key:
        """By which its rows are known."""
        return self.attempt, self.number

    @property
    def name(self) -> str:
        """`ATTEMPT.LAUNCH`, as in logs."""
        return f"{self.attempt}.{self.number}"


class Attempt(msgspec.Struct, kw_only=True):
    """One requeue period."""

    number: int
    job_id: int
    restart_count: int
    began: int
    ended: int  # of the newest one that still runs: its newest record
    said_end: bool = False  # it ended with a final record
    exit_code: int | None = None
    why: str = ""
    nodes: tuple[str, ...] = ()  # at its start
    gpus_per_node: int = 0  # 0: not known
    held: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (from when, nodes that it used)
    left: dict[str, int] = msgspec.field(default_factory=dict)  # node -> since when it is used no more
    phases: list[tuple[int, str]] = msgspec.field(default_factory=list)  # (from when, phase)
    resume: tuple[int, str] = (0, "")  # step and directory that the next launch starts from
    still: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (begin, end): the supervisor did not run
    launches: list[Launch] = msgspec.field(default_factory=list)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong, or nearly."""

    at: int
    attempt: int
    launch: int | None
    kind: str  # `node fault`, `node lost`, `save failed`, `step damaged`, `not fit`, `drift`
    what: str
    decided: str = ""
    node: str = ""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step directory that there is, or was."""

    step: int
    directory: str
    at: int | None = None  # when it was committed
    bytes: int = 0
    seconds: float = 0.0  # from the request to durable
    emergency: bool = False
    # verified; committed, not yet verified; or damaged.  Besides: suspect, pinned, pruned, gone, rolled back
    states: tuple[str, ...] = (COMMITTED,)
    problem: str = ""
    resumed: int = 0  # launches that started from it


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time went.

    `wall` are microseconds of the clock, `node_time` microseconds of nodes; both add up exactly:
    `sum(wall.values()) == wall_total`, `sum(node_time.values()) == node_total`.
    """

    wall: dict[Use, int]
    node_time: dict[Use, int]
    wall_total: int
    node_total: int

    def with_queue(self, waited: int) -> Accounts:
        """Return the accounts with so many microseconds more in the queue, which cost no node-time."""
        wall = {**self.wall, Use.QUEUE: self.wall[Use.QUEUE] + waited}
        return msgspec.structs.replace(self, wall=wall, wall_total=self.wall_total + waited)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: productive time over the time that passed.

        The clock runs from the first attempt's start to the last one's end (or now), waiting in the queue between
        attempts included; the wait before the first attempt is not known to the run.  A step is productive where no
        later launch did it again.  After Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning
        Research Clusters, arXiv 2410.21680.  None where nothing is known: no time passed, or steps were not reported.
        """
        known = self.wall_total - self.wall[Use.UNKNOWN]
        return self.wall[Use.PRODUCTIVE] / known if known > 0 else None

    @property
    def goodput(self) -> float | None:
        """Productive node-time over all node-time that the run held, spares included; the queue costs none.

        The runtime part of Google's ML Productivity Goodput (2024): progress that was kept, of the time in which the
        resources were there.  Nodes that the run gave up count up to that moment.  Those of a suspended job count:
        Slurm lends its CPUs to others, and goes on holding its GPUs and its memory.
        """
        known = self.node_total - self.node_time[Use.UNKNOWN]
        return self.node_time[Use.PRODUCTIVE] / known if known > 0 else None


# The steps of each launch, in columns: a million rows take 32 MB.

ROWS_MAX = 20_000_000
NONE = math.nan  # a step without a loss; one whose loss is no number has an infinite one here
AT_MAX = 1e11  # Unix seconds beyond it are a torn line


class Rows:
    """The completed steps of one launch, oldest first."""

    __slots__ = ("_usual", "at", "loss", "rate", "step", "tokens")

    def __init__(self) -> None:
        self.at = array("q")  # microseconds
        self.step = array("q")
        self.loss = array("d")
        self.rate = array("d")  # the learning rate
        self.tokens = 0  # of the newest
        self._usual = (0, 0)  # of so many rows, the median

    def add(self, at: float, step: int, loss: float | None, tokens: int = 0, rate: float | None = None) -> None:
        """Append one; time never goes back."""
        instant = micro(at)
        if self.at and instant < self.at[-1]:
            instant = self.at[-1]
        self.at.append(instant)
        self.step.append(step)
        self.loss.append(NONE if loss is None else math.inf if math.isnan(loss) else loss)
        self.rate.append(NONE if rate is None else rate)
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.at)

    def median_step(self) -> int:
        """Return the median time of a step, microseconds; 0 where that is not known."""
        count, known = self._usual
        if count != len(self):
            times = [
                (after - before) // max(1, later - earlier)
                for (before, after), (earlier, later) in zip(pairwise(self.at), pairwise(self.step), strict=True)
            ]
            known = int(statistics.median(times)) if times else 0
            self._usual = (len(self), known)
        return known


class RowTable:
    """The rows of `metrics.csv` by launch, line by line."""

    def __init__(self) -> None:
        self.rows: dict[Key, Rows] = {}
        self._lines = 0

    def take(self, line: bytes) -> None:
        """Take the next line; one that is torn is passed over, and so is what comes after `ROWS_MAX` lines."""
        self._lines += 1
        cells = line.split(b",")
        if self._lines > ROWS_MAX:
            return
        try:
            step, tokens, at = int(cells[0]), int(cells[2]), float(cells[5])
            loss = float(cells[1]) if cells[1] else None
            rate = float(cells[3]) if cells[3] else None
            key = int(cells[6]), int(cells[7])
        except (ValueError, IndexError):
            return  # the header, or torn
        if 0 < at < AT_MAX and 0 <= step < 2**53:
            self.rows.setdefault(key, Rows()).add(at, step, loss, tokens, rate)
