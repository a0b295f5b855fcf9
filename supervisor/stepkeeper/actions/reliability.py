"""What ranks are told of the run's failures so far, so that `checkpoint_every="auto"` need not learn it anew."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stepkeeper.planning import measured
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats.interval import RELIABILITY_VARIABLE, FailureRate

if TYPE_CHECKING:
    from pathlib import Path

READ_WITHIN_S = 5.0  # an estimate is not worth a later start


def reliability_variables(run_directory: Path, *, within_s: float = READ_WITHIN_S) -> dict[str, str]:
    """Return the variable for the ranks; none where the journal cannot be read in time: they start from the prior."""
    found: list[FailureRate] = []

    def read() -> None:
        try:
            found.append(measured.reliability(RunDirectory(run_directory).journal))
        except OSError:
            return  # the journal's own thread says what is wrong with the storage

    reader = threading.Thread(target=read, name="reliability", daemon=True)
    reader.start()
    reader.join(within_s)
    if not found or not found[0].node_hours:
        return {}
    return {RELIABILITY_VARIABLE: f"{found[0].failures:.4f}:{found[0].node_hours:.4f}"}
