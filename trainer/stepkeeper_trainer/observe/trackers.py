"""Experiment trackers that see one run, however often it is requeued.

One rule for both: the run that the user has named by the tracker's own variable (`WANDB_RUN_ID`, `MLFLOW_RUN_ID`), else
that of the launches before.  W&B takes a name of ours.  MLflow gives one, which is kept in the run directory: of a
`MlflowTracker`, or of the run that the script has opened itself.  Rank 0 only, on a thread, imported when it is used;
what goes wrong is said once and harms no training.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.records import MLFLOW_VARIABLE, TrackerIds, read_tracker_ids, write_tracker_ids
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping
    from pathlib import Path


WAITING_MAX = 10_000  # rows that wait for a server that is away; newer ones are dropped
BATCH_MAX = 500  # rows of one call
RETRY_S, RETRY_MAX_S = 1.0, 60.0
WITHIN_S = 10.0  # the end of a launch waits so long for the last rows


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of one step."""

    step: int
    at: float  # Unix seconds
    values: Mapping[str, float]


class Tracker(Protocol):
    """Where rows go; every method may raise, and is called from one thread."""

    def begin(self, known: TrackerIds) -> TrackerIds:
        """Open the run that is known, or a new one; return what is known now."""
        ...

    def log(self, rows: list[Row]) -> None:
        """Take rows."""
        ...

    def end(self, *, finished: bool) -> None:
        """Say that the launch is over: for good, or to go on later."""
        ...


def keep_runs(run_id: str, run_directory: Path, tracker: Tracker | None) -> None:
    """Have what the script itself logs go on in the runs of the launches before; a tracker of ours does so itself."""
    keep_wandb_run(run_id)
    if tracker is None:
        keep_mlflow_run(run_directory)


def keep_wandb_run(run_id: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have `wandb.init()` of every launch go on in one run, unless the script or its user has chosen otherwise.

    For rank 0: the others would write into its run.  W&B itself is not touched.
    """
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in run_id)[:64]
    if name and "WANDB_RUN_ID" not in environ:
        environ["WANDB_RUN_ID"] = name
        environ.setdefault("WANDB_RESUME", "allow")


def keep_mlflow_run(run_directory: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have `mlflow.start_run()` of this launch go on in the run of those before, unless somebody has chosen otherwise.

    For rank 0, where no supervisor has said so already.  MLflow itself is not touched.
    """
    known = read_tracker_ids(run_directory).mlflow_run_id
    if known is not None:
        environ.setdefault(MLFLOW_VARIABLE, known)


def note_mlflow_run(run_directory: Path, modules: Mapping[str, Any] = sys.modules) -> None:
    """Keep the name of the run that the script has opened with `mlflow.start_run()`, for the launches after this one.

    Called in the thread that trains, once it has done a step: MLflow's open run is one of the thread.
    """
    mlflow = modules.get("mlflow")
    if mlflow is None:
        return
    try:
        active = mlflow.active_run()
        named = None if active is None else str(active.info.run_id)
    except Exception as error:  # noqa: BLE001  # a foreign library: whatever it raises is its own
        warn("tracker_failed", why=shorten(f"{type(error).__name__}: {error}"))
        return
    if named is not None:
        threading.Thread(target=_keep, args=(run_directory, named), name="stepkeeper-mlflow", daemon=True).start()


def _keep(run_directory: Path, named: str) -> None:
    """Write it, on a thread: storage that hangs costs no step."""
    known = read_tracker_ids(run_directory)
    if known.mlflow_run_id == named:
        return
    try:
        write_tracker_ids(run_directory, msgspec.structs.replace(known, mlflow_run_id=named))
    except OSError as error:
        warn("tracker_failed", why=shorten(f"the run's name at MLflow was not kept: {error}"))


class MlflowTracker:
    """One MLflow run for the whole training, by the client of `mlflow` (or `mlflow-skinny`)."""

    def __init__(self, experiment: str, *, name: str | None = None, uri: str | None = None) -> None:
        """Prepare; `uri` of the server or store, `MLFLOW_TRACKING_URI` if it is not given."""
        self._experiment, self._name, self._uri = experiment, name, uri
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def begin(self, known: TrackerIds) -> TrackerIds:
        """Open the run.  Raises ImportError without MLflow, and whatever the server answers."""
        import mlflow  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  # only where it is used: it is no dependency
        from mlflow import entities  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

        self._entities = entities
        self._client = client = mlflow.MlflowClient(tracking_uri=self._uri)
        named = os.environ.get(MLFLOW_VARIABLE) or known.mlflow_run_id
        if named is not None:
            self._run_id = named
            client.update_run(named, status="RUNNING")
            return msgspec.structs.replace(known, mlflow_run_id=named)
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        self._run_id = client.create_run(experiment_id, run_name=self._name).info.run_id
        return msgspec.structs.replace(known, mlflow_run_id=self._run_id)

    def log(self, rows: list[Row]) -> None:
        """Send rows."""
        metric = self._entities.Metric
        self._client.log_batch(
            self._run_id,
            metrics=[
                metric(name, value, int(row.at * 1000), row.step) for row in rows for name, value in row.values.items()
            ],
        )

    def end(self, *, finished: bool) -> None:
        """Close the run; a launch that goes on later leaves it scheduled."""
        if finished:
            self._client.set_terminated(self._run_id, "FINISHED")
        else:
            self._client.update_run(self._run_id, status="SCHEDULED")


class Trackers:
    """Hands rows to a tracker, on a thread of its own."""

    def __init__(
        self,
        tracker: Tracker,
        run_directory: Path,
        *,
        retry_s: float = RETRY_S,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._tracker, self._run_directory = tracker, run_directory
        self._retry_s, self._wait = retry_s, wait
        self._rows: queue.Queue[Row | None] = queue.Queue(WAITING_MAX)
        self._dropped = 0
        self._finished = False
        self._gave_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepkeeper-tracker", daemon=True)
        self._thread.start()

    def row(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take the numbers of a step.  Never blocks."""
        known = {name: value for name, value in values.items() if value is not None}
        if not known or self._gave_up.is_set():
            return
        try:
            self._rows.put_nowait(Row(step, time.time(), known))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                warn("tracker_behind", why=f"{WAITING_MAX} rows wait for the tracker: newer ones are dropped")

    def close(self, *, finished: bool, within_s: float = WITHIN_S) -> None:
        """Send the last rows, as far as there is time; `finished`: the work is done, and not only this launch."""
        self._finished = finished
        with contextlib.suppress(queue.Full):  # the thread is far behind: it will not come to the end in time
            self._rows.put_nowait(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            warn("tracker_late", why="rows were left behind")

    def _work(self) -> None:
        try:
            if not self._until_done(self._begin):
                return
            ended = False
            while not ended:
                rows, ended = self._take()
                if rows and not self._until_done(lambda rows=rows: self._tracker.log(rows)):  # type: ignore[misc]
                    return
            self._tracker.end(finished=self._finished)
        except Exception as error:  # noqa: BLE001  # a foreign library: whatever it raises is its own
            self._gave_up.set()
            warn("tracker_failed", why=shorten(f"{type(error).__name__}: {error}"))

    def _begin(self) -> None:
        known = read_tracker_ids(self._run_directory)
        now = self._tracker.begin(known)
        if now != known:
            write_tracker_ids(self._run_directory, now)
        say("tracker_began", mlflow_run_id=now.mlflow_run_id)

    def _take(self) -> tuple[list[Row], bool]:
        """Return what waits, at least one row; true if it is the end."""
        rows: list[Row] = []
        at = self._rows.get()
        while at is not None:
            rows.append(at)
            if len(rows) == BATCH_MAX or self._rows.empty():
                return rows, False
            at = self._rows.get()
        return rows, True

    def _until_done(self, act: Callable[[], object]) -> bool:
        """Do something that needs the server, trying again for as long as it is away."""
        wait_s, said = self._retry_s, False
        while True:
            try:
                act()
            except ImportError as error:
                self._gave_up.set()
                warn("tracker_failed", why=f"{error}: install mlflow-skinny where the ranks run")
                return False
            except Exception as error:  # noqa: BLE001  # a server that is away comes back
                if not said:
                    warn("tracker_away", why=shorten(f"{type(error).__name__}: {error}"))
                said = True
                self._wait(wait_s)
                wait_s = min(RETRY_MAX_S, 2 * wait_s)
            else:
                return True
