"""What silence is longer than usual, by a run's own step times."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.core.baseline import (
    ENOUGH,
    KEPT_MAX,
    SAVES_ENOUGH,
    STEADY,
    WARM_UP_STEPS,
    Pace,
    certain_s,
    launched,
    least_save_s,
    saved,
    silence_s,
    steady_s,
    step_taken,
)
from stepkeeper.core.policy import Policy

POLICY = Policy(hang_steps=20.0, hang_least_s=10.0, hang_most_s=1000.0)


def paced(*seconds: float, pace: Pace | None = None, warm_up: float = 50.0) -> Pace:
    pace = pace or Pace()
    for each in (*[warm_up] * WARM_UP_STEPS, *seconds):
        pace = step_taken(pace, each)
    return pace


def allowed(pace: Pace, *, saving: bool = False) -> float:
    return silence_s(pace, POLICY, saving=saving)


def test_a_run_without_statistics_gets_the_longest_time() -> None:
    assert allowed(Pace()) == 1000.0
    assert allowed(paced(*[1.0] * (ENOUGH - 1))) == 1000.0


def test_a_steady_run_is_looked_at_after_so_many_of_its_steps() -> None:
    assert allowed(paced(*[2.0] * 20)) == pytest.approx(40.0)
    assert allowed(paced(*[0.01] * 20)) == 10.0, "never sooner than the least"
    assert allowed(paced(*[500.0] * 20)) == 1000.0, "never later than the most"


def test_first_steps_are_no_measure() -> None:
    """They compile and load."""
    assert allowed(paced(*[2.0] * 20, warm_up=300.0)) == pytest.approx(40.0)


def test_one_long_step_does_not_make_all_usual_and_may_come_again() -> None:
    """An evaluation every thousand steps."""
    pace = paced(*[1.0] * 30, 100.0, *[1.0] * 30)

    assert allowed(pace) == pytest.approx(300.0)


def test_uneven_steps_are_given_more_time() -> None:
    assert allowed(paced(*[1.0, 3.0] * 10)) > allowed(paced(*[2.0] * 20))


def test_a_new_launch_goes_by_the_one_before_until_it_has_statistics() -> None:
    before = paced(*[2.0] * 20, warm_up=30.0)
    pace = launched(before)

    assert allowed(pace) == pytest.approx(40.0 + 3 * 30.0), "loading and the first step as well"
    pace = paced(pace=pace)
    assert allowed(pace) == pytest.approx(40.0)
    pace = paced(*[4.0] * ENOUGH, pace=launched(before))
    assert allowed(pace) == pytest.approx(80.0)


def test_a_launch_that_came_to_nothing_leaves_the_statistics_before_it() -> None:
    before = paced(*[2.0] * 20)

    assert launched(launched(before)).before == launched(before).before
    assert launched(before).before.before is None, "no chain of launches grows"


def test_a_save_may_take_as_long_as_saves_do() -> None:
    pace = paced(*[1.0] * 20)

    assert allowed(pace, saving=True) == 1000.0, "nobody knows how long yet"
    assert allowed(msgspec.structs.replace(pace, save=60.0), saving=True) == pytest.approx(20.0 + 180.0)


def test_only_the_newest_steps_are_kept() -> None:
    assert len(paced(*[1.0] * 500).recent) == KEPT_MAX


def test_the_least_time_of_a_save_is_known_after_a_few_and_outlives_a_launch() -> None:
    pace = Pace()
    for number, seconds in enumerate((50.0, 40.0, 45.0), start=1):
        assert least_save_s(pace) == 0.0
        pace = saved(pace, seconds, by_disk=False)
        assert pace.saves == number
    assert SAVES_ENOUGH == 3
    assert least_save_s(pace) == 10.0, "a quarter of the quickest: an urgent one may be quicker than those before"
    assert least_save_s(launched(pace)) == 10.0
    assert pace.save == 50.0


def test_saves_by_way_of_the_disks_tell_nothing_of_the_quickest_way() -> None:
    pace = Pace()
    for seconds in (50.0, 40.0, 45.0):
        pace = saved(pace, seconds, by_disk=True)

    assert least_save_s(pace) == 0.0
    assert pace.save == 50.0


def test_even_steps_are_looked_at_sooner_once_there_are_many() -> None:
    policy = Policy(hang_least_s=120.0, hang_steady_s=30.0, hang_steps=20.0)

    def soon(*seconds: float, saving: bool = False) -> float | None:
        return steady_s(paced(*seconds), policy, saving=saving)

    assert soon(*[0.2] * STEADY) == pytest.approx(30.0)
    assert soon(*[0.5] * STEADY) == pytest.approx(50.0), "a hundred steps"
    assert soon(*[0.2] * (STEADY - 1)) is None
    assert soon(*[0.2] * STEADY, saving=True) is None
    assert soon(*[2.0] * STEADY) is None, "no sooner than elsewhere"
    assert soon(*[0.2] * STEADY, 25.0) == pytest.approx(75.0), "a pause that was seen may come again"
    assert soon(*[0.2] * STEADY, 45.0) is None
    assert soon(*[0.1, 0.9] * STEADY) is None, "uneven"


def test_a_first_look_comes_after_ten_steps_or_two_seconds() -> None:
    policy = Policy()

    def first(*seconds: float, saving: bool = False) -> float | None:
        return certain_s(paced(*seconds), policy, saving=saving)

    assert first(*[0.2] * ENOUGH) == pytest.approx(2.0)
    assert first(*[0.1] * ENOUGH) == pytest.approx(2.0)
    assert first(*[2.0] * ENOUGH) == pytest.approx(20.0)
    assert first(*[0.2] * (ENOUGH - 1)) is None
    assert first(*[0.2] * ENOUGH, saving=True) is None, "a save takes its time"
    assert first(*[0.2] * KEPT_MAX, 5.0) == pytest.approx(50.0), "one of a hundred steps is as long"
    assert first(40.0, *[0.2] * KEPT_MAX) == pytest.approx(60.0), "a pause that was seen is not looked at each time"
