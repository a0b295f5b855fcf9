"""The time limit of an attempt beside the notice that comes before it."""

from __future__ import annotations

import pytest

from stepkeeper.errors import StepkeeperError
from stepkeeper.submit import preflight


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("0:30", 30),
        ("10:30", 630),
        ("24:00:00", 86_400),
        ("2-0", 172_800),
        ("2-01", 176_400),
        ("2-01:30", 178_200),
        ("2-01:30:05", 178_205),
        ("0", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_a_limit_is_read_as_sbatch_reads_it(text: str, seconds: float | None) -> None:
    assert preflight.limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("time", "options", "asked"),
    [
        ("5", (), "5"),
        (None, (), None),
        (None, ("--mem=0", "--time=1-0"), "1-0"),
        ("5", ("-t 7", "--time 9"), "9"),
        (None, ("-t7",), "7"),
        (None, ("--time-min=7", "--test-only"), None),
    ],
)
def test_the_last_word_on_the_limit_counts(time: str | None, options: tuple[str, ...], asked: str | None) -> None:
    assert preflight.requested_limit(time, options) == asked


def test_a_limit_that_leaves_nothing_for_training_is_refused() -> None:
    preflight.require_room(600, 120, "-t 10")
    with pytest.raises(StepkeeperError, match=r"^-t 3: .* nothing is left for training"):
        preflight.require_room(180, 120, "-t 3")
