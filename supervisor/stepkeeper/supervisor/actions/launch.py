"""Starting a training step, and waiting for its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stepkeeper import __version__, wrapper
from stepkeeper.core import events as on
from stepkeeper.frameworks.following import Following
from stepkeeper.log import PatientStream
from stepkeeper.loop_tools import patiently, shown
from stepkeeper.run_store import paths
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.slurm import cmd
from stepkeeper.slurm import launch as lines
from stepkeeper.slurm import launch as slurm_launch
from stepkeeper.slurm.launch import scrub_geometry
from stepkeeper.supervisor.actions import log_progress, rank_files
from stepkeeper.supervisor.actions.foreign import End, ForeignCheckpoints, ForeignError
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.supervisor.srun import Srun
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.integrations import hook

ERROR_CHARACTERS_MAX = 300
UNREACHABLE = "unable to contact slurm controller"
KILLED = ((3.0, signal.SIGTERM), (10.0, signal.SIGKILL))
KILLED_WITHOUT_A_NODE = ((1.0, signal.SIGTERM), (3.0, signal.SIGKILL))  # nobody reports the end of what ran there
STORAGE_WITHIN_S = 10.0
HOSTS = "hosts"  # among the logs of a launch: where its ranks are, where that is not Slurm's order
SRUN_LOG = "srun.log"  # among the logs of a launch: what srun itself says
_DEATH = re.compile(
    r"srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>\d+(?:[-,]\d+)*): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<words>[A-Z][A-Za-z ()]+))"
)
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
_OUTSIDE_CODES = tuple(code for number in _OUTSIDE for code in (128 + number, -number))  # -: srun itself was killed
_SIGNALS = {signal.strsignal(number) or "": int(number) for number in signal.Signals}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every launch of an attempt."""

    command: tuple[str, ...]
    torchrun: bool
    geometry: lines.Geometry
    run_directory: Path
    run_id: str
    attempt: int
    socket: str  # with %N for the node
    variables: dict[str, str] = {}  # further variables for the ranks: those of tiers
    starts_ranks: bool = False  # CMD is a script in which a launcher stands
    resume_argument: bool | None = None  # appended on a resume, where CMD does not say where it goes; None: if it may
    takes_resume: bool = False  # the script declares the option
    following: Following | None = None  # the framework of the script, where that is not our own library

    @property
    def wrapped(self) -> bool:
        """Whether our wrapper stands around each task: not so in a user's own srun line."""
        return not cmd.is_own_srun(self.command)

    @property
    def launcher(self) -> bool:
        """Whether each task starts ranks itself: one torchrun a node, ours or in CMD."""
        return self.torchrun or self.starts_ranks or cmd.kind(self.command) is cmd.Kind.LAUNCHER

    def ranks(self, nodes: Sequence[str]) -> int | None:
        """Return the ranks of a launch on so many nodes; None where CMD itself chooses their number."""
        each: int | None = self.geometry.tasks_per_node
        if not self.wrapped or "PET_NPROC_PER_NODE" in os.environ:
            each = None
        elif self.launcher and not self.torchrun:
            each = cmd.torchrun_ranks(self.command, self.geometry.tasks_per_node)
        return None if each is None else len(nodes) * each

    def tasks(self, nodes: Sequence[str]) -> int:
        """Return the tasks of a training step on so many nodes: one a rank, or one launcher a node."""
        return len(nodes) * (1 if self.launcher else self.geometry.tasks_per_node)


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: its number and nodes, where its ranks meet, and what it resumes from."""

    launch: int
    nodes: tuple[str, ...]
    address: str
    port: int
    resume_from: str | None
    skipped_data: str = ""  # `STEP:STEPS,...`: data that the ranks do not take
    arguments: tuple[str, ...] | None = None  # of the framework, in place of our own resume argument
    answered: bool = False  # the trainer library has, in this run: it needs no resume argument
    in_slurms_order: bool = True  # false: a spare has taken the place of another node among the ranks
    newest: bool = True  # false: the run goes back on purpose, and what a tier has newer must not be taken


def launch_argv(job: Job, meeting: Meeting, directory: Path) -> list[str]:
    """Return the command line of a launch, by the one rule for CMD."""
    # where CMD gives one for the first start, as for a run that goes on with another one's step, ours is the later word
    may = cmd.says_resume(job.command) or (job.takes_resume and not meeting.answered)
    if meeting.arguments is not None:
        may = job.following is not None and job.following.appended
    append = job.resume_argument if job.resume_argument is not None else may
    own = cmd.resume_argument(meeting.resume_from)
    resumed = cmd.with_resume(job.command, own if meeting.arguments is None else meeting.arguments, append=append)
    command = cmd.with_nodes(resumed, len(meeting.nodes))
    pattern = str(directory).replace("%", "%%") + "/%N.log"
    if not job.wrapped:
        return lines.own_srun_argv(command, pattern)
    program = [sys.executable, "-I", "-S", os.path.abspath(wrapper.__file__)]
    geometry = job.geometry
    if job.launcher:
        program += ["--agent", "--", *(_torchrun(job, meeting) if job.torchrun else ()), *command]
        geometry = msgspec.structs.replace(
            geometry,
            tasks_per_node=1,
            cpus_per_task=(geometry.cpus_per_task or 1) * geometry.tasks_per_node,
        )
    else:
        program += ["--", *command]
    return lines.training_argv(meeting.nodes, geometry, pattern, program, in_slurms_order=meeting.in_slurms_order)


def _torchrun(job: Job, meeting: Meeting) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(meeting.nodes)}",
        f"--nproc-per-node={job.geometry.tasks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting.address}:{meeting.port}",
        f"--rdzv-id={job.run_id}-{job.attempt}-{meeting.launch}",
        "--max-restarts=0",  # restarts are ours: two supervisors of one training would fight
        "--no-python",
    ]


def launch_environment(job: Job, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the ranks find in their environment, besides the user's own."""
    return {
        # the user's own srun line finds what it would find without us
        **(scrub_geometry(environment) if job.wrapped else own_line(environment, job.command)),
        **_rendezvous(job, meeting, environment),
        "STEPKEEPER_SOCKET": job.socket,
        "STEPKEEPER_RELEASE": __version__,
        "STEPKEEPER_RUN_DIR": str(job.run_directory),
        "STEPKEEPER_RUN_ID": job.run_id,
        "STEPKEEPER_ATTEMPT": str(job.attempt),
        "STEPKEEPER_LAUNCH": str(meeting.launch),
        "STEPKEEPER_RESUME_FROM": meeting.resume_from or "",
        "STEPKEEPER_RESUME_NEWEST": "1" if meeting.newest else "",
        "STEPKEEPER_SKIP_DATA": meeting.skipped_data,
        "STEPKEEPER_TASKS_PER_NODE": str(job.geometry.tasks_per_node),
        "STEPKEEPER_ERROR_DIR": str(errors_directory(job, meeting.launch)),
        **nccl_recorder(job, meeting.launch, environment),
        **wandb_run(job, environment),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        **job.variables,
        **chosen_checkpoint(job, meeting),
        **python_path(job, environment),
        "PYTHONUNBUFFERED": environment.get("PYTHONUNBUFFERED", "1"),
    }


def python_path(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has each Python of the training load our hook, where the run attaches to frameworks."""
    if hook.VARIABLE not in job.variables:
        return {}
    own = str(Path(hook.__file__).parent / "site")
    behind = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{own}:{behind}" if behind else own}


def chosen_checkpoint(job: Job, meeting: Meeting) -> dict[str, str]:
    """Return what names the framework's checkpoint to a script whose own call names none, where the run attaches."""
    if hook.VARIABLE not in job.variables or job.following is None or meeting.arguments is None:
        return {}
    return {hook.CHECKPOINT_VARIABLE: f"{job.following.framework}:{meeting.resume_from}"}


def own_line(environment: Mapping[str, str], line: Sequence[str]) -> dict[str, str]:
    """Return the environment of the user's own srun line.

    Since 22.05 srun takes sbatch's `--cpus-per-task` no more, and each rank has one CPU: it is passed on where the
    line leaves tasks and CPUs to the job.
    """
    cpus = environment.get("SLURM_CPUS_PER_TASK", "")
    passed_on = {"SRUN_CPUS_PER_TASK": cpus} if cpus and cmd.leaves_shape_to_the_job(line) else {}
    return {**passed_on, **environment}


def _rendezvous(job: Job, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a torchrun in CMD goes by where its line says nothing; its options win over these variables."""
    if job.torchrun or not (job.wrapped and job.launcher):
        return {}
    said = {
        "PET_NNODES": str(len(meeting.nodes)),
        "PET_NPROC_PER_NODE": str(job.geometry.tasks_per_node),
        "PET_MASTER_ADDR": meeting.address,
        "PET_MASTER_PORT": str(meeting.port),
        "PET_RDZV_ENDPOINT": f"{meeting.address}:{meeting.port}",
        "PET_RDZV_ID": f"{job.run_id}-{job.attempt}-{meeting.launch}",
    }
    return {name: value for name, value in said.items() if name not in environment}


def errors_directory(job: Job, launch: int) -> Path:
    """Return where torch writes what ended a rank, in a script that records it."""
    return RunDirectory(job.run_directory).logs(job.attempt, launch) / paths.ERRORS_NAME


def nccl_recorder(job: Job, launch: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of NCCL's flight recorder that the user has not made: its dumps go to the launch's logs."""
    place = RunDirectory(job.run_directory).logs(job.attempt, launch) / paths.STACKS_NAME
    defaults = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # its older name would have torch warn in every rank's log
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{place}/nccl-of-rank-",
    }
    return {name: value for name, value in defaults.items() if name not in environment}


def wandb_run(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has `wandb.init()` of each attempt go on in one run; nothing where the user has named one.

    An empty WANDB_RUN_ID counts as named: for scripts in which every rank has a run of its own.
    """
    if "WANDB_RUN_ID" in environment:
        return {}
    return {"WANDB_RUN_ID": job.run_id, "WANDB_RESUME": environment.get("WANDB_RESUME", "allow")}


class Launch:
    """A training step that runs.  `LaunchEnded` comes when it is over, `LaunchRefused` when it cannot be started.

    Its threads touch the shared storage, never the loop; none of them lets a full or hung one hide the end.
    """

    def __init__(
        self,
        job: Job,
        meeting: Meeting,
        environment: Mapping[str, str],
        *,
        inbox: Inbox,
        foreign: ForeignCheckpoints | None = None,
    ) -> None:
        """Start srun on a thread; `foreign` says at the end whether the script's framework has finished."""
        self._job = job
        self._meeting = meeting
        self._inbox = inbox
        self._logs = RunDirectory(job.run_directory).logs(job.attempt, meeting.launch)
        self._srun = Srun(inbox, Part.LAUNCH, f"launch-{meeting.launch}", on_word=self._on_word)
        self._log = PatientStream(lambda: (self._logs / SRUN_LOG).open("a", encoding="utf-8"))
        self._error = self._unreachable = ""  # what may be the reason of its end, and what says more: Slurm was away
        self._killed = False
        self._foreign = foreign
        self._first_death: tuple[int | None, int | None] | None = None  # exit code and signal
        inbox.run(Part.LAUNCH, lambda: self._run(dict(environment)), name=f"launch-{meeting.launch}")
        following = job.following
        if following is not None and following.step_line and job.wrapped:
            prints = log_progress.Prints([self._logs / f"{node}.log" for node in meeting.nodes], following.step_line)
            inbox.run(
                Part.LOG_PROGRESS,
                lambda: log_progress.follow(prints, meeting.launch, inbox=inbox, ended=self._srun.ended),
            )

    def note_death(self, code: int | None, number: int | None) -> None:
        """Remember how the first rank failed: by itself, or by a signal from outside."""
        failed = number is not None or code not in (None, records.EXIT_FINISHED, records.EXIT_STOPPED)
        if self._first_death is None and failed:
            self._first_death = (code, number)

    def kill(self, *, node_lost: bool) -> None:
        """See to it that the step ends, also where a watcher that should kill its ranks is gone, or a whole node."""
        if not self._killed:
            self._killed = True
            ladder = KILLED_WITHOUT_A_NODE if node_lost else KILLED
            self._inbox.run(Part.KILL, lambda: self._srun.end(ladder), name=f"kill-{self._meeting.launch}")

    def _run(self, environment: dict[str, str]) -> None:
        launch, meeting = self._meeting.launch, self._meeting
        try:
            for path in (self._logs, self._logs / paths.ERRORS_NAME, self._logs / paths.STACKS_NAME):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._foreign is not None:
                ranks = self._job.ranks(meeting.nodes)
                self._inbox.guard(Part.FRAMEWORK, self._foreign.note_launch)(self._job.attempt, launch, ranks)
                meeting = self._for_ranks(self._foreign, ranks)
                self._inbox.guard(Part.FRAMEWORK, self._foreign.repair)(meeting.resume_from, lambda: self._killed)
                if self._killed:
                    self._never_began()
                    return
            hosts = {}
            if not meeting.in_slurms_order:
                tasks_per_node = self._job.tasks(meeting.nodes) // len(meeting.nodes)
                (self._logs / HOSTS).write_text(lines.hosts(meeting.nodes, tasks_per_node))
                hosts["SLURM_HOSTFILE"] = str(self._logs / HOSTS)
            wait = self._srun.run(
                launch_argv(self._job, meeting, self._logs),
                launch_environment(self._job, meeting, environment) | hosts | self._known(environment),
            )
        except ForeignError as failure:
            self._never_began(1, str(failure))
            return
        except OSError as failure:
            self._srun.ended.set()
            why = f"{failure.filename}: {failure.strerror}"
            self._inbox.put(on.LaunchRefused(at=self._inbox.clock.now(), launch=launch, error=why))
            return
        code = wait()
        self._log.drain(STORAGE_WITHIN_S)
        error = self._unreachable or self._error
        said = self._said()
        end = End()
        if not said:
            end = self._inbox.guard(Part.FRAMEWORK, self._end_of_framework)(code) or end
        self._inbox.put(
            on.LaunchEnded(
                at=self._inbox.clock.now(),
                launch=launch,
                code=code,
                finished=said == "finished" or end.finished,
                stopped=said == "stopped",
                error=error if code else "",
                step=end.step,
                target=end.target,
                unproven=end.unproven,
            )
        )
        failed = f"srun ended with {code}{f'; {error}' if error else ''}" if not said and not end.finished else ""
        self._inbox.guard(Part.LAUNCH_LOGS, self._tidy)(failed)

    def _tidy(self, failed: str) -> None:
        with contextlib.suppress(OSError):  # housekeeping: the next launch tries again
            if failed:
                paths.mark_failed(self._logs, failed)
            paths.prune_logs(self._job.run_directory / "logs")

    def _for_ranks(self, foreign: ForeignCheckpoints, ranks: int | None) -> Meeting:
        """Return the meeting with the checkpoint that so many ranks can resume from.

        Raises:
            ForeignError: there is none.
        """
        try:
            found = foreign.convert(self._meeting.resume_from, ranks, lambda: self._killed)
        except ForeignError:
            raise
        except Exception as error:
            self._inbox.failed(Part.FRAMEWORK, error)
            raise ForeignError(f"the checkpoint could not be prepared for {ranks} ranks: {shown(error)}") from error
        if found == self._meeting.resume_from:
            return self._meeting
        return msgspec.structs.replace(self._meeting, resume_from=found, arguments=foreign.arguments(found))

    def _never_began(self, code: int = 128 + signal.SIGTERM, error: str = "was ended before it began") -> None:
        """Say that the launch has ended while it was prepared: there is no srun to be ended."""
        self._srun.ended.set()
        self._inbox.put(on.LaunchEnded(at=self._inbox.clock.now(), launch=self._meeting.launch, code=code, error=error))

    def _known(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what launches before have left for the ranks in the run directory; they can do without it."""
        run_directory = self._job.run_directory
        reliability = self._inbox.guard(Part.RANK_FILES, rank_files.reliability_variables)(run_directory)
        trackers = self._inbox.guard(Part.RANK_FILES, rank_files.tracker_variables)(run_directory, environment)
        return (reliability or {}) | (trackers or {})

    def _on_word(self, text: str) -> None:
        """Keep what srun itself says: the ranks write to their own files."""
        self._log.write(text + "\n")
        if UNREACHABLE in text.lower():
            self._unreachable = self._unreachable or text[:ERROR_CHARACTERS_MAX]
        if not slurm_launch.only_follows(text):
            self._error = text[:ERROR_CHARACTERS_MAX]
        for rank, code, number in deaths(text):
            self.note_death(code, number)
            # the wrapper's own word may have been lost, and a user's own srun line has no wrapper
            self._inbox.put(
                on.RankExited(
                    at=self._inbox.clock.now(),
                    launch=self._meeting.launch,
                    rank=rank,
                    node=_node(text),
                    code=code,
                    signal=number,
                )
            )

    def _end_of_framework(self, code: int) -> End:
        """Return what the checkpoints show of the end, where the ranks were not ended from outside."""
        died, number = self._first_death or (code, None)
        if number in _OUTSIDE or died in _OUTSIDE_CODES:
            return End()
        if (step := self._trained()) is not None:
            if code and self._foreign is not None:
                self._foreign.say_failed_later(step, code)
            return End(finished=True, step=step)
        if self._foreign is None:
            return End()
        return self._foreign.end(code, resumed_from=self._meeting.resume_from)

    def _said(self) -> str:
        """Return what rank 0 wrote of the end."""
        return patiently(lambda: _outcome(self._job, self._meeting.launch), STORAGE_WITHIN_S) or ""

    def _trained(self) -> int | None:
        """Return the last step, where rank 0 of another framework wrote that this launch has come to its end."""
        return patiently(lambda: _last_step(self._job, self._meeting.launch), STORAGE_WITHIN_S)


def deaths(text: str) -> list[tuple[int, int | None, int | None]]:
    """Return (rank, exit code, signal) for each task that srun reports as failed in one line of its stderr.

    >>> deaths("srun: error: gpu3: tasks 0-1,4: Exited with exit code 1")
    [(0, 1, None), (1, 1, None), (4, 1, None)]
    >>> deaths("srun: error: gpu3: task 2: Killed")
    [(2, None, 9)]
    >>> deaths("srun: error: gpu3: task 2: Segmentation fault (core dumped)")
    [(2, None, 11)]
    >>> deaths("srun: error: gpu3: task 2: Exited with exit code 75")
    []
    """
    match = _DEATH.search(text)
    if match is None:
        return []
    code = int(match["code"]) if match["code"] else None
    number = None if code is not None else _SIGNALS.get(match["words"].removesuffix(" (core dumped)").strip())
    if code in (records.EXIT_FINISHED, records.EXIT_STOPPED) or (code is None and number is None):
        return []
    ranks: list[int] = []
    for part in match["tasks"].split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return [(rank, code, number) for rank in ranks]


def _node(text: str) -> str:
    match = _DEATH.search(text)
    return match["node"] if match else ""


def _last_step(job: Job, launch: int) -> int | None:
    try:
        found = records.read_trained(job.run_directory)
    except (OSError, ValueError):
        return None  # as if it had not been written: the checkpoints may show it
    return found.step if found is not None and found.launch == f"{job.attempt}.{launch}" else None


def _outcome(job: Job, launch: int) -> str:
    """Return what rank 0 wrote about the end of this very launch."""
    try:
        found = records.read_outcome(job.run_directory)
    except (OSError, ValueError):
        return ""  # as if it had not been written: the launch counts as failed, and is repeated
    if found is None or found.launch != f"{job.attempt}.{launch}":
        return ""
    return found.outcome
