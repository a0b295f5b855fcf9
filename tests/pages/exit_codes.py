"""`docs/exit-codes.md`: the supervisor's own codes."""

from __future__ import annotations

from stepkeeper.core.exits import ExitCode
from tests.pages.tables import MADE, table


def page() -> str:
    """Return the page."""
    rows = [[f"`{code.value}`", f"`{code.name}`", code.meaning] for code in ExitCode]
    notes = (
        "`stepkeeper checkpoints latest` ends with 1 where there is no verified step directory.  "
        "130 means that the command was interrupted from the keyboard."
    )
    lead = "One a reason, never renumbered."
    return "\n".join(["# Exit codes", "", MADE, "", lead, "", *table("code name meaning", rows), "", notes, ""])
