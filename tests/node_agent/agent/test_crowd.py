"""A switch fails, and thousands of agents have a fault at once: what slurmctld has to bear, on a virtual clock."""

from __future__ import annotations

import pytest

from stepkeeper.node_agent.core.state import Mode, Policy
from tests.node_agent.agent.crowd import switch_fails

ALL_AT_ONCE = Policy(mode=Mode.ACT, crowded_s=float("inf"))


def test_a_switch_failure_leaves_the_controller_free_for_others() -> None:
    agents = 1500

    spread = switch_fails(agents)

    at_once = switch_fails(agents, ALL_AT_ONCE, hours=0.1)
    assert spread.longest_wait_s < 0.3 * at_once.longest_wait_s
    assert spread.work_first_minute_s < 0.5 * at_once.work_first_minute_s
    assert spread.lists <= 2 * agents, "each counts once, and once more in the hour"
    assert spread.last_known_s <= 3600
    assert 0 < spread.drained <= 2 * Policy().drains_per_hour


@pytest.mark.campaign
def test_ten_thousand_agents_leave_the_controller_free_for_others() -> None:
    load = switch_fails(10_000)

    assert load.longest_wait_s < 10
    assert load.work_first_minute_s < 30
    assert load.work_s < 0.5 * 3600
    assert load.drained <= 2 * Policy().drains_per_hour
