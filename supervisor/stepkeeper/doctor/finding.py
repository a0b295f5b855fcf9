"""What the doctor has to say of one thing."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stepkeeper.node.xid.parse import SYSCTL


class Level(StrEnum):
    """How much it matters, mildest first."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing to do
    WARNING = "warning"  # works, but costs something or fails in some cases
    PROBLEM = "problem"  # a run would lose work or not come back

    @property
    def weight(self) -> int:
        """The graver, the larger."""
        return list(Level).index(self)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One setting or fact, what it means for a run, and what to do about it."""

    level: Level
    subject: str  # the setting's own name, or what was looked at
    found: str  # its value
    means: str
    remedy: str = ""  # what to write, and where


def users_log() -> Finding:
    """Return what the doctor and the node agent both say of a machine where `users_may_write()`."""
    return Finding(
        level=Level.WARNING,
        subject=SYSCTL,
        found="1, on this machine",
        means="any user can write records into the kernel log that begin like a GPU's fault; the node agent passes "
        "over those of netfilter, other programs that read the log may not",
        remedy=f"admin: sysctl -w {SYSCTL}=0 on the nodes, and in /etc/sysctl.d",
    )
