"""The declaration itself: every setting can be set, is described, and its default is allowed."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from stepkeeper.config import resolve
from stepkeeper.config.rank_settings import parse_metrics_port
from stepkeeper.config.settings import SETTINGS, RunSettings, Setting, build
from stepkeeper.config.values import REMOVED, checked, from_text, known, shown
from stepkeeper.core.policy import Limits, Policy
from stepkeeper.errors import StepkeeperError
from tests.pages import configuration

ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
NUMBERS = [setting for setting in SETTINGS.values() if setting.kind in {int, float}]


# texts that are read when they are set (test_readable.py)
READ = {
    "checkpoint_every": "30 min",
    "retention": "newest 2",
    "local_tier": "/nvme",
    "cold_tier": "s3://bucket/run",
    "snapshot_every": "5 steps",
    "snapshot_dir": "/memory",
    "slurm_client": "pyslurm:/opt/pyslurm/bin/python",
    "metrics_port": "0.0.0.0:9400",
}


def is_row(setting: Setting) -> bool:
    """Whether it is a row of the ladder."""
    return setting.key.startswith("policy.on_")


def other_value(setting: Setting) -> bool | int | float | str:
    """Return an allowed value that is not the default."""
    if setting.kind is bool:
        return not setting.default
    if setting.about.choices:
        return next(each for each in setting.about.choices if each != setting.default)
    if setting.key in READ:
        return READ[setting.key]
    if setting.kind is str:
        return "elsewhere" if not is_row(setting) else "relaunch after 7 s, leave, stop"
    assert setting.about.least is not None
    number = setting.about.least + 1
    return setting.kind(number if number != setting.default else number + 1)


def test_every_field_of_the_policy_but_its_constants_is_a_setting() -> None:
    fields = {f"policy.{field.name}" for field in msgspec.structs.fields(Policy)}
    constants = {f"policy.{field.name}" for field in msgspec.structs.fields(Limits)}

    assert fields - constants == {key for key in SETTINGS if key.startswith("policy.")}


def test_the_defaults_are_what_the_core_has() -> None:
    assert build({key: setting.default for key, setting in SETTINGS.items()}) == RunSettings()
    assert RunSettings().policy == Policy()


@EVERY
def test_every_setting_is_described_and_allows_its_default(setting: Setting) -> None:
    assert setting.help.endswith(".")
    assert setting.default is None or checked(setting, setting.default, "default") == setting.default
    if setting.key.endswith("_s") and not setting.key.endswith("_per_s"):
        assert setting.about.unit == "s"


@EVERY
def test_every_setting_reaches_the_program_from_text(setting: Setting) -> None:
    value = other_value(setting)

    parsed = from_text(setting, shown(value), "here")
    built = build({**{key: each.default for key, each in SETTINGS.items()}, setting.key: parsed})

    group, _, name = setting.key.rpartition(".")
    assert getattr(built.policy if group else built, name) == value
    assert setting.default != value


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.key)
def test_what_is_out_of_range_is_refused_with_the_range(setting: Setting) -> None:
    least, most = setting.about.least, setting.about.most
    assert least is not None
    assert most is not None
    for wrong in (least - 1, most + 1):
        with pytest.raises(StepkeeperError, match=rf"here: {re.escape(setting.key)} = .* from {least:g} to"):
            checked(setting, setting.kind(wrong), "here")


@EVERY
def test_text_that_is_no_value_is_refused_and_not_repeated_to_the_terminal(setting: Setting) -> None:
    long = "x" * 5000 if setting.key in READ else "9" * 5000
    for wrong in ("", "nan", "inf", "-inf", "1e400", "\x1b[31m", "1.5.2", long):
        free = setting.kind is str and not setting.about.choices and not is_row(setting) and setting.key not in READ
        if free and wrong and wrong.isprintable():
            assert from_text(setting, wrong, "here") == wrong
            continue
        with pytest.raises(StepkeeperError) as refused:
            from_text(setting, wrong, "here")

        assert str(refused.value).startswith("here: ")
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("spares", True), ("spares", 1.0), ("torchrun", 1), ("free_gib_min", "1"), ("run_dir", 3), ("spares", [1])],
)
def test_a_value_of_another_kind_is_refused(key: str, wrong: object) -> None:
    with pytest.raises(StepkeeperError, match=f"{key} = .* is wanted"):
        checked(SETTINGS[key], wrong, "here")


def test_a_whole_number_will_do_for_a_number() -> None:
    value = checked(SETTINGS["free_gib_min"], 5, "here")

    assert (value, type(value)) == (5.0, float)


def test_a_port_may_stand_alone_and_as_a_number() -> None:
    assert checked(SETTINGS["metrics_port"], 9400, "here") == "9400"
    assert parse_metrics_port("9400") == ("127.0.0.1", 9400)
    assert parse_metrics_port("10.0.0.1:0") == ("10.0.0.1", 0)
    for wrong in ("65536", "-1", "here:", "10.0.0.1"):
        with pytest.raises(StepkeeperError, match="ADDRESS:PORT"):
            checked(SETTINGS["metrics_port"], wrong, "here")


def test_most_settings_earn_their_line() -> None:
    """One that nobody would set is a constant in `Limits` of `core/policy.py`."""
    assert len(SETTINGS) <= 54


def test_the_page_has_every_setting_once() -> None:
    assert sorted(key for keys in configuration.TOPICS.values() for key in keys) == sorted(SETTINGS)
    assert len(next(iter(configuration.TOPICS.values()))) == 10


def test_names_are_unique() -> None:
    for names in (
        [setting.flag for setting in SETTINGS.values() if setting.flag],
        [setting.variable for setting in SETTINGS.values() if setting.variable],
    ):
        assert len(names) == len(set(names))
    variables = {setting.variable for setting in SETTINGS.values()}
    assert not variables & (resolve.PASSED_ON | resolve.MODULES)


def test_every_variable_of_the_programs_is_a_setting_or_told_to_ranks() -> None:
    """A new variable must be one of both: else a run started inside a rank would refuse to start."""
    known = {setting.variable for setting in SETTINGS.values()} | resolve.PASSED_ON
    found = {
        name
        for below in ("supervisor", "trainer")
        for path in (ROOT / below).rglob("*.py")
        for name in re.findall(r"[\"'](STEPKEEPER_[A-Z_]+[A-Z])[\"']", path.read_text())
    }

    assert {"STEPKEEPER_RUN_DIR", "STEPKEEPER_SOCKET"} <= found
    assert found - known == set()


def test_options_keep_their_names() -> None:
    """Batch scripts that were written for an earlier version use them."""
    command = argparse.ArgumentParser()
    resolve.declare_flags(command)

    words = (
        "--run-dir=r --torchrun --tasks-per-node=2 --spares=1 --min-nodes=3 --free-gib-min=0.5 --group-readable "
        "--failures-max=4 --save-margin-s=5"
    )
    given = command.parse_args(words.split())

    assert {key: entry.value for key, entry in resolve.read_flags(given).items()} == {
        "run_dir": "r",
        "torchrun": True,
        "tasks_per_node": 2,
        "spares": 1,
        "min_nodes": 3,
        "free_gib_min": 0.5,
        "group_readable": True,
        "policy.failures_max": 4,
        "policy.save_margin_s": 5.0,
    }


def test_a_removed_setting_is_an_error_that_says_what_to_do_instead() -> None:
    for key, instead in REMOVED.items():
        assert key not in SETTINGS
        assert all(named in SETTINGS for named in re.findall(r"set `([\w.]+)`", instead))
        with pytest.raises(StepkeeperError, match=re.escape(instead)):
            known(key, "here")
    assert "constant since 1.0: 30" in REMOVED["policy.kill_within_s"]
    assert "constant since 1.0: leave, requeue" in REMOVED["policy.on_node_lost"]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--max-nodes", "8"], "--max-nodes: `max_nodes` is no setting any more: set `spares`"),
        (["--load-memory-gib", "2"], "--load-memory-gib: .* give `CheckpointManager` the argument"),
        (["--progress-log-every-s", "9"], "--progress-log-every-s: .* the log gets a line every 10 s at most"),
        (["--resubmit", "auto"], "a job that Slurm cannot requeue is submitted again"),
        (["--set", "policy.on_hang=stop"], "constant since 1.0: relaunch, leave, requeue, stop"),
        (["--set", "policy.grow_ask_s=9"], "set `policy.grow_idle_s`"),
        (["--set", "policy.on_node_fault=stop"], "constant since 1.0: leave, requeue"),
        (["--set", "spares"], "--set KEY=VALUE"),
        (["--set", "spare=1"], "did you mean `spares`"),
        (["--set", "spares=1", "--spares", "1"], "twice"),
        (["--set", "spares=1", "--set", "spares=1"], "twice"),
        (["--set", "policy.failures_max=0"], "from 1 to"),
        (["--set", "policy.loss_spike=tell"], "no value any more: set `report`"),
        (["--set", "policy.slow_node=tell"], "no value any more: set `report`"),
        (["--set", "policy.loss_spike=tel"], "one of off, report, rollback is wanted"),
    ],
)
def test_an_assignment_that_is_wrong_says_why(words: list[str], wrong: str) -> None:
    command = argparse.ArgumentParser()
    resolve.declare_flags(command)

    with pytest.raises(StepkeeperError, match=wrong):
        resolve.read_flags(command.parse_args(words))
