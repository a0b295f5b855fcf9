"""From what NVML says of GPUs to faults.  Pure.  Only a change, or the first reading, makes a fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from stepkeeper.node.sensors.readings import GpuHealth, NvmlState, NvmlStatus
from stepkeeper.node.xid import payload
from stepkeeper.node.xid.catalogue import Catalogue
from stepkeeper.node.xid.judge import lost
from stepkeeper.node.xid.model import Action, Domain, Fault, Kind, Source
from stepkeeper.node.xid.parse import canonical
from stepkeeper.node.xid.payload import Decoded

# During XID 119 every NVML call blocks, up to 45 s, and there are dozens in a row; loading the driver or resetting a
# GPU blocks for a minute too.  All of these end by themselves, and 119 has a line of its own that drains much sooner.
# So silence alone is believed only after a time that none of them takes.  The remedy is then that of 119, for it is
# the same hang without its line: a reset, and a reboot where the hanging driver refuses that.
STUCK_LOG_AFTER_S: Final = 60.0
STUCK_DRAIN_AFTER_S: Final = 600.0
# At boot, and while an administrator changes it, the driver is away for a while: then no GPU is missing yet.
ABSENT_BELIEVED_AFTER_S: Final = 120.0
# A GPU that answers with errors: a driver that is being loaded, or a GPU that is gone.  Looks come on request too, so
# their number alone says nothing.
SILENT_LOOKS: Final = 3
SILENT_BELIEVED_AFTER_S: Final = 15.0
# A list that is too short, while the driver brings its GPUs up: a second one has to say the same.
LISTED_AGAIN_AFTER_S: Final = 5.0


def judge_health(health: GpuHealth, before: GpuHealth | None, *, catalogue: Catalogue) -> list[Fault]:
    """Return what is new in the health of one GPU since the reading `before`."""
    if health.lost:  # nothing else that is said of it can be trusted
        if before is not None and before.lost:
            return []
        return [_fault(health, Kind.LOST, lost(catalogue, "NVML says that the GPU is lost"), standing=before is None)]
    return [_fault(health, Kind.HEALTH, each, standing=before is None) for each in _news(health, before)]


def was_reset(health: GpuHealth, before: GpuHealth) -> str:
    """Say by what a GPU shows that it was reset since the reading `before`; "" where it does not."""
    errors, errors_before = health.ecc_uncorrected, before.ecc_uncorrected
    if errors is not None and errors_before is not None and errors < errors_before:
        return "the GPU was reset: it counts its memory errors anew"
    if before.rows_pending and health.rows_pending is False:
        return "the GPU was reset: no memory row waits for that any more"
    return ""


def silent(health: GpuHealth, *, standing: bool, catalogue: Catalogue) -> Fault:
    """Return the fault of a GPU that has not answered for several looks in a row: as good as lost."""
    decided = lost(catalogue, f"the GPU does not answer: {'; '.join(health.errors)}")
    return _fault(health, Kind.LOST, decided, standing=standing)


def missing(expected: int, found: int, *, at: float, catalogue: Catalogue, gone: Iterable[str] = ()) -> Fault | None:
    """Return the fault of a node that shows fewer GPUs than it should; None where none is missing.

    `gone`: the names of GPUs that were there, or are on the PCI bus, and do not show.

    A GPU can be gone without a line in the log: it may never have come up.
    """
    if found >= expected:
        return None
    which = ", ".join(gone)
    decided = lost(catalogue, f"{found} of {expected} GPUs are there" + (f"; missing: {which}" if which else ""))
    return Fault(
        at=at,
        source=Source.NVML,
        kind=Kind.LOST,
        action=decided.action,
        domain=Domain.HARDWARE,
        why=decided.why,
        standing=True,  # it is said at every listing
    )


def stuck(status: NvmlStatus) -> Fault | None:
    """Return the fault of an NVML that does not answer; None as long as that is nothing unusual.

    It is not certain: NVML may answer the next moment.
    """
    if status.state is not NvmlState.STUCK or status.stuck_s < STUCK_LOG_AFTER_S:
        return None
    drain = status.stuck_s >= STUCK_DRAIN_AFTER_S
    call = f" in {status.call}" if status.call else ""
    return Fault(
        at=status.at,
        source=Source.NVML,
        kind=Kind.STUCK,
        action=Action.DRAIN_RESET if drain else Action.LOG,
        domain=Domain.DRIVER_FIRMWARE,
        why=f"NVML has not answered{call} for {status.stuck_s:.0f} s" + ("" if drain else ": it may come back"),
    )


def _news(health: GpuHealth, before: GpuHealth | None) -> Iterator[Decoded]:
    if before is None or health.recovery_action != before.recovery_action:
        advice = payload.recovery(health.recovery_action or payload.RECOVERY_NONE)
        if advice is not None:
            yield advice
    if health.rows_failed and not (before is not None and before.rows_failed):
        why = "NVML: a memory row could not be remapped"
        yield Decoded(action=Action.DRAIN_RMA, why=why, certain=True)
    if health.sram_threshold_exceeded and not (before is not None and before.sram_threshold_exceeded):
        why = "NVML: more uncorrectable SRAM errors than the GPU may have"
        yield Decoded(action=Action.DRAIN_RMA, why=why, certain=True)
    if health.rows_pending and not (before is not None and before.rows_pending):
        yield Decoded(action=Action.DEFER_RESET, why="NVML: a memory row waits for a reset to be remapped")
    if health.pages_pending and not (before is not None and before.pages_pending):
        yield Decoded(action=Action.DEFER_RESET, why="NVML: a memory page waits for a reset to be retired")
    errors = health.ecc_uncorrected or 0
    errors_before = before.ecc_uncorrected or 0 if before is not None else 0
    if errors > errors_before:  # a smaller number means that the GPU was reset
        why = f"NVML: {errors - errors_before} new uncorrectable memory errors: XID 48, 94 or 95 would tell more"
        yield Decoded(action=Action.LOG, why=why)


def _fault(health: GpuHealth, kind: Kind, decided: Decoded, *, standing: bool) -> Fault:
    return Fault(
        at=health.at,
        source=Source.NVML,
        kind=kind,
        action=decided.action,
        domain=decided.domain or Domain.HARDWARE,
        why=decided.why,
        standing=standing,
        certain=decided.certain,
        pci=canonical(health.pci),
        gpu=health.uuid,
    )
