"""What our Slurm steps inherit: the job's identity, never a geometry that was meant for another srun."""

from __future__ import annotations

import os
from collections.abc import Mapping

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

# What sbatch has set for the job that tells how it was submitted; srun sets some of them anew for a Slurm step.
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
