"""When the supervisor looks again, though nothing happens."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core.state import Growth, Nodes, Phase, Resting, State, Timer, Timers

replace = msgspec.structs.replace
WAITING = State(
    timers=Timers({Timer.SAVE: 50.0, Timer.HANG: 40.0, Timer.LIMIT: 30.0}),
    nodes=Nodes(growth=Growth(ask_at=20.0, resting=(Resting(node="c", look_at=10.0),))),
)


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        (Phase.STARTING, 30.0),  # no rank can be silent, and no node is looked at beside it
        (Phase.TRAINING, 10.0),
        (Phase.SAVING, 50.0),  # it leaves already: its own deadline counts
        (Phase.CLOSING, 50.0),
    ],
)
def test_each_phase_wakes_for_what_can_fall_due_in_it(phase: Phase, at: float) -> None:
    assert replace(WAITING, phase=phase).wake_at == at


def test_training_that_waits_for_nothing_is_not_woken() -> None:
    assert State(phase=Phase.TRAINING).wake_at is None


def test_a_node_that_is_looked_at_is_waited_for_and_not_looked_at_again() -> None:
    growth = replace(WAITING.nodes.growth, looked_at=("c",), look_until=15.0, ask_at=None)

    assert growth.wake_at == 15.0
    assert Growth(resting=(Resting(node="c", look_at=None),)).wake_at is None
