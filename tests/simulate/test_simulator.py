from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.run_analytics.model import Use
from stepkeeper.simulate import simulator
from stepkeeper.simulate.simulator import Simulator, simulate
from stepkeeper.simulate.world import PRESETS, Kind, World

HOUR = 3600.0


@pytest.mark.campaign
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(spares=16), id="llama3"),
        pytest.param(World(nodes=128, spares=2, failures=PRESETS["rsc1"], days=200.0, load_s=600.0), id="rsc1"),
        pytest.param(World(spares=16, interval_s=600.0), id="every ten minutes"),
        pytest.param(World(spares=16, interval_s=2 * HOUR, blocked_s=60.0, persist_s=300.0), id="slow"),
        pytest.param(World(), id="every fault of a node waits in the queue"),
    ],
)
def test_what_the_rules_come_to_is_what_the_plan_expects(world: World) -> None:
    """The formula knows nothing of the rules, and the simulation nothing of the formula."""
    found = simulate(world, Policy(), runs=3, seed=1)

    assert found.formula is not None
    assert found.ettr == pytest.approx(found.formula, rel=0.02)
    assert found.ettr_low <= found.ettr <= found.ettr_high
    assert found.failures == pytest.approx(world.failures * world.nodes * world.days / 1000, rel=0.2)


@pytest.mark.campaign
def test_published_rates_come_to_published_shares() -> None:
    """Llama 3: 419 interruptions in 54 days, and more than nine tenths of the time effective."""
    found = simulate(World(spares=16, interval_s=600.0), Policy(), runs=2, seed=3)

    assert 0.9 < found.ettr < 0.97
    assert 350 < found.failures < 480
    assert found.requeues < 30  # spares instead of the queue


def test_every_second_goes_somewhere() -> None:
    world = World(nodes=512, spares=1, failures=20.0, days=20.0, preemptions_per_day=2.0, time_limit_s=21_600.0)

    result = Simulator(world, Policy(), seed=4).run()

    assert sum(result.spent.values()) == pytest.approx(result.wall_s)
    assert result.wall_s == pytest.approx(20 * 86_400.0)
    assert min(result.spent.values()) >= 0
    assert result.happened[Kind.PREEMPTION] > 20
    assert result.happened[Kind.TIME_LIMIT] > 5
    assert result.spent[Use.QUEUE] > 0


def test_the_same_seed_is_the_same_run() -> None:
    world = World(spares=4, days=10.0)

    first, again, other = (Simulator(world, Policy(), seed=seed).run() for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_a_notice_costs_a_save_and_no_step() -> None:
    world = World(failures=0.0, preemptions_per_day=4.0, days=20.0, nodes=8)

    result = Simulator(world, Policy(), seed=1).run()

    assert result.happened[Kind.PREEMPTION] > 50
    assert result.spent[Use.LOST] == 0
    assert result.persons == 0
    assert result.attempts == result.happened[Kind.PREEMPTION] + 1


def test_without_failures_only_the_start_and_the_saves_cost() -> None:
    world = World(failures=0.0, days=10.0, interval_s=995.0, blocked_s=5.0)

    result = Simulator(world, Policy(), seed=1).run()

    assert result.launches == 1
    assert result.spent[Use.PRODUCTIVE] / (result.wall_s - result.spent[Use.STARTING]) == pytest.approx(0.995, abs=1e-3)


def test_budgets_hold_in_a_world_where_nothing_gets_done() -> None:
    """A failure every minute: the run ends for a person again and again, and never spins."""
    world = World(nodes=1000, failures=1440.0, days=2.0, interval_s=600.0, person_s=HOUR, queue_s=0.0)

    result = Simulator(world, Policy(), seed=1).run()

    assert result.persons >= 5
    assert result.launches < 2 * 1440
    assert result.spent[Use.PRODUCTIVE] < 0.01 * result.wall_s


@pytest.mark.campaign
def test_names_of_nodes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(nodes=160, spares=4, failures=30.0, days=20.0)
    few = simulate(world, Policy(), runs=4, seed=1)

    monkeypatch.setattr(simulator, "NAMED_MAX", 160)
    all_named = simulate(world, Policy(), runs=4, seed=1)

    assert few.ettr == pytest.approx(all_named.ettr, rel=0.01)
    assert few.requeues == pytest.approx(all_named.requeues, rel=0.25)


ELASTIC = World(nodes=128, nodes_min=96, failures=20.0, days=20.0, queue_s=4 * HOUR, repair_s=2 * HOUR)


def test_a_smaller_world_goes_on_where_the_queue_is_long() -> None:
    waits = simulate(msgspec.structs.replace(ELASTIC, nodes_min=0), Policy(), runs=2, seed=1)
    shrinks = simulate(ELASTIC, Policy(), runs=2, seed=1)

    assert waits.speed == pytest.approx(waits.ettr)
    assert shrinks.requeues < 0.2 * waits.requeues
    assert shrinks.speed < shrinks.ettr, "smaller launches do less in the same time"
    assert shrinks.speed > waits.speed
    assert shrinks.formula is None


def test_growing_back_pays_where_the_queue_is_short() -> None:
    """Nodes that were repaired come back by a requeue, right after a checkpoint: no step is done twice for it."""
    world = msgspec.structs.replace(ELASTIC, queue_s=300.0)
    stays = simulate(world, Policy(grow_back="launch"), runs=2, seed=1)
    grows = simulate(world, Policy(grow_back="checkpoint"), runs=2, seed=1)

    assert grows.requeues > stays.requeues
    assert grows.speed > stays.speed + 0.03
    lost = [found.shares[Use.LOST] / found.failures for found in (grows, stays)]
    assert lost[0] == pytest.approx(lost[1], rel=0.25)


def test_every_second_and_every_node_hour_of_a_smaller_world_goes_somewhere() -> None:
    result = Simulator(ELASTIC, Policy(grow_back="checkpoint"), seed=3).run()

    assert sum(result.spent.values()) == pytest.approx(result.wall_s)
    assert min(result.spent.values()) >= 0
    assert result.steps_s < result.spent[Use.PRODUCTIVE]
    held_s = result.wall_s - result.spent[Use.QUEUE]
    assert 0.9 * held_s < result.held_node_s / ELASTIC.nodes < held_s
    assert result.persons == 0


def test_a_run_that_misses_nothing_asks_for_nothing() -> None:
    asked = []

    def listen(_before: State, _event: on.Event, decision: Decision) -> None:
        asked.extend(effect for effect in decision.effects if isinstance(effect, do.AskIdleNodes))

    world = msgspec.structs.replace(ELASTIC, failures=0.0, days=5.0)
    Simulator(world, Policy(grow_back="checkpoint"), seed=1, listener=listen).run()
    assert not asked

    Simulator(ELASTIC, Policy(grow_back="checkpoint"), seed=1, listener=listen).run()
    assert asked


def test_figures_that_make_no_sense_are_said() -> None:
    assert "cannot shrink" in (World(nodes=4, nodes_min=5).problem() or "")
    assert World().problem() is None
    assert "too short" in (World(interval_s=10.0).problem() or "")
    assert "must be more than 0" in (World(nodes=0).problem() or "")
    assert "load_s is -1" in (World(load_s=-1.0).problem() or "")
