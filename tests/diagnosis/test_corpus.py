from __future__ import annotations

import pytest

from stepkeeper.core.causes import Cause
from tests.diagnosis.corpus import Case, cases, verdict

# the rules were written with these in sight
LEARNED = ("known", "second", "third", "fourth", "fifth", "sixth", "seventh")
HELD_OUT_AT_LEAST = 0.95  # of logs that no rule was written for


def is_right(case: Case) -> bool:
    judged = verdict(case.log)
    return judged.cause in (case.cause, *case.also) and case.location in ("", judged.location)


def share(names: tuple[str, ...]) -> float:
    """Print what was judged wrongly, and return how much was judged rightly."""
    known = [case for name in names for case in cases(name)]
    wrong = [case for case in known if not is_right(case)]
    for case in wrong:
        judged = verdict(case.log)
        print(f"  {case.name}: {judged.cause.value} by {judged.rule}, not {case.cause.value} ({case.source})")
    accuracy = 1 - len(wrong) / len(known)
    print(f"{', '.join(names)}: {len(known) - len(wrong)} of {len(known)} are judged rightly ({accuracy:.1%})")
    return accuracy


def test_nine_of_ten_public_failure_logs_are_judged_rightly() -> None:
    assert share((*LEARNED, "held_out")) >= 0.95


def test_logs_that_no_rule_was_written_for_are_judged_rightly_as_a_rule() -> None:
    assert share(("held_out",)) >= HELD_OUT_AT_LEAST


def test_a_log_without_a_failure_is_never_called_one() -> None:
    assert share(("healthy",)) == 1.0


def test_every_cause_that_a_log_can_tell_has_a_case() -> None:
    told = {case.cause for name in (*LEARNED, "held_out", "healthy") for case in cases(name)}

    assert set(Cause) == told | {Cause.UNKNOWN, Cause.STOPPED}  # who had it stopped stands in the journal only


@pytest.mark.parametrize("name", [*LEARNED, "held_out"])
def test_every_case_names_its_source_once(name: str) -> None:
    known = cases(name)

    assert all(case.source.startswith("https://github.com/") for case in known)
    assert len({case.name for case in known}) == len(known)


def test_the_order_of_lines_of_other_ranks_does_not_change_the_verdict() -> None:
    """Ranks write between each other's lines: srun merges them as they come."""
    failing = ["1: Traceback (most recent call last):", '1:   File "/w/train.py", line 7, in main', "1:     step()"]
    failing.append("1: ValueError: bad batch")
    other = "0: [rank0]: RuntimeError: Connection reset by peer"
    for position in range(len(failing) + 1):
        lines = [*failing[:position], other, *failing[position:]]

        judged = verdict("\n".join(lines))

        assert (judged.cause, judged.rank, judged.location) == (
            Cause.EXCEPTION,
            1,
            "ValueError at /w/train.py:7 in main",
        )
