from __future__ import annotations

import pytest

from stepkeeper.config import resolve
from stepkeeper.config.rank_settings import rank_variables
from stepkeeper.config.settings import RunSettings
from stepkeeper_trainer.coordinate.cadence import Rule, choose_rule
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.load.resume import choose_limits
from stepkeeper_trainer.observe.confirmation import choose_every
from stepkeeper_trainer.store.retention import Policy, choose_policy


def test_what_the_run_was_given_counts_instead_of_the_script() -> None:
    told = rank_variables(
        RunSettings(checkpoint_every="auto or 500 steps", retention="newest 2, every 10 percent", confirm_every=50)
    )
    read = read_environment(told)
    assert choose_rule(read.checkpoint_every, 7) == Rule(every_steps=500, auto=True)
    assert choose_every(read.confirm_every, 7) == 50
    assert choose_policy(read.retention, "all", total_steps=100) == Policy(
        keep_last=2, every_percent=10.0, total_steps=100, epochs=False
    )


def test_the_memory_of_a_node_for_loading_is_shared_by_its_ranks() -> None:
    assert choose_limits(8.0, ranks=4).memory_bytes == 2 * 1024**3
    assert choose_limits(None, ranks=4).memory_bytes == 1024**3, "each rank"
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="load_memory_gib"):
            choose_limits(wrong, ranks=1)


def test_without_a_setting_the_script_decides() -> None:
    assert rank_variables(RunSettings()) == {}
    read = read_environment(rank_variables(RunSettings()))
    assert choose_rule(read.checkpoint_every, 7) == Rule(every_steps=7)


def test_the_variables_are_settings_and_may_come_from_any_place() -> None:
    read = resolve.read_environment({"STEPKEEPER_CHECKPOINT_EVERY": "30 min", "STEPKEEPER_RETENTION": "all"})
    assert {key: entry.value for key, entry in read.items()} == {"checkpoint_every": "30 min", "retention": "all"}
