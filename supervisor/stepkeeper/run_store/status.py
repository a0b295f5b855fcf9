"""`status.json`: where a run stands, for people and programs.  Replaced atomically."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import closed_gates
from stepkeeper.core.state import Phase, State
from stepkeeper.errors import StepkeeperError
from stepkeeper_trainer.formats.plain import decode, read_plain

ALIVE_EVERY_S = 5.0  # a supervisor writes the status at least so often
SILENT_AFTER_S = 20.0  # a status that is older was not renewed: nobody writes it, or the storage hangs
# of a version that wrote only when something happened: each step reached it
OLD_SILENT_S, OLD_SILENT_STEPS = 120.0, 10


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `stepkeeper status` shows.  Instants are Unix seconds."""

    format: int = 1
    run_id: str
    job_id: int
    slurm_name: str = ""  # as Slurm's commands name the job: `ARRAY_TASK` for a task of an array
    restart_count: int
    attempt: int
    launch: int  # the newest that was started
    launched: bool = True  # one was started in this attempt
    phase: str
    nodes: tuple[str, ...]
    step: int | None = None
    tokens: int | None = None
    total_steps: int | None = None  # when the work is done, where the script says it
    loss: float | None = None
    loss_not_finite: bool = False  # that of the newest step is NaN or infinite
    step_seconds: float | None = None
    checkpoint_step: int | None = None  # newest committed one that was reported
    snapshot_step: int | None = None  # newest that the nodes' memory holds; it is lost with the allocation
    resumed_from: str | None = None
    library: bool | None = None  # the trainer library has answered; False: ranks run, and it has not; None: none runs
    waits_for: tuple[str, ...] = ()  # of a launch that is to start: `core.gates.Gate`, the first first
    why: str = ""  # the newest decision
    reason: str = ""  # its first reason: a tag of `core.reasons`
    exit_code: int | None = None
    suspended_seconds: float = 0.0  # of this attempt: its supervisor did not run
    started_at: float
    updated_at: float  # the newest event
    alive_at: float | None = None  # the supervisor's loop ran; None: of a version that did not write it


NO_LIBRARY = (
    "no trainer library has answered so far: steps, losses and checkpoints are not known to Stepkeeper, which "
    "has the script save by a signal and starts it again; where it resumes is up to the script"
)


_decoder = msgspec.json.Decoder(Status)


def is_over(path: Path) -> bool:
    """Tell whether a run's newest attempt has ended, and not by a requeue.

    Raises:
        OSError: the file is there and cannot be read.
    """
    status = known(path)
    return status is not None and status.phase == Phase.DONE and status.exit_code != ExitCode.REQUEUED


def heard_at(status: Status) -> float:
    """Return when the supervisor wrote its newest record."""
    return max(status.updated_at, status.alive_at or 0.0)


def is_silent(status: Status, now: float) -> bool:
    """Tell whether a supervisor that should write has stopped writing."""
    if status.phase == Phase.DONE:
        return False
    patience_s = SILENT_AFTER_S
    if status.alive_at is None:
        patience_s = max(OLD_SILENT_S, OLD_SILENT_STEPS * (status.step_seconds or 0.0))
    return now - heard_at(status) > patience_s


def changes(status: Status, event: on.Event, before: State, state: State) -> dict[str, object]:
    """Return what one event, and the state after it, change in a status."""
    found: dict[str, object] = {"phase": state.phase.value, "waits_for": closed_gates(state)}
    if state.launch.running:  # else the number is that of a launch that is being prepared, and may never be started
        found |= {"launch": state.launch.number, "launched": True}
        if (status.launch, status.launched) != (state.launch.number, True) and status.step != state.resume.step:
            # what was done after the step that this launch goes on from is lost
            found |= {"step": state.resume.step, "tokens": None, "loss": None, "loss_not_finite": False}
            found["snapshot_step"] = None
    if state.has_library or state.launch.all_tasks_started or (state.launch.running and not state.identity.wrapped):
        found["library"] = state.has_library
    if isinstance(event, on.Progressed):
        found |= {name: getattr(event, name) for name in ("step", "tokens", "loss", "step_seconds")}
        found |= {"loss_not_finite": event.not_finite, "snapshot_step": event.held_step}
    if isinstance(event, on.RankHello) and event.total_steps is not None:
        found["total_steps"] = event.total_steps
    if isinstance(event, on.Suspended):
        found["suspended_seconds"] = status.suspended_seconds + event.seconds
    if isinstance(event, on.CheckpointCommitted):
        found["checkpoint_step"] = event.step
    if isinstance(event, on.CheckpointChosen):
        found |= {"resumed_from": event.directory, "checkpoint_step": event.step}
    if isinstance(event, on.RankHello) and state.resume.step != before.resume.step:
        where = "held by the nodes in memory" if event.in_memory else "which the ranks brought"
        kind = "snapshot_step" if event.in_memory else "checkpoint_step"
        source = f"step {state.resume.step}, {where}"
        found |= {"resumed_from": source, kind: state.resume.step, "step": state.resume.step}
    return found


def read(path: Path) -> Status | None:
    """Return the status; None where there is none.

    Raises:
        OSError: it cannot be read, or is no plain file.
        msgspec.MsgspecError: it is no status.
    """
    try:
        data = read_plain(path, within=path.parent)
    except FileNotFoundError:
        return None
    return decode(_decoder, data)


def known(path: Path) -> Status | None:
    """Return the status; None where there is none that this version can read.  Raises OSError, as `read`."""
    try:
        return read(path)
    except msgspec.MsgspecError:
        return None


def require(path: Path) -> Status | None:
    """Return the status; None where there is none.

    Raises:
        OSError: as `read`.
        StepkeeperError: it is no status.
    """
    try:
        return read(path)
    except msgspec.MsgspecError as error:
        raise StepkeeperError(
            f"{path}: not a status: {error}; the journal tells more: `stepkeeper events {path.parent}`",
            ExitCode.RUN_DIRECTORY,
        ) from error
