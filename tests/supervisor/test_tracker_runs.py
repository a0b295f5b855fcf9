"""What a launch is told of the run of an experiment tracker."""

from __future__ import annotations

import os
from pathlib import Path

from stepkeeper.supervisor.actions import rank_files
from stepkeeper_trainer.formats.records import TRACKERS_NAME, TrackerIds, write_tracker_ids


def test_a_launch_goes_on_in_the_run_of_those_before(tmp_path: Path) -> None:
    assert rank_files.tracker_variables(tmp_path, {}) == {}
    write_tracker_ids(tmp_path, TrackerIds(mlflow_run_id="0a1b"))
    assert rank_files.tracker_variables(tmp_path, {"HOME": "/"}) == {"MLFLOW_RUN_ID": "0a1b"}


def test_a_run_that_the_user_has_named_stays(tmp_path: Path) -> None:
    write_tracker_ids(tmp_path, TrackerIds(mlflow_run_id="0a1b"))
    assert rank_files.tracker_variables(tmp_path, {"MLFLOW_RUN_ID": "chosen"}) == {}
    assert rank_files.tracker_variables(tmp_path, {"MLFLOW_RUN_ID": ""}) == {}, "none is a choice too"


def test_a_file_that_is_none_or_never_answers_keeps_no_launch_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKERS_NAME)
    assert rank_files.tracker_variables(tmp_path, {}, within_s=0.5) == {}
