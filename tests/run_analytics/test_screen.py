from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.run_analytics import reading
from stepkeeper.run_analytics.glance import Glance, glance, line
from stepkeeper.run_analytics.screen import screen
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build

NOW = build.START + 90


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = build.make_run(tmp_path / "run")
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "it left the bus"}
    told = [*build.story(run), build.record(on.NodeFaulted(at=build.START + 50, node="n9", **fault), why="n9 is left")]
    build.write_journal(run, told)
    build.write_status(run)
    rows = "".join(f"{step},{5 - step / 100},0,,,{build.START + step},1,0\n" for step in range(1, 60))
    (run.path / "metrics.csv").write_text("step,loss,tokens,lr,grad_norm,time,attempt,launch\n" + rows + "60,torn")
    return run


def drawn(run: RunDirectory, width: int = 80, height: int = 24, *, plain: bool = False, now: float = NOW) -> list[str]:
    accounts = reading.see(run, now=now).accounts
    return screen("my-run", glance(run), accounts, now=now, width=width, height=height, plain=plain)


def test_what_an_on_call_person_needs_fits_on_a_small_terminal(run: RunDirectory) -> None:
    said = "\n".join(drawn(run))

    for words in (
        "my-run",
        "phase          training, for",
        "job            12 (restart 1), attempt 1, launch 0",
        "step           250, loss 2.125, 250,000 tokens, 1 s a step",
        "checkpoint     step 200 (step_00000200), 50 steps ago, 50 s ago",
        "4.41 to 4.81",
        "nodes          2 in use: n1 n2; left: n9 (XID 79)",
        "last decision  step 200 is committed",
        "updated        30 s ago",
        "ETTR",
        "newest verified step directory",
        "n9 is left",
        "to stop: scancel 12",
    ):
        assert words in said, (words, said)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60), (20, 5), (1, 1)])
def test_nothing_stands_out_of_the_terminal(run: RunDirectory, width: int, height: int) -> None:
    lines = drawn(run, width, height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_terminal_without_unicode_gets_none(run: RunDirectory) -> None:
    assert all(each.isascii() for each in drawn(run, plain=True))


def test_silence_is_said(run: RunDirectory) -> None:
    said = " ".join(" ".join(drawn(run, now=NOW + 3600)).split())

    assert "unknown, no update for 1 h 00 min; it was training" in said
    assert "the job is suspended or gone, or its storage hangs" in said
    assert "training, for" not in said


def test_what_a_training_writes_cannot_act_on_the_terminal(run: RunDirectory) -> None:
    build.write_status(run, why="\x1b[2Jgone\x07\u202e", nodes=("\x1b]0;title\x07",))

    assert not any("\x1b" in each or "\x07" in each or "\u202e" in each for each in drawn(run))
    assert "\x1b" not in line(glance(run), NOW)


def test_an_end_is_told_from_a_requeue(run: RunDirectory) -> None:
    build.write_status(run, phase="done", exit_code=10)
    assert not glance(run).is_over

    build.write_status(run, phase="done", exit_code=20)
    assert glance(run).is_over
    said = "\n".join(drawn(run))
    assert "ended: the training failed repeatedly" in said
    assert "scancel" not in said


def test_a_run_without_anything_is_said(tmp_path: Path) -> None:
    run = build.make_run(tmp_path / "run")

    assert glance(run) == Glance(status=None)
    assert "no supervisor has worked on this run yet" in "\n".join(drawn(run))
    assert line(glance(run), time.time()).endswith("no status yet")


def test_ordinary_saves_do_not_hide_what_matters(run: RunDirectory) -> None:
    saves = [
        build.record(
            on.CheckpointCommitted(
                at=build.START + 60 + n, launch=0, step=300 + n, save_id="s", directory="d", bytes=1, seconds=1.0
            ),
            why=f"step {300 + n} is committed",
        )
        for n in range(100)
    ]
    build.write_journal(run, saves)

    said = "\n".join(drawn(run, now=NOW + 100))

    assert "step 399 is committed" not in said
    assert "n9 is left" in said


def test_a_loss_that_is_no_number_is_said_beside_the_curve_of_those_before(run: RunDirectory) -> None:
    with (run.path / "metrics.csv").open("a") as file:
        file.write(f"\n60,nan,0,,,{build.START + 60},1,0\n61,nan,0,,,{build.START + 61},1,0\n")

    (row,) = [each for each in drawn(run) if each.startswith("loss")]

    assert row.startswith("loss           NaN or infinite now  ")
    assert row.endswith("4.41 to 4.62")


def test_on_a_narrow_terminal_the_run_the_reason_and_how_many_nodes_were_left_can_be_told(run: RunDirectory) -> None:
    build.write_status(run, why="the storage is full: 12 GiB are missing on /scratch for the next step")
    fault = {"incident": "i", "name": "XID 79", "action": "drain", "leave": True, "why": "it left the bus"}
    lost = [
        build.record(
            on.NodeFaulted(at=build.START + 51 + index, node=f"a-long-name-{index}", **fault), why="it is left"
        )
        for index in range(12)
    ]
    build.write_journal(run, lost)
    name = "/scratch/somebody/runs/the-run-of-today"
    said = screen(name, glance(run), None, now=NOW, width=44, height=16)

    assert said[0].startswith("~")
    assert "runs/the-run-of-today " in said[0]
    assert any("left 13:" in each for each in said)
    reason = said.index(next(each for each in said if each.startswith("last decision")))
    assert "the storage is full" in said[reason]
    assert said[reason + 1].startswith(15 * " ")
