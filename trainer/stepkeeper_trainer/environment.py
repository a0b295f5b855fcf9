"""What the supervisor, torchrun and Slurm tell a rank by environment variables: the only reader of them."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.coordinate.cadence import RELIABILITY_VARIABLE
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.lineage import LeftOut

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_NODE = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?")
_PORT_FIRST, _PORT_COUNT = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables of Stepkeeper, and the epoch of the Slurm job around it."""

    socket: str | None
    run_directory: Path | None
    run_id: str
    attempt: int
    launch: int
    resume_from: str | None
    epoch: tuple[int, int] | None  # (job id, restart count); None outside Slurm
    node: str
    resume_newest: bool = False  # what a tier has newer than `resume_from` may be taken instead
    goes_back: bool = False  # on purpose: what a tier has newer must never return
    checkpoint_every: str | None = None  # counts instead of what the script says
    retention: str | None = None  # the same
    confirm_every: str | None = None  # the same
    supervisor_version: str = ""  # its release; 0.1.0 does not say
    skip_data: tuple[LeftOut, ...] = ()
    reliability: tuple[float, float] | None = None  # failures of the infrastructure, and node-hours, of the run so far

    @property
    def reads_values(self) -> bool:
        """Whether the reader of step directories knows values that share bytes; a supervisor of 0.1.0 does not."""
        return self.socket is None or bool(self.supervisor_version)

    @property
    def launch_name(self) -> str:
        """How messages, metrics and outcomes name this launch."""
        return f"{self.attempt}.{self.launch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 29500


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables of Stepkeeper.  Raises UsageError."""
    job_id = environ.get("SLURM_JOB_ID")
    restarts = _integer(environ, "SLURM_RESTART_COUNT", 0)
    run_directory = environ.get("STEPKEEPER_RUN_DIR")
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Environment(
        # The wrapper fills in the node's name; where none runs (a user's own srun line) we do.
        socket=environ.get("STEPKEEPER_SOCKET", "").replace("%N", node) or None,
        run_directory=Path(run_directory) if run_directory else None,
        run_id=environ.get("STEPKEEPER_RUN_ID", ""),
        attempt=_integer(environ, "STEPKEEPER_ATTEMPT", restarts),
        launch=_integer(environ, "STEPKEEPER_LAUNCH", 0),
        resume_from=environ.get("STEPKEEPER_RESUME_FROM") or None,
        epoch=(_integer(environ, "SLURM_JOB_ID", 0), restarts) if job_id else None,
        node=node,
        resume_newest=environ.get("STEPKEEPER_RESUME_NEWEST") == "1",
        goes_back=environ.get("STEPKEEPER_RESUME_NEWEST") == "",
        checkpoint_every=environ.get("STEPKEEPER_CHECKPOINT_EVERY") or None,
        retention=environ.get("STEPKEEPER_RETENTION") or None,
        confirm_every=environ.get("STEPKEEPER_CONFIRM_EVERY") or None,
        supervisor_version=environ.get("STEPKEEPER_RELEASE", ""),
        skip_data=_windows(environ.get("STEPKEEPER_SKIP_DATA", "")),
        reliability=_reliability(environ.get(RELIABILITY_VARIABLE)),
    )


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Say which rank this is: by torchrun's variables, else by Slurm's; None for a process alone.

    Raises:
        UsageError: only some of the variables are set.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        if not ("RANK" in environ and "WORLD_SIZE" in environ):
            raise UsageError("RANK and WORLD_SIZE belong together, and one is missing: set both, or neither")
        return Place(
            rank=_integer(environ, "RANK", 0),
            world_size=_integer(environ, "WORLD_SIZE", 1),
            local_rank=_integer(environ, "LOCAL_RANK", 0),
            master_address=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_integer(environ, "MASTER_PORT", 29500),
        )
    # A batch script has SLURM_PROCID too, and is no task of a Slurm step: it has no SLURM_STEP_ID.
    batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    if "SLURM_PROCID" not in environ or batch_script:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    port = (
        _PORT_FIRST + (_integer(environ, "SLURM_JOB_ID", 0) * 31 + _integer(environ, "SLURM_STEP_ID", 0)) % _PORT_COUNT
    )
    return Place(
        rank=_integer(environ, "SLURM_PROCID", 0),
        world_size=_integer(environ, tasks, 1),
        local_rank=_integer(environ, "SLURM_LOCALID", 0),
        master_address=environ.get("MASTER_ADDR") or _first_node(environ),
        master_port=_integer(environ, "MASTER_PORT", port),
    )


def first_node(node_list: str) -> str:
    """Return the first name of a Slurm node list.

    >>> first_node("gpu[003-004,7],cpu1"), first_node("login1,login2"), first_node("a[1-2]-ib")
    ('gpu003', 'login1', 'a1-ib')
    """
    match = _FIRST_NODE.match(node_list)
    if match is None:
        return "127.0.0.1"
    return f"{match.group(1)}{match.group(2) or ''}{match.group(3) or ''}"


def _first_node(environ: Mapping[str, str]) -> str:
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")) == "1":
        return "127.0.0.1"
    return first_node(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")


def _windows(text: str) -> tuple[LeftOut, ...]:
    try:
        windows = tuple(LeftOut(*map(int, part.split(":"))) for part in text.split(",") if part)
    except (TypeError, ValueError):
        raise UsageError(f"STEPKEEPER_SKIP_DATA={text!r} is not STEP:STEPS,...: set it right, or unset it") from None
    if any(window.step < 1 or window.steps < 1 for window in windows):
        raise UsageError(f"STEPKEEPER_SKIP_DATA={text!r}: steps are counted from 1: set it right, or unset it")
    return windows


def _reliability(text: str | None) -> tuple[float, float] | None:
    if not text:
        return None
    try:
        failures, node_hours = (float(part) for part in text.split(":"))
    except ValueError:
        failures = node_hours = math.nan
    if not (0 <= failures < math.inf and 0 <= node_hours < math.inf):
        raise UsageError(f"{RELIABILITY_VARIABLE}={text!r} is not FAILURES:NODE_HOURS: set it right, or unset it")
    return failures, node_hours


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number: set it right, or unset it") from None


def read_number(environ: Mapping[str, str], name: str, *, error: type[Exception] = UsageError) -> float | None:
    """Return the number that a variable holds; None where it is unset or empty.  Raises `error`: it is none."""
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise error(f"{name}={text!r} is not a number: set it right, or unset it") from None
