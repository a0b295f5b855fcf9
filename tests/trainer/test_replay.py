"""Steps that are done again after a resume are compared with the first time."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import messages
from stepkeeper_trainer.formats.lineage import LeftOut
from stepkeeper_trainer.formats.messages import Replayed
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.observe.exactness import STEPS_MAX, Replay, comparable_losses, distance, recorded_losses
from stepkeeper_trainer.observe.metrics import HEADER
from tests.trainer.ranks import Ranks, steps_of, watcher_socket

RECORDED = {21: 2.5, 22: 2.25, 23: 2.125}


def told(
    losses: dict[int, float], recorded: dict[int, float] | None = None, *, deterministic: bool = True
) -> list[Replayed]:
    """Return what is said of losses, over a real socket."""
    name = f"replay-{time.monotonic_ns()}"
    with watcher_socket(name) as sock:
        link = Link(f"@{name}", "0.1")
        replay = Replay(dict(RECORDED if recorded is None else recorded), link, deterministic=deterministic, changed="")
        for step, loss in losses.items():
            replay.observe(step, loss)
        found = []
        while True:
            try:
                message = messages.decode_from_rank(sock.recv(2048))
            except TimeoutError:
                return found
            assert isinstance(message, Replayed)
            found.append(message)


def test_equal_bits_are_told_once_when_all_recorded_steps_are_done() -> None:
    (word,) = told({**RECORDED, 24: 2.0, 25: 1.9})

    assert (word.step, word.steps, word.worst, word.deterministic) == (23, 3, None, True)


def test_another_loss_of_a_deterministic_run_is_told_at_once() -> None:
    (word,) = told({**RECORDED, 22: math.nextafter(2.25, 3)})

    assert (word.step, word.steps, word.first, word.worst, word.then) == (22, 2, 22, 22, 2.25)
    assert word.now == math.nextafter(2.25, 3)


def test_of_other_runs_the_step_that_differs_most_is_told_at_the_end() -> None:
    (word,) = told({21: 2.5001, 22: 2.3, 23: 2.125}, deterministic=False)

    assert (word.step, word.steps, word.first, word.worst) == (23, 3, 21, 22)
    assert (word.then, word.now) == (2.25, 2.3)


@pytest.mark.parametrize(("then", "now"), [(math.nan, 2.0), (2.0, math.inf)])
def test_a_loss_that_is_no_number_on_one_side_differs(then: float, now: float) -> None:
    (word,) = told({21: now}, {21: then})

    assert word.worst == 21
    assert (word.then, word.now) == (
        then if math.isfinite(then) else None,
        now if math.isfinite(now) else None,
    )


def test_nothing_is_told_where_nothing_is_done_again() -> None:
    assert told({24: 2.0}) == []
    assert told({24: 2.0}, {}) == []
    assert distance(math.nan, math.nan) == 0.0
    assert distance(-1.0, 2.0) == 3.0


def test_a_later_row_of_a_step_counts_and_few_are_kept(tmp_path: Path) -> None:
    rows = [f"{step},{step / 7!r},0,,,0,0,0" for step in range(1, 1000)]
    rows += ["22,nan,0,,,0,0,1", "23,,0,,,0,0,1", "24,1.5,0,,,0,0,1", "25,1.", "x,y"]
    (tmp_path / "metrics.csv").write_text("\n".join([HEADER, *rows]))

    found = recorded_losses(tmp_path, after=20)

    assert list(found) == list(range(21, 21 + STEPS_MAX))
    assert math.isnan(found[22])
    assert (found[21], found[23], found[24], found[25]) == (21 / 7, 23 / 7, 1.5, 25 / 7)
    assert recorded_losses(tmp_path / "nothing", after=0) == {}


def test_what_was_left_out_long_ago_does_not_end_the_comparing(tmp_path: Path) -> None:
    """Steps 31 and later of the first launch were on the data that the second one left out at step 18."""
    rows = [f"{step},9.0,0,,,0,0,0" for step in range(1, 61)] + [f"{step},2.0,0,,,0,0,1" for step in range(11, 31)]
    (tmp_path / "metrics.csv").write_text("\n".join([HEADER, *rows, ""]))
    window = LeftOut(18, 1)

    assert comparable_losses(tmp_path, 20, (window,)) == dict.fromkeys(range(21, 31), 2.0)
    assert comparable_losses(tmp_path, 20, (window, LeftOut(24, 1))) == dict.fromkeys(range(21, 24), 2.0)
    assert comparable_losses(tmp_path, 10, (window,)).keys() == set(range(11, 18))
    assert comparable_losses(tmp_path, 20, ()).keys() == set(range(21, 61))


@pytest.mark.campaign
def test_a_rank_that_is_killed_and_resumed_comes_to_the_same_losses_and_says_so(tmp_path: Path) -> None:
    run_dir, name = tmp_path / "run", f"replay-{time.monotonic_ns()}"
    with Ranks(1, run_dir, "--step-seconds-min=0.3", every=8) as ranks:
        ranks.until(lambda: "step_00000008" in steps_of(run_dir))
        ranks.until_step(10)  # and long before the next save
        ranks.kill()
    words = []
    environment = {"STEPKEEPER_SOCKET": f"@{name}"}
    with (
        watcher_socket(name) as sock,
        Ranks(1, run_dir, "--resume-from=latest", every=8, environment=environment) as ranks,
    ):
        ended = False
        while True:  # beside it: a socket takes a few words only
            try:
                words.append(messages.decode_from_rank(sock.recv(2048)))
            except TimeoutError:
                if ended:
                    break
                ended = ranks.processes[0].poll() is not None
        assert ranks.wait() == [0], ranks.output()
    (word,) = [each for each in words if isinstance(each, Replayed)]

    assert word.deterministic
    assert word.worst is None
    assert word.steps >= 1
