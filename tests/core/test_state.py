"""When the supervisor looks again, though nothing happens."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core.reasons import RankFailed
from stepkeeper.core.state import Growth, Launch, Next, Nodes, Phase, Plan, Resting, State, Timer, Timers

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


def test_an_end_that_nobody_planned_is_followed_by_another_launch() -> None:
    why = (RankFailed(rank=1, node="b", code=1),)

    assert State(launch=Launch(first_failure=why)).plan == Plan(next=Next.RELAUNCH, why=why)


def test_a_phase_waits_for_one_thing_and_what_runs_beside_it_goes_on() -> None:
    timers = WAITING.timers.waiting(Timer.KILL, 60.0)

    assert timers == Timers({Timer.KILL: 60.0, Timer.HANG: 40.0, Timer.LIMIT: 30.0})
    assert timers.waiting(None, None) == Timers({Timer.HANG: 40.0, Timer.LIMIT: 30.0})
    assert timers.beside(Timer.HANG, None) == Timers({Timer.KILL: 60.0, Timer.LIMIT: 30.0})


@pytest.mark.parametrize(
    ("phase", "due"),
    [
        (Phase.STARTING, Timer.LIMIT),
        (Phase.TRAINING, Timer.LIMIT),  # before a deadline, and that before silence
        (Phase.SAVING, Timer.SAVE),
        (Phase.REQUEUEING, Timer.SAVE),
    ],
)
def test_what_is_due_is_what_counts_in_the_phase(phase: Phase, due: Timer) -> None:
    assert WAITING.timers.due(phase, 50.0) is due
    assert WAITING.timers.due(phase, 29.0) is None
    assert WAITING.timers.beside(Timer.LIMIT, None).due(Phase.TRAINING, 45.0) is Timer.HANG
