"""What the manager does by itself: periodic saves, retention, room, failing storage; on real ranks over gloo."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepkeeper_trainer.coordinate.agreement import Proposal, Want
from stepkeeper_trainer.coordinate.cadence import parse_rule
from stepkeeper_trainer.coordinate.requests import Periodic, Toll
from stepkeeper_trainer.errors import NoRoomError, SaveError, UsageError
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.save.commit import CommittedStep
from stepkeeper_trainer.store import guard as storage
from stepkeeper_trainer.store import retention, space
from stepkeeper_trainer.store.guard import Backoff
from tests.trainer.forked import Story, play
from tests.trainer.test_keeper import Loop, names

MIB = 1024 * 1024


def saves(said: str, rank: int) -> list[int]:
    """Return the steps whose save a rank began, in order."""
    return [int(step) for step in re.findall(rf"^\[{rank}\] save_started step=(\d+)", said, re.MULTILINE)]


def until(condition: Callable[[], object]) -> None:
    limit_at = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < limit_at, "not met in time"
        time.sleep(0.01)


@pytest.fixture
def small_disk(tmp_path: Path, mounted: Callable[[Path, str], Path]) -> Path:
    """A disk of its own with less room than a save may take."""
    return mounted(tmp_path / "disk", "size=40m")


# --- real ranks ----------------------------------------------------------------------------------------


def test_ranks_do_by_themselves_what_the_script_has_said_once(tmp_path: Path, small_disk: Path) -> None:
    """Rank 0's clock, ends of epochs, old steps, a disk that is full for a rank and one without room for all."""
    clock = Story(run_dir=str(tmp_path / "clock"), every="0.2 s", steps=120)
    kept = Story(
        run_dir=str(tmp_path / "kept"),
        every=10,
        epoch=25,
        steps=110,
        step_s=0.025,
        options={"retention": "newest 2, epoch ends"},
    )
    full = Story(run_dir=str(tmp_path / "full"), rank=1, full_until=20, steps=20, every=2)
    lacking = Story(run_dir=str(small_disk / "run"), steps=20, every=2)
    stories = [clock, kept, full, lacking]

    played = dict(zip(("clock", "kept", "full", "lacking"), play(stories), strict=True))

    for name, ended in played.items():
        assert ended.codes == [0, 0], (name, ended.said)
    said = played["clock"].said
    assert len(saves(said, 0)) >= 3, said
    assert saves(said, 0) == saves(said, 1), "all ranks save at the same boundary"
    for rank in (0, 1):
        heard = re.findall(rf"^\[{rank}\] heard step=(\d+) whole=True", said, re.MULTILINE)
        assert [int(step) for step in heard] == saves(said, rank), "each commit is heard on every rank"
        assert f"[{rank}] closed" in said

    said = played["kept"].said
    assert "steps_removed" in said, said
    left = [step.step for step in list_steps(tmp_path / "kept/checkpoints")]
    for end in (25, 50, 75, 100):  # its save waits where another one is in flight
        assert any(end <= step < end + 25 for step in left), ("the ends of epochs", end, left)
    assert 10 not in left
    assert all(verify(step.path).ok for step in list_steps(tmp_path / "kept/checkpoints"))

    said = played["full"].said
    assert len(re.findall(r"^\[1\] storage_alarm .*No space left", said, re.MULTILINE)) == 1, said
    assert len(re.findall(r"^\[0\] save_failed", said, re.MULTILINE)) == 1, "periodic saves wait for the storage"
    for rank in (0, 1):
        assert saves(said, rank) == [2, 20], "and the last one is tried anyway"
        assert f"[{rank}] save_waits step=4" in said or f"[{rank}] save_waits step=5" in said, said
    assert names(tmp_path / "full") == ["step_00000020"]

    said = played["lacking"].said
    assert re.search(r"^\[0\] storage_alarm rank=0 why=.*bytes left, the save may take \d+", said, re.MULTILINE), said
    assert saves(said, 0) == saves(said, 1) == [2, 20], "given up once, and made at the end all the same"
    assert names(small_disk / "run") == ["step_00000020"]


def test_a_rank_that_has_the_storage_against_it_holds_all_and_none_for_ever() -> None:
    """The agreement carries it: periodic saves wait on all ranks while one holds."""
    reduced = Proposal.unpack(
        [max(pair) for pair in zip(Proposal(held=True).pack(), Proposal(committed=4).pack(), strict=True)]
    )
    assert (reduced.held, reduced.committed) == (True, 4)
    backoff = Backoff(first_s=10.0, longest_s=60.0)
    assert [backoff.failed(0.0) for _ in range(5)] == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert backoff.holding(59.9)
    assert not backoff.holding(60.0)
    backoff.succeeded()
    assert not backoff.holding(0.0)
    assert backoff.failed(0.0) == 10.0


# --- the clock -----------------------------------------------------------------------------------------


def committed(number: int, *, blocked_s: float, persist_s: float) -> CommittedStep:
    return CommittedStep(
        step=number,
        save_id=str(number),
        checkpoints=Path("none"),
        emergency=False,
        epoch_end=False,
        requested_at=0.0,
        blocked_s=blocked_s,
        persist_s=persist_s,
    )


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _play_auto(seen: tuple[float, float] | None, *, slowed_s: float) -> list[float]:
    """Train for 6 hours of played time in steps of 10 s; return when saves began."""
    clock = _Clock()
    periodic = Periodic(parse_rule("auto"), rank=0, nodes=512, seen=seen, clock=clock, wall=clock)
    periodic.start(0)
    began: list[float] = []
    for step in range(1, 2160):
        saving = bool(began) and clock.now - began[-1] < 20
        clock.now += 10 + (slowed_s / 2 if saving else 0)
        periodic.step(step, epoch_end=False)
        if began and 20 <= clock.now - began[-1] < 40:
            periodic.note_commit(committed(len(began), blocked_s=0.5, persist_s=20.0))
        periodic.note_agreed(Proposal(want=Want.DUE if periodic.asks(step) else Want.NOTHING))
        if periodic.due:
            periodic.begun(step)
            began.append(clock.now)
        periodic.spoken(saving=bool(began) and clock.now - began[-1] < 20)
    return began


def test_auto_saves_as_often_as_its_measured_costs_and_failures_say(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stepkeeper_trainer"):
        cheap = _play_auto(None, slowed_s=0.0)
    dear = _play_auto(None, slowed_s=20.0)
    failing = _play_auto((60.0, 5000.0), slowed_s=20.0)

    assert 60 <= cheap[0] - 1000 <= 70, "the first save measures what saves cost"
    assert len(cheap) > 1.5 * len(dear), "a save that slows the steps counts as one that blocks them"
    assert len(failing) > 1.5 * len(dear), "a run that has seen failures saves more often"
    told = re.findall(r"checkpoint_interval seconds=(\S+) blocked_s=(\S+)", caplog.text)
    assert told
    assert float(told[0][1]) == pytest.approx(0.5)
    assert len(told) < len(cheap) / 4, "told when it changes much, and not at each save"


def test_an_evaluation_is_no_cost_of_a_save() -> None:
    toll = Toll()
    assert toll.settle(0.3) == 0.3, "nothing else is known"
    for _ in range(9):
        toll.step(1.0, saving=False)
    toll.step(1.5, saving=True)
    toll.step(1.2, saving=True)
    assert toll.settle(0.1) == pytest.approx(0.7)
    assert toll.settle(0.1) == 0.1, "a cost counts once"
    clock = _Clock()
    periodic = Periodic(parse_rule("auto"), rank=0, nodes=1, clock=clock, wall=clock)
    periodic.start(0)
    for step in range(1, 9):
        clock.now += 1.0
        if step == 5:
            periodic.paused()
            clock.now += 500.0
        periodic.step(step, epoch_end=False)
        periodic.spoken(saving=step >= 4)
    periodic.note_commit(committed(1, blocked_s=0.0, persist_s=4.0))
    assert periodic._cadence.costs is not None
    assert periodic._cadence.costs.blocked_s == 0.0


def test_ranks_other_than_the_first_have_no_clock() -> None:
    clock = _Clock()
    periodic = Periodic(parse_rule("1 s"), rank=1, nodes=1, clock=clock, wall=clock)
    periodic.start(0)
    clock.now += 100
    periodic.step(1, epoch_end=False)
    assert not periodic.asks(1)
    periodic.note_agreed(Proposal(want=Want.SAVE))
    assert not periodic.due, "a request is no word of the clock"
    periodic.note_agreed(Proposal(want=Want.DUE))
    assert periodic.due
    periodic.begun(1)
    periodic.note_agreed(Proposal(want=Want.DUE))
    assert not periodic.due, "what was said before the save began is served by it"
    periodic.spoken(saving=True)
    periodic.note_agreed(Proposal(want=Want.DUE))
    assert periodic.due


@pytest.mark.usefixtures("one_process")
def test_the_operators_word_counts_more_than_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKEEPER_CHECKPOINT_EVERY", "3 steps")
    monkeypatch.setenv("STEPKEEPER_RETENTION", "all")
    loop = Loop(tmp_path / "run", every="never", retention="newest 1")
    loop.manager.resume()
    for _ in range(7):
        loop.step()
        if loop.manager._saver is not None and loop.manager._saver.busy:
            loop.saved()
    assert names(tmp_path / "run") == ["step_00000003", "step_00000006"]
    monkeypatch.setenv("STEPKEEPER_CHECKPOINT_EVERY", "often")
    with pytest.raises(UsageError, match="'often' cannot be read"):
        Loop(tmp_path / "run")
    monkeypatch.delenv("STEPKEEPER_CHECKPOINT_EVERY")
    monkeypatch.setenv("STEPKEEPER_RELIABILITY", "3:-1")
    with pytest.raises(UsageError, match="FAILURES:NODE_HOURS"):
        Loop(tmp_path / "run")


# --- retention -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_steps_that_no_rule_wants_go_and_marked_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SETTLED_S", 0.02)
    run_dir = tmp_path / "run"
    loop = Loop(run_dir, retention="newest 2, every 10 steps, epoch ends, best score 1 highest", total_steps=24)
    loop.manager.resume()
    for step in range(1, 24):
        loop.step_with(metrics={"score": 9.0 if step == 7 else 1.0 / step}, epoch_end=step == 4)
        if not loop.manager._saver.busy:  # type: ignore[union-attr]
            loop.manager.save()
        loop.saved()
        if step == 13:
            [thirteenth] = [
                s.manifest.save_id for s in list_steps(run_dir / "checkpoints") if s.step == 13 and s.manifest
            ]
            mark = lineage.Mark(at=time.time(), save_id=thirteenth, mark=lineage.SUSPECT)
            lineage.append(run_dir / "checkpoints", mark)

    expected = [4, 7, 10, 13, 20, 22, 23]
    until(lambda: [step.step for step in reversed(list_steps(run_dir / "checkpoints"))] == expected)
    assert newest_verified(run_dir / "checkpoints").chosen.step == 23  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("failures", [1, 20])
def test_the_end_of_an_epoch_whose_save_fails_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    run_dir = tmp_path / "run"
    loop = Loop(run_dir)
    loop.manager.resume()
    link, failed = os.rename, 0

    def fails(source: object, target: object, **how: object) -> None:
        nonlocal failed
        if Path(str(target)).name.startswith("step_") and failed < failures:
            failed += 1
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        link(source, target, **how)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(os, "rename", fails)
    with caplog.at_level(logging.INFO, "stepkeeper_trainer"):
        for step in range(1, 11):
            loop.step_with(epoch_end=step == 2)
            saver = loop.manager._saver
            assert saver is not None
            if saver.last is not None:
                saver.last.settled.wait(90)

    lines = lineage.read(run_dir / "checkpoints")
    marked = [s.step for s in list_steps(run_dir / "checkpoints") if lines and s.manifest
              and lineage.EPOCH in lines.marks.get(s.manifest.save_id, ())]  # fmt: skip
    if failures == 1:
        assert len(marked) == 1, "the next save stands for it"
        assert 2 < marked[0] < 6
        assert caplog.text.count("epoch_end_made_up") == 1
    else:
        assert marked == []
        assert caplog.text.count("epoch_end_made_up") == 3, "not at every step for ever"


@pytest.mark.usefixtures("one_process")
def test_a_metric_that_is_no_number_spoils_no_manifest(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.manager.resume()
    loop.step_with(metrics={"score": 2, "broken": float("nan"), "far": float("inf")})
    loop.manager.save()
    loop.saved()

    [step] = list_steps(tmp_path / "run/checkpoints")
    assert step.manifest is not None, step.problem
    assert step.manifest.metrics == {"score": 2.0}


@pytest.mark.usefixtures("one_process")
def test_a_damaged_newest_step_keeps_the_manager_from_removing_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = threading.Event()
    prune = retention.prune

    def prune_then(*arguments: Any, **options: Any) -> retention.Outcome:
        assert damaged.wait(60)
        return prune(*arguments, **options)

    monkeypatch.setattr(retention, "SETTLED_S", 0.0)
    monkeypatch.setattr(retention, "prune", prune_then)
    run_dir = tmp_path / "run"
    loop = Loop(run_dir, retention="newest 1")
    loop.manager.resume()
    for step in (1, 2, 3):
        loop.run(step)
        loop.manager.save()
        loop.saved()
    os.truncate(run_dir / "checkpoints/step_00000003/__0_0.distcp", 100)
    damaged.set()

    until(lambda: "retention_blocked" in caplog.text)

    assert "step_00000003, is not verified" in caplog.text
    assert len(names(run_dir)) == 3
    loop.manager.finish()


# --- storage -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_periodic_saves_come_back_when_the_storage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path / "run", every=1, storage_test="off")
    loop.manager.resume()
    loop.manager._guard._backoff.first_s = 0.2
    full = True
    lacks = space.lacking
    monkeypatch.setattr(space, "lacking", lambda *a, **o: "disk: 5 bytes left" if full else lacks(*a, **o))
    tried: list[int] = []

    def step() -> None:
        loop.step()
        saver = loop.manager._saver
        assert saver is not None
        assert saver.last is not None
        if saver.last.sequence not in tried:
            tried.append(saver.last.sequence)
        saver.last.settled.wait(90)

    with caplog.at_level(logging.INFO, "stepkeeper_trainer"):
        began = time.monotonic()
        while len(tried) < 3:
            step()
        assert time.monotonic() - began >= 0.2 + 0.4, "twice as long after the second failure"
        assert loop.manager.step > 3, "training goes on meanwhile"
        full = False
        until(lambda: (step(), names(tmp_path / "run"))[1])

    assert "storage_works_again rank=0 failures=3" in caplog.text
    assert caplog.text.count("storage_alarm") == 3
    waits = [text.count("it is given time") for text in caplog.text.split("storage_alarm")[1:]]
    assert any(waits), caplog.text
    assert max(waits) == 1, "said once for each wait; none where a step took longer than that"


@pytest.mark.usefixtures("one_process")
def test_an_emergency_save_is_tried_where_no_other_would_be(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(small_disk / "run", every=1, attach_signals=True)
    loop.manager.resume()
    loop.run(3)
    loop.manager.wait_saved(90)
    until(lambda: "storage_alarm" in caplog.text)
    assert names(small_disk / "run") == []
    os.kill(os.getpid(), signal.SIGTERM)

    assert loop.step()[1]
    assert loop.manager.finish() == 75

    assert names(small_disk / "run") == ["step_00000004"]


@pytest.mark.usefixtures("one_process")
def test_bad_storage_is_found_beside_the_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sync = os.fsync

    def broken(descriptor: int) -> None:
        if space.TEST_PREFIX in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    loop = Loop(tmp_path / "run", every=1, storage_test=4 * MIB)
    loop.manager.resume()
    until(lambda: "storage_alarm" in caplog.text)
    assert "cannot sync a file: Input/output error" in caplog.text
    loop.run(5)
    assert loop.manager._saver is not None
    assert loop.manager._saver.last is None, "periodic saves wait for storage that has just failed"
    assert loop.manager.finish() == 0
    assert not list((tmp_path / "run").rglob(f"{space.TEST_PREFIX}*"))
    with caplog.at_level(logging.INFO, "stepkeeper_trainer"):
        monkeypatch.setattr(os, "fsync", sync)
        good = Loop(tmp_path / "other")
        good.manager.resume()
        until(lambda: f"storage_tested rank=0 bytes={storage.QUICK_BYTES}" in caplog.text)
    with pytest.raises(UsageError, match="quick"):
        Loop(tmp_path / "other", storage_test="slow")


@pytest.mark.usefixtures("one_process")
def test_several_damaged_steps_in_a_row_have_the_storage_tested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    loop = Loop(run_dir)
    loop.manager.resume()
    for step in (1, 2, 3):
        loop.run(step)
        loop.manager.save()
        loop.saved()
    for step in (2, 3):
        os.truncate(run_dir / f"checkpoints/step_0000000{step}/__0_0.distcp", 100)

    assert Loop(run_dir, resume_from="latest").manager.resume() == 1

    assert "storage_suspect" in caplog.text
    assert "bytes written now come back as they were" in caplog.text


def test_what_came_of_the_storage_is_told_from_what_did_not() -> None:
    wrapped = SaveError("cannot be made")
    wrapped.__cause__ = OSError(28, "No space left on device")

    assert storage.of_storage(OSError(5, "Input/output error"))
    assert storage.of_storage(wrapped)
    assert storage.of_storage(NoRoomError("full"))
    assert not storage.of_storage(SaveError("rank 3 did not report in time"))
    assert not storage.of_storage(OSError(2, "No such file"))
