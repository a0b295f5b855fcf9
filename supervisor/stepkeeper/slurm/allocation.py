"""Our job as Slurm's environment describes it: what we hold, and whether we are its batch process."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping

import msgspec

from stepkeeper.core.events import JobFacts
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.launch import node_name

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


def read_allocation(environment: Mapping[str, str], client: SlurmClient, tasks_per_node: int | None) -> Allocation:
    """Return our job's shape.

    Raises:
        SlurmError: the node list could not be expanded.
        StepkeeperError: a variable is not what Slurm sets.
    """
    nodes = client.hostnames(environment["SLURM_JOB_NODELIST"])
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    asked = environment.get("SLURM_NTASKS_PER_NODE", "")
    if tasks_per_node is not None:
        tasks = tasks_per_node
    elif gpus.isdigit() and int(gpus):
        tasks = int(gpus)
    elif asked.isdigit():
        tasks = int(asked)
    else:
        tasks = 1
    if tasks < 1:
        raise StepkeeperError("--tasks-per-node is at least 1", ExitCode.USAGE)
    per_task = environment.get("SLURM_CPUS_PER_TASK", "")
    cpus: int | None
    on_node = re.match(r"\d+", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if per_task.isdigit() and not _in_srun(environment):  # else those of a bare srun's only task: ours
        cpus = int(per_task)
    elif on_node:
        cpus = int(on_node.group()) // tasks
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
