"""Where the agent stands: one frozen record, of which `decide` makes the next.  Incidents are the ledger's too."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stepkeeper.node_agent.readings import NvmlState
from stepkeeper.node_agent.xid.catalogue import Action, Domain, Kind, Source

CODES_MAX = 16
PLACES_MAX = 2  # of one incident: more than one is no place
JOBS_MAX = 32


class Outcome(StrEnum):
    """What came of an incident."""

    OPEN = "open"  # not settled, or its drain is under way
    NOTED = "noted"  # it asks for no drain
    OBSERVED = "observed"  # mode observe: it would have drained the node
    DRAINED = "drained"  # the node is drained by us
    FOREIGN = "foreign"  # somebody else had drained the node or taken it down: left alone
    REFUSED = "refused"  # the circuit breaker is open
    TAKEN_BACK = "taken_back"  # two agents passed the breaker at once, and we were the later one
    RESOLVED = "resolved"  # drained by us, and back in service
    PASSED = "passed"  # left alone, and over: the checks vouch for the GPU, or it was reset or the node rebooted since
    SUSPECTED = "suspected"  # only the kernel log says so: a look at the GPU decides
    DOUBTED = "doubted"  # only the kernel log says so, and NVML finds the GPU well


class Incident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault, however often and by whomever it was seen."""

    id: str
    first_at: float  # Unix seconds
    last_at: float
    action: Action
    domain: Domain
    kind: Kind
    name: str  # `XID 79`, of the sighting that gave the action
    why: str  # which rule gave the action
    settle_at: float  # when its action counts, whatever may follow
    settled: bool = False
    returned: bool = False  # somebody took our drain over or away: he knows, and what is still there is his decision
    outcome: Outcome = Outcome.OPEN
    outcome_why: str = ""
    codes: tuple[int, ...] = ()  # every XID and SXID, in the order of their first sighting
    decisive: int | None = None  # the code that gave the action
    nvml_codes: tuple[int, ...] = ()  # those that NVML has seen
    agreed: bool = False  # NVML says so too, or cannot say
    places: tuple[str, ...] = ()  # on the GPU, as far as its lines say: `GPC 7 TPC 7`
    # its GPU was named to a person because of it: what was before counts no more; ledgers have it by its name of 0.1
    named: bool = msgspec.field(default=False, name="checked")
    count: int = 1  # sightings
    sources: tuple[Source, ...] = ()
    pci: str = ""
    gpu: str = ""  # UUID
    instance: str = ""
    text: str = ""  # the line that gave the action
    escalated: str = ""  # why it asks for more than its own rule says
    jobs: tuple[int, ...] = ()  # on the node when it began
    uids: tuple[int, ...] = ()  # the owners of all these jobs; empty where they are not known
    boot_id: str = ""
    sequence: int = -1  # of the newest kernel record in it
    driver: str = ""

    @property
    def gpu_label(self) -> str:
        """Return the GPU as people look for it: `GPU 0000:3b:00.0 (GPU-…)`; empty where it is not known."""
        if not self.pci:
            return f"GPU {self.gpu}" if self.gpu else ""
        return f"GPU {self.pci}" + (f" ({self.gpu})" if self.gpu else "")


LEFT_ALONE = (Outcome.FOREIGN, Outcome.REFUSED, Outcome.TAKEN_BACK)


def is_unfinished(incident: Incident) -> bool:
    """Tell whether something is still to come of it."""
    return incident.outcome in (Outcome.OPEN, Outcome.DRAINED, Outcome.SUSPECTED) or is_left_alone(incident)


def is_left_alone(incident: Incident) -> bool:
    """Tell whether it asks for a drain that somebody else's hold, or the breaker, forbade, and is not over."""
    return incident.outcome in LEFT_ALONE and incident.action.drains and not incident.returned


def is_pending(incident: Incident) -> bool:
    """Tell whether the node has to be drained for it, and nobody has dealt with that yet."""
    return incident.outcome is Outcome.OPEN and incident.settled and incident.action.drains


class Repair(StrEnum):
    """What was done about a drained node."""

    NONE = ""
    RESET = "reset"  # of its GPUs, by us
    REBOOT = "reboot"  # a new boot id, by whomever


class Drain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drain of our node that we hold."""

    reason: str
    action: Action  # the most severe of its incidents
    at: float
    boot_id: str
    counted: bool = False  # the breaker was looked at again after it
    resume_sent: bool = False  # we asked Slurm to return the node, and its answer may be lost
    reboot_sent: bool = False  # we asked Slurm to reboot it, and its answer may be lost
    repair: Repair = Repair.NONE
    reset_failed: bool = False
    reboot_asked: bool = False
    passed: bool = False  # the checks, after the repair

    @property
    def slurm_returns(self) -> bool:
        """Whether Slurm itself may return the node, after the reboot that we asked for."""
        return self.reboot_asked or self.reboot_sent


class Call(StrEnum):
    """What is in flight."""

    LOOK = "look"  # at the GPUs, for what is suspected
    COUNT = "count"  # before a drain: is the node free for it, and may we?
    DRAIN = "drain"
    RECOUNT = "recount"  # after it: did two agents pass the breaker at once?
    TAKE_BACK = "take_back"
    WATCH = "watch"  # is the drain still ours?
    CHECK = "check"
    RESUME = "resume"
    RESET = "reset"
    REBOOT = "reboot"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a decision depends on besides the event and the policy."""

    node: str
    boot_id: str
    known_sequence: int = -1  # kernel records up to here, of this boot, were dealt with before we started
    driver: str = ""
    gpus: tuple[tuple[str, str], ...] = ()  # (PCI address, UUID), of all GPUs ever listed since the boot
    nvml: NvmlState | None = None  # None: it has not answered yet
    nvml_since: float | None = None  # since when it has been ready without a break
    incidents: tuple[Incident, ...] = ()  # oldest first
    drain: Drain | None = None

    call: Call | None = None
    call_number: int = 0
    call_until: float = 0.0
    call_incidents: tuple[str, ...] = ()  # that the drain or look in flight is for
    call_reason: str = ""
    tries: int = 0  # in a row that failed
    retry_at: float = 0.0  # no call before
    watch_at: float = 0.0  # the next unhurried one
    listened: bool = False  # Slurm has answered about our own node: the count of all nodes is next
    observing: bool = False  # mode observe, known from the start


# The numbers that the agent's decisions depend on, each named, with its unit and a reason for its default.


class Mode(StrEnum):
    """Whether the agent does what it decides."""

    OBSERVE = "observe"  # it says what it would do
    ACT = "act"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants that `decide` compares with."""

    reset_within_s: float = 300.0
    """For all GPUs together; then a reset counts as failed."""

    gather_s: float = 5.0
    """A fault's burst: what an uncertain fault asks for is settled after this; certain ones do not wait."""

    join_s: float = 30.0
    """What a GPU reports this soon after an incident's last report belongs to it."""

    repeat_within_s: float = 7 * 86400.0
    """The same GPU in need of a reset or reboot a second time within this is broken."""

    restarts_within_s: float = 86400.0
    """Faults that cost a GPU's job its life count together for this long."""

    restarts_max: int = 3
    """So many of those in one place of a GPU, of different jobs and users, raise an alarm."""

    keep_s: float = 8 * 86400.0
    """Incidents are remembered this long: longer than anything above looks back."""

    incidents_max: int = 500
    """Remembered at most; unresolved ones count first."""

    retry_s: float = 1.0
    """After the first call to Slurm that failed; doubled from try to try."""

    retry_max_s: float = 60.0
    """The longest pause between two tries: a drain is never given up."""

    answer_within_s: float = 120.0
    """A call is always answered; one that was not by then is made again."""

    crowded_s: float = 0.2
    """Slurm takes this long to answer about our own node alone: many agents ask, or it is busy.  Then the count of all
    nodes, which costs slurmctld a thousand times as much on a large cluster, waits."""

    crowd_spread: float = 1800.0
    """That wait is spread by node over so many times as long as Slurm took."""

    crowd_spread_max_s: float = 3600.0
    """No longer: of a crowd, the breaker lets a few nodes an hour be drained."""

    watch_s: float = 300.0
    """While we hold a drain: how often Slurm is asked whether a person has taken it away.  Else never."""

    idle_poll_s: float = 60.0
    """While a remedy waits for the last job to leave."""

    check_again_s: float = 60.0
    """After checks that failed."""


class Policy(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the administrator allows, with the constants: all that `decide` compares with."""

    mode: Mode = Mode.OBSERVE

    undrain: bool = False
    """Return a node that we drained, once it was reset or rebooted and has passed its checks."""

    reset_gpus: bool = False
    """Remedy: `nvidia-smi --gpu-reset`, on a node that we drained and that no job uses any more."""

    reboot: bool = False
    """Remedy: `scontrol reboot`, where a reset cannot help or has failed.  Asks for `undrain` too: Slurm itself
    returns a node that it has rebooted, and the checks then follow."""

    nodes_min: int = 2
    """Circuit breaker: so many nodes of a partition may be drained by us in any case."""

    nodes_share: float = 0.05
    """Circuit breaker: above that, this share of a partition's nodes."""

    drains_per_hour: int = 4
    """Circuit breaker: what hits more nodes in an hour is the fabric, the driver or a job."""

    agreement: bool = True
    """What only the kernel log says drains the node once NVML, where it is there, does not find the GPU well."""
