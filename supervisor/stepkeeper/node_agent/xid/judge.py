"""From a report to a fault: what should be done, and which rule says so.  Pure.

The order: the GPU's own recovery action, then what the text of the report says, then the catalogue.  A code that nobody
knows is logged and never drained on.  13, 31, 43 and 45 come from programs: alone they never drain.  Two exceptions to
the order: what a recovery action cannot say (only a person can mend it) it cannot lower, and of a GPU that is gone
NVML knows only what was before.

`Fault.certain` is set exactly where nothing that may follow in the burst could lower the action, so that the agent need
not wait for the rest: recovery actions 1 and 2, a GPU that is gone, a fault that only a person can mend, an uncontained
error whose line asks for the reset, and a fatal report of a switch about its whole fabric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from stepkeeper.node_agent.readings import GpuHealth, NvmlState, NvmlStatus, NvmlXid
from stepkeeper.node_agent.xid import payload
from stepkeeper.node_agent.xid.catalogue import (
    TEXT_CHARACTERS_MAX,
    Action,
    Catalogue,
    Domain,
    Fault,
    Kind,
    Row,
    Severity,
    Source,
)
from stepkeeper.node_agent.xid.parse import Report, canonical, instance
from stepkeeper.node_agent.xid.payload import Decoded

OFF_THE_BUS: Final = 79
CLEAN_UP: Final = 45
RECOVERY_CHANGED: Final = 154
KEY_ROTATION: Final = 144  # what the number stood for before drivers with NVLink 5
NVLINK5_DRIVER_MIN: Final = 560


def judge(
    report: Report,
    *,
    at: float,
    source: Source,
    catalogue: Catalogue,
    recovery_action: int | None = None,
    driver: str = "",
    gpu: str = "",
    boot_id: str = "",
    sequence: int | None = None,
) -> Fault:
    """Return the judged sighting of a kernel report.

    `recovery_action` is NVML field 230 of this GPU; None where it is not known.
    """
    cause = None
    if report.kind is Kind.SXID:
        decided = _switch(report, catalogue)
    elif report.kind is Kind.LOST or report.code is None:
        decided = lost(catalogue, "the kernel says that the GPU fell off the bus")
    else:
        cause = payload.cause(report.payload) if report.code == CLEAN_UP else None
        plain = _by_text(report.code, report.payload, cause, catalogue, driver)
        decided = _with_recovery(report.code, report.payload, recovery_action, plain, catalogue.rows.get(report.code))
    return Fault(
        at=at,
        source=source,
        kind=report.kind,
        action=decided.action,
        domain=decided.domain or Domain.INFO,
        why=decided.why,
        certain=decided.certain,
        code=report.code,
        pci=report.pci,
        gpu=gpu,
        instance=report.instance,
        place=payload.place(report.payload) if report.kind is Kind.XID else "",
        cause=cause,
        text=report.record[:TEXT_CHARACTERS_MAX],
        boot_id=boot_id,
        sequence=sequence,
    )


def judge_xid_event(
    event: NvmlXid,
    *,
    catalogue: Catalogue,
    recovery_action: int | None = None,
    kernel_log: bool = True,
) -> Fault:
    """Return the judged sighting of an XID event of NVML, which has no text.

    Where the text decides on a code, the mildest that it can say counts, for the kernel's line will raise it: unless
    `kernel_log` says that nobody reads that.
    """
    row = catalogue.rows.get(event.code)
    if event.code == OFF_THE_BUS:
        decided = lost(catalogue, "XID 79: the GPU fell off the bus")
    else:
        plain = _without_text(event.code, row) if kernel_log else _by_catalogue(event.code, row)
        decided = _over(payload.recovery(recovery_action), plain, row)
    mig = instance(event.gpu_instance, event.compute_instance)
    decided = msgspec.structs.replace(decided, domain=decided.domain or Domain.INFO)
    return _of_nvml(event, Kind.XID, decided, code=event.code, instance=mig)


def lost(catalogue: Catalogue, why: str) -> Decoded:
    """Return what a GPU that is gone asks for: the same as XID 79, from whichever sensor it comes."""
    row = catalogue.rows[OFF_THE_BUS]
    return Decoded(action=row.action, why=why, certain=True, domain=row.domain)


def _with_recovery(code: int, text: str, recovery_action: int | None, plain: Decoded, row: Row | None) -> Decoded:
    """Return the recovery action's word, be it NVML's or that of a 154, over what text and catalogue say."""
    if code == OFF_THE_BUS:
        return plain  # what NVML says of a GPU that is gone, it said before
    advice = payload.recovery(recovery_action)
    if code == RECOVERY_CHANGED and not (row is not None and row.site):
        wanted = payload.changed_recovery(text)
        if wanted == payload.RECOVERY_NONE and advice is None:
            why = "the GPU's recovery action went back to none"
            return Decoded(action=Action.LOG, why=why, domain=_blamed(row))
        from_text = payload.recovery(wanted)
        advice = max(
            (each for each in (from_text, advice) if each is not None),
            key=lambda each: each.action.severity,
            default=None,
        )
    return _over(advice, plain, row)


def _over(advice: Decoded | None, plain: Decoded, row: Row | None) -> Decoded:
    """Return the recovery action's word where there is one; "a person has to look" is beyond what it can say."""
    if advice is None or plain.action is Action.DRAIN_RMA:
        return plain
    return Decoded(action=advice.action, why=advice.why, certain=advice.certain, domain=_blamed(row))


def _blamed(row: Row | None) -> Domain:
    """Return whose fault it is when the GPU itself asks for recovery: no program can make it do so."""
    if row is None:
        return Domain.INFO
    return Domain.HARDWARE if row.domain is Domain.APPLICATION else row.domain


def _by_text(code: int, text: str, cause: int | None, catalogue: Catalogue, driver: str) -> Decoded:
    row = catalogue.rows.get(code)
    if code == OFF_THE_BUS:
        return lost(catalogue, "XID 79: the GPU fell off the bus")
    if row is not None and row.site:
        return _by_catalogue(code, row)
    if cause is not None and cause != CLEAN_UP:
        return _by_cause(cause, catalogue)
    if code == KEY_ROTATION and 0 < _branch(driver) < NVLINK5_DRIVER_MIN:
        why = f"driver {driver} means a key rotation by 144, not NVLink"
        return Decoded(action=Action.LOG, why=why, domain=Domain.DRIVER_FIRMWARE)
    decoded = payload.decode(code, text)
    if decoded is None:
        return _by_catalogue(code, row)
    domain = decoded.domain or (row.domain if row is not None else None)
    return Decoded(action=decoded.action, why=decoded.why, certain=decoded.certain, domain=domain)


def _by_cause(cause: int, catalogue: Catalogue) -> Decoded:
    """Judge a 45 by the code that it names.  A channel is gone, so the job's program is lost at the least."""
    row = catalogue.rows.get(cause)
    if cause == OFF_THE_BUS:
        return lost(catalogue, "45 says that XID 79 caused it")
    if row is None:
        return Decoded(action=Action.LOG, why=f"45 says that XID {cause} caused it, which is unknown: logged")
    plain = _without_text(cause, row)
    action = plain.action if plain.action.severity > Action.RESTART_JOB.severity else Action.RESTART_JOB
    why = f"45 says that XID {cause} caused it: {row.meaning}"
    return Decoded(action=action, why=why, certain=plain.certain, domain=row.domain)


def _by_catalogue(code: int, row: Row | None) -> Decoded:
    if row is None:
        return Decoded(action=Action.LOG, why=f"code {code} is unknown: logged, never drained on")
    certain = row.action is Action.DRAIN_RMA and code not in payload.MILDEST
    whose = "the site's catalogue" if row.site else "catalogue"
    return Decoded(action=row.action, why=f"{whose}: {row.meaning}", certain=certain, domain=row.domain)


def _without_text(code: int, row: Row | None) -> Decoded:
    plain = _by_catalogue(code, row)
    mildest = payload.MILDEST.get(code)
    if row is None or row.site or mildest is None or mildest.severity >= plain.action.severity:
        return plain
    why = f"{row.meaning}: the kernel's line, which says more, may raise it"
    return Decoded(action=mildest, why=why, domain=row.domain)


def _switch(report: Report, catalogue: Catalogue) -> Decoded:
    """Judge a switch's report: the word in the line counts, then the list."""
    row = catalogue.switch_rows.get(report.code or 0)
    what = f"SXID {report.code}" + (f" ({row.meaning})" if row is not None else "")
    always = row is not None and row.severity is Severity.ALWAYS_FATAL
    word = report.payload.partition(",")[0].strip().lower()
    if word == "fatal" and always:
        return _fabric(Action.DRAIN_REBOOT, f"{what}: fatal for the whole fabric", certain=True)
    if word == "fatal":
        return _fabric(Action.DRAIN_RESET, f"{what}: fatal for the GPUs on its link")
    if word in ("non-fatal", "nonfatal"):
        return _fabric(Action.LOG, f"{what}: not fatal")
    if always:
        return _fabric(Action.DRAIN_REBOOT, f"{what}: no severity given, but always fatal")
    return _fabric(Action.LOG, f"{what}: no severity given")


def _fabric(action: Action, why: str, *, certain: bool = False) -> Decoded:
    return Decoded(action=action, why=why, certain=certain, domain=Domain.NVLINK_FABRIC)


def _branch(driver: str) -> int:
    """Return 570 for `570.86.15`; 0 where the version is not known."""
    branch = driver.partition(".")[0]
    return int(branch) if branch.isascii() and branch.isdecimal() else 0


# From what NVML says of GPUs to faults.  Pure.  Only a change, or the first reading, makes a fault.

# During XID 119 every NVML call blocks, up to 45 s, and there are dozens in a row; loading the driver or resetting a
# GPU blocks for a minute too.  All of these end without help, and 119 has a line of its own that drains much sooner.
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
        gone = lost(catalogue, "NVML says that the GPU is lost")
        return [_of_nvml(health, Kind.LOST, gone, present_at_start=before is None)]
    return [_of_nvml(health, Kind.HEALTH, each, present_at_start=before is None) for each in _news(health, before)]


def was_reset(health: GpuHealth, before: GpuHealth) -> str:
    """Say by what a GPU shows that it was reset since the reading `before`; "" where it does not."""
    errors, errors_before = health.ecc_uncorrected, before.ecc_uncorrected
    if errors is not None and errors_before is not None and errors < errors_before:
        return "the GPU was reset: it counts its memory errors from 0 again"
    if before.rows_pending and health.rows_pending is False:
        return "the GPU was reset: no memory row waits for that any more"
    return ""


def silent(health: GpuHealth, *, present_at_start: bool, catalogue: Catalogue) -> Fault:
    """Return the fault of a GPU that has not answered for several looks in a row: as good as lost."""
    decided = lost(catalogue, f"the GPU does not answer: {'; '.join(health.errors)}")
    return _of_nvml(health, Kind.LOST, decided, present_at_start=present_at_start)


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
        present_at_start=True,  # it is said at every listing
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
    before = before or GpuHealth(at=health.at, pci=health.pci)
    advice = payload.recovery(health.recovery_action)
    if advice is not None and health.recovery_action != before.recovery_action:
        yield advice
    if health.rows_failed and not before.rows_failed:
        yield Decoded(action=Action.DRAIN_RMA, why="NVML: a memory row could not be remapped", certain=True)
    if health.sram_threshold_exceeded and not before.sram_threshold_exceeded:
        why = "NVML: more uncorrectable SRAM errors than the GPU may have"
        yield Decoded(action=Action.DRAIN_RMA, why=why, certain=True)
    if health.rows_pending and not before.rows_pending:
        yield Decoded(action=Action.DEFER_RESET, why="NVML: a memory row waits for a reset to be remapped")
    if health.pages_pending and not before.pages_pending:
        yield Decoded(action=Action.DEFER_RESET, why="NVML: a memory page waits for a reset to be retired")
    new_errors = (health.ecc_uncorrected or 0) - (before.ecc_uncorrected or 0)
    if new_errors > 0:  # a smaller number means that the GPU was reset
        why = f"NVML: {new_errors} new uncorrectable memory errors: XID 48, 94 or 95 would say more"
        yield Decoded(action=Action.LOG, why=why)


def _of_nvml(seen: GpuHealth | NvmlXid, kind: Kind, decided: Decoded, **more: Any) -> Fault:
    return Fault(
        at=seen.at,
        source=Source.NVML,
        kind=kind,
        action=decided.action,
        domain=decided.domain or Domain.HARDWARE,
        why=decided.why,
        certain=decided.certain,
        pci=canonical(seen.pci),
        gpu=seen.uuid,
        **more,
    )
