"""Which of six places wins, what an administrator locks, and what the environment may hold."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from stepkeeper.cli import attempt
from stepkeeper.config import files, resolve, shape
from stepkeeper.config.resolve import MODULES, PASSED_ON, Origin
from stepkeeper.config.values import REMOVED, Outdated
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import paths
from tests.config.conftest import Gather


def test_the_nearest_place_wins(user_file: Path, site_file: Path, run_directory: Path, gather: Gather) -> None:
    """Take the places away one by one, from the nearest on."""
    site_file.write_text("spares = 5")
    user_file.write_text("# mine\nspares = 4")
    (run_directory / "config.toml").write_text("spares = 3")
    seen = []

    config = gather({"spares": 1}, STEPKEEPER_SPARES="2").resolve(run_directory)
    seen.append((config.settings.spares, config.values["spares"].origin, config.values["spares"].where))
    config = gather(STEPKEEPER_SPARES="2").resolve(run_directory)
    seen.append((config.settings.spares, config.values["spares"].origin, config.values["spares"].where))
    for path in (run_directory / "config.toml", user_file, site_file, None):
        config = gather().resolve(run_directory)
        seen.append((config.settings.spares, config.values["spares"].origin, config.values["spares"].where))
        if path is not None:
            path.unlink()

    assert seen == [
        (1, Origin.FLAG, "--spares"),
        (2, Origin.ENVIRONMENT, "STEPKEEPER_SPARES"),
        (3, Origin.RUN, f"{run_directory}/config.toml, line 1"),
        (4, Origin.USER, f"{user_file}, line 2"),
        (5, Origin.SITE, f"{site_file}, line 1"),
        (0, Origin.DEFAULT, ""),
    ]


def test_each_key_has_its_own_origin(user_file: Path, site_file: Path, gather: Gather) -> None:
    user_file.write_text("torchrun = true\n[policy]\nfailures_max = 9\n")
    site_file.write_text("policy.failures_max = 5\npolicy.leave_within_s = 20\n")

    config = gather({"torchrun": False}).resolve()

    assert config.settings.torchrun is False
    assert (config.settings.policy.failures_max, config.settings.policy.leave_within_s) == (9, 20.0)
    assert config.values["policy.leave_within_s"].origin is Origin.SITE
    assert config.values["policy.hang_least_s"].origin is Origin.DEFAULT


@pytest.mark.parametrize("lock", ["[locked]\nspares = 2", "locked = ['spares']\nspares = 2"])
@pytest.mark.parametrize("where", ["flag", "environment", "run", "user"])
def test_a_locked_key_cannot_be_set_anywhere_else(
    *, lock: str, where: str, user_file: Path, site_file: Path, run_directory: Path, gather: Gather
) -> None:
    site_file.write_text(lock)
    if where == "run":
        (run_directory / "config.toml").write_text("spares = 0")
    if where == "user":
        user_file.write_text("spares = 0")
    flags = {"spares": 0} if where == "flag" else {}
    environment = {"STEPKEEPER_SPARES": "0"} if where == "environment" else {}
    named = {
        "flag": "--spares",
        "environment": "STEPKEEPER_SPARES",
        "run": f"{run_directory}/config.toml, line 1",
        "user": f"{user_file}, line 1",
    }

    with pytest.raises(StepkeeperError) as refused:
        gather(flags, **environment).resolve(run_directory)

    assert str(refused.value).startswith(f"{named[where]}: `spares` is locked")
    assert str(site_file) in str(refused.value)
    assert "at 2" in str(refused.value)


def test_a_lock_holds_the_administrators_value_and_is_shown(site_file: Path, gather: Gather) -> None:
    site_file.write_text("locked = ['spares']\n[policy]\nfailures_max = 7\n")

    config = gather().resolve()

    assert config.values["spares"].origin is Origin.DEFAULT
    assert config.values["spares"].locked == f"{site_file}, line 1"
    assert config.values["policy.failures_max"].locked == ""
    assert config.settings.policy.failures_max == 7


def test_a_lock_of_one_key_leaves_the_others(user_file: Path, site_file: Path, gather: Gather) -> None:
    site_file.write_text("[locked]\npolicy.failures_max = 7\n")
    user_file.write_text("policy.leave_within_s = 9")

    policy = gather().resolve().settings.policy

    assert (policy.failures_max, policy.leave_within_s) == (7, 9.0)


def test_the_run_directory_can_be_locked(site_file: Path, gather: Gather) -> None:
    site_file.write_text("[locked]\nrun_dir = '/scratch/%u/%x-%j'\n")

    with pytest.raises(StepkeeperError, match=r"STEPKEEPER_RUN_DIR: `run_dir` is locked .* at /scratch/%u/%x-%j"):
        gather(STEPKEEPER_RUN_DIR="/tmp/mine").resolve()
    assert gather().resolve().settings.run_dir == "/scratch/%u/%x-%j"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("STEPKEEPER_SPARE", "STEPKEEPER_SPARES"), ("STEPKEEPER_RUNDIR", "STEPKEEPER_RUN_DIR"),
     ("STEPKEEPER_FAILURES_MAX", "STEPKEEPER_POLICY_FAILURES_MAX")],
)  # fmt: skip
def test_a_variable_that_is_not_known_is_an_error_that_names_the_nearest(
    variable: str, meant: str, gather: Gather
) -> None:
    with pytest.raises(StepkeeperError, match=rf"^{variable}: no such setting; did you mean `{meant}`"):
        gather(**{variable: "1"})


def test_what_ranks_are_told_and_what_modules_set_is_no_setting(gather: Gather) -> None:
    told = dict.fromkeys(PASSED_ON | MODULES, "7")

    config = gather(**told).resolve()

    assert {found.origin for found in config.values.values()} == {Origin.DEFAULT}


def test_other_peoples_variables_are_not_looked_at(gather: Gather) -> None:
    assert gather(STEPKEEPER="/opt/stepkeeper", STEPKEEPERS_X="1", stepkeeper_spares="x").environment == {}


def test_an_empty_variable_sets_nothing(gather: Gather) -> None:
    assert gather(STEPKEEPER_RUN_DIR="", STEPKEEPER_SPARES="").environment == {}


def test_a_wrong_variable_is_named(gather: Gather) -> None:
    with pytest.raises(StepkeeperError, match=r"^STEPKEEPER_SPARES: spares = many: a whole number from 0"):
        gather(STEPKEEPER_SPARES="many")


def test_a_removed_setting_is_named_wherever_it_stands(user_file: Path, gather: Gather) -> None:
    with pytest.raises(StepkeeperError, match=r"^STEPKEEPER_POLICY_KILL_WITHIN_S: .*leave it out; it is a constant"):
        gather(STEPKEEPER_POLICY_KILL_WITHIN_S="20")
    user_file.write_text("[policy]\nrequeue_retry_s = 60")
    with pytest.raises(StepkeeperError, match=r"line 2: `policy.requeue_retry_s` is no setting any more"):
        gather()


def test_a_run_that_continues_leaves_removed_settings_out_and_says_so(
    user_file: Path, site_file: Path, run_directory: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    user_file.write_text("spares = 1\nmax_nodes = 4\npolicy.loss_spike = 'tell'")
    site_file.write_text("[locked]\npolicy.on_hang = 'stop'\npolicy.failures_max = 7")
    (run_directory / "config.toml").write_text("cold_zstd = 3")
    command = argparse.ArgumentParser()
    resolve.declare_flags(command)
    outdated: list[Outdated] = []
    words = ["--resubmit", "auto", "--set", "policy.grow_ask_s=9", "--set", "policy.kill_within_s=30"]
    flags = resolve.read_flags(command.parse_args(words), outdated)
    environment = {"HOME": str(home), "STEPKEEPER_PYSLURM_PYTHON": "/x/token=abcdef123456"}

    config = resolve.gather(flags, environment, site=site_file, outdated=outdated).resolve(run_directory)

    assert (config.settings.spares, config.settings.policy.failures_max) == (1, 7)
    assert config.settings.policy.loss_spike == "report"
    with capture_logs() as said:
        attempt.note(config, paths.RunDirectory(run_directory), 0, ("true",), structlog.get_logger())
    assert [(line["key"], line["where"]) for line in said if line["event"] == "setting_removed"] == [
        ("policy.resubmit", "--resubmit"),
        ("policy.grow_ask_s", "--set policy.grow_ask_s=9"),
        ("pyslurm_python", "STEPKEEPER_PYSLURM_PYTHON"),
        ("max_nodes", f"{user_file}, line 2"),
        ("policy.loss_spike", f"{user_file}, line 3"),
        ("policy.on_hang", f"{site_file}, line 2"),
        ("cold_zstd", f"{run_directory}/config.toml, line 1"),
    ]
    assert {line["instead"] for line in said if line.get("key") == "max_nodes"} == {REMOVED["max_nodes"]}


def test_a_setting_that_is_not_known_is_an_error_in_a_run_that_continues_too(user_file: Path) -> None:
    with pytest.raises(StepkeeperError, match="STEPKEEPER_SPARE: no such setting"):
        resolve.read_environment({"STEPKEEPER_SPARE": "1"}, [])
    with pytest.raises(StepkeeperError, match="`spare` is not known"):
        files.parse(b"spare = 1", user_file, files.Role.USER, [])


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("kill_within_s", "30", "31"),
        ("kill_within_s", "30.0", "'30 s'"),
        ("requeue_tries_max", "14", "[14]"),
        ("on_hang", "'relaunch, leave, requeue, stop'", "'stop'"),
        ("on_hang", "'relaunch,leave, requeue,stop'", "true"),
    ],
)
def test_a_removed_setting_with_the_value_of_the_constant_is_passed_over(
    *, key: str, right: str, wrong: str, user_file: Path, site_file: Path, gather: Gather
) -> None:
    variable = f"STEPKEEPER_POLICY_{key.upper()}"
    text = right.strip("'")
    command = argparse.ArgumentParser()
    resolve.declare_flags(command)
    user_file.write_text(f"[policy]\n{key} = {right}")
    site_file.write_text(f"[locked]\npolicy.{key} = {right}")

    assert gather(**{variable: text}).resolve() == gather().resolve()
    assert resolve.read_flags(command.parse_args(["--set", f"policy.{key} = {text}"])) == {}
    user_file.write_text(f"[policy]\n{key} = {wrong}")
    with pytest.raises(StepkeeperError, match=f"line 2: `policy.{key}` is no setting any more"):
        gather()


@pytest.mark.parametrize(
    ("values", "nodes", "command", "words"),
    [
        ("spares = 2", 2, "python", ("spares = 2", "config.toml, line 1", "2 nodes")),
        ("spares = 1\nmin_nodes = 2", 2, "python", ("min_nodes = 2", "line 2", "a launch has 1 nodes")),
        ("spares = 1", 3, "srun", ("spares = 1", "leave out `srun`")),
        ("min_nodes = 1", 3, "srun", ("min_nodes = 1", "leave out `srun`")),
    ],
)
def test_a_shape_that_does_not_fit_names_the_place_that_set_it(
    *, values: str, nodes: int, command: str, words: tuple[str, ...], user_file: Path, gather: Gather
) -> None:
    user_file.write_text(values)
    config = gather().resolve()

    with pytest.raises(StepkeeperError) as refused:
        shape.nodes_wanted(config, nodes, [command, "x"])

    for word in words:
        assert word in str(refused.value)


def test_a_launch_gets_all_but_the_spares(gather: Gather) -> None:
    config = gather({"spares": 1, "min_nodes": 2}).resolve()

    assert shape.nodes_wanted(config, 4, ["python"]) == 3


@pytest.mark.parametrize(("mode", "expected"), [(0o700, (0o700, 0o600)), (0o750, (0o750, 0o640))])
def test_the_record_of_an_attempt_holds_values_and_origins(
    mode: int, expected: tuple[int, int], run_directory: Path, user_file: Path, gather: Gather
) -> None:
    user_file.write_text("policy.failures_max = 9")
    run_directory.chmod(mode)
    config = gather({"spares": 1}).resolve(run_directory)

    path = resolve.write_record(run_directory, 12, config)
    resolve.write_record(run_directory, 12, config)  # the same attempt once more: replaced

    assert path == run_directory / "attempts" / "attempt-012" / "config.json"
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == expected
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]
    settings = json.loads(path.read_text())["settings"]
    assert settings["spares"] == {"value": 1, "unit": "nodes", "origin": "flag", "where": "--spares", "locked": ""}
    assert settings["policy.failures_max"]["origin"] == "user"
    assert settings["tasks_per_node"] == {
        "value": None, "unit": "ranks a node", "origin": "default", "where": "", "locked": "",
    }  # fmt: skip
    assert set(settings) == set(config.values)


def test_no_secret_is_recorded_or_logged(run_directory: Path, gather: Gather) -> None:
    config = gather(STEPKEEPER_RUN_DIR="/scratch/token=abcdef123456/run").resolve(run_directory)

    path = resolve.write_record(run_directory, 0, config)

    assert "abcdef123456" not in path.read_text() + str(resolve.changed_settings(config))
    assert resolve.changed_settings(config) == {"run_dir": "/scratch/token=*** (STEPKEEPER_RUN_DIR)"}
