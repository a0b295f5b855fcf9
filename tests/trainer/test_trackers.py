"""Experiment trackers: one run there for one run here, whatever becomes of the tracker."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper_trainer.formats.records import TRACKERS_NAME, TrackerIds, read_tracker_ids
from stepkeeper_trainer.observe.trackers import (
    MlflowTracker,
    Row,
    Trackers,
    keep_mlflow_run,
    keep_wandb_run,
    note_mlflow_run,
)
from tests.trainer.test_keeper import Loop

pytestmark = pytest.mark.usefixtures("one_process")


WITHIN_S = 90.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


class _Server:
    """A tracker in this process, which may be away."""

    def __init__(self, *, away: int = 0) -> None:
        self.away = away  # so many calls fail
        self.rows: list[Row] = []
        self.ends: list[bool] = []
        self.began: list[str | None] = []

    def begin(self, known: TrackerIds) -> TrackerIds:
        self._answer()
        self.began.append(known.mlflow_run_id)
        return TrackerIds(mlflow_run_id=known.mlflow_run_id or "made-here")

    def log(self, rows: list[Row]) -> None:
        self._answer()
        self.rows += rows

    def end(self, *, finished: bool) -> None:
        self.ends.append(finished)

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise ConnectionError("no route to the tracker")


def test_every_launch_goes_on_in_the_same_run_and_sends_what_metrics_csv_has(tmp_path: Path) -> None:
    server = _Server()
    first = Loop(tmp_path / "run", tracker=server, total_steps=4)
    first.manager.resume()
    found = first.run(2)
    first.manager.save()
    first.saved()
    assert first.manager._records is not None
    first.manager._last_seconds()  # as an exception that nobody catches does

    second = Loop(tmp_path / "run", tracker=server, total_steps=4, resume_from="latest")
    second.manager.resume()
    loss, _ = second.step_with(metrics={"val_loss": 0.5})
    found = [*found, loss, *second.run(4)]
    assert second.manager.finish() == 0

    assert server.began == [None, "made-here"]
    assert server.ends == [False, True]
    assert [row.values["loss"] for row in server.rows] == found
    assert [row.step for row in server.rows] == [1, 2, 3, 4]
    assert [row.values.get("val_loss") for row in server.rows] == [None, None, 0.5, None]


def test_a_tracker_that_is_away_costs_no_step_and_gets_its_rows_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _Server(away=3)
    held = threading.Event()
    trackers = Trackers(server, tmp_path, wait=lambda _s: held.wait(90))
    for step in range(1, 1200):
        trackers.row(step, {"loss": 1.0 / step, "grad_norm": None})
    assert not server.rows
    held.set()
    trackers.close(finished=False)

    assert [row.step for row in server.rows] == list(range(1, 1200))
    assert "grad_norm" not in server.rows[0].values
    assert caplog.text.count("tracker_away") == 1
    assert "no route to the tracker" in caplog.text


def test_a_tracker_that_is_not_installed_or_never_answers_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Missing(_Server):
        def begin(self, known: TrackerIds) -> TrackerIds:
            raise ModuleNotFoundError(f"No module named 'mlflow', for {known}")

    loop = Loop(tmp_path / "run", tracker=Missing(), total_steps=3)
    loop.manager.resume()
    loop.run(3)
    assert loop.manager.finish() == 0
    assert "install mlflow-skinny" in caplog.text

    trackers = Trackers(_Server(away=10**9), tmp_path, wait=lambda _s: time.sleep(0.01))
    trackers.row(1, {"loss": 1.0})
    trackers.close(finished=True, within_s=0.1)
    assert "rows were left behind" in caplog.text


@pytest.mark.campaign
def test_mlflow_itself_has_one_run_with_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # it wants a database, which the small package has no part of
    uri = (tmp_path / "store").as_uri()
    for until, status in ((2, "SCHEDULED"), (4, "FINISHED")):
        loop = Loop(
            tmp_path / "run",
            tracker=MlflowTracker("tests", name="one", uri=uri),
            total_steps=4,
            resume_from="latest",
        )
        loop.manager.resume()
        loop.run(until)
        if until == 2:
            loop.manager.save()
            loop.saved()
            loop.manager._last_seconds()
        else:
            assert loop.manager.finish() == 0
        known = read_tracker_ids(tmp_path / "run").mlflow_run_id
        assert known is not None
        client = mlflow.MlflowClient(tracking_uri=uri)
        assert client.get_run(known).info.status == status

    [experiment] = [e for e in client.search_experiments() if e.name == "tests"]
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [known]
    history = client.get_metric_history(known, "loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]


class _Mlflow:
    """What `import mlflow` gives to a script that opens its run itself: as `mlflow.start_run()` does it."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.open: str | None = None
        self._environ = environ

    def start_run(self) -> None:
        self.open = self._environ.pop("MLFLOW_RUN_ID", "of-the-server")

    def active_run(self) -> SimpleNamespace | None:
        return None if self.open is None else SimpleNamespace(info=SimpleNamespace(run_id=self.open))


def test_a_run_that_the_script_opens_itself_is_gone_on_with(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    keep_mlflow_run(tmp_path, environ)
    assert environ == {}, "of the first launch nothing is known"
    note_mlflow_run(tmp_path, {"sys": object()})
    first = _Mlflow(environ)
    note_mlflow_run(tmp_path, {"mlflow": first})
    assert not (tmp_path / TRACKERS_NAME).exists(), "a script that only imports MLflow has no run"
    first.start_run()
    note_mlflow_run(tmp_path, {"mlflow": first})
    until(lambda: read_tracker_ids(tmp_path).mlflow_run_id == "of-the-server")

    keep_mlflow_run(tmp_path, environ)
    second = _Mlflow(environ)
    second.start_run()
    assert second.open == "of-the-server"
    theirs = {"MLFLOW_RUN_ID": "chosen"}
    keep_mlflow_run(tmp_path, theirs)
    assert theirs == {"MLFLOW_RUN_ID": "chosen"}


def test_the_manager_notes_the_run_of_the_script_with_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    mlflow = _Mlflow({})
    mlflow.start_run()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    loop = Loop(tmp_path / "run", total_steps=2)
    loop.manager.resume()
    loop.run(2)
    assert loop.manager.finish() == 0
    until(lambda: read_tracker_ids(tmp_path / "run").mlflow_run_id == "of-the-server")


def test_mlflow_itself_goes_on_in_a_run_that_a_script_has_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as first:
        note_mlflow_run(tmp_path)
        until(lambda: read_tracker_ids(tmp_path).mlflow_run_id == first.info.run_id)
    keep_mlflow_run(tmp_path)
    with mlflow.start_run() as second:
        assert second.info.run_id == first.info.run_id
    assert "MLFLOW_RUN_ID" not in os.environ, "MLflow takes the variable away"


@pytest.mark.parametrize("damaged", [b"{", b'{"mlflow_run_id": 7}', b'{"mlflow_run_id": "../x\\ny"}', b"\xff"])
def test_a_damaged_name_is_no_name(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / TRACKERS_NAME).write_bytes(damaged)
    assert read_tracker_ids(tmp_path) == TrackerIds()


def test_wandb_goes_on_in_one_run_unless_somebody_chose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: dict[str, str] = {}
    keep_wandb_run("train/7 b", mine)
    assert mine == {"WANDB_RUN_ID": "train-7-b", "WANDB_RESUME": "allow"}
    theirs = {"WANDB_RUN_ID": "chosen"}
    keep_wandb_run("train", theirs)
    assert theirs == {"WANDB_RUN_ID": "chosen"}
    alone: dict[str, str] = {}
    keep_wandb_run("", alone)
    assert alone == {}
    monkeypatch.setenv("STEPKEEPER_RUN_ID", "run-of-this-test")
    monkeypatch.setenv("WANDB_RUN_ID", "before")
    monkeypatch.delenv("WANDB_RUN_ID")
    monkeypatch.setenv("WANDB_RESUME", "before")
    monkeypatch.delenv("WANDB_RESUME")
    Loop(tmp_path / "run")
    assert os.environ["WANDB_RUN_ID"] == "run-of-this-test"
