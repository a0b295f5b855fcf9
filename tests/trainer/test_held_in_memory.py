"""Real ranks with snapshots in memory: two processes, on one node or as two nodes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import steps
from tests.trainer.ranks import Ranks, finish, losses

WORLD = 2
SLOW_STEPS = "--step-seconds-min=0.2"  # a run that is killed is not through before
EVERY = 2
SAVES = 8  # steps from one save to the next
LATEST = "--resume-from=latest"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return finish(WORLD, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def settings(memory: Path, *, nodes: int, **more: str) -> Callable[[int], dict[str, str]]:
    def of_rank(rank: int) -> dict[str, str]:
        return {
            "SLURMD_NODENAME": f"n{rank % nodes}",
            "STEPKEEPER_SNAPSHOT_EVERY": f"{EVERY} steps",
            "STEPKEEPER_SNAPSHOT_DIR": str(memory),
            **more,
        }

    return of_rank


def held(ranks: Ranks) -> list[int]:
    """Return the steps that all nodes have held."""
    return [int(step) for step in re.findall(r"snapshot_held step=(\d+)", ranks.logs[0].read_text())]


def of_node(memory: Path, node: int) -> list[Path]:
    """Return a node's snapshots, newest first."""
    return sorted(memory.glob(f"stepkeeper-*/run.*.n{node}/checkpoints/step_*"), reverse=True)


def kill(ranks: Ranks, rank: int = 1) -> None:
    """Kill one rank with SIGKILL; the launch ends by that, as under a supervisor."""
    ranks.processes[rank].send_signal(signal.SIGKILL)
    ranks.kill()


def kill_between(tmp_path: Path, memory: Path, *, nodes: int = 1, after: int = 13, **more: str) -> int:
    """Kill a rank when a snapshot is held that is newer than any save; return its step."""
    with Ranks(
        WORLD, tmp_path / "run", SLOW_STEPS, every=SAVES, of_rank=settings(memory, nodes=nodes, **more)
    ) as ranks:
        ranks.until(lambda: max(held(ranks), default=0) >= after)
        if more.get("STEPKEEPER_PEER_COPIES"):
            ranks.until(lambda: all("peer_copied step=14" in log.read_text() for log in ranks.logs))
        kill(ranks)
        return max(held(ranks))


def resume(tmp_path: Path, memory: Path, *, nodes: int = 1, **more: str) -> str:
    """Run to the end, and return what the ranks said."""
    of_rank = settings(memory, nodes=nodes, **more)
    with Ranks(WORLD, tmp_path / "run", LATEST, every=SAVES, of_rank=of_rank) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        return ranks.output()


@pytest.mark.parametrize("nodes", [1, 2])
def test_after_a_killed_rank_it_goes_on_from_the_snapshot_with_the_same_losses(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str], nodes: int
) -> None:
    step = kill_between(tmp_path, memory, nodes=nodes)
    run = tmp_path / "run"
    assert [each.step for each in steps.list_steps(run / "checkpoints")] == [8], "snapshots are nowhere else"
    said = resume(tmp_path, memory, nodes=nodes)
    assert f"step_brought step={step}" in said
    assert f"resumed step={step}" in said
    assert 'came_from="the nodes\' memory"' in said
    assert losses(run) == undisturbed
    assert not os.listdir(memory), "a run that has ended leaves nothing"
