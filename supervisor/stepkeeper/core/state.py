"""Where an attempt stands: one frozen record, of which `decide` makes the next.

It is made of records by idea: what changes together lies together.  Where a record says what is the case, None says
that it is not.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from stepkeeper.core.baseline import Baseline, Pace
from stepkeeper.core.causes import Cause, SkippedData, Tried
from stepkeeper.core.events import Exclusion, Judged
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.losses import Losses
from stepkeeper.core.reasons import Finding, Why
from stepkeeper.core.stragglers import Stragglers

NODE_TERM = "node TERM"  # a watcher got SIGTERM, and nobody else
LIMIT = "limit"  # the time limit is near, by our own clock
NO_SIGNAL = "no signal"  # asked of our own accord: no answer, and a job that just runs, mean nothing


class Phase(StrEnum):
    """What the supervisor is doing."""

    STARTING = "starting"  # watchers, checkpoint, clean nodes: then the launch
    TRAINING = "training"
    SAVING = "saving"  # ranks were asked to save and leave
    STOPPING = "stopping"  # ranks leave or are killed: waiting for the end of their Slurm step
    CLOSING = "closing"  # watchers leave, the last checkpoint is read back
    REQUEUEING = "requeueing"
    DONE = "done"


class Next(StrEnum):
    """What comes when the ranks are gone."""

    RELAUNCH = "relaunch"
    REQUEUE = "requeue"
    END = "end"


class SlurmReachability(StrEnum):
    """What is known while training goes on and no watcher answers: are the nodes gone, or is Slurm away?"""

    NONE = "none"
    ASKED = "asked"  # no watcher came back in time: Slurm is being asked
    AWAY = "away"  # it did not answer, so no bus can start: training goes on, the bus is tried again
    LAST = "last"  # it answered: the bus is tried once more, then the nodes are lost


class BusStatus(StrEnum):
    """Of the watchers' Slurm step."""

    ENDED = "ended"  # or never started
    OPEN = "open"
    LEAVING = "leaving"  # the watchers were asked to leave


class Choice(StrEnum):
    """Which checkpoint the next launch begins with."""

    OPEN = "open"
    ROLLING_BACK = "rolling back"  # the lineage is being led to an older step; then it is chosen anew
    CHOSEN = "chosen"


class Question(StrEnum):
    """The question to Slurm that is under way."""

    ASKED = "asked"
    OUTDATED = "outdated"  # something happened since: it is asked again after the answer


class Timer(StrEnum):
    """What falls due at an instant."""

    # what a phase waits for, one at a time; too late, and the next rougher means comes
    WATCHERS = "watchers"  # they answer, or are back
    CHECKPOINT_CHOICE = "checkpoint_choice"
    CAUSE = "cause"  # why the launch before failed
    PAUSE = "pause"  # what made it fail may pass
    UNFIT_RETRY = "unfit_retry"
    CLEARING = "clearing"  # every node is asked whether it is clear and fit
    NOT_CLEARED = "not_cleared"  # that takes too long: which nodes are missing?
    TASKS_STARTED = "tasks_started"
    LIBRARY = "library"  # its first message
    SAVE = "save"
    RANKS_LEAVE = "ranks_leave"
    KILL = "kill"  # the end of what was killed
    READ_BACK = "read_back"
    LEAD_BACK = "lead_back"  # the lineage goes back to what was confirmed, before the job leaves
    WATCHERS_LEAVE = "watchers_leave"
    SLURM_ANSWER = "slurm_answer"
    SLURM_RETRY = "slurm_retry"
    REQUEUE_ANSWER = "requeue_answer"
    REQUEUE_TRY = "requeue_try"
    # what runs beside it
    STORAGE_TEST = "storage_test"  # in STARTING: the end of the test under way
    STORAGE_RETRY = "storage_retry"  # in STARTING: the next one
    HANG = "hang"  # in TRAINING: until then a message of the ranks must come
    LIMIT = "limit"  # the job's time limit is near
    REQUEUE_END = "requeue_end"  # also where Slurm never answers


BESIDE = {
    Timer.STORAGE_TEST: (Phase.STARTING,),
    Timer.STORAGE_RETRY: (Phase.STARTING,),
    Timer.HANG: (Phase.TRAINING,),
    Timer.LIMIT: (Phase.STARTING, Phase.TRAINING),
    Timer.REQUEUE_END: (Phase.REQUEUEING,),
}  # the phases in which they count


class Timers(msgspec.Struct, frozen=True):
    """When what falls due; Unix seconds."""

    at: dict[Timer, float] = {}

    def get(self, timer: Timer) -> float | None:
        """Return when it falls due; None where it does not run."""
        return self.at.get(timer)

    @property
    def wait(self) -> Timer | None:
        """What the phase waits for."""
        return next((timer for timer in self.at if timer not in BESIDE), None)

    def waiting(self, timer: Timer | None, at: float | None) -> Timers:
        """Have the phase wait for this, and for nothing else; None: for nothing."""
        beside = {each: due for each, due in self.at.items() if each in BESIDE}
        return Timers(beside if timer is None or at is None else {timer: at, **beside})

    def beside(self, timer: Timer, at: float | None) -> Timers:
        """Set what runs beside the phase's wait; None: it does not."""
        others = {each: due for each, due in self.at.items() if each is not timer}
        return Timers(others if at is None else {**others, timer: at})

    def due(self, phase: Phase, at: float) -> Timer | None:
        """Return what is due in a phase: what runs beside it first, but for silence."""
        due = [timer for timer, when in self.at.items() if at >= when and phase in BESIDE.get(timer, (phase,))]
        return max(due, key=_ORDER.index, default=None)

    def wake_at(self, phase: Phase) -> float | None:
        """Return when the first falls due that counts in a phase."""
        return min((at for timer, at in self.at.items() if phase in BESIDE.get(timer, (phase,))), default=None)


_ORDER = (
    Timer.HANG,
    *(timer for timer in Timer if timer not in BESIDE),
    Timer.STORAGE_RETRY,
    Timer.STORAGE_TEST,
    Timer.REQUEUE_END,
    Timer.LIMIT,
)


class Blame(StrEnum):
    """Whose budget a relaunch counts in."""

    TRAINING = "training"
    NODE = "node"
    SLURM = "slurm"  # it did not answer: in no budget


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What comes when the ranks are gone, and why."""

    next: Next
    why: Why
    code: ExitCode = ExitCode.REQUEUED  # of the supervisor, where it ends
    blame: Blame = Blame.TRAINING
    cause: Cause | None = None  # of the failure that led to it, where that is known
    to_grow: bool = False  # nothing failed: the ranks were asked to leave, because there are more nodes


class Resting(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the allocation that failed its check and takes no part for now."""

    node: str
    look_at: float | None  # Unix seconds: it is looked at again; None: it is fit, and waits for a launch


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of nodes that could come back; all of it is empty while none is missing."""

    resting: tuple[Resting, ...] = ()
    looked_at: tuple[str, ...] = ()  # are being checked
    look_until: float | None = None  # their answer must come
    failed: tuple[tuple[str, int], ...] = ()  # checks that a node failed in this attempt
    ask_at: float | None = None  # Slurm is asked for idle nodes
    idle_since: float | None = None  # there have been enough

    @property
    def wake_at(self) -> float | None:
        """When something is to be done."""
        looks = (each.look_at for each in self.resting if each.node not in self.looked_at)
        return min((at for at in (*looks, self.look_until, self.ask_at) if at is not None), default=None)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that failed: why is being found out while the next one is prepared."""

    judge_by: float  # Unix seconds: then its cause counts as unknown
    judged: Judged | None = None


class Suspended(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds in which nothing ran, and which say nothing of how fast this run is."""

    step: float = 0.0  # of the newest suspension, until the step that it fell into was reported
    save: float = 0.0  # during the save in flight


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which job and attempt this is, and what Slurm said of it; set once, but for `end_at`."""

    job_id: int = 0
    restart_count: int = 0
    attempt: int = 0
    batch_node: str = ""
    has_batch_script: bool = True  # the job can be requeued, or submitted again
    kill_wait_s: float = 30.0
    wrapped: bool = True  # every task of a launch says when it has started
    started_at: float | None = None
    end_at: float | None = None  # the job's time limit, as Slurm said last


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of the allocation: those that a launch may use, and those that are left."""

    allocated: tuple[str, ...] = ()  # at the start of the attempt, in Slurm's order
    usable: tuple[str, ...] = ()  # without lost and faulty ones
    wanted: int = 0  # by a launch; the others are spares
    min: int = 0  # that a launch may shrink to; 0: never
    counts: tuple[int, ...] = ()  # that a launch may have; empty: any
    launched_before: tuple[str, ...] = ()  # of the launch before, or of the attempt before
    lost: tuple[tuple[str, float], ...] = ()  # (node, when): Slurm may not have noticed yet
    excluded: tuple[Exclusion, ...] = ()  # the weakest reason first: lost nodes, then faulty ones, each oldest first
    readmit: tuple[str, ...] = ()  # that we excluded earlier, and do no more
    switches: dict[str, str] = {}  # what Slurm has above each node, as far as it is known: `core.placement`
    releasing: bool = False  # some that were left are still in the allocation, and can be given back
    growth: Growth = Growth()


class Watchers(msgspec.Struct, frozen=True, kw_only=True):
    """The bus, and which watchers answer on it."""

    bus: int = 0  # the number of the newest
    status: BusStatus = BusStatus.ENDED
    ready: frozenset[str] = frozenset()  # nodes whose watcher answers
    silent: frozenset[str] = frozenset()  # nodes whose watcher was lost since all answered last, and not heard since
    answered: frozenset[str] = frozenset()  # nodes whose watcher answered since then; without those given more time
    without: frozenset[str] = frozenset()  # nodes that the newest bus was started without, though a launch may use them
    error: str = ""  # why the newest bus ended, until every watcher answers again
    complete_at: float | None = None  # when all answered that the newest bus was started with
    restarts: int = 0
    tries: int = 0  # restarts beside training of a bus on which nobody answered: in no budget
    reachability: SlurmReachability = SlurmReachability.NONE

    @property
    def open(self) -> bool:
        """Whether watchers may run."""
        return self.status is not BusStatus.ENDED


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Since when, and until when, the next launch waits; what for, `gates` says."""

    wait_until: float | None = None  # the cause of the failure before may pass
    slurm_away_since: float | None = None  # the launch before could not begin, and waits for Slurm
    unfit_since: float | None = None  # most nodes fail the checks


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint the next launch begins with; the newest one, while it runs."""

    choice: Choice = Choice.OPEN
    directory: str | None = None
    step: int | None = None
    went_back: bool = False  # to an older step, and nothing is committed since: what a tier has newer must not return
    not_led_back: Why = ()  # why the job leaves with a lineage that may lead to what was not confirmed
    skipped_data: tuple[SkippedData, ...] = ()  # of steps at which the loss went wrong; carried over
    same_world: bool = False  # no other number of ranks can resume from it

    @property
    def chosen(self) -> bool:
        """Whether the checkpoint for the next launch is known."""
        return self.choice is Choice.CHOSEN


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the storage can be trusted, and what is read back."""

    suspect: Why = ()  # why it is
    failing_since: float | None = None  # it failed its test: no launch starts
    tries: int = 0
    reading_back: tuple[str, ...] = ()  # step directories: the first is being read, the others wait
    read_back_wrong: int = 0  # in a row
    verifying: str | None = None  # the last directory, read back while the ranks leave


class Ranks(StrEnum):
    """Whether ranks of a launch may run."""

    NONE = "none"  # not yet, or no more
    RUNNING = "running"  # from StartLaunch to LaunchEnded
    KILLED = "killed"  # they may still run
    GONE = "gone"  # they were killed


class Announced(StrEnum):
    """What the ranks of a launch have said of themselves."""

    NOTHING = "nothing"
    TASKS_STARTED = "tasks started"  # every task has, or a rank spoke
    LIBRARY = "library"  # a rank with the trainer library said hello
    WITHDRAWN = "withdrawn"  # then rank 0 said that it saves nothing on request any more


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch that runs, or ran last; a new record with each.  Its number counts on while the next is prepared."""

    number: int = 0
    nodes: tuple[str, ...] = ()
    began_at: float | None = None
    ranks: Ranks = Ranks.NONE
    announced: Announced = Announced.NOTHING
    bus_restarted: bool = False  # messages of its ranks may be lost
    slurm_sent: str = ""  # the newest signal that Slurm sent to the Slurm steps: ranks without a wrapper have it
    step: int | None = None  # the last one completed, as far as reported
    snapshot: int | None = None  # the step that it resumed from, where no step directory has it
    saving: str | None = None  # save_id in flight
    hints: tuple[tuple[str, str], ...] = ()  # (node, fault): faults that do not make a job leave
    paced: bool = False  # it was compared with those before
    first_failure: Why = ()  # what the first rank that failed said
    found: Finding | None = None  # why it failed, as we saw ourselves

    @property
    def running(self) -> bool:
        """Whether ranks may run."""
        return self.ranks in (Ranks.RUNNING, Ranks.KILLED)

    @property
    def killed(self) -> bool:
        """Whether its ranks were killed."""
        return self.ranks in (Ranks.KILLED, Ranks.GONE)

    @property
    def all_tasks_started(self) -> bool:
        """Whether every task has started, or a rank spoke."""
        return self.announced is not Announced.NOTHING

    @property
    def library_seen(self) -> bool:
        """Whether its ranks save on request: the trainer library is there."""
        return self.announced is Announced.LIBRARY

    @property
    def library_withdrawn(self) -> bool:
        """Whether the trainer library was there, and saves nothing on request any more."""
        return self.announced is Announced.WITHDRAWN

    def ended(self) -> Launch:
        """Return it without ranks: none of them runs any more."""
        return replace(self, ranks=Ranks.GONE if self.killed else Ranks.NONE)

    def runs(self, number: int) -> bool:
        """Return whether this is the launch of that number, and its ranks may run: else its message is late."""
        return self.running and number == self.number


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """How long the ranks of a launch say nothing."""

    patience: float = 1.0  # how many times longer, since the ranks were seen to move
    looking: bool = False  # their stacks are being collected
    early_s: float = 0.0  # so much before its usual time silence is looked at, or the look at hand began
    certain_s: float = 0.0  # so much before that look: a first one, for ranks that are sure to do nothing


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Why the launch or the job ends, and by when."""

    plan: Plan | None = None
    fallback_plan: Plan | None = None  # what comes if outcome.json denies that the training is finished
    term_at: float | None = None  # when Slurm sent the batch process SIGTERM
    leave_at: float | None = None  # Slurm's limit: by then the requeue must be on its way
    preempted_at: float | None = None  # PreemptTime, as Slurm announced it while the job ran
    eviction_confirmed: bool = False  # Slurm said why it takes the allocation: SIGTERM to the steps is no news


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm is asked."""

    signal: str = ""  # the newest that we asked about
    question: Question | None = None  # at most one
    stale: bool = False  # we did not run since one was asked: the next answer does not count, whichever it belongs to

    @property
    def asking(self) -> bool:
        """Whether an answer is on its way."""
        return self.question is not None


class Requeue(msgspec.Struct, frozen=True, kw_only=True):
    """The requeue in REQUEUEING."""

    tries: int = 0
    resubmitting: bool = False  # the site let us requeue nothing: the job is submitted again instead


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """What may fail how often; carried over attempts through the journal."""

    failures: int = 0
    failure_counted: bool = False  # the launch before counts as one
    node_losses: int = 0
    nodes_lost_at: float | None = None  # when nodes were lost last that a launch needed
    tried: tuple[Tried, ...] = ()
    best_step: int | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on besides the event and the policy."""

    phase: Phase = Phase.STARTING
    timers: Timers = Timers()
    identity: Identity = Identity()
    nodes: Nodes = Nodes()
    watchers: Watchers = Watchers()
    start: Start = Start()
    resume: Resume = Resume()
    storage: Storage = Storage()
    launch: Launch = Launch()
    leaving: Leaving = Leaving()
    query: Query = Query()
    requeue: Requeue = Requeue()
    budgets: Budgets = Budgets()
    failure: Failure | None = None  # of the launch before, until it is settled what follows
    answered: tuple[str, ...] = ()  # requests of people, the newest

    # what is observed beside training
    silence: Silence = Silence()
    suspended: Suspended = Suspended()
    pace: Pace = Pace()
    baseline: Baseline = Baseline()  # carried over attempts through the journal
    losses: Losses = Losses()
    stragglers: Stragglers = Stragglers()

    @property
    def has_library(self) -> bool:
        """Whether the trainer library has answered in this run, and has not withdrawn in this launch."""
        return self.launch.library_seen or (self.baseline.start_s > 0.0 and not self.launch.library_withdrawn)

    @property
    def plan(self) -> Plan:
        """What comes when the ranks are gone: another launch, where nothing else was decided."""
        return self.leaving.plan or Plan(next=Next.RELAUNCH, why=self.launch.first_failure)

    @property
    def requesting(self) -> bool:
        """Whether a requeue was ordered, and Slurm has not answered."""
        return self.timers.wait is Timer.REQUEUE_ANSWER

    @property
    def deadline_at(self) -> float | None:
        """When the phase has waited for long enough."""
        wait = self.timers.wait
        return None if wait is None else self.timers.get(wait)

    def waiting(self, timer: Timer, at: float) -> State:
        """Return the state that waits for this, and for nothing else in its phase."""
        return replace(self, timers=self.timers.waiting(timer, at))

    def waiting_until(self, at: float) -> State:
        """Return the state that waits for the same until another instant; one that waits for nothing goes on so."""
        return replace(self, timers=self.timers.waiting(self.timers.wait, at))

    def waiting_for_nothing(self) -> State:
        """Return the state whose phase has no deadline."""
        return replace(self, timers=self.timers.waiting(None, None))

    def beside(self, timer: Timer, at: float | None) -> State:
        """Return the state in which this falls due beside what the phase waits for; None: it does not."""
        return replace(self, timers=self.timers.beside(timer, at))

    @property
    def wake_at(self) -> float | None:
        """When the next `Tick` must come."""
        grow_at = self.nodes.growth.wake_at if self.phase is Phase.TRAINING else None
        return min((at for at in (self.timers.wake_at(self.phase), grow_at) if at is not None), default=None)
