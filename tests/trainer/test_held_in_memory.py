"""Real ranks with snapshots in memory: two processes, on one node or as two nodes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stepkeeper_trainer.formats import steps
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, seal, unseal
from tests.trainer.flipping import flip
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
            ranks.until(lambda: has_both(of_node(memory, 0)) and has_both(of_node(memory, 1)))
        kill(ranks)
        return max(held(ranks))


def has_both(snapshots: list[Path]) -> bool:
    """Whether a node's newest snapshot has the other one's part too."""
    return {f"__{rank}_0.distcp" for rank in range(WORLD)} <= {path.name for path in snapshots[0].glob("*")}


def resume(tmp_path: Path, memory: Path, *, nodes: int = 1, **more: str) -> str:
    """Run to the end, and return what the ranks said."""
    of_rank = settings(memory, nodes=nodes, **more)
    with Ranks(WORLD, tmp_path / "run", LATEST, every=SAVES, of_rank=of_rank) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        return ranks.output()


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_after_a_killed_rank_it_goes_on_from_the_snapshot_with_the_same_losses(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str], nodes: int
) -> None:
    step = kill_between(tmp_path, memory, nodes=nodes)
    run = tmp_path / "run"
    assert [each.step for each in steps.list_steps(run / "checkpoints")] == [8], "snapshots are nowhere else"
    said = resume(tmp_path, memory, nodes=nodes)
    assert re.search(rf"\bresumed step={step} directory={memory}", said), said
    assert "step_brought" not in said, "each rank reads what its node has"
    assert "snapshot_not_loaded" not in said
    assert losses(run) == undisturbed
    saved = [each.step for each in steps.list_steps(run / "checkpoints")]
    assert step not in saved
    assert step + 1 in saved, "what only memory had is saved with the next step"
    assert parents(run) == saved[1:], "commits follow each other"
    assert not os.listdir(memory), "a run that has ended leaves nothing"


def parents(run: Path) -> list[int | None]:
    """Return the step that each commit follows, newest first, but for the first one."""
    found = steps.list_steps(run / "checkpoints")
    of = {each.manifest.save_id: each.step for each in found if each.manifest is not None}
    return [of.get(each.manifest.parent or "") for each in found if each.manifest is not None][:-1]


@pytest.mark.campaign
def test_what_was_loaded_in_part_is_never_trained_on(tmp_path: Path, memory: Path) -> None:
    """A snapshot of several chunks is damaged, and no step directory is there to be loaded over it."""
    run, model = tmp_path / "run", ("--layers=3", "--width=384")
    undisturbed = finish(WORLD, tmp_path / "undisturbed", *model, steps=2)
    of_rank = settings(memory, nodes=1)
    with Ranks(WORLD, run, SLOW_STEPS, *model, every=1000, of_rank=of_rank) as ranks:
        ranks.until(lambda: max(held(ranks), default=0) >= 3)
        kill(ranks)
    for file in memory.glob("stepkeeper-*/run.*/checkpoints/step_*/__1_0.distcp"):
        flip(file, 12_000_000)
    with Ranks(WORLD, run, LATEST, *model, every=1000, of_rank=of_rank) as ranks:
        assert 0 not in ranks.wait(), ranks.output()
        assert "the snapshot is removed, start the training again" in ranks.output()
    again = finish(WORLD, run, LATEST, *model, steps=2, every=1000, of_rank=of_rank)
    assert {step: again[step] for step in undisturbed} == undisturbed


def test_killed_again_before_the_next_snapshot_the_same_one_counts(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    step = kill_between(tmp_path, memory, nodes=2)
    run, seldom = tmp_path / "run", {"STEPKEEPER_SNAPSHOT_EVERY": "1000 steps"}
    with Ranks(WORLD, run, SLOW_STEPS, LATEST, every=1000, of_rank=settings(memory, nodes=2, **seldom)) as ranks:
        ranks.until(lambda: "resumed step=" in ranks.logs[0].read_text())
        kill(ranks)
    [resumed] = re.findall(r"\bresumed step=(\d+)", resume(tmp_path, memory, nodes=2))
    assert int(resumed) in (step, step + 1), "the save that follows may be through"
    assert losses(run) == undisturbed


@pytest.mark.campaign
def test_torn_by_a_kill_the_one_before_counts(tmp_path: Path, memory: Path, undisturbed: dict[int, str]) -> None:
    step = kill_between(tmp_path, memory, nodes=2)
    newest = of_node(memory, 1)[0]
    assert newest.name == f"step_{step:08d}"
    later = newest.with_name(f"step_{step + EVERY:08d}")
    shutil.copytree(newest, later)  # as a kill between the nodes' renames leaves it: one node has the next one
    rename_manifest(later, step + EVERY)
    said = resume(tmp_path, memory, nodes=2)
    assert f"local_step_incomplete step={step + EVERY}" in said
    assert f"resumed step={step}" in said
    assert losses(tmp_path / "run") == undisturbed


def rename_manifest(directory: Path, step: int) -> None:
    """Have a copied step be another save of another step."""
    path = directory / MANIFEST_NAME
    manifest = unseal(path.read_bytes(), source=str(path))
    other = msgspec.structs.replace(manifest, step=step, save_id=f"{step:032x}")
    path.chmod(0o600)
    path.write_bytes(seal(other))


@pytest.mark.campaign
def test_killed_while_snapshots_are_written_it_goes_on_from_a_whole_one(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    """A snapshot after each step, and kills as soon as files of the next one are there."""
    run, of_rank = tmp_path / "run", settings(memory, nodes=2, STEPKEEPER_SNAPSHOT_EVERY="1 steps")
    arguments: tuple[str, ...] = (SLOW_STEPS,)
    for after in (3, 9, 12):
        with Ranks(WORLD, run, *arguments, every=SAVES, of_rank=of_rank) as ranks:
            ranks.until(lambda bound=after: max(held(ranks), default=0) >= bound)
            ranks.until(lambda: list(memory.glob("stepkeeper-*/run.*/checkpoints/.tmp-*/__*")))
            kill(ranks, rank=after % WORLD)
            whole = max(held(ranks))
        arguments = (SLOW_STEPS, LATEST)
    with Ranks(WORLD, run, LATEST, every=SAVES, of_rank=of_rank) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        [resumed] = re.findall(r"\bresumed step=(\d+)", ranks.output())
    assert int(resumed) >= whole, "the last words of a rank may be late, and never early"
    assert losses(run) == undisturbed
    assert not os.listdir(memory)


@pytest.mark.campaign
def test_a_flipped_byte_is_found_and_what_is_on_disk_counts(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    step = kill_between(tmp_path, memory, nodes=2)
    [file] = of_node(memory, 1)[0].glob("__1_0.distcp")
    flip(file, file.stat().st_size // 2)
    said = resume(tmp_path, memory, nodes=2)
    assert re.search(rf"local_part_failed step={step} .*bytes of chunk 0 .* are wrong", said), said
    assert f"local_step_incomplete step={step}" in said
    assert "resumed step=8" in said
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.campaign
def test_a_lost_node_takes_its_snapshots_with_it(tmp_path: Path, memory: Path, undisturbed: dict[int, str]) -> None:
    step = kill_between(tmp_path, memory, nodes=2)
    shutil.rmtree(of_node(memory, 1)[0].parents[1])
    said = resume(tmp_path, memory, nodes=2)
    assert f"local_step_incomplete step={step}" in said
    assert "resumed step=8" in said
    assert losses(tmp_path / "run") == undisturbed


def test_with_peer_copies_the_next_node_has_the_lost_ones_part(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    peers = {"STEPKEEPER_PEER_COPIES": "true", "STEPKEEPER_PEER_INTERFACE": "lo"}
    step = kill_between(tmp_path, memory, nodes=2, **peers)
    shutil.rmtree(of_node(memory, 1)[0].parents[1])
    said = resume(tmp_path, memory, nodes=2, **peers)
    assert f"snapshot_sent step={step} nodes=1" in said
    assert "step_brought" not in said, "no byte goes through shared storage"
    assert f"resumed step={step}" in said
    assert losses(tmp_path / "run") == undisturbed
    assert not os.listdir(memory)


def test_a_copy_that_is_damaged_is_not_taken_and_the_snapshot_before_it_counts(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    peers = {"STEPKEEPER_PEER_COPIES": "true", "STEPKEEPER_PEER_INTERFACE": "lo"}
    step = kill_between(tmp_path, memory, nodes=2, **peers)
    shutil.rmtree(of_node(memory, 1)[0].parents[1])
    newest, before, *_ = of_node(memory, 0)
    [copy] = newest.glob("__1_0.distcp")
    copy.chmod(0o600)
    flip(copy, copy.stat().st_size // 2)
    said = resume(tmp_path, memory, nodes=2, **peers)
    assert re.search(rf"snapshot_not_sent step={step} nodes=1 why=.*__1_0.distcp", said), said
    assert f"local_step_incomplete step={step}" in said
    assert f"resumed step={int(before.name.removeprefix('step_'))}" in said
    assert losses(tmp_path / "run") == undisturbed
    assert not os.listdir(memory)


def test_ranks_that_changed_their_nodes_resume_by_way_of_shared_storage(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    step = kill_between(tmp_path, memory, nodes=2)

    def of_rank(rank: int) -> dict[str, str]:
        return settings(memory, nodes=2)(1 - rank)

    with Ranks(WORLD, tmp_path / "run", LATEST, every=SAVES, of_rank=of_rank) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        said = ranks.output()
    assert f"step_brought step={step}" in said
    assert 'came_from="the nodes\' memory"' in said
    assert f"resumed step={step}" in said
    assert losses(tmp_path / "run") == undisturbed
    assert not os.listdir(memory)


def test_an_interface_that_a_node_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path, memory: Path) -> None:
    of_rank = settings(memory, nodes=2, STEPKEEPER_PEER_COPIES="true", STEPKEEPER_PEER_INTERFACE="ib7")
    with Ranks(WORLD, tmp_path / "run", of_rank=of_rank) as ranks:
        assert 0 not in ranks.wait()
        assert "peer_interface ib7: " in ranks.output()
        assert "has no such network interface with an IPv4 address" in ranks.output()
        assert re.search(r"it has .*\blo\b", ranks.output())


@pytest.fixture
def small_memory(memory: Path, mounted: Callable[[Path, str], Path]) -> Path:
    """Memory of one node that does not hold a snapshot."""
    return mounted(memory / "small", "size=200k,mode=700")


def test_where_memory_has_no_room_it_is_told_once_and_training_and_saves_go_on(
    tmp_path: Path, memory: Path, small_memory: Path, undisturbed: dict[int, str]
) -> None:
    def of_rank(rank: int) -> dict[str, str]:
        return settings(small_memory if rank else memory, nodes=2)(rank)

    with Ranks(WORLD, tmp_path / "run", every=SAVES, of_rank=of_rank) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        said = ranks.output()
    assert held(ranks) == [], said
    assert said.count("snapshots_wait") == 1, said
    assert re.search(r"snapshots_wait rank=1 .*a snapshot takes .* MiB; 0 MiB of 0 MiB are free", said), said
    assert losses(tmp_path / "run") == undisturbed
    assert [each.step for each in steps.list_steps(tmp_path / "run" / "checkpoints")] == [24, 16, 8]


@pytest.mark.campaign
def test_ranks_of_a_node_that_do_not_share_its_memory_say_so_once_and_leave_nothing_in_it(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    def of_rank(rank: int) -> dict[str, str]:
        own = memory / f"container{rank}"
        own.mkdir(mode=0o700, exist_ok=True)
        return settings(own, nodes=1)(rank)

    with Ranks(WORLD, tmp_path / "run", SLOW_STEPS, every=SAVES, of_rank=of_rank) as ranks:
        ranks.until(lambda: "snapshot_failed" in ranks.logs[0].read_text())
        ranks.until(lambda: not list(memory.glob("*/stepkeeper-*/run.*/checkpoints/*step_*")))
        assert ranks.wait() == [0] * WORLD, ranks.output()
        said = ranks.output()
    assert held(ranks) == [], said
    assert said.count("snapshot_failed") == 1, said
    assert "__1_0.distcp of rank 1 is not there: the ranks of this node do not share this directory" in said
    assert not list(memory.glob("*/stepkeeper-*/run.*/checkpoints/*step_*"))
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(
    "made", ["link", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("open", "stranger"))]
)
def test_what_somebody_else_made_in_memory_is_not_used(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str], made: str
) -> None:
    name, elsewhere = memory / f"stepkeeper-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if made == "link":
        name.symlink_to(elsewhere)
    else:
        name.mkdir(mode=0o700)
        if made == "open":
            name.chmod(0o777)
        elif os.geteuid():
            pytest.skip("only root can give a directory to somebody else")
        else:
            os.chown(name, 65534, 65534)
    with Ranks(WORLD, tmp_path / "run", every=SAVES, of_rank=settings(memory, nodes=2)) as ranks:
        assert ranks.wait() == [0] * WORLD, ranks.output()
        said = ranks.output()
    word = {
        "link": "is a symbolic link, which is not followed",
        "open": "everybody may use it",
        "stranger": "belongs to user id 65534",
    }[made]
    assert said.count("snapshots_off") == 1, said
    assert word in said
    assert held(ranks) == []
    assert not os.listdir(elsewhere)
    assert not os.listdir(name)
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.campaign
def test_a_notice_is_not_held_up_by_snapshots_and_leaves_none(
    tmp_path: Path, memory: Path, undisturbed: dict[int, str]
) -> None:
    run, of_rank = tmp_path / "run", settings(memory, nodes=2, STEPKEEPER_SNAPSHOT_EVERY="1 steps")
    with Ranks(WORLD, run, SLOW_STEPS, every=SAVES, of_rank=of_rank) as ranks:
        ranks.until(lambda: max(held(ranks), default=0) >= 3)
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert ranks.wait() == [75] * WORLD, ranks.output()
    stopped_at = max(losses(run))
    assert next(each.step for each in steps.list_steps(run / "checkpoints")) == stopped_at
    assert not os.listdir(memory)
    assert f"resumed step={stopped_at}" in resume(tmp_path, memory, nodes=2)
    assert losses(run) == undisturbed


@pytest.mark.campaign
def test_with_a_local_tier_the_newest_of_both_counts(tmp_path: Path, memory: Path, undisturbed: dict[int, str]) -> None:
    """Step 16 is on the nodes' disks only, step 18 in their memory only; then memory is lost."""
    disks = {"STEPKEEPER_LOCAL_TIER": str(tmp_path / "disk" / "%N"), "STEPKEEPER_COPY_RATE": "0.001"}
    step = kill_between(tmp_path, memory, nodes=2, after=18, **disks)
    kept = tmp_path.with_name(f"{tmp_path.name}-kept")
    shutil.copytree(tmp_path, kept)
    said = resume(tmp_path, memory, nodes=2, **disks)
    assert f"resumed step={step}" in said
    assert losses(tmp_path / "run") == undisturbed
    shutil.rmtree(tmp_path)
    shutil.copytree(kept, tmp_path)
    said = resume(tmp_path, memory, nodes=2, **disks)
    assert "resumed step=16" in said
    assert losses(tmp_path / "run") == undisturbed
