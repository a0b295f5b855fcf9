"""Our job as Slurm describes it, the command lines of our Slurm steps, and what these inherit.

Geometry is always explicit.  Golden tests hold the lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepkeeper.core.events import JobFacts
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError, UsageError
from stepkeeper.slurm.client import SlurmError, fold

if TYPE_CHECKING:
    from stepkeeper.slurm.jobs import SlurmCommands


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a training step on each of its nodes."""

    tasks_per_node: int
    cpus_per_task: int | None = None
    overcommit: bool = False  # fewer CPUs on a node than ranks

    def with_tasks(self, number: int) -> Geometry:
        """Return the shape with so many tasks on a node, which share the same CPUs."""
        if number == self.tasks_per_node:
            return self
        cpus = (self.cpus_per_task or 0) * self.tasks_per_node
        overcommit = self.overcommit or cpus < number
        return Geometry(tasks_per_node=number, cpus_per_task=(cpus // number) or None, overcommit=overcommit)


def watcher_argv(nodes: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the srun line of the watchers: one task a node, beside the training, taking nothing from it.

    `--overlap --mem=0` share what the job has; no `--gres=none`, which would hide the GPUs from NVML; no
    `--unbuffered`, which tears lines; `--no-kill` and `--kill-on-bad-exit=0` keep the other watchers when
    one dies; `--input=all` sends each command to all of them.
    """
    return [*_shape(nodes, 1), "--cpus-per-task=1", *_beside("stepkeeper-watcher"), *program]


def standby_argv(nodes: Sequence[str], geometry: Geometry, program: Sequence[str]) -> list[str]:
    """Return the srun line of the standbys: the shape of the training step, for each becomes one of its ranks.

    Its cgroup must be that of a training step: CPUs, memory and GPUs.  The rest is as for the watchers.
    """
    shape = [*_shape(nodes, geometry.tasks_per_node), *_cpus(geometry)]
    return [*shape, *_beside(_STANDBY), *program]


def own_standby_argv(options: Sequence[str], before: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the srun line of the standbys of a user's own srun line.

    Args:
        options: the user's own, which say where ranks are and how they are bound.  Ours say how tasks speak with us.
        before: what stands before Python, such as `env NAME=VALUE`.
        program: of the standbys.
    """
    speaking = ("--input=all", "--output=all", "--error=all", f"--job-name={_STANDBY}")
    return ["srun", "--mem=0", *options, *(each for each in _BESIDE if each != "--mem=0"), *speaking, *before, *program]


def training_argv(
    nodes: Sequence[str], geometry: Geometry, log_pattern: str, program: Sequence[str], *, in_slurms_order: bool = True
) -> list[str]:
    """Return the srun line of a training step: ranks are contiguous on the nodes, in Slurm's order or by `hosts`."""
    shape = _shape(nodes, geometry.tasks_per_node) if in_slurms_order else _by_hosts(nodes, geometry.tasks_per_node)
    shape += _cpus(geometry)
    return [*shape, *_step_options(log_pattern), "--cpu-bind=none", *program]


def _shape(nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--nodelist={fold(nodes)}",
    ]


def _by_hosts(nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """Return the shape of a step whose tasks are where SLURM_HOSTFILE says; 26.05 takes no `--nodes` beside it."""
    return ["srun", f"--ntasks={len(nodes) * tasks_per_node}", "--distribution=arbitrary"]


def hosts(nodes: Sequence[str], tasks_per_node: int) -> str:
    """Return the text of SLURM_HOSTFILE: a line a task, in the order of the ranks.

    >>> hosts(("n4", "n2"), 2).split()
    ['n4', 'n4', 'n2', 'n2']
    """
    return "".join(f"{node}\n" * tasks_per_node for node in nodes)


def _cpus(geometry: Geometry) -> list[str]:
    if geometry.overcommit:
        return ["--overcommit"]
    return [f"--cpus-per-task={geometry.cpus_per_task}"] if geometry.cpus_per_task else []


# of every Slurm step of ours, beside others, and stopped by us alone: when a rank dies, the others may still finish the
# commit in flight
_BESIDE = ("--overlap", "--mem=0", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")


_STANDBY = "stepkeeper-standby"


def _beside(name: str) -> list[str]:
    """What a step of ours beside the training needs; see `watcher_argv`."""
    return [*_BESIDE, "--cpu-bind=none", "--input=all", f"--job-name={name}"]


def own_srun_argv(line: Sequence[str], log_pattern: str) -> list[str]:
    """Return the user's own srun line (`cmd.is_own_srun`) with our step options, which yield to the user's."""
    return [line[0], *_step_options(log_pattern), *line[1:]]


def _step_options(log_pattern: str) -> list[str]:
    """What every training step needs."""
    return [*_BESIDE, "--input=none", "--label", f"--output={log_pattern}", "--open-mode=append"]


# What our Slurm steps inherit: the job's identity, never a geometry that was meant for another srun.

# srun reads these as options (srun(1), INPUT ENVIRONMENT VARIABLES).  After a shrink, or inside a batch
# script of another shape, they start the wrong number of tasks or none at all; ours are always explicit.
_GEOMETRY = frozenset(
    f"SLURM_{name}"
    for name in (
        "BCAST", "BCAST_EXCLUDE", "COMPRESS", "CONSTRAINT", "CORE_SPEC", "CPU_BIND", "CPU_BIND_LIST",
        "CPU_BIND_TYPE", "CPU_BIND_VERBOSE", "CPU_FREQ_REQ", "CPUS_PER_GPU", "CPUS_PER_TASK", "DEPENDENCY",
        "DISABLE_STATUS", "DIST_PLANESIZE", "DISTRIBUTION", "EPILOG", "EXACT", "EXCLUSIVE", "EXPORT_ENV",
        "GPU_BIND", "GPU_FREQ", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GRES",
        "GRES_FLAGS", "HINT", "HOSTFILE", "IMMEDIATE", "JOB_NUM_NODES", "KILL_BAD_EXIT", "LABELIO",
        "MEM_BIND", "MEM_BIND_LIST", "MEM_BIND_PREFER", "MEM_BIND_SORT", "MEM_BIND_TYPE", "MEM_BIND_VERBOSE",
        "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "MPI_TYPE", "NNODES", "NO_KILL", "NPROCS", "NTASKS",
        "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_NODE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES",
        "OPEN_MODE", "OVERCOMMIT", "OVERLAP", "PARTITION", "POWER", "PROFILE", "PROLOG", "QOS", "RELATIVE",
        "REMOTE_CWD", "REQ_SWITCH", "RESERVATION", "RESV_PORTS", "SIGNAL", "SPREAD_JOB", "SRUN_MULTI",
        "STDERRMODE", "STDINMODE", "STDOUTMODE", "STEP_GRES", "STEP_KILLED_MSG_NODE_ID", "TASK_EPILOG",
        "TASK_PROLOG", "TASKS_PER_NODE", "THREAD_SPEC", "THREADS", "THREADS_PER_CORE", "TIMELIMIT",
        "TRES_BIND", "TRES_PER_TASK", "UMASK", "UNBUFFEREDIO", "USE_MIN_NODES", "WAIT", "WAIT4SWITCH",
        "WCKEY", "WORKING_DIR", "WHOLE",
    )
)  # fmt: skip
# What would make a Python of ours load somebody else's modules, or behave otherwise.
_PYTHON = frozenset(("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS"))

# What sbatch has set for the job that shows how it was submitted; srun sets some of them anew for a Slurm step.
_OF_SUBMISSION = frozenset(
    f"SLURM_{name}"
    for name in (
        "CPU_FREQ_REQ", "CPUS_PER_TASK", "DIST_PLANESIZE", "DISTRIBUTION", "EXPORT_ENV", "GPU_BIND", "GPU_FREQ", "HINT",
        "OVERCOMMIT", "PROFILE",
    )
)  # fmt: skip

WATCHER_VARIABLE = "STEPKEEPER_WATCHER"  # holds a watcher's assignment: who has it is in a Slurm step of ours
KEPT = "STEPKEEPER_KEPT_"  # before the name of a variable that a watcher must not use, but may have to pass on


def scrub_geometry(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what srun would take for options."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _GEOMETRY and not name.startswith(("SRUN_", "SLURM_STEP"))
    }


def without_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what steers a Python interpreter: for our own processes."""
    return {name: value for name, value in environment.items() if name not in _PYTHON}


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a watcher must not use, under other names: one that submits the job again needs it."""
    return {f"{KEPT}{name}": value for name, value in environment.items() if name in _PYTHON | _OF_SUBMISSION}


def as_submitted(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the batch process, also to a watcher: what `kept` has kept is as it was."""
    if WATCHER_VARIABLE not in environment:
        return dict(environment)
    ours = {name: value for name, value in environment.items() if name not in _OF_SUBMISSION}
    return ours | {name.removeprefix(KEPT): ours.pop(name) for name in list(ours) if name.startswith(KEPT)}


def node_name() -> str:
    """Return the name by which Slurm knows this node."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


# srun's second process, which ends a Slurm step when srun itself is killed.
#
# Seen on Slurm 22.05: every srun forks a child that waits for its end, and has the step's tasks SIGKILLed when that
# end was not in order.  When the supervisor is killed, slurmstepd kills its sruns one after the other, and whether
# the child is faster decides whether watchers and ranks live: those that should save the training and the job.  So
# the child is dismissed as soon as it is there; srun itself ends, and ends its tasks on SIGTERM, as before.

FOUND_WITHIN_S = 20.0
LOOK_EVERY_S = 0.05
NOISE = "write(shepherd)"  # srun's complaint at its end: no reason for anything


def dismiss_shepherd(srun: int) -> bool:
    """SIGKILL the shepherd of an srun once it is there; False if none was seen in time, or srun ended."""
    give_up_at = time.monotonic() + FOUND_WITHIN_S
    while time.monotonic() < give_up_at:
        try:
            children = _children(srun)
        except OSError:
            return False  # srun is over
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
                os.kill(pid, signal.SIGKILL)
        if children:
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _children(srun: int) -> list[int]:
    """Return the children of an srun that are an srun too (not yet: they are something else in between).

    Raises:
        OSError: there is no such process.
    """
    os.stat(f"/proc/{srun}")
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # ended meanwhile
        comm = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
        state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
        if comm == b"srun" and int(parent) == srun and state not in b"ZX":
            found.append(int(name))
    return found


# What Slurm says around the end of a Slurm step without saying why: warnings, and what follows from an end.  Pure.

_FOLLOWS = re.compile(
    rf"""
    srun:\ (?:(?i:warning):
        |cluster\ configuration\ lacks\ support
        |Job\ step\ aborted
        |(?i:forc(?:e|ing)\ )?(?i:terminat(?:ed|ing))\b
        |forcing\ job\ termination
        |(?:error:\ )?Timed\ out\ waiting\ for\ job\ step
        |launch/slurm:
        |error:\ [^\s:]+:\ tasks?\ \d[\d,-]*:
        |[^\s:]+:\ tasks?\ \d[\d,-]*:
        |(?:got|sending|interrupt|Cancelled\ pending|First\ task\ exited|Waiting\ up\ to|unknown\ signal)
        |job\ \S+\ (?:queued|has\ been\ allocated)
        |Complete(?:d)?\ job\ step|StepId=\S+\ aborted\ before\ step\ completely\ launched)
    |slurmstepd(?:-[^\s:]+)?:\ error:\ \*\*\*\ STEP\ \S+\ (?:ON\ \S+\ )?CANCELLED\ AT\ [\dT:.-]+
        (?:\ DUE\ TO\ TASK\ FAILURE)?\ \*\*\*
    |.*{re.escape(NOISE)}
    """,
    re.VERBOSE,
)


def only_follows(text: str) -> bool:
    """Return whether a line of Slurm's names no cause: a warning, or that what runs of a Slurm step is ended.

    >>> follows("srun: error: n2: task 1: Killed"), follows("srun: warning: can't honor --ntasks-per-node")
    (True, True)
    >>> follows("srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification")
    False
    >>> follows("slurmstepd: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-09-21T10:00:00 DUE TO TIME LIMIT ***")
    False
    >>> follows("slurmstepd: error: Detected 1 oom_kill event in StepId=7.2. Some of the step tasks have been killed.")
    False
    """
    return _FOLLOWS.match(text) is not None


# Our job as Slurm's environment describes it: what we hold, and whether we are its batch process.

_BATCH = ("-5", "4294967291")  # the number of the step of a batch script
_INTERACTIVE = ("-6", "4294967290")  # and of the shell of `salloc`, where it runs on a node
_NOT_OURS = (
    "not the batch process: Slurm signals only that one, so its place must be ours; "
    "in the batch script write `exec stepkeeper run ...` as the last line"
)


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm's environment says of our job."""

    job_id: int
    slurm_name: str  # as Slurm's commands want it: a task of an array goes by the array's id and its own number
    restart_count: int
    nodes: tuple[str, ...]
    batch_node: str
    tasks_per_node: int
    gpus_per_node: int | None  # that Slurm gave us on this node; None where it says nothing
    cpus_per_task: int | None
    overcommit: bool
    uneven_tasks: str = ""  # how Slurm shares tasks that are not ranks: some nodes get more than others


def is_batch_process(environment: Mapping[str, str]) -> bool:
    """Tell whether we are a batch process; else a person's `salloc` or bare `srun` holds the allocation.

    A Slurm step of a batch job looks like a bare `srun`: only Slurm can distinguish the two.

    Raises:
        StepkeeperError: we are in no job, or where Slurm's signals would reach somebody else.
    """
    if "SLURM_HET_SIZE" in environment:
        raise StepkeeperError(
            "a heterogeneous job: its parts cannot be requeued one by one; submit one job of one shape",
            ExitCode.NO_SLURM,
        )
    missing = [name for name in ("srun", "scontrol", "scancel") if shutil.which(name) is None]
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise StepkeeperError(
            "not inside a Slurm job: `stepkeeper submit -- CMD ARGS...` submits one; in a batch script of your own "
            "for sbatch the last line is `exec stepkeeper run -- CMD ARGS...`",
            ExitCode.NO_SLURM,
        )
    if missing:
        raise StepkeeperError(f"{', '.join(missing)} not on PATH: is Slurm installed here?", ExitCode.NO_SLURM)
    if _in_srun(environment):
        tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
        if tasks != "1":
            raise StepkeeperError(
                f"this srun starts {tasks} supervisors, and one is enough for a job: `srun --ntasks=1`, or, for more "
                "than one node, `salloc --nodes=N stepkeeper run ...` without srun",
                ExitCode.NOT_BATCH_PROCESS,
            )
        return False
    if "SLURM_TASK_PID" not in environment or environment.get("SLURM_STEP_ID") in _INTERACTIVE:
        return False
    if environment["SLURM_TASK_PID"] != str(os.getpid()):
        raise StepkeeperError(_NOT_OURS, ExitCode.NOT_BATCH_PROCESS)
    return True


def _in_srun(environment: Mapping[str, str]) -> bool:
    """Tell whether a srun has started us: newer Slurms number the steps of batch scripts and shells, too."""
    return environment.get("SLURM_STEP_ID", _BATCH[0]) not in (*_BATCH, *_INTERACTIVE)


def require_no_batch_script(facts: JobFacts) -> None:
    """Refuse to run in a Slurm step of a batch job.  Raises StepkeeperError."""
    if facts.batch:
        raise StepkeeperError(_NOT_OURS, ExitCode.NOT_BATCH_PROCESS)


def read_allocation(environment: Mapping[str, str], client: SlurmCommands, tasks_per_node: int | None) -> Allocation:
    """Return our job's shape.

    Raises:
        SlurmError: the node list could not be expanded.
        StepkeeperError: a variable is not what Slurm sets.
    """
    nodes = client.hostnames(environment["SLURM_JOB_NODELIST"])
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    asked = environment.get("SLURM_NTASKS_PER_NODE", "")
    in_all = environment.get("SLURM_NTASKS", "")  # of `--ntasks`
    shares = environment.get("SLURM_TASKS_PER_NODE", "")  # such as 7,1 or 4(x2), as the nodes' CPUs allow
    even = re.fullmatch(r"(\d+)(?:\(x\d+\))?", shares)
    uneven_tasks = ""
    if tasks_per_node is not None:
        tasks = tasks_per_node
    elif gpus.isdigit() and int(gpus):
        tasks = int(gpus)
    elif asked.isdigit():
        tasks = int(asked)
    elif in_all.isdigit() and int(in_all) > len(nodes) and even:
        tasks = int(even[1])
    else:
        tasks = 1
        uneven_tasks = shares if in_all.isdigit() and int(in_all) > len(nodes) else ""
    if tasks < 1:
        raise UsageError("--tasks-per-node is at least 1")
    per_task = environment.get("SLURM_CPUS_PER_TASK", "")
    cpus: int | None
    on_nodes = re.findall(r"(?:^|,)(\d+)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))  # such as 8,2(x3)
    if per_task.isdigit() and not _in_srun(environment):  # else those of a bare srun's only task: ours
        cpus = int(per_task)
    elif on_nodes:
        cpus = min(map(int, on_nodes)) // tasks
    else:
        cpus = None
    here = node_name()  # that of salloc may be a login node
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return Allocation(
        job_id=int(environment["SLURM_JOB_ID"]),
        slurm_name=f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"],
        restart_count=int(environment.get("SLURM_RESTART_COUNT", "0")),
        nodes=nodes,
        batch_node=here if here in nodes else nodes[0],
        tasks_per_node=tasks,
        # slices of a GPU are no GPUs, which is what NVML counts
        gpus_per_node=int(gpus)
        if gpus.isdigit() and "MIG-" not in environment.get("CUDA_VISIBLE_DEVICES", "")
        else None,
        cpus_per_task=cpus or None,
        overcommit=cpus == 0,
        uneven_tasks=uneven_tasks,
    )


# Jobs with expedited requeue (`--requeue=expedite`, Slurm 25.11 and later), where Slurm itself acts on exit codes.
#
# A script that ends with another code than 0 goes back into the queue, and is held there if its nodes are sound.  For
# a run that is over, one would have to find and cancel a job that waits for ever: like any other, it ends as FAILED.

EXPEDITED_PARAMETER = "enable_expedited_requeue"
# goes on, is over for Slurm too, or is best off held: `scontrol release` makes up for the requeue that failed
LEFT_TO_SLURM = frozenset(
    (
        ExitCode.FINISHED,
        ExitCode.REQUEUED,
        ExitCode.CANCELLED,
        ExitCode.SUPERSEDED,
        ExitCode.NO_BATCH_SCRIPT,
        ExitCode.REQUEUE_FAILED,
        ExitCode.UNDECIDED,
    )
)


def let_end(code: int, environment: Mapping[str, str], ask: Callable[..., str]) -> str:
    """See to it that a run which is over leaves no job behind that is held; return in words what was done.

    Args:
        code: with which we are about to end.
        environment: of this process.
        ask: calls a command of Slurm's, and returns what it says.

    Raises:
        SlurmError: Slurm holds such jobs, and does not take it: the job will be held.
    """
    if code in LEFT_TO_SLURM or environment.get("SLURM_TASK_PID") != str(os.getpid()):
        return ""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    try:
        settings = ask("scontrol", "show", "config")
    except SlurmError:
        return ""  # nothing says that it would hold the job; who asked it before has reported that it does not answer
    if EXPEDITED_PARAMETER not in settings:
        return ""
    if not re.search(r"\sExpeditedRequeue=Yes(?:\s|$)", ask("scontrol", "-o", "show", "job", job)):
        return ""
    ask("scontrol", "update", f"JobId={job}", "Requeue=0")
    return f"job {job} has expedited requeue, and is over: Requeue=0 keeps Slurm from putting it back and holding it"
