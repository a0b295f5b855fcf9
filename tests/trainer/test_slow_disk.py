"""A disk that has become slow: training goes on beside the save, which commits late or is given up in time.

The kernel's own calls are delayed (strace), so everything that is made durable takes long, and nothing else does.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.crash.campaign import place
from tests.trainer.crash.gates import Strace
from tests.trainer.scenes import Stage

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

SCENE = "tests.trainer.test_slow_disk:train"
DELAYED = "fsync,fdatasync,pwrite64"
EVERY, SLOW_FROM = 5, 15  # steps
SLOW = SLOW_FROM + EVERY  # the step whose save meets the slow disk
WAIT_S = 60.0


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory: what this machine's own disk has to do for others makes no save of these slow."""
    with place(tmp_path) as found:
        yield found


def train(_rank: int, directory: Path, *, save_within_s: float, delay_s: float, fails: bool) -> int:
    """Train on a quick disk, on one that is slow until a save is committed there or fails, and on a quick one."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 1))
    manager = CheckpointManager(
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters())},
        every=EVERY,
        run_dir=directory / "run",
        total_steps=1000,
        save_within_s=save_within_s,
        retention="all",
        storage_test="off",
    )
    manager.resume()

    def step() -> None:
        time.sleep(0.02)
        manager.step_done(loss=1.0)

    def steps_to(last: int) -> None:
        """Have each save come to its end before the next step."""
        while manager.step < last:
            step()
            saver = manager._saver
            assert saver is not None
            assert saver.wait(time.time() + WAIT_S)

    steps_to(SLOW_FROM)
    delay = f"inject={DELAYED}:delay_enter={round(1e6 * delay_s)}"
    strace = Strace(os.getpid(), directory / "strace", "-f", "-e", f"trace={DELAYED}", "-e", delay)
    while manager.step < SLOW:
        step()
    saver = manager._saver
    assert saver is not None
    slow = saver.last
    assert slow is not None
    assert slow.summary.step == SLOW
    while not (slow.settled.is_set() if fails else saver.newest is not None and saver.newest.step >= SLOW):
        assert manager.step < 900, "the save has no end"
        step()
    print(f"steps beside: {manager.step - SLOW}", flush=True)
    chosen = newest_verified(directory / "run/checkpoints", cached=False).chosen
    print(f"newest: {chosen.step if chosen else None}", flush=True)
    strace.detach()
    manager.save()
    assert saver.wait(time.time() + WAIT_S)
    steps_to((manager.step // EVERY + 2) * EVERY)
    print(f"ends at {manager.step}", flush=True)
    return 0


def play(stage: Stage, directory: Path, **options: object) -> tuple[str, int]:
    """Return what was said, and how many steps were done beside the slow save."""
    arguments = {"save_within_s": WAIT_S, "delay_s": 0.5, "fails": False} | options
    ended = stage.play(SCENE, directory, limit_s=240.0, **arguments)
    said = ended.said
    assert ended.codes == [0], said
    assert "(DELAYED)" in (directory / "strace").read_text(errors="replace"), "the disk was slow"
    steps = {step.step: step for step in list_steps(directory / "run/checkpoints")}
    assert all(verify(step.path).ok for step in steps.values())
    assert {EVERY, 2 * EVERY, SLOW_FROM} <= set(steps), "older steps are there"
    last = int(_found(r"^ends at (\d+)$", said))
    assert last in steps, "saves go on when the disk does"
    assert re.search(rf"^\[0\] committed step={last} ", said, re.MULTILINE)
    return said, int(_found(r"^steps beside: (\d+)$", said))


def _found(pattern: str, said: str) -> str:
    found = re.search(pattern, said, re.MULTILINE)
    assert found is not None, said
    return found.group(1)


def _told_as_slow(said: str, slow: int) -> bool:
    """Tell whether a step's save was told as slow, once, and with how long it usually takes.

    The disk of a busy machine may have been slow for others as well.
    """
    told = re.findall(r"storage_slow step=(\d+) seconds=(\S+) usual_s=(\S+)", said)
    assert all(float(seconds) > 4 * float(usual_s) for _, seconds, usual_s in told)
    return [step for step, _, _ in told].count(str(slow)) == 1


def test_the_save_that_is_due_beside_a_slow_one_waits_for_it(stage: Stage, directory: Path) -> None:
    said, beside = play(stage, directory)

    assert beside > EVERY, said
    assert _told_as_slow(said, SLOW), said
    assert re.search(rf"save_waits step={SLOW + EVERY} why=.*another is in flight", said)
    order = re.findall(r"(save_started|committed) step=(\d+)", said)
    began, ended = order.index(("save_started", str(SLOW))), order.index(("committed", str(SLOW)))
    assert ended == began + 1, "none began beside it"


@pytest.mark.campaign
def test_a_slow_save_is_given_up_at_its_time_limit(stage: Stage, directory: Path) -> None:
    said, beside = play(stage, directory, save_within_s=4.0, delay_s=2.5, fails=True)

    assert beside >= 1, said
    assert re.search(rf"save_failed step={SLOW} .*(in time|not come|late)", said), said
    assert int(_found(r"^newest: (\d+)$", said)) == SLOW_FROM, "the one before is the newest, and whole"
    assert f"committed step={SLOW} " not in said
