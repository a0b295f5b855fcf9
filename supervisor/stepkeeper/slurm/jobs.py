"""What Stepkeeper asks of Slurm about jobs, as small as its use, by Slurm's own commands."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.redaction import redact
from stepkeeper.slurm import launch, resubmission
from stepkeeper.slurm.client import ClusterSettings, Resubmitted, SlurmError, field_of, fold, parse_config, shown_job
from stepkeeper.slurm.launch import as_submitted

# Running one of Slurm's commands with a time limit: for every client on top of them.

SAID_CHARACTERS_MAX = 300
AWAY = ("unable to contact", "connection refused", "timed out", "communication")  # how they say that nobody answered


def call(
    argv: Sequence[str],
    within_s: float,
    *,
    what: str,
    delays: Collection[str] = AWAY,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    instead_of_ours: bool = False,
) -> str:
    """Return what a command prints; times are Unix seconds.

    Args:
        argv: its words.
        within_s: its time limit.
        what: how errors name it.
        delays: words in its complaint, lower case, that mean that the controller did not answer.
        environment: on top of our own.
        directory: where it runs; ours by default.
        instead_of_ours: `environment` is all it gets.

    Raises:
        SlurmError: it could not be run, was refused, or did not answer in time.
    """
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            stdin=subprocess.DEVNULL,
            env={
                **({} if instead_of_ours else os.environ),
                **(environment or {}),
                "SLURM_TIME_FORMAT": "%s",
                "LC_ALL": "C",
            },
            check=False,
            cwd=directory,
            start_new_session=True,  # a signal to our process group must not end a call half-way
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{what}: no answer in {within_s:g} s", unreachable=True) from None
    except OSError as error:
        raise SlurmError(f"{what}: {error.strerror}; are Slurm's commands on PATH?") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:SAID_CHARACTERS_MAX]
        unreachable = any(word in said.lower() for word in delays)
        raise SlurmError(f"{what}: {said or f'exit code {done.returncode}'}", unreachable=unreachable)
    return done.stdout


_MADE = "%N|%T|%f|%G|%c|%m"  # of sinfo: a node, its state, and what shows its kind
_Made = tuple[str, set[str], int, int]  # GPUs, features, CPUs, memory
_USABLE = "idle,allocated,mixed,completing,reserved,planned"
CALL_WITHIN_S = 6.0  # of a notice of 30 s, most is left when the controller does not answer
# a controller that is overloaded answers late, for minutes: after a call without an answer the next may take this long
PATIENT_S = 13.0
SUBMIT_WITHIN_S = 20.0  # a site's own filter may take its time
# a state that is not listed here is none that decisions depend on: never take it for the end of a job
_STATES = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "EXPEDITING": JobState.PENDING,  # requeued by `--requeue=expedite` of 25.11 and later: it keeps sound nodes
    "COMPLETING": JobState.COMPLETING,
    **dict.fromkeys(
        (
            "BOOT_FAIL",
            "CANCELLED",
            "COMPLETED",
            "DEADLINE",
            "FAILED",
            "LAUNCH_FAILED",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "PREEMPTED",
            "RECONFIG_FAIL",
            "REVOKED",
            "TIMEOUT",
        ),
        JobState.ENDED,
    ),
}


class SlurmCommands:
    """Asks Slurm by scontrol and its kin.  Each method raises `SlurmError`, and returns within its time limit.

    A job is named as Slurm's commands want it: its id, or `ARRAY_TASK` for one task of an array, whose own id may be
    the id of the whole array.
    """

    def __init__(self, *, call_within_s: float = CALL_WITHIN_S) -> None:
        self._call_within_s = call_within_s
        self._unanswered = threading.Event()  # the call before was not

    def job(self, job: str) -> JobFacts:
        """Return the facts of a job."""
        return parse_job(self._call("scontrol", "-o", "show", "job", job))

    def job_runs(self, job: str) -> bool:
        """Tell whether a job holds nodes; a job that Slurm has forgotten does not."""
        try:
            facts = self.job(job)
        except SlurmError as error:
            if error.forgotten:
                return False
            raise
        return facts.state not in (JobState.PENDING, JobState.ENDED)

    def settings(self) -> ClusterSettings:
        """Return the cluster's settings."""
        return parse_settings(self._call("scontrol", "show", "config"))

    def time(self) -> float | None:
        """Return the time of the controller's clock, Unix seconds; None where it does not say."""
        return parse_time(self._call("scontrol", "show", "config"))

    def slurmds(self, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Return the address and the port of slurmd on some nodes.  Raises `SlurmError`."""
        shown = self._call("scontrol", "-o", "show", "node", fold(nodes))
        return parse_slurmds(shown, self._call("scontrol", "show", "config"))

    def hostnames(self, node_list: str) -> tuple[str, ...]:
        """Expand a node list such as `gpu[1-3]`, in Slurm's order."""
        return tuple(self._call("scontrol", "show", "hostnames", node_list).split())

    def requeue(self, job: str) -> None:
        """Requeue a job of our own."""
        self._call("scontrol", "requeue", job)

    def resubmit(
        self, job: str, run_directory: str, nodes: int, words: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> Resubmitted:
        """Submit a job of our own again, to start after its end and to go on with its run; once, however often asked.

        Args:
            job: Ours: what cannot be read off the job is taken from our environment.
            run_directory: Absolute.
            nodes: That the job was submitted with; some may have been given back since.
            words: Our own command line: it may show the batch script's arguments exactly.
            exclude: Nodes on which the new job may not run.
        """
        shown = self._call("scontrol", "-o", "show", "job", job).splitlines()[0]
        number = field_of(shown, "JobId")
        ours = resubmission.marker(shown)
        all_ours = ("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A|%k")
        listing = self._call(*all_ours)
        if (there := resubmission.followed_by(listing, ours)) is not None:
            return Resubmitted(job_id=there, found=True)
        script = self._call("scontrol", "write", "batch_script", job, "-")
        planned = resubmission.plan(
            shown,
            script,
            as_submitted(os.environ),
            words,
            nodes=nodes,
            exclude=",".join(exclude),
            comment=resubmission.comment_of(listing, int(number), ours),
        )
        environment = resubmission.environment_of(os.environ, run_directory, number)
        places = (os.environ.get("SLURM_SUBMIT_DIR", ""), planned.directory)
        with tempfile.TemporaryDirectory(prefix="stepkeeper-") as directory:  # ours alone: scripts may hold secrets
            path = os.path.join(directory, os.path.basename(planned.script or "batch.sh"))
            with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(script)
            try:
                said = call(
                    ["sbatch", "--parsable", *planned.options, path, *planned.arguments],
                    SUBMIT_WITHIN_S,
                    what="sbatch",
                    environment=environment,
                    instead_of_ours=True,
                    directory=next((place for place in places if os.path.isdir(place)), "/"),
                )
            except SlurmError as error:
                if error.unreachable:
                    raise
                by_hand = redact(planned.command(number, run_directory))
                raise SlurmError(f"{error}; to continue by hand: {by_hand}") from error
        return Resubmitted(job_id=parse_submitted(said), unknown=planned.unknown)

    def exclude(self, job: str, nodes: Sequence[str], *, within_s: float | None = None) -> None:
        """Replace the list of nodes on which a job that does not run may not run; `within_s`: a shorter time limit."""
        argv = ("scontrol", "update", f"JobId={job}", f"ExcNodeList={fold(nodes)}")
        if within_s is None:
            self._call(*argv)
        else:
            call(argv, within_s, what=" ".join(argv))

    def usable_nodes(self, job: str, like: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the nodes of a job's partitions that are neither down nor drained, busy ones too.

        With `like`, nodes of the job: only those that are made as well as one of these, so that the job fits there.
        """
        fields, sinfo = self._partition(job)
        usable = self._call(*sinfo, f"--states={_USABLE}", "--format=%N").split()  # a drained one may still be mixed
        fit = parse_fit(self._call(*sinfo, f"--format={_MADE}"), like, fields.get("Features", ""))
        return tuple(sorted(set(usable).intersection(fit)))

    def idle_nodes(self, job: str, like: Sequence[str]) -> tuple[str, ...]:
        """Return the idle nodes of a job's partitions that it does not exclude and that are made as some of its own."""
        fields, sinfo = self._partition(job)
        excluded = self.hostnames(fields["ExcNodeList"]) if "ExcNodeList" in fields else ()
        listing = self._call(*sinfo, f"--format={_MADE}")
        return tuple(node for node in parse_idle(listing, like) if node not in excluded)

    def _partition(self, job: str) -> tuple[Mapping[str, str], tuple[str, ...]]:
        """Return what Slurm shows of a job, and the words of sinfo about the nodes of its partitions."""
        fields = shown_job(self._call("scontrol", "-o", "show", "job", job)).fields
        if "Partition" not in fields:
            raise SlurmError(f"scontrol show job {job}: it names no partition")
        return fields, ("sinfo", "--noheader", "--Node", f"--partition={fields['Partition']}")

    def keep(self, job: str, nodes: Sequence[str]) -> None:
        """Give back all nodes of a running job but these."""
        with tempfile.TemporaryDirectory(prefix="stepkeeper-") as directory:  # scontrol leaves shell scripts there
            self._call("scontrol", "update", f"JobId={job}", f"NodeList={fold(nodes)}", directory=directory)

    def comment(self, job: str, text: str) -> None:
        """Set the comment of a job of our own, which everybody can read."""
        self._call("scontrol", "update", f"JobId={job}", f"Comment={text}")

    def cancel(self, job: str) -> None:
        """Cancel a job of our own."""
        self._call("scancel", job)

    def let_end(self, code: int) -> str:
        """Have our own job end with a code, and not be held, where it has expedited requeue (`launch.let_end`)."""
        return launch.let_end(code, os.environ, self._call)

    def _call(self, *argv: str, directory: str | None = None) -> str:
        """Run one command and return what it prints."""
        with self._patience() as within_s:
            return call(argv, within_s, what=" ".join(argv), directory=directory)

    @contextlib.contextmanager
    def _patience(self) -> Iterator[float]:
        """Give the time limit of one call: a longer one after a call without an answer."""
        try:
            yield max(self._call_within_s, PATIENT_S) if self._unanswered.is_set() else self._call_within_s
        except SlurmError as error:
            if error.unreachable:
                self._unanswered.set()
            raise
        self._unanswered.clear()


def parse_job(text: str) -> JobFacts:
    """Parse the first line of `scontrol -o show job`, with times printed as Unix seconds.

    >>> parse_job("JobId=7 JobName=a b UserId=u(1) GroupId=g(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    ...           "EndTime=1790000000 PreemptTime=None").restarts
    2
    """
    fields = shown_job(text).fields
    slurm_state = fields.get("JobState", "?")
    return JobFacts(
        state=job_state(slurm_state),
        slurm_state=slurm_state,
        restarts=int(fields.get("Restarts", 0)),
        reason=fields.get("Reason", "None"),
        preempt_at=_time(fields.get("PreemptTime")),
        end_at=_time(fields.get("EndTime")),
        requeue_allowed=fields.get("Requeue") != "0",
        batch=fields.get("BatchFlag") != "0",
        excluded=fields.get("ExcNodeList", ""),
        required=fields.get("ReqNodeList", ""),
    )


def parse_submitted(said: str) -> int:
    r"""Return the job id that `sbatch --parsable` prints; a site's wrapper may print more around it.

    >>> parse_submitted("Welcome!\n4711;cluster\nProject a1 is charged\n")
    4711

    Raises:
        SlurmError: there is no job id.
    """
    for line in said.splitlines():
        number = line.strip().partition(";")[0]
        if number.isascii() and number.isdigit():
            return int(number)
    # asked again, as where Slurm is away: the new job is found by its comment then
    raise SlurmError(f"sbatch said no job id, but: {said.strip()[:200]!r}", unreachable=True)


def parse_idle(listing: str, like: Sequence[str]) -> tuple[str, ...]:
    r"""Return the idle nodes of a listing that have features, GPUs, CPUs and memory as one of `like` has.

    A job may want more of a node than a partition promises; what it wanted its own nodes have.

    >>> parse_idle("a|mixed|h100|gpu:8|64|9\nb|idle|h100|gpu:8|64|9\nc|idle|a100|gpu:8|64|9", like=["a"])
    ('b',)
    """
    rows = {name: (state, made) for name, state, made in (line.split("|", 2) for line in listing.splitlines())}
    kinds = {rows[node][1] for node in like if node in rows}
    return tuple(name for name, (state, made) in rows.items() if state == "idle" and made in kinds)


def parse_fit(listing: str, like: Sequence[str], features: str = "") -> tuple[str, ...]:
    r"""Return the nodes of a listing, without drained ones, on which a job fits that runs on `like`.

    They have the GPUs of one of `like`, no less CPUs and memory, and the same of the features that the job asks for:
    what else its own nodes have, such as the name of a rack, it does not need.  Where none of `like` is listed, all do.

    >>> parse_fit("a|mixed|h100,r1|gpu:8|64|9\nb|idle|h100,r2|gpu:8|64|9\nc|idle|a100|gpu:8|64|9", ["a"], "h100&ib")
    ('a', 'b')
    """
    asked = set(re.findall(r"[^\s&|,()\[\]*]+", features))
    made: dict[str, _Made] = {}
    sound = []
    for line in listing.splitlines():
        try:
            node, state, has, gpus, cpus, memory = line.split("|")
            gpus = re.sub(r"\([^)]*\)", "", gpus)  # the sockets that they are at
            made[node] = (gpus, asked.intersection(has.split(",")), int(cpus), int(memory))
        except ValueError:
            raise SlurmError(f"sinfo: unexpected answer: {line[:200]!r}") from None
        if not state.startswith(("drain", "down")):
            sound.append(node)
    ours = [made[node] for node in like if node in made] or [*made.values()]
    return tuple(node for node in sound if any(_as_good(made[node], one) for one in ours))


def _as_good(node: _Made, other: _Made) -> bool:
    return node[:2] == other[:2] and node[2] >= other[2] and node[3] >= other[3]


def parse_settings(text: str) -> ClusterSettings:
    r"""Parse `scontrol show config`.

    >>> parse_settings("KillWait = 30 sec\nSLURM_VERSION = 22.05.8\nAccountingStorageType = accounting_storage/none\n")
    ClusterSettings(kill_wait_s=30.0, version='22.05.8', accounting=False)
    """
    settings = parse_config(text)
    kill_wait = re.match(r"\d+", settings.get("KillWait", ""))
    if kill_wait is None:
        raise SlurmError("scontrol show config: it shows no KillWait")
    return ClusterSettings(
        kill_wait_s=float(kill_wait.group()),
        version=settings.get("SLURM_VERSION", "?"),
        accounting="slurmdbd" in settings.get("AccountingStorageType", ""),
    )


def parse_slurmds(shown: str, config: str) -> dict[str, tuple[str, int]]:
    """Parse `scontrol -o show node`, which names a port only where it is not that of `scontrol show config`.

    >>> config = "SlurmdPort              = 6818"
    >>> parse_slurmds("NodeName=a NodeAddr=10.0.0.1 NodeHostName=a Port=17001 Version=22.05.8", config)
    {'a': ('10.0.0.1', 17001)}
    >>> parse_slurmds("NodeName=b NodeAddr=b-ib NodeHostName=b Version=26.05.5", config)
    {'b': ('b-ib', 6818)}

    Raises:
        SlurmError: it says something else.
    """
    usual = parse_config(config).get("SlurmdPort", "")
    found = {}
    for line in filter(None, map(str.strip, shown.splitlines())):
        name, address, port = field_of(line, "NodeName"), field_of(line, "NodeAddr"), field_of(line, "Port") or usual
        if not (name and address and port.isdigit()):
            raise SlurmError(f"scontrol show node: no address and port of slurmd in {line[:SAID_CHARACTERS_MAX]!r}")
        found[name] = address, int(port)
    return found


def parse_time(text: str) -> float | None:
    r"""Return when the controller wrote its `scontrol show config`.

    >>> parse_time("Configuration data as of 1790000000\nAccountingStorageBackupHost = (null)\n")
    1790000000.0
    """
    as_of = re.match(r"Configuration data as of (\d+)\s", text)
    return float(as_of.group(1)) if as_of else None


def job_state(slurm_state: str) -> JobState:
    """Return what a state means that Slurm prints: `OTHER` is none that decisions depend on."""
    return _STATES.get(slurm_state, JobState.OTHER)


def _time(value: str | None) -> float | None:
    return float(value) if value and value.isdigit() else None
