"""What the records of two runs prove."""

from __future__ import annotations

from pathlib import Path

from stepkeeper.submit import selftest
from stepkeeper.submit.selftest import Row


def rows(first: int, last: int, *, attempt: int = 0, launch: int = 0, at: float = 0.0, shift: float = 0.0) -> list[Row]:
    return [
        Row(step=step, loss=repr(5.0 / step + shift), at=at + step, attempt=attempt, launch=launch)
        for step in range(first, last + 1)
    ]


def test_an_interrupted_run_with_the_same_losses_holds() -> None:
    tested = [*rows(1, 30), *rows(21, 60, launch=1, at=10), *rows(61, 80, attempt=1, at=100)]
    found = selftest.compare(rows(1, 80), tested)
    assert found.holds(exactly=True)
    assert [(each.requeued, each.after_step, each.redone) for each in found.interruptions] == [
        (False, 30, 10),
        (True, 60, 0),
    ]
    assert found.interruptions[0].seconds == 11.0


def test_a_loss_that_differs_after_the_resume_does_not_hold() -> None:
    found = selftest.compare(rows(1, 40), [*rows(1, 20), *rows(21, 40, launch=1, shift=1e-9)])
    assert not found.holds(exactly=True)
    assert found.holds(exactly=False), "a billionth is rounding"
    assert found.equal == 20
    assert not selftest.compare(rows(1, 40), [*rows(1, 20), *rows(21, 40, launch=1, shift=0.1)]).holds(exactly=False)


def test_missing_steps_and_losses_that_are_no_numbers_do_not_hold() -> None:
    assert not selftest.compare(rows(1, 40), rows(1, 39)).holds(exactly=True)
    broken = [*rows(1, 39), Row(step=40, loss="nan", at=1.0, attempt=0, launch=0)]
    assert not selftest.compare(rows(1, 40), broken).holds(exactly=False)
    assert not selftest.compare([], []).holds(exactly=True), "nothing proves nothing"


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    assert selftest.read_run(file) == []
    file.write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n1,2.5,10,0.1,1.0,100.5,0,0\n2,2.4,20")
    assert selftest.read_run(file) == [Row(step=1, loss="2.5", at=100.5, attempt=0, launch=0)]
