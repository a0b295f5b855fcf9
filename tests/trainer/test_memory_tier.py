"""What a node holds in memory: where, how much, and what is left there by whom."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.save.commit import Completer
from stepkeeper_trainer.save.save import Save
from stepkeeper_trainer.store.memory import memory_left
from stepkeeper_trainer.tiers import Held, TierError
from stepkeeper_trainer.tiers.holding import hold, let_go, remove_unless_held
from stepkeeper_trainer.tiers.memory import (
    WATCHED,
    Memory,
    NotSharedError,
    Snapshots,
    discard_told,
    hold_told,
)
from stepkeeper_trainer.tiers.tier import Tiers, writer_of
from stepkeeper_trainer.tiers.tiering import choose
from tests.trainer.tier_steps import content, lay, make

GIB = 1024**3


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    tiers = Tiers(snapshot_every="5 steps", snapshot_directory=str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir(mode=0o1777)
    made = Memory(tiers.snapshots_of(tmp_path / "run", "1", "n1"))
    made.open()
    return made


def held(memory: Memory, step: int) -> Held:
    """Have a step held, all of it by this node."""
    files = content(step)
    step_made = make(step, files)
    lay(memory.begin(step, step_made.manifest.save_id, 0), files)
    memory.commit(step_made)
    return step_made


def there(memory: Memory) -> list[str]:
    return sorted(os.listdir(memory.checkpoints))


def test_runs_and_nodes_have_places_of_their_own_that_nobody_else_may_enter(tmp_path: Path, memory: Memory) -> None:
    tiers = Tiers(snapshot_every="5 steps", snapshot_directory=str(tmp_path / "shm"))
    others = {tiers.snapshots_of(tmp_path / run, made, node) for run in "ab" for made in "12" for node in ("n1", "n2")}
    assert len(others | {memory.checkpoints}) == 9
    for each in (memory.checkpoints, memory.own, memory.own.parent):
        assert each.stat().st_mode & 0o777 == 0o700
    assert memory.own.parent == tmp_path / "shm" / f"stepkeeper-{os.geteuid()}"


def test_the_newest_that_all_nodes_hold_stays_until_the_next_is_held_by_all(memory: Memory) -> None:
    snapshots = Snapshots(memory, ranks=(0,), rank=0, peers=None)
    first = held(memory, 5)
    snapshots.commit(first.raw)
    snapshots.held()
    assert there(memory) == ["step_00000005"]
    torn = held(memory, 10)  # and some other node does not have its part
    snapshots.failed(10, torn.manifest.save_id, TierError("another rank cannot write"))
    files = content(15)
    third = make(15, files)
    lay(snapshots.begin(15, third.manifest.save_id), files)
    assert [name for name in there(memory) if name.startswith("step_")] == ["step_00000005"], "two at most"
    snapshots.commit(third.raw)
    snapshots.held()
    assert there(memory) == ["step_00000015"]
    snapshots.discard()
    assert not memory.own.parent.exists()


def test_ranks_that_do_not_share_the_directory_hold_nothing_and_try_no_more(tmp_path: Path) -> None:
    """As in one container a rank: each has a directory of its own at the same path."""
    nodes = []
    for rank in (0, 1):
        shm = tmp_path / f"shm{rank}"
        shm.mkdir(mode=0o700)
        memory = Memory(Tiers(snapshot_directory=str(shm)).snapshots_of(tmp_path / "run", "1", "n1"))
        nodes.append((memory, Snapshots(memory, ranks=(0, 1), rank=rank, peers=None)))
    files = content(5)
    step = make(5, files)
    for rank, (_, snapshots) in enumerate(nodes):
        directory = snapshots.begin(5, step.manifest.save_id)
        lay(directory, {name: data for name, data in files.items() if writer_of(name) == rank})
    with pytest.raises(NotSharedError, match=r"__1_0.distcp of rank 1 is not there: .* do not share") as raised:
        nodes[0][1].commit(step.raw)
    nodes[1][1].commit(step.raw)
    for (memory, snapshots), error in zip(nodes, (raised.value, SaveError("another rank cannot write")), strict=True):
        snapshots.failed(5, step.manifest.save_id, error)
        assert there(memory) == []
    assert nodes[0][1].waits(), "one that waits keeps all from the next one"
    assert nodes[0][1]._rest_until == math.inf


@pytest.mark.parametrize("gone", ["all", "a file", "the end of a file"])
def test_what_is_removed_while_it_is_written_is_no_step(memory: Memory, gone: str) -> None:
    snapshots = Snapshots(memory, ranks=(0, 1), rank=0, peers=None)
    files = content(5)
    step = make(5, files)
    directory = snapshots.begin(5, step.manifest.save_id)
    lay(directory, files)
    if gone == "all":
        shutil.rmtree(memory.own)
    elif gone == "a file":
        (directory / "__0_0.distcp").unlink()
    else:
        os.truncate(directory / "__0_0.distcp", 1)
    with pytest.raises(TierError, match="was removed while") as raised:
        snapshots.commit(step.raw)
    assert not isinstance(raised.value, NotSharedError), "it is tried again later"
    snapshots.failed(5, step.manifest.save_id, raised.value)
    assert not list(memory.checkpoints.glob("step_*"))
    assert snapshots.waits()
    assert snapshots._rest_until < math.inf


def test_what_somebody_removed_is_made_again_and_is_no_lack_of_room(memory: Memory) -> None:
    snapshots = Snapshots(memory, ranks=(0,), rank=0, peers=None)
    shutil.rmtree(memory.own.parent)  # an epilog, or the end of the user's last session (RemoveIPC)
    assert not snapshots.waits()
    files = content(5)
    step = make(5, files)
    lay(snapshots.begin(5, step.manifest.save_id), files)
    snapshots.commit(step.raw)
    assert there(memory) == ["step_00000005"]


def test_what_somebody_else_made_in_its_place_meanwhile_is_not_used(
    tmp_path: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots(memory, ranks=(0,), rank=0, peers=None)
    shutil.rmtree(memory.own.parent)
    (tmp_path / "elsewhere").mkdir()
    memory.own.parent.symlink_to(tmp_path / "elsewhere")
    assert snapshots.waits()
    assert "is a symbolic link, which is not followed" in caplog.text
    assert not os.listdir(tmp_path / "elsewhere")


def test_it_says_what_does_not_fit_and_counts_what_will_be_given_back(memory: Memory) -> None:
    status = os.statvfs(memory.checkpoints)
    free = status.f_bavail * status.f_frsize
    assert memory.why_no_room(1024, None) is None
    assert "10% are left to the training" in (memory.why_no_room(free, None) or "")
    step = held(memory, 5)
    assert memory.bytes_beside("step_00000005") == 0
    assert memory.bytes_beside(None) >= sum(entry.bytes for entry in step.manifest.files.values())


def of_another_run(memory: Memory, name: str, *, watched: bool = False) -> Memory:
    other = Memory(memory.own.with_name(f"{name}.0123456789ab.n1") / "checkpoints")
    for each in (other.own, other.checkpoints):
        each.mkdir(mode=0o700)
    if watched:
        (other.own / WATCHED).touch()
    return other


def make_old(memory: Memory) -> None:
    yesterday = time.time() - 90_000
    for each in (memory.checkpoints, memory.own):
        os.utime(each, (yesterday, yesterday))


def test_what_a_script_left_goes_after_a_day_and_what_is_in_use_stays(memory: Memory) -> None:
    held(memory, 5)
    old, new = (of_another_run(memory, name) for name in ("old", "new"))
    make_old(old)
    make_old(memory)
    assert memory.sweep() == [old.own.name]
    assert new.own.exists()
    assert there(memory) == ["step_00000005"]


def holding(path: Path) -> subprocess.Popen[bytes]:
    """Have another process hold a directory, as a rank or a watcher does."""
    code = (
        "import pathlib, sys; from stepkeeper_trainer.tiers.holding import hold; "
        "hold(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@pytest.mark.parametrize("watched", [True, False])
def test_what_a_process_holds_stays_and_once_it_is_killed_what_had_a_watcher_goes_at_once(
    memory: Memory, *, watched: bool
) -> None:
    other = of_another_run(memory, "other", watched=watched)
    with holding(other.own) as process:
        make_old(other)
        assert memory.sweep() == [], "a job may be suspended for days"
        process.kill()
        process.wait()
        os.utime(other.own)
        assert memory.sweep() == ([other.own.name] if watched else [])
        assert not list(memory.own.parent.glob(".trash-*"))


def test_what_a_killed_process_was_about_to_remove_is_removed(memory: Memory) -> None:
    trash = memory.own.with_name(".trash-other.0123456789ab.n1")
    trash.mkdir()
    with holding(trash):
        assert memory.sweep() == [], "it is being removed"
    assert memory.sweep() == [trash.name]
    assert not trash.exists()


def test_a_directory_that_was_removed_and_made_again_is_held_too(memory: Memory) -> None:
    shutil.rmtree(memory.own.parent)
    memory.open()
    assert not remove_unless_held(memory.own)
    assert memory.own.exists()


def test_what_is_being_removed_is_not_held(memory: Memory) -> None:
    descriptor = os.open(memory.own.parent, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(FileNotFoundError, match="is being removed"):
        hold(memory.own.parent)
    os.close(descriptor)
    let_go(hold(memory.own.parent))


def test_an_old_watcher_leaves_what_a_later_launch_holds(memory: Memory) -> None:
    ours = held(memory, 5)
    descriptor = hold_told(str(memory.own), None)
    assert hold_told(str(memory.own), descriptor) == descriptor, "ranks repeat themselves"
    assert not discard_told(str(memory.own), descriptor)
    assert memory.find(ours) == "step_00000005"


def test_a_watcher_does_not_remove_what_was_made_in_the_place_of_what_it_held(memory: Memory) -> None:
    other = of_another_run(memory, "other")
    descriptor = hold_told(str(other.own), None)
    shutil.rmtree(other.own)
    of_another_run(memory, "other")
    assert discard_told(str(other.own), descriptor)
    assert other.checkpoints.exists()


def test_a_watcher_removes_what_ranks_have_told_and_nothing_else(tmp_path: Path, memory: Memory) -> None:
    held(memory, 5)
    for wrong in (
        str(tmp_path),
        str(memory.own.parent),
        "/",
        "",
        "stepkeeper-0/run",
        str(tmp_path / "stepkeeper-x" / "run"),
    ):
        with pytest.raises(TierError, match="not a place of snapshots"):
            hold_told(wrong, None)
    with pytest.raises(FileNotFoundError):
        hold_told(str(memory.own.with_name("gone.0123456789ab.n1")), None)
    memory.own.parent.chmod(0o755)
    with pytest.raises(TierError, match="everybody may use it"):
        hold_told(str(memory.own), None)
    memory.own.parent.chmod(0o700)
    assert there(memory) == ["step_00000005"]
    left = of_another_run(memory, "left")  # its ranks have ended
    assert discard_told(str(left.own), hold_told(str(left.own), None))
    assert not left.own.exists()
    assert there(memory) == ["step_00000005"]
    memory.discard()
    assert not memory.own.parent.exists()


def test_others_must_not_be_able_to_replace_the_directory(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o777)  # and not sticky
    with pytest.raises(TierError, match="others can replace what is in it"):
        Memory(Tiers(snapshot_directory=str(tmp_path / "shm")).snapshots_of(tmp_path / "run", "1", "n1")).open()


def lay_groups(root: Path, proc: Path, lines: str, groups: dict[str, dict[str, str]]) -> list[tuple[str, int, int]]:
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    (proc / "self/cgroup").write_text(lines)
    for path, files in groups.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / path / name).write_text(text)
    return list(memory_left(root, proc))


def test_limits_of_all_groups_around_count_and_pages_of_files_do_not(tmp_path: Path) -> None:
    step = {"memory.max": "max", "memory.current": str(GIB)}
    job = {
        "memory.max": str(4 * GIB),
        "memory.current": str(3 * GIB),
        "memory.stat": f"anon {GIB}\nshmem {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n",
    }
    found = lay_groups(
        tmp_path / "cgroup",
        tmp_path / "proc",
        "0::/slurm/job_7/step_0\n",
        {"slurm/job_7/step_0": step, "slurm/job_7": job},
    )
    assert [(left, whole) for _, left, whole in found] == [(4 * GIB, 8 * GIB), (GIB + 3 * GIB // 4, 4 * GIB)]
    assert found[1][0].endswith("job_7")


def test_limits_of_the_older_control_groups_count_too(tmp_path: Path) -> None:
    job = {
        "memory.limit_in_bytes": str(2 * GIB),
        "memory.usage_in_bytes": str(GIB),
        "memory.stat": f"total_inactive_file {GIB // 2}\ntotal_active_file 0\n",
    }
    found = lay_groups(
        tmp_path / "cgroup", tmp_path / "proc", "9:memory:/job_7\n3:cpu,cpuacct:/\n", {"memory/job_7": job}
    )
    assert [(left, whole) for _, left, whole in found[1:]] == [(GIB + GIB // 2, 2 * GIB)]


def test_a_run_that_is_told_to_take_snapshots_keeps_the_tiers_that_its_script_names() -> None:
    scripts = Tiers(local="/nvme", local_keep=3)
    told = Tiers(snapshot_every="5 steps", peers=True, peer_interface="ib0")
    both = Tiers(local="/nvme", local_keep=3, snapshot_every="5 steps", peers=True, peer_interface="ib0")
    assert choose(told, scripts) == both
    assert choose(scripts, told) == both
    assert choose(told, None) == told
    assert choose(Tiers(), both) == both
    assert choose(Tiers(local="/other"), both).local == "/other"


def test_the_script_compresses_what_goes_to_the_object_store_that_the_environment_names() -> None:
    scripts = Tiers(cold="s3://b/r", cold_zstd=3)
    assert choose(Tiers(cold="s3://other/r", cold_keep=2), scripts) == Tiers(
        cold="s3://other/r", cold_keep=2, cold_zstd=3
    )
    assert choose(Tiers(local="/nvme"), scripts) == Tiers(local="/nvme")
    assert choose(Tiers(cold="/archive"), scripts) == Tiers(cold="/archive")


def test_a_snapshot_that_gives_way_does_not_wait_for_rows_on_shared_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[bool] = []

    def sync(_limit_at: float, unwanted: Callable[[], bool]) -> None:
        looked.append(unwanted())
        save.cancelled = "a notice has come"
        looked.append(unwanted())

    save: Any = SimpleNamespace(limit_at=time.time() + 60.0, cancelled=None)
    save.check = lambda: Save.check(save)
    nothing: Any = None
    completer = Completer(
        commits=nothing,
        world_size=1,
        link=nothing,
        parent=None,
        before_commit=sync,
        on_committed=nothing,
        uploader=None,
    )
    monkeypatch.setattr(completer, "_describe", lambda *_: (make(5, content(5)).manifest, {}))
    with pytest.raises(SaveError, match="a notice has come"):
        completer.describe_snapshot(save, nothing, [])
    assert looked == [False, True]


def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    """Data loaders outlive a killed rank by seconds."""
    held = hold(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        let_go(held)
        assert remove_unless_held(tmp_path, within_s=5.0)
        assert not tmp_path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
