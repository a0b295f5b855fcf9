"""What a rank works itself is told apart from what it waits for the others."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from stepkeeper_trainer.formats import messages
from stepkeeper_trainer.observe.straggler_probe import WARM_UP_STEPS, Own, StragglerProbe, parts
from tests.ports import reserve
from tests.trainer import warm
from tests.trainer.ranks import LIMIT_S, ROOT, TINY, watcher_socket

BUSY_S = 0.05  # of each of two forwards of a step
WAITS_S = 1.5  # far longer than a busy machine keeps a thread that is ready from running


class Saves:
    """As much of a saver as is looked at."""

    def __init__(self) -> None:
        self.busy, self.sequence = False, 0


def work(seconds: float) -> None:
    """Compute for so long."""
    end_at = time.thread_time() + seconds
    while time.thread_time() < end_at:
        pass


def own_of(act: object) -> Own | None:
    """Return the own time of the first step that counts; `act(model)` is done in it."""
    model = torch.nn.Linear(2, 2)
    own = StragglerProbe(model, lambda: None)
    own.restart()
    for _ in range(WARM_UP_STEPS):
        model(torch.ones(2))
        own.step(time.monotonic())
    act(model)  # type: ignore[operator]
    own.step(time.monotonic())
    return own.take()


def test_computing_counts_and_waiting_does_not() -> None:
    def waits(model: torch.nn.Module) -> None:
        model(torch.ones(2))
        work(0.02)
        time.sleep(WAITS_S)

    own = own_of(waits)

    assert own is not None
    assert 0.02 <= own.seconds < WAITS_S


def test_loading_data_counts_whole_even_where_it_sleeps() -> None:
    def loads(model: torch.nn.Module) -> None:
        time.sleep(0.1)
        model(torch.ones(2))

    own = own_of(loads)

    assert own is not None
    assert own.seconds >= own.loading >= 0.1


def test_waiting_for_others_in_a_hook_before_the_forward_is_not_loading() -> None:
    """`fully_shard` gathers parameters in such a hook: there all ranks wait for the one that loads data."""
    model = torch.nn.Linear(2, 2)
    wait_s = 0.0
    model.register_forward_pre_hook(lambda *_: time.sleep(wait_s), prepend=True)
    own = StragglerProbe(model, lambda: None)
    own.restart()
    for number in range(WARM_UP_STEPS + 1):
        wait_s = WAITS_S if number == WARM_UP_STEPS else 0.0
        model(torch.ones(2))
        own.step(time.monotonic())

    taken = own.take()

    assert taken is not None
    assert taken.seconds < WAITS_S


def test_a_model_that_is_not_called_counts_by_the_processor() -> None:
    own = own_of(lambda _: work(0.02))

    assert own is not None
    assert own.seconds >= 0.02
    assert own.loading == 0.0, "where loading ends is not known"


def test_warm_up_evaluation_and_saves_do_not_count() -> None:
    saves = Saves()
    own = StragglerProbe(torch.nn.Linear(2, 2), lambda: saves)  # type: ignore[arg-type,return-value]
    own.restart()

    def told() -> bool:
        own.step(time.monotonic())
        return own.take() is not None

    assert [told() for _ in range(WARM_UP_STEPS + 1)] == [False] * WARM_UP_STEPS + [True]
    own.disturb()  # by an evaluation
    assert [told(), told()] == [False, True]
    saves.sequence, saves.busy = 1, True  # begun at the end of this step, and under way in the next
    assert [told(), told()] == [False, False]
    saves.busy = False
    assert told()
    saves.sequence = 2  # begun and done within a step
    assert [told(), told()] == [False, True]


def test_only_innermost_sharded_parts_are_looked_at_on_a_gpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))

    assert parts(model) == [model]


def test_a_rank_that_computes_longer_is_told_by_its_own_time_and_not_by_its_steps(tmp_path: Path) -> None:
    """Two real ranks on gloo: both take equally long for a step, and one of them only waits."""
    port, name = reserve(), f"own-time-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "tests.trainer.busy_rank", "1", str(BUSY_S), *TINY]
    command += [f"--run-dir={tmp_path / 'run'}", "--steps=600", "--checkpoint-every-steps=1000"]
    inherited = {each: value for each, value in os.environ.items() if not each.startswith(("SLURM_", "STEPKEEPER_"))}
    inherited |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    inherited |= {"STEPKEEPER_SOCKET": f"@{name}", "STEPKEEPER_RUN_DIR": str(tmp_path / "run")}
    own: dict[int, list[float]] = defaultdict(list)
    step: dict[int, list[float]] = defaultdict(list)
    with watcher_socket(name) as sock, (tmp_path / "log").open("wb") as log:
        ranks = [
            warm.Process(
                command,
                cwd=ROOT,
                env=inherited | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        try:
            limit_at = time.monotonic() + LIMIT_S
            while (len(own[1]) < 3 or not own[0]) and time.monotonic() < limit_at:
                try:
                    data = sock.recv(2048)
                except TimeoutError:
                    continue
                message = messages.decode_from_rank(data)
                if isinstance(message, messages.Progress) and message.own_seconds is not None:
                    own[message.rank].append(message.own_seconds)
                    step[message.rank].append(message.step_seconds or 0.0)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(LIMIT_S)
    assert len(own[1]) >= 3, (tmp_path / "log").read_text()

    busy, waiting = statistics.median(own[1]), statistics.median(own[0])
    assert busy >= 2 * BUSY_S
    assert busy > 1.3 * waiting
    assert statistics.median(step[0]) >= 2 * BUSY_S  # the other one's steps take as long


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_forward_on_a_gpu_is_measured_without_waiting_for_it() -> None:
    model = torch.nn.Linear(8192, 8192).cuda()
    own = StragglerProbe(model, lambda: None)
    own.restart()
    found = []
    limit_at = time.monotonic() + LIMIT_S
    while not found and time.monotonic() < limit_at:
        model(torch.ones(4096, 8192, device="cuda")).sum().backward()
        own.step(time.monotonic())
        taken = own.take()
        found += [taken] if taken is not None else []

    assert found
    assert found[0].seconds > 0.0
