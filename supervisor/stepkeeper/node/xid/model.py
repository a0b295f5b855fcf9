"""The words of the fault plane: what should be done, whose fault it is, and one judged sighting of a fault."""

from __future__ import annotations

from enum import StrEnum

import msgspec

TEXT_CHARACTERS_MAX = 500


class Action(StrEnum):
    """What a fault asks for, from mild to severe: `severity` compares."""

    LOG = "log"  # record and count; neither job nor node is touched
    RESTART_JOB = "restart_job"  # the job is dead or soon will be: restart it on the same nodes, count per GPU
    DEFER_RESET = "defer_reset"  # let the job run; reset this GPU when the node is next idle
    DRAIN_RESET = "drain_reset"  # drain, reset the GPU, check, resume; a reboot where the reset fails
    DRAIN_REBOOT = "drain_reboot"  # drain and reboot: no reset can help
    DRAIN_RMA = "drain_rma"  # drain and keep out: a person has to look

    @property
    def severity(self) -> int:
        """Return the place in the order above."""
        return _SEVERITIES[self]

    @property
    def drains(self) -> bool:
        """Whether the node must not be given to another job."""
        return self.severity >= Action.DRAIN_RESET.severity


_SEVERITIES = {action: place for place, action in enumerate(Action)}


class Domain(StrEnum):
    """Whose fault it is."""

    APPLICATION = "application"
    DRIVER_FIRMWARE = "driver_firmware"
    HARDWARE = "hardware"
    THERMAL_POWER = "thermal_power"
    NVLINK_FABRIC = "nvlink_fabric"
    INFO = "info"


class Source(StrEnum):
    """Who saw it."""

    KERNEL = "kernel"  # /dev/kmsg
    JOURNAL = "journal"  # the journal of the boot before
    NVML = "nvml"  # an NVML event, or what NVML says of a GPU's health


class Kind(StrEnum):
    """What was seen."""

    XID = "xid"
    SXID = "sxid"  # of an NVSwitch
    LOST = "lost"  # the GPU does not answer any more, or is missing; with or without an XID
    HEALTH = "health"  # recovery action, remapped rows, ECC: no number came with it
    STUCK = "stuck"  # NVML itself does not answer


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One judged sighting.  The same fault seen twice, by whomever, is one incident: see `node.incidents`."""

    at: float  # Unix seconds
    source: Source
    kind: Kind
    action: Action
    domain: Domain
    why: str  # one clause: which rule gave the action
    standing: bool = False  # a condition that was there at the first look: nobody can tell since when
    certain: bool = False  # nothing that follows in its burst could explain it away: do not wait for the rest
    code: int | None = None  # XID or SXID
    pci: str | None = None  # `0000:3b:00.0`, lower case, with function; of the GPU or the switch
    gpu: str = ""  # UUID, where it is known
    instance: str = ""  # of MIG: `GI 5`, `GI 5 CI 0`
    place: str = ""  # on the GPU, where the text tells: `GPC 7 TPC 7`
    cause: int | None = None  # of XID 45: the code that it says it was caused by
    text: str = ""  # the kernel's line, at most TEXT_CHARACTERS_MAX
    boot_id: str = ""
    sequence: int | None = None  # of the kernel record, within the boot

    @property
    def name(self) -> str:
        """Return what people call it: `XID 79`, `SXID 20034`, `GPU lost`."""
        if self.code is not None:
            return f"{self.kind.value.upper()} {self.code}"
        return {Kind.LOST: "GPU lost", Kind.STUCK: "NVML stuck"}.get(self.kind, "GPU health")
