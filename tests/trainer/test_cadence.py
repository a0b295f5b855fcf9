from __future__ import annotations

import dataclasses
import math
import random

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

from stepkeeper_trainer.coordinate.cadence import (
    PRIOR_NODE_HOURS,
    Cadence,
    Costs,
    FailureRate,
    Rule,
    best_interval_s,
    daly_s,
    floor_interval_s,
    parse_rule,
    productive_share,
    young_s,
)
from stepkeeper_trainer.errors import UsageError

HARD = Costs(blocked_s=300.0, persist_s=300.0, restart_s=600.0, mtbf_s=3 * 3600.0)
ASYNC = Costs(blocked_s=2.0, persist_s=90.0, restart_s=300.0, mtbf_s=2 * 3600.0)
LARGE = Costs(blocked_s=6.3, persist_s=60.0, restart_s=120.0, mtbf_s=1800.0)


def simulate(interval_s: float, costs: Costs, failures: int, seed: int) -> float:
    """Play the lives of a job from failure to failure: the share of wall time that became durable progress."""
    dice = random.Random(seed)  # noqa: S311
    wall_s = durable_s = 0.0
    for _ in range(failures):
        life_s = dice.expovariate(1 / costs.mtbf_s)
        wall_s += life_s
        begins_s = costs.restart_s  # of the next snapshot; a failure may come before training goes on
        while True:
            begins_s += interval_s
            if begins_s + max(costs.persist_s, costs.blocked_s) > life_s:
                break  # not durable when the node died: the next life begins at the snapshot before
            durable_s += interval_s
            begins_s += costs.blocked_s
    return durable_s / wall_s


@pytest.mark.campaign
@pytest.mark.parametrize("costs", [HARD, ASYNC, LARGE], ids=["synchronous", "asynchronous", "huge job"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_formula_agrees_with_a_simulation_of_the_job(costs: Costs, factor: float) -> None:
    interval_s = max(factor * best_interval_s(costs), floor_interval_s(costs))
    shares = [simulate(interval_s, costs, failures=20_000, seed=seed) for seed in range(3)]
    assert sum(shares) / len(shares) == pytest.approx(productive_share(interval_s, costs), rel=0.02)


@pytest.mark.campaign
@pytest.mark.parametrize("costs", [HARD, LARGE], ids=["synchronous", "huge job"])
def test_the_simulated_job_does_best_at_the_interval_that_is_called_best(costs: Costs) -> None:
    best = best_interval_s(costs)
    at = {
        factor: sum(simulate(factor * best, costs, failures=20_000, seed=seed) for seed in range(3)) / 3
        for factor in (0.4, 1.0, 2.5)
        if factor * best >= floor_interval_s(costs)
    }
    assert len(at) > 1
    assert max(at, key=lambda factor: at[factor]) == 1.0


costs_of_jobs = some.builds(
    Costs,
    blocked_s=some.floats(0.01, 600),
    persist_s=some.floats(0.01, 3600),
    restart_s=some.floats(0, 3600),
    mtbf_s=some.floats(300, 1e8),
)


@settings(max_examples=200, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(costs=costs_of_jobs, other=some.floats(0.01, 100))
def test_no_allowed_interval_beats_the_best(costs: Costs, other: float) -> None:
    best = best_interval_s(costs)
    elsewhere = max(best * other, floor_interval_s(costs), 1e-3)
    assert best >= floor_interval_s(costs)
    assert productive_share(best, costs) >= productive_share(elsewhere, costs) * (1 - 1e-9)


def test_it_agrees_with_the_published_approximations() -> None:
    assert best_interval_s(HARD) == pytest.approx(2350, abs=2)
    assert daly_s(HARD) == pytest.approx(best_interval_s(HARD), rel=1e-3)
    assert young_s(HARD) == pytest.approx(2546, abs=1)
    small = msgspec.structs.replace(HARD, blocked_s=1.0, persist_s=1.0)
    assert productive_share(best_interval_s(small), small) == pytest.approx(0.933, abs=1e-3)


def test_without_failures_only_the_blocked_time_is_lost() -> None:
    costs = Costs(blocked_s=1.0, persist_s=5.0, mtbf_s=math.inf)
    assert productive_share(99.0, costs) == 0.99
    assert best_interval_s(costs) == math.inf


def test_a_save_that_blocks_nothing_is_made_as_often_as_the_storage_takes_it() -> None:
    assert best_interval_s(Costs(blocked_s=0.0, persist_s=40.0, mtbf_s=9e4)) == 40.0


@pytest.mark.parametrize(
    ("change", "names"),
    [({"blocked_s": -1.0}, "blocked_s"), ({"mtbf_s": 0.0}, "mtbf_s"), ({"restart_s": math.nan}, "restart_s")],
)
def test_costs_that_make_no_sense_are_named(change: dict[str, float], names: str) -> None:
    assert names in (msgspec.structs.replace(HARD, **change).problem() or "")
    assert HARD.problem() is None


# --- the failure rate -----------------------------------------------------------------------------


def test_the_prior_is_the_literature_and_gives_way_to_what_is_seen() -> None:
    rate = FailureRate()
    assert rate.per_node_hour * 24 == pytest.approx(5e-3)
    truth, hours = 1 / 500.0, 100.0
    dice = random.Random(1)  # noqa: S311
    for hour in range(500):
        seen = sum(dice.random() < truth for _ in range(int(hours)))
        rate.observe(hour * 10.0, node_hours=hours, failures=seen)
    assert rate.per_node_hour == pytest.approx(truth, rel=0.25)


def test_a_quiet_week_is_believed_and_an_old_bad_one_is_forgotten() -> None:
    quiet, bad = FailureRate(), FailureRate()
    quiet.observe(0.0, node_hours=10 * PRIOR_NODE_HOURS)
    assert quiet.per_node_hour == pytest.approx(1 / (11 * PRIOR_NODE_HOURS))
    bad.observe(0.0, node_hours=100.0, failures=50)
    at_first = bad.per_node_hour
    bad.observe(10 * bad.half_life_s, node_hours=0.0)
    assert bad.per_node_hour < at_first / 40


def test_mtbf_is_of_the_whole_job() -> None:
    assert FailureRate().mtbf_s(2048) == pytest.approx(FailureRate().mtbf_s(1) / 2048)
    # of the size of Llama 3's run: one in 2.3 h by the prior, one in 3.1 h in truth
    assert 2.0 < FailureRate().mtbf_s(2048) / 3600 < 3.5


# --- rules and the clock --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("500", Rule(every_steps=500)),
        ("500 steps", Rule(every_steps=500)),
        ("30 min", Rule(every_s=1800.0)),
        ("2h", Rule(every_s=7200.0)),
        ("1.5 hours", Rule(every_s=5400.0)),
        ("auto", Rule(auto=True)),
        ("auto or 1000 steps or 90s", Rule(every_steps=1000, every_s=90.0, auto=True)),
        ("never", Rule()),
    ],
)
def test_a_rule_reads_as_people_write_it(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "often", "0 steps", "1.5 steps", "-3 min", "5 parsecs", "auto or", "inf s"])
def test_a_rule_that_cannot_be_read_says_which_part(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        parse_rule(text)


def test_steps_count_the_same_whatever_the_clock_says() -> None:
    cadence = Cadence(rule=Rule(every_steps=5))
    cadence.start(0, now=100.0)
    assert [step for step in range(1, 21) if cadence.due(step, now=1e9)] == [5, 10, 15, 20]


def test_minutes_run_from_the_begin_of_the_newest_save_of_any_kind() -> None:
    cadence = Cadence(rule=parse_rule("10 min"))
    cadence.start(40, now=0.0)
    assert not cadence.due(41, now=599.0)
    assert cadence.due(41, now=600.0)
    cadence.note_begun(41, now=610.0)
    assert not cadence.due(42, now=1209.0)
    assert cadence.due(42, now=1210.0)


def test_a_state_that_is_saved_is_not_due_again() -> None:
    cadence = Cadence(rule=parse_rule("1s"))
    cadence.start(40, now=0.0)
    assert not cadence.due(40, now=1e6)


def test_auto_saves_early_once_and_then_as_often_as_pays() -> None:
    cadence = Cadence(rule=Rule(auto=True), nodes=64)
    cadence.start(0, now=0.0)
    assert cadence.interval_s == cadence.first_after_s
    cadence.note_begun(3, now=60.0)
    for _ in range(3):
        cadence.note_save(blocked_s=0.5, persist_s=20.0)
    costs = cadence.costs
    assert costs is not None
    assert cadence.interval_s == pytest.approx(best_interval_s(costs) + 0.5)
    calm = cadence.interval_s
    for day in range(5):
        cadence.rate.observe(86400.0 * day, node_hours=24.0, failures=1.0)
    assert cadence.interval_s < 0.6 * calm


def test_auto_never_asks_for_more_than_its_share_nor_for_two_saves_at_once() -> None:
    dear = Cadence(rule=Rule(auto=True), nodes=10_000)
    dear.note_save(blocked_s=60.0, persist_s=70.0)
    assert 60.0 / dear.interval_s == pytest.approx(dear.overhead_max)
    slow = Cadence(rule=Rule(auto=True), nodes=10_000)
    slow.note_save(blocked_s=0.01, persist_s=900.0)
    assert slow.interval_s >= 900.0


def test_auto_never_leaves_a_small_job_without_a_save_for_hours() -> None:
    alone = Cadence(rule=Rule(auto=True), nodes=1)
    alone.note_save(blocked_s=5.0, persist_s=10.0)
    assert alone.interval_s == alone.longest_s + 5.0


def test_one_dear_first_save_does_not_stretch_the_interval() -> None:
    cadence = Cadence(rule=Rule(auto=True), nodes=100)
    for blocked in (30.0, 0.5, 0.5, 0.5):
        cadence.note_save(blocked_s=blocked, persist_s=5.0)
    costs = cadence.costs
    assert costs is not None
    assert costs.blocked_s == 0.5


def test_all_of_a_jobs_ranks_agree_though_their_clocks_do_not() -> None:
    """Ranks' clocks differ; the steps rule asks none, the time rule only rank 0's."""
    ranks = [Cadence(rule=parse_rule("100 s or 7 steps")) for _ in range(4)]
    clocks = [0.0, 1e6, -50.0, 3.3]
    for cadence, clock in zip(ranks, clocks, strict=True):
        cadence.start(0, clock)
    saved: list[list[int]] = [[] for _ in ranks]
    agreed = False
    for step in range(1, 60):
        heard = agreed
        for rank, cadence in enumerate(ranks):
            now = clocks[rank] + step * (9.0 + rank)
            if heard or cadence.due_by_steps(step):
                cadence.note_begun(step, now)
                saved[rank].append(step)
        agreed = ranks[0].due_by_time(step, clocks[0] + step * 9.0)
    assert saved[0] == saved[1] == saved[2] == saved[3]
    assert set(range(7, 60, 7)) <= set(saved[0])


def test_bounds_that_cannot_be_kept_are_refused() -> None:
    for change in ({"nodes": 0}, {"overhead_max": 0.0}, {"overhead_max": 1.0}, {"longest_s": 0.0}):
        with pytest.raises(UsageError, match="more than 0"):
            dataclasses.replace(Cadence(rule=Rule()), **change)
