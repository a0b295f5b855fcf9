"""Experiment trackers: one run there for one run here, whatever becomes of the tracker."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from stepkeeper_trainer.trackers import Known, MlflowTracker, Row, Trackers, keep_wandb_run, read_known
from tests.trainer.test_keeper import Loop

pytestmark = pytest.mark.usefixtures("one_process")


class _Server:
    """A tracker in this process, which may be away."""

    def __init__(self, *, away: int = 0) -> None:
        self.away = away  # so many calls fail
        self.rows: list[Row] = []
        self.ends: list[bool] = []
        self.began: list[str | None] = []

    def begin(self, known: Known) -> Known:
        self._answer()
        self.began.append(known.mlflow_run_id)
        return Known(mlflow_run_id=known.mlflow_run_id or "made-here")

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
    first.keeper.resume()
    found = first.run(2)
    first.keeper.save()
    first.saved()
    assert first.keeper._records is not None
    first.keeper._last_seconds()  # as an exception that nobody catches does

    second = Loop(tmp_path / "run", tracker=server, total_steps=4, resume_from="latest")
    second.keeper.resume()
    loss, _ = second.step_with(metrics={"val_loss": 0.5})
    found = [*found, loss, *second.run(4)]
    assert second.keeper.finish(leave_process=False) == 0

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
    trackers = Trackers(server, tmp_path, wait=lambda _s: held.wait(20))
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
        def begin(self, known: Known) -> Known:
            raise ModuleNotFoundError(f"No module named 'mlflow', for {known}")

    loop = Loop(tmp_path / "run", tracker=Missing(), total_steps=3)
    loop.keeper.resume()
    loop.run(3)
    assert loop.keeper.finish(leave_process=False) == 0
    assert "install mlflow-skinny" in caplog.text

    trackers = Trackers(_Server(away=10**9), tmp_path, wait=lambda _s: time.sleep(0.01))
    trackers.row(1, {"loss": 1.0})
    trackers.close(finished=True, within_s=0.1)
    assert "rows were left behind" in caplog.text


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
        loop.keeper.resume()
        loop.run(until)
        if until == 2:
            loop.keeper.save()
            loop.saved()
            loop.keeper._last_seconds()
        else:
            assert loop.keeper.finish(leave_process=False) == 0
        known = read_known(tmp_path / "run").mlflow_run_id
        assert known is not None
        client = mlflow.MlflowClient(tracking_uri=uri)
        assert client.get_run(known).info.status == status

    [experiment] = [e for e in client.search_experiments() if e.name == "tests"]
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [known]
    history = client.get_metric_history(known, "loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]


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
