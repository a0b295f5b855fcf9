"""The steps that scripts without the trainer library print are followed while the launch runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stepkeeper.core import events as on
from stepkeeper.frameworks import recognise
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions import log_progress
from stepkeeper.supervisor.actions.log_progress import Prints
from stepkeeper.supervisor.sources.process import Inbox

WITHIN_S = 60.0
MEGATRON = (
    " [2026-11-23 10:00:00] iteration {:8d}/   10000 | consumed samples: 1 | elapsed time per iteration (ms): 9 |\n"
)


@pytest.mark.parametrize(
    ("framework", "line", "step"),
    [
        ("megatron", MEGATRON.format(20), 20),
        ("torchtitan", "[titan] - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  2.5  \x1b[33mmemory: 1GiB\n", 20),
        ("torchtitan", "step:  7  loss:  2.5\n", 7),
        ("deepspeed", "[INFO] [logging.py:107:log_dist] [Rank 0] step=20, skipped=0, lr=[0.01], mom=[0.9]\n", 20),
        ("huggingface", " 20%|##        | 20/100 [00:01<00:04, 18.1it/s]\r 21%|##   | 21/100 [00:01<00:04]\r", 21),
        ("huggingface", " 99%|######### | 99/120 [00:01<00:04, 18.1it/s]\r", None),  # the bar of an evaluation
        ("megatron", "loaded iteration 400 / 500\nstep: 3\n", None),
    ],
)
def test_the_line_of_each_framework_is_known(tmp_path: Path, framework: str, line: str, step: int | None) -> None:
    pattern = recognise.known()[framework].step_line.replace("{total}", "100")
    (tmp_path / "n1.log").write_text(f"anything\n{line}")

    assert Prints([tmp_path / "n1.log"], pattern).newest() == step


def test_lines_are_read_once_and_whole_from_the_first_and_the_last_node(tmp_path: Path) -> None:
    paths = [tmp_path / f"n{number}.log" for number in (1, 2, 3)]
    prints = Prints(paths, recognise.known()["megatron"].step_line)
    assert prints.newest() is None, "nothing was printed yet"
    for path, step in zip(paths, (10, 99, 11), strict=True):
        path.write_text(MEGATRON.format(step))
    assert prints.newest() == 11
    assert prints.newest() is None
    text = MEGATRON.format(12)
    with paths[2].open("a") as file:
        file.write(text[:30])
        file.flush()
        assert prints.newest() is None
        file.write(text[30:])
    assert prints.newest() == 12


def test_of_a_large_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_progress, "BYTES_MAX", 1000)
    log = tmp_path / "n1.log"
    log.write_text(MEGATRON.format(1) + "x" * 5000 + "\n" + MEGATRON.format(2))

    assert Prints([log], recognise.known()["megatron"].step_line).newest() == 2


def test_later_steps_become_events_until_the_launch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_progress, "LOOK_EVERY_S", 0.01)
    log, inbox, ended = tmp_path / "n1.log", Inbox(Clock()), threading.Event()
    prints = Prints([log], recognise.known()["megatron"].step_line)
    thread = threading.Thread(target=lambda: log_progress.follow(prints, 3, inbox=inbox, ended=ended), daemon=True)
    thread.start()
    found = []
    for step in (10, 10, 30):
        with log.open("a") as file:
            file.write(MEGATRON.format(step))
        if step not in [event.step for event in found]:
            event = inbox.get(WITHIN_S)
            assert isinstance(event, on.Progressed), event
            found.append(event)
    ended.set()
    thread.join(WITHIN_S)

    assert not thread.is_alive()
    assert [(event.launch, event.step, event.printed) for event in found] == [(3, 10, True), (3, 30, True)]
    assert found[0].step_seconds is None
    assert found[1].step_seconds is not None
