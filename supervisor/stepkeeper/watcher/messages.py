"""What the supervisor and its watchers say to each other over Slurm's stdio: one JSON line each.

A line has at most `LINE_BYTES_MAX` bytes with its newline: up to there Slurm never tears lines of
concurrent writers.  Fields are only ever added, with defaults; unknown types are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import xxhash

from stepkeeper.run_store.lines import parsed
from stepkeeper.slurm.launch import WATCHER_VARIABLE
from stepkeeper_trainer.formats.collectives import Place
from stepkeeper_trainer.formats.messages import FromRank, fitted

LINE_BYTES_MAX = 1024


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    pass


# --- to the watchers (every watcher reads every line) ---------------------------------------------


class Lease(_Line, frozen=True, kw_only=True, tag="lease"):
    """The supervisor is alive; without another one it is suspect, and then gone (`core.liveness`)."""

    seconds: float  # for watchers of an earlier version, which had no other limit
    launch: int | None = None  # the launch whose words count


class Save(_Line, frozen=True, kw_only=True, tag="save"):
    """Ask the ranks of a launch to save, and to leave if `stop`."""

    launch: int
    request_id: int
    stop: bool
    why: str
    deadline_at: float | None = None
    signal: str = ""  # for ranks without the trainer library; empty: they have it already, or shall not have it
    library_seen: bool = msgspec.field(
        default=False, name="heard"
    )  # a rank of the launch, on some node, has the trainer library


class Kill(_Line, frozen=True, kw_only=True, tag="kill"):
    """SIGKILL every process of this run's ranks on the node."""

    launch: int


class Clear(_Line, frozen=True, kw_only=True, tag="clear"):
    """As `Kill`, then confirm with `Cleared` that nothing is left, and say whether the node is fit for a launch."""

    launch: int
    number: int = 0  # of this request: the answer has it too
    at: float | None = None  # the supervisor's clock, Unix seconds; None: of a version that knew no checks


class Check(_Line, frozen=True, kw_only=True, tag="check"):
    """For one node, which takes no part: say with `Checked` whether it is fit; nothing is ended."""

    node: str
    number: int
    at: float  # as in `Clear`


class Look(_Line, frozen=True, kw_only=True, tag="look"):
    """For one node: have the agent look at the hardware, because a rank failed there."""

    node: str
    why: str


class Read(_Line, frozen=True, kw_only=True, tag="read"):
    """For one node: read shard `index` of `of` of a step directory and compare; answered by `ShardRead`.

    Sent only to watchers whose `Ready` says that they know it.
    """

    node: str
    number: int  # of the verification; what belongs to a lower one is dropped
    directory: str  # its name, below the run's `checkpoints/`
    index: int
    of: int
    mib_per_s: float = 0.0  # at most; 0: no limit
    from_disk: bool = False  # past the page cache


class ReadNoMore(_Line, frozen=True, kw_only=True, tag="read_no_more"):
    """Every shard of this verification and of those before is read, or nobody needs them any more."""

    number: int


class Stacks(_Line, frozen=True, kw_only=True, tag="stacks"):
    """Take the stacks of the launch's ranks, twice, and where they are in their collectives.

    Answered by `Stood` for each rank, `StoodBelow` for some, `Entered` for each of their groups, then `StacksTaken`.
    """

    launch: int
    number: int
    brief: bool = False  # without native stacks, so without `StoodBelow`


class Leave(_Line, frozen=True, kw_only=True, tag="leave"):
    """The run goes on without this node, and no rank of it runs there: what it holds in memory is given back."""

    node: str


class Quit(_Line, frozen=True, kw_only=True, tag="quit"):
    """Leave: another bus takes over, or the run leaves the nodes."""

    for_good: bool = False  # the run leaves the nodes: what they hold in memory is given back


# --- from a watcher -------------------------------------------------------------------------------


class Ready(_Line, frozen=True, kw_only=True, tag="ready"):
    """The watcher listens to its ranks."""

    node: str
    pid: int
    version: str
    reads: bool = False  # it knows `Read`: a version that did not never says so
    switches: str = ""  # above the node, the highest first: `switches_above`


class Alive(_Line, frozen=True, kw_only=True, tag="alive"):
    """Sent every few seconds: silence means that the watcher or its node is gone."""

    node: str


class Signaled(_Line, frozen=True, kw_only=True, tag="signaled"):
    """Slurm sent the watcher's step a signal."""

    node: str
    signal: str


class Cleared(_Line, frozen=True, kw_only=True, tag="cleared"):
    """Nothing of an earlier launch is left on the node, which others reach by `address`; `port` is free."""

    node: str
    launch: int
    address: str
    port: int
    unfit: str = ""  # why no launch should start here
    shared: bool = False  # the cause may be common to all nodes: storage, clock
    number: int = 0  # of the request


class Checked(_Line, frozen=True, kw_only=True, tag="checked"):
    """The answer to `Check`."""

    node: str
    number: int  # of the request
    unfit: str = ""  # why no launch should start here


class Faulted(_Line, frozen=True, kw_only=True, tag="faulted"):
    """A fault of the node's hardware: an incident of the agent's, or what the watcher has seen itself."""

    node: str
    incident: str
    name: str
    action: str
    leave: bool
    why: str
    gpu: str = ""
    drained: bool = False


class ShardRead(_Line, frozen=True, kw_only=True, tag="share_read"):
    """How far a shard is, every second while it is read; then, with `done`, what was found."""

    node: str
    number: int
    index: int
    of: int
    bytes_read: int
    done: bool = False
    error: str = ""  # why this watcher cannot read it; says nothing of the bytes
    problem: str = ""  # the first one
    problems: int = 0
    manifest: str = ""  # digest of the manifest that this node sees
    seen: str = ""  # digest over the state of the shard's files
    began_at: float = 0.0  # this node's clock, Unix seconds


class Stood(_Line, frozen=True, kw_only=True, tag="stood"):
    """What a rank does, while the training is silent."""

    node: str
    number: int  # of the request
    rank: int
    where: str  # in words: `waits in all_reduce`, `is in load (data.py:7)`
    waits: bool = False  # for other ranks
    moved: bool = False  # it did something else a moment later
    halted: bool = False  # it can do nothing: stopped by a signal, ended, or stuck in the kernel
    idle: bool = False  # it is sure that it computed, read and wrote nothing in between; false: it may have
    sure_s: float = 0.0  # for so long it is sure to do nothing: it is stopped, or asleep until then
    sleeps: bool = False  # between two looks it did nothing but sleep at one line of the user's, as all below it


class DoesNothing(_Line, frozen=True, kw_only=True, tag="does_nothing"):
    """A rank is stopped, or sleeps in the user's code, at the first of two looks; its `Stood` says whether it lasts."""

    node: str
    number: int  # of the request
    rank: int


class StoodBelow(_Line, frozen=True, kw_only=True, tag="stood_below"):
    """What a rank does below Python, after its `Stood`, where that says more."""

    node: str
    number: int  # of the request
    rank: int
    where: str  # in words: `in read of /data/train.bin`


class Entered(_Line, frozen=True, kw_only=True, tag="entered"):
    """Where a rank is in one of its groups' collectives."""

    node: str
    number: int  # of the request
    rank: int
    place: Place
    ranks: str = ""  # all that are at this very place, as of `collectives.compress`; empty: `rank` alone


class StacksTaken(_Line, frozen=True, kw_only=True, tag="stacks_taken"):
    """Every rank of the node has been reported."""

    node: str
    number: int


class Rank(_Line, frozen=True, kw_only=True, tag="rank"):
    """The message of a rank, passed on."""

    node: str
    message: FromRank
    late_s: float = 0.0  # so long ago the watcher got it: progress alone is held back


class Paced(_Line, frozen=True, kw_only=True, tag="paced"):
    """What the node's slowest rank worked itself for a step, without waiting for others: medians of some seconds."""

    node: str
    launch: str  # as the ranks say it
    step: int  # the newest
    step_seconds: float
    own_seconds: float
    rank: int | None = None  # the slowest; None: of a version that sent the median of all
    loading_seconds: float = 0.0  # of its own, before the first forward: loading data


class Lost(_Line, frozen=True, kw_only=True, tag="lost"):
    """A rank without our wrapper is gone: nobody knows how it ended."""

    node: str
    launch: str
    rank: int


class StopSignalSent(_Line, frozen=True, kw_only=True, tag="told"):
    """Ranks of a launch on this node got the stop signal: no trainer library answers there."""

    node: str
    launch: int
    text: str


class Left(_Line, frozen=True, kw_only=True, tag="left"):
    """The last line of a watcher that was asked to quit."""

    node: str


class Note(_Line, frozen=True, kw_only=True, tag="note"):
    """Something for the log."""

    node: str
    text: str


OfStacks = DoesNothing | Stood | StoodBelow | Entered | StacksTaken  # what ranks do that stand still
ToWatcher = Lease | Save | Kill | Clear | Check | Look | Read | ReadNoMore | Stacks | Leave | Quit
FromWatcher = (
    Ready
    | Alive
    | Signaled
    | Cleared
    | Checked
    | Faulted
    | ShardRead
    | OfStacks
    | Rank
    | Paced
    | Lost
    | StopSignalSent
    | Left
    | Note
)

_to_watcher: msgspec.json.Decoder[ToWatcher] = msgspec.json.Decoder(ToWatcher)
_from_watcher: msgspec.json.Decoder[FromWatcher] = msgspec.json.Decoder(FromWatcher)


def encode(message: ToWatcher | FromWatcher, *, on_cut: Callable[[str], object] = lambda _: None) -> bytes:
    """Return the line with its newline, cut where it is too long: `on_cut` gets what was done to it.

    The sender of free text shortens it: a line that must be cut is a mistake, and its sender goes on.
    """
    data, cut = fitted(message, LINE_BYTES_MAX - 1)
    if cut:
        on_cut(cut)
    return data + b"\n"


def decode_to_watcher(line: bytes) -> ToWatcher | None:
    """Parse a line of the supervisor; None for what this version does not know."""
    return parsed(_to_watcher, line)


def decode_from_watcher(line: bytes) -> FromWatcher | None:
    """Parse a line of a watcher; None for what this version does not know, or for stray output."""
    return parsed(_from_watcher, line)


# What a watcher gets at its start, in one environment variable.
#
# Not on its command line: other users of a node read command lines, and must not know the ranks' address before it
# is taken.

VARIABLE = WATCHER_VARIABLE


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a watcher serves."""

    run_directory: str
    run_id: str
    job_id: int
    slurm_name: str  # of the job, as Slurm's commands want it
    restart_count: int
    attempt: int
    nodes: tuple[str, ...]
    kill_wait_s: float
    accounting: bool = True  # Slurm has a database of its jobs
    nonce: str  # nobody can guess it: another user could take the ranks' address first
    started_at: float = 0.0  # of the attempt, Unix seconds
    words: tuple[str, ...] = ()  # the supervisor's own command line
    batch: bool = True  # false: nothing of the job can be requeued or submitted again
    stop_signal: str = "TERM"  # for ranks without the trainer library
    gpus_per_node: int | None = None  # that a node must have before a launch; None: any number
    free_bytes_min: int = 0  # that the run directory's storage must have before a launch
    bus: int = 0  # the higher one takes over from the lower

    @property
    def epoch(self) -> tuple[int, int, int, int]:
        """What decides between two watchers of a run on one node."""
        return (self.job_id, self.restart_count, self.attempt, self.bus)

    def socket_name(self, node: str = "%N") -> str:
        """Return the ranks' address: an abstract socket, which is visible inside containers.

        `%N` stands for the node's name, filled in on the node.
        """
        of_attempt = f"{self.run_id}/{self.job_id}.{self.restart_count}/{self.nonce}"
        return f"@stepkeeper-{xxhash.xxh3_64_hexdigest(of_attempt.encode())}/{node}"

    def environment(self) -> dict[str, str]:
        """Return what the watcher finds in its environment."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def read(environment: Mapping[str, str]) -> Assignment:
    """Parse what `environment` made.  Raises KeyError, msgspec.MsgspecError."""
    return msgspec.json.decode(environment[VARIABLE], type=Assignment)


def switches_above(address: str, node: str) -> str:
    """Return the switches or blocks of SLURM_TOPOLOGY_ADDR; empty where Slurm knows none, or of another node.

    >>> switches_above("core.leaf3.n7", "n7"), switches_above("block2.n7", "n7")
    ('core.leaf3', 'block2')
    >>> switches_above("n7", "n7"), switches_above("core.leaf3.n8", "n7")
    ('', '')
    """
    return address.removesuffix(f".{node}") if address.endswith(f".{node}") else ""
