"""A save that hangs in the kernel: it is told, once; training goes on; saves go on when the storage does.

The file system is a real one, frozen by the kernel: who writes there sleeps until it is thawed.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.formats.messages import SaveFailed, decode_from_rank
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.save import persist, planner, saver
from stepkeeper_trainer.save import save as failing
from stepkeeper_trainer.store import space
from stepkeeper_trainer.store.guard import Backoff
from tests.trainer.crash.disks import Gone, NotHereError
from tests.trainer.failing_scenes import LIMIT_S, Rank
from tests.trainer.scenes import Stage

FREEZE, THAW = 0xC0045877, 0xC0045878
EVERY = 5
STUCK = 2 * EVERY  # the step whose save hangs
HANGS_S = 0.5  # the save that hangs has so much time left
WITHIN_S = 6.0  # rank 0 waits so long for the other's report


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def tell(disk: Path, what: int) -> None:
    """Freeze or thaw the file system of a directory."""
    descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, what, 0)
    finally:
        os.close(descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, that can be frozen."""
    if os.getuid() != 0:
        pytest.skip("needs root: mounts")
    try:
        made = Gone(tmp_path / "disk", tmp_path / "backing")
    except NotHereError as error:
        pytest.skip(str(error))
    try:
        yield made.at
    finally:
        with suppress(OSError):  # it is thawed
            tell(made.at, THAW)
        made.remove()


def freezes(_rank: int, directory: Path) -> int:
    """Train; the storage of the run freezes before a save and thaws when it was told."""
    failing.STUCK_AFTER_S, space.MARGIN_BYTES = 0.5, 0  # the disk is small
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as watcher:
        watcher.bind("")
        os.environ["STEPKEEPER_SOCKET"] = "@" + watcher.getsockname()[1:].decode()
        model = torch.nn.Linear(40, 40)
        manager = CheckpointManager(
            {"model": model, "optimizer": torch.optim.AdamW(model.parameters())},
            every=EVERY,
            run_dir=directory / "run",
            save_within_s=LIMIT_S,
            retention="all",
            storage_test="off",
        )
        manager.resume()
        manager._guard._backoff = Backoff(first_s=0.1)
        own = manager._saver
        assert own is not None

        def step() -> None:
            time.sleep(0.02)
            manager.step_done(loss=1.0)

        def heard() -> list[SaveFailed]:
            """Return what the supervisor is told of failures."""
            with suppress(BlockingIOError):
                while True:
                    message = decode_from_rank(watcher.recv(65536, socket.MSG_DONTWAIT))
                    if isinstance(message, SaveFailed):
                        failures.append(message)
            return failures

        failures: list[SaveFailed] = []
        while manager.step < EVERY:
            step()
        assert own.wait(time.time() + LIMIT_S)
        write = persist.write_file

        def freeze_and_write(*arguments: Any, **options: Any) -> Any:
            persist.write_file = write
            tell(directory, FREEZE)
            own.last.limit_at = time.time() + HANGS_S
            return write(*arguments, **options)

        persist.write_file = freeze_and_write  # type: ignore[assignment]  # there was room: it is asked with a limit
        limit_at = time.monotonic() + LIMIT_S
        while not heard():
            assert time.monotonic() < limit_at, "nobody was told"
            step()
        for _ in range(4 * EVERY):  # training goes on, and nothing more is said
            step()
        assert own.busy, "it hangs"
        tell(directory, THAW)
        limit_at = time.monotonic() + LIMIT_S
        while own.newest is None or own.newest.step == EVERY:
            assert time.monotonic() < limit_at, "no save was made again"
            step()
            heard()
        print(f"failures: {[(each.step, each.error) for each in heard()]}", flush=True)
    return 0


def waits(said: str, step: int) -> int:
    """Return how often it was said that another save waits for that of a step."""
    return said.partition(f"save_started step={step} ")[2].partition("save_started")[0].count("another is in flight")


def test_a_save_that_hangs_is_told_once_and_saves_go_on_when_the_storage_answers(stage: Stage, disk: Path) -> None:
    ended = stage.play("tests.trainer.test_stuck_saves:freezes", disk, limit_s=240.0)

    said = ended.said
    assert ended.codes == [0], said
    stuck = re.findall(r"save_stuck step=(\d+) .*why=\"the storage does not answer: (writing) (\S+)", said)
    assert [step for step, _, _ in stuck] == [str(STUCK)], said
    assert stuck[0][2].startswith(f"{disk}/run/checkpoints/.tmp-step_"), "it names what does not answer"
    assert len(re.findall(rf"^failures: \[\({STUCK}, .stuck: the storage does not answer", said, re.MULTILINE)) == 1
    assert said.count("storage_alarm") == 1
    assert waits(said, STUCK) == 1, "once a save, and not at each step"
    steps = sorted(step.step for step in list_steps(disk / "run/checkpoints"))
    assert STUCK not in steps, said
    assert steps[0] == EVERY
    assert len(steps) >= 2
    assert all(verify(step.path).ok for step in list_steps(disk / "run/checkpoints"))


def one_rank_hangs(rank: int, directory: Path) -> int:
    """Rank 1's disk does not answer; rank 0 gives the save up by its limit, and both wait for rank 1."""
    failing.STUCK_AFTER_S = 0.5 if rank == 1 else LIMIT_S  # rank 0 may be slow to give up
    mine = Rank(rank, directory, every=EVERY)
    if rank == 0:
        mine.saver._limit_s = WITHIN_S

    def any_rank(what: object) -> bool:
        flag = torch.tensor(int(bool(what)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def step_until(met: Callable[[], bool]) -> None:
        limit_at = time.monotonic() + LIMIT_S
        while not any_rank(met()):
            assert not any_rank(time.monotonic() > limit_at), "not met in time"
            mine.step()
            time.sleep(0.02)

    with mine.disk.held() if rank == 1 else nullcontext():
        step_until(lambda: rank == 1 and mine.disk.reached.is_set())
        if rank == 1:
            mine.saver.last.limit_at = time.time() + HANGS_S
        step_until(lambda: rank == 1 and mine.saver.last.reported_stuck)
        step_until(lambda: rank == 0 and not mine.saver.busy)
        mine.saver._limit_s = LIMIT_S
        mine.step(4 * EVERY)
        assert mine.saver.sequence == 1, "none begins beside it"
    step_until(lambda: mine.saver.committed > 1)
    return 0


@pytest.mark.campaign
def test_where_one_rank_hangs_all_go_on_and_wait_for_it(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play("tests.trainer.test_stuck_saves:one_rank_hangs", tmp_path, ranks=2, limit_s=240.0)

    said = ended.said
    assert ended.codes == [0, 0], said
    stuck = re.findall(r"save_stuck step=(\d+) save_id=\S+ rank=(\d) why=\"[^\"]*__1_0.distcp\"", said)
    assert stuck == [(str(EVERY), "1")], said
    assert re.search(rf"^\[0\] save_failed step={EVERY} .*rank 1 .*did not report in time", said, re.MULTILINE), said
    for rank in (0, 1):
        own = "".join(line for line in said.splitlines(keepends=True) if line.startswith(f"[{rank}]"))
        assert waits(own, EVERY) == 1, said


def prepares_for_long(rank: int, directory: Path) -> int:
    """Rank 1 does not come to plan the first save, beside training."""
    saver.PUT_OFF_AFTER_S = 0.0
    gate, agree = threading.Event(), planner.Planner.agree

    def held(self: planner.Planner, *arguments: Any, **options: Any) -> Any:
        assert gate.wait(LIMIT_S)
        return agree(self, *arguments, **options)

    planner.Planner.agree = held if rank == 1 else agree  # type: ignore[method-assign]
    mine = Rank(rank, directory, every=EVERY)
    mine.step(4 * EVERY)
    assert mine.saver.sequence == 0, "training went on, and no save began"
    gate.set()
    limit_at = time.monotonic() + LIMIT_S
    while mine.saver.sequence == 0:
        assert time.monotonic() < limit_at
        mine.step()
    assert mine.ends(mine.saver.last) is None
    dist.barrier()
    return 0


def test_a_rank_that_hangs_in_planning_stops_no_training(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play("tests.trainer.test_stuck_saves:prepares_for_long", tmp_path, ranks=2, limit_s=240.0)

    assert ended.codes == [0, 0], ended.said
    assert "save_failed" not in ended.said, ended.said
    assert ended.said.count("the memory for it is being made") == 2, "once a rank"
    assert len(list_steps(tmp_path / "run/checkpoints")) == 1
