"""Real ranks with tiers: two processes as two nodes, each with a disk of its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.verify import verify
from tests.trainer.ranks import Ranks, finish, losses
from tests.trainer.s3_server import s3_server, variables

NODES = 2
SLOW_STEPS = "--step-seconds-min=0.2"  # a run that is stopped or killed is not through before


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return finish(NODES, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


def nodes(tmp_path: Path, **more: str) -> Callable[[int], dict[str, str]]:
    """Each rank is a node."""

    def of_rank(rank: int) -> dict[str, str]:
        disk = tmp_path / f"disk{rank}"
        disk.mkdir(exist_ok=True)
        return {"SLURMD_NODENAME": f"n{rank}", "STEPKEEPER_LOCAL_TIER": str(disk), **more}

    return of_rank


def parts(tmp_path: Path, rank: int) -> dict[str, list[str]]:
    """Return the files of each step on a node's disk."""
    found = {}
    for path in (tmp_path / f"disk{rank}").glob("run.*/checkpoints/step_*"):
        with suppress(FileNotFoundError):  # a newer one has taken its place meanwhile
            found[path.name] = sorted(os.listdir(path))
    return found


def held_locally(tmp_path: Path, *, by_peers: bool = False) -> int:
    """Return the newest step of which each node has its part, and with `by_peers` the other's too; 0: none."""
    found = [
        {
            int(name.removeprefix("step_"))
            for name, files in parts(tmp_path, rank).items()
            if f"__{rank}_0.distcp" in files and (not by_peers or f"__{1 - rank}_0.distcp" in files)
        }
        for rank in range(NODES)
    ]
    return max(set.intersection(*found), default=0)


def kill_with_a_step_on_the_disks_only(tmp_path: Path, *, by_peers: bool = False) -> tuple[int, int]:
    """Kill all ranks when a step is on the nodes' disks only; return the newest on shared storage, and that one."""
    run = tmp_path / "run"
    with Ranks(NODES, run, SLOW_STEPS, of_rank=nodes(tmp_path)) as ranks:
        ranks.until(lambda: newest(run))
    for rank in range(NODES):
        shutil.rmtree(tmp_path / f"disk{rank}")
    slow = nodes(tmp_path, STEPKEEPER_COPY_RATE="0.001", STEPKEEPER_PEER_COPIES=str(by_peers).lower())
    with Ranks(NODES, run, "--resume-from=latest", SLOW_STEPS, of_rank=slow) as ranks:
        ranks.until(lambda: held_locally(tmp_path, by_peers=by_peers))
    base = newest(run)
    assert base is not None
    return int(base.removeprefix("step_")), held_locally(tmp_path, by_peers=by_peers)


def newest(run_dir: Path) -> str | None:
    chosen = steps.newest_verified(run_dir / "checkpoints").chosen
    return chosen.path.name if chosen else None


@pytest.mark.campaign
def test_when_all_but_the_cold_tier_is_lost_it_goes_on_from_there_with_the_same_losses(
    tmp_path: Path, undisturbed: dict[int, str], s3: str
) -> None:
    """On the way: nodes' disks, shared storage, an object store; then back."""
    run = tmp_path / "run"
    own = variables(s3) | {"STEPKEEPER_COLD_TIER": "s3://bucket/lost"}
    with Ranks(NODES, run, of_rank=nodes(tmp_path, **own)) as ranks:
        ranks.until(lambda: "cold_copied" in ranks.output())
        for rank in range(NODES):
            for files in parts(tmp_path, rank).values():
                assert f"__{rank}_0.distcp" in files
                assert f"__{1 - rank}_0.distcp" not in files, "each disk has the files of its own ranks"
    for lost in (run / "checkpoints", tmp_path / "disk0", tmp_path / "disk1"):
        shutil.rmtree(lost)
    with Ranks(NODES, run, "--resume-from=latest", of_rank=nodes(tmp_path, **own)) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        said = ranks.output()
    assert "came_from=s3://bucket/lost" in said
    assert "resumed step=" in said
    assert "anything-that-is-secret" not in said
    assert losses(run) == undisturbed
    assert newest(run) == "step_00000024"
    left = {path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")}
    assert not {name for name in left if name.startswith((".tmp-", ".copy-", ".cold-"))}, said
    for rank in range(NODES):
        assert len(parts(tmp_path, rank)) <= 3, "the newest ones"


def lose_nothing(_tmp_path: Path, _step: int) -> None:
    pass


def lose_a_disk(tmp_path: Path, _step: int) -> None:
    shutil.rmtree(tmp_path / "disk1")


def damage_a_part(tmp_path: Path, step: int) -> None:
    [file] = (tmp_path / "disk1").glob(f"run.*/checkpoints/step_{step:08d}/__1_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.campaign
def test_killed_with_the_newest_step_on_the_nodes_disks_only_it_goes_on_from_what_is_whole(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    base, step = kill_with_a_step_on_the_disks_only(tmp_path)
    assert base < step
    kept = tmp_path.with_name(f"{tmp_path.name}-kept")
    shutil.copytree(tmp_path, kept)
    run = tmp_path / "run"
    for lose, resumed, word in (
        (lose_nothing, step, f"step_brought step={step}"),
        (lose_a_disk, base, f"local_step_incomplete step={step}"),
        (damage_a_part, base, "bytes of chunk 0"),
    ):
        shutil.rmtree(tmp_path)
        shutil.copytree(kept, tmp_path)
        lose(tmp_path, step)
        with Ranks(NODES, run, "--resume-from=latest", of_rank=nodes(tmp_path)) as ranks:
            assert ranks.wait() == [0, 0]
            assert word in ranks.output()
            assert f"resumed step={resumed}" in ranks.output()
        assert losses(run) == undisturbed, lose.__name__
        assert newest(run) == "step_00000024"


@pytest.mark.campaign
def test_a_lost_node_loses_nothing_that_the_next_one_keeps(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    base, step = kill_with_a_step_on_the_disks_only(tmp_path, by_peers=True)
    assert base < step
    shutil.rmtree(tmp_path / "disk1")
    run = tmp_path / "run"
    with Ranks(NODES, run, "--resume-from=latest", of_rank=nodes(tmp_path)) as ranks:
        assert ranks.wait() == [0, 0]
        assert f"step_brought step={step}" in ranks.output()
    assert losses(run) == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path, mounted: Callable[[Path, str], Path]) -> Path:
    """A real file system that does not hold a node's part of a step."""
    return mounted(tmp_path / "disk1", "size=200k")


@pytest.mark.campaign
@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_of_a_node_is_told_and_shared_storage_takes_its_files_at_once(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    run = tmp_path / "run"
    with Ranks(NODES, run, of_rank=nodes(tmp_path)) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
        said = ranks.logs[1].read_text()
    assert "local_tier_failed" in said
    assert "No space left" in said
    assert losses(run) == undisturbed
    found = steps.list_steps(run / "checkpoints")
    assert len(found) >= 2
    assert all(verify(step.path).ok for step in found)


@pytest.mark.campaign
def test_asked_to_stop_ranks_leave_when_their_step_is_on_shared_storage_whatever_the_rate_limit(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    run = tmp_path / "run"
    with Ranks(NODES, run, SLOW_STEPS, of_rank=nodes(tmp_path, STEPKEEPER_COPY_RATE="0.001")) as ranks:
        ranks.until(lambda: held_locally(tmp_path))
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [75, 75], ranks.output()
    stopped_at = max(losses(run))
    assert newest(run) == f"step_{stopped_at:08d}"
    with Ranks(NODES, run, "--resume-from=latest", of_rank=nodes(tmp_path)) as ranks:
        assert ranks.wait() == [0, 0]
        assert f"resumed step={stopped_at}" in ranks.output()
    assert losses(run) == undisturbed
