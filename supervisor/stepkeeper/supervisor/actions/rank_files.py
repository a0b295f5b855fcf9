"""What ranks get of the run's failures so far, so that `checkpoint_every="auto"` need not learn it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepkeeper.loop_tools import patiently
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.submit import plan
from stepkeeper_trainer.coordinate.cadence import RELIABILITY_VARIABLE, FailureRate
from stepkeeper_trainer.formats.records import MLFLOW_VARIABLE, read_tracker_ids

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


READ_WITHIN_S = 5.0  # an estimate is not worth a later start


def reliability_variables(run_directory: Path, *, within_s: float = READ_WITHIN_S) -> dict[str, str]:
    """Return the variable for the ranks; none where the journal cannot be read in time: they start from the prior."""

    def read() -> FailureRate | None:
        try:
            return plan.reliability(RunDirectory(run_directory).journal)
        except OSError:
            return None  # the journal's own thread says what is wrong with the storage

    rate = patiently(read, within_s)
    return {RELIABILITY_VARIABLE: f"{rate.failures:.4f}:{rate.node_hours:.4f}"} if rate and rate.node_hours else {}


# What ranks get of experiment trackers, so that `mlflow.start_run()` of each launch goes on in one run.
#
# Weights & Biases takes a name of ours (`wandb_run` in launch.py); MLflow gives its own, which rank 0 of the first
# launch has left in the run directory.


def tracker_variables(
    run_directory: Path, environment: Mapping[str, str], *, within_s: float = READ_WITHIN_S
) -> dict[str, str]:
    """Return the variable for the ranks; none where the user has named a run, or storage does not answer in time.

    An empty variable counts as named: for scripts in which every rank has a run of its own.
    """
    if MLFLOW_VARIABLE in environment:
        return {}
    found = patiently(lambda: read_tracker_ids(run_directory), within_s)
    return {MLFLOW_VARIABLE: found.mlflow_run_id} if found is not None and found.mlflow_run_id else {}
