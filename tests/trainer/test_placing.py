"""Saves on their way from the nodes' disks to shared storage."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.formats import lineage, steps
from stepkeeper_trainer.formats.manifest import PENDING_NAME, FileEntry
from stepkeeper_trainer.save.commit import Commits
from stepkeeper_trainer.save.report import report_name
from stepkeeper_trainer.tiers import DirectoryTier, Held, Pace, TierError
from stepkeeper_trainer.tiers import uploader as placing_module
from stepkeeper_trainer.tiers.directory import InFlight, LocalTier, mark_failed, require_none_failed
from stepkeeper_trainer.tiers.search import Gatherer, counts, find_place
from stepkeeper_trainer.tiers.uploader import Upload, Uploader
from tests.trainer.tier_steps import LATE_S, content, lay, make, on_ranks

RANKS = 2


class Nodes:
    """Two ranks, each a node with a disk, and shared storage."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.shared = path / "run" / "checkpoints"
        self.shared.mkdir(parents=True)
        self.commits = Commits(path / "run", read_environment({}))
        self.locals = [LocalTier(path / f"disk{rank}", keep=keep) for rank in range(RANKS)]
        self.told: list[str] = []
        self.placings: list[Uploader] = []
        self.newest: str | None = None

    def start(self, *, rate: float | None = None, retry_s: float = 0.001, one_node: bool = False) -> None:
        if one_node:
            self.locals = self.locals[:1] * RANKS
        self.placings = [
            Uploader(
                self.locals[rank], rank=rank, leads=rank == 0 or not one_node, shared=self.shared, pace=Pace(rate),
                retry_s=retry_s,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def write(self, held: Held, files: dict[str, bytes], *, local: bool = True, seal: bool = True) -> list[Upload]:
        """Do what the ranks' saves do, up to the sealed manifest."""
        step, save_id = held.manifest.step, held.manifest.save_id
        directory = self.commits.in_flight(step, save_id)
        directory.mkdir(parents=True, exist_ok=True)
        self.commits.claim(directory)
        upload = []
        for rank in range(RANKS):
            own = {
                name: data
                for name, data in files.items()
                if name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")
            }
            lay(self.locals[rank].begin(step, save_id, 0) if local else directory, own)
            upload.append(
                Upload(
                    step=step, save_id=save_id, directory=directory, is_local=local,
                    files={name: held.manifest.files[name] for name in own},
                    commit=(lambda: self.commit(held)) if rank == 0 else None,
                    give_up=self.told.append if rank == 0 else None,
                )
            )  # fmt: skip
        if seal:
            (directory / PENDING_NAME).write_bytes(held.raw)
        return upload

    def commit(self, held: Held) -> None:
        directory = self.commits.in_flight(held.manifest.step, held.manifest.save_id)
        self.commits.commit(directory, held.manifest, RANKS, after=self.newest)
        self.newest = held.manifest.save_id

    def hand_over(self, upload: list[Upload]) -> None:
        for uploader, save in zip(self.placings, upload, strict=True):
            uploader.written(save, 0.1)

    def gather(self, lost: tuple[int, ...] = ()) -> str | None:
        """Do what a start does, and return the step that was brought."""
        chosen = steps.newest_verified(self.shared).chosen

        def work(rank: int, together: object) -> str | None:
            newer = Gatherer(
                place=find_place(rank, RANKS, f"n{rank}", together),  # type: ignore[arg-type]
                together=together,  # type: ignore[arg-type]
                shared=DirectoryTier(self.shared, read_back=False),
                nodes=[self.locals[rank] if rank not in lost else LocalTier(Path("/nonexistent/disk"), keep=1)],
                cold=None,
                fence=lambda: None,
                load=lambda *_: False,
                listen=None,
            ).newer_than(chosen.manifest if chosen is not None else None)
            return newer.directory.name if newer is not None else None

        found = on_ranks(RANKS, work)
        assert len(set(found)) == 1, "all ranks hear the same"
        return found[0]  # type: ignore[no-any-return]

    def stop(self) -> None:
        for uploader in self.placings:
            uploader.close(0.0)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.stop()


def in_shared(nodes: Nodes) -> list[str]:
    return sorted(path.name for path in nodes.shared.iterdir() if path.is_dir())


def test_each_rank_copies_its_own_files_and_the_run_has_the_step(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    upload = nodes.write(make(100, files), files)
    nodes.hand_over(upload)
    assert all(uploader.wait(time.time() + LATE_S) for uploader in nodes.placings)
    assert in_shared(nodes) == ["step_00000100"]
    for name, data in files.items():
        assert (nodes.shared / "step_00000100" / name).read_bytes() == data
    for rank, local in enumerate(nodes.locals):
        [held] = local.steps()
        others = {f"__{other}_0.distcp" for other in range(RANKS) if other != rank}
        assert not others & set(local.files(held))


def test_a_rank_looks_at_its_own_files_only_on_shared_storage(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, str]] = []
    done = InFlight.done

    def counted(self: InFlight, name: str, expected: FileEntry) -> bool:
        looked.append((threading.get_ident(), name))
        return done(self, name, expected)

    monkeypatch.setattr(InFlight, "done", counted)
    nodes.start()
    copies = {each._threads[1].ident: rank for rank, each in enumerate(nodes.placings)}
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files))
    assert all(each.wait(time.time() + LATE_S) for each in nodes.placings)

    assert {(copies[thread], name) for thread, name in looked} == {
        (0, ".metadata"), (0, "__0_0.distcp"), (1, "__1_0.distcp")
    }  # fmt: skip


def test_rank_0_waits_for_the_word_that_a_copy_is_durable_and_not_for_one_of_a_rank_that_is_gone(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    held = make(100, files)
    upload = nodes.write(held, files, seal=False)
    for rank in range(RANKS):
        (upload[0].directory / report_name(rank)).touch()
    lay(upload[1].directory, {"__1_0.distcp": files["__1_0.distcp"]})  # as if it had come, and were not durable yet
    nodes.placings[0].seal(upload[0], held.manifest.files, held.raw)
    assert upload[0].to_come == {0}, "rank 1 has written to shared storage itself"
    upload[0].to_come = frozenset({0, 1})
    nodes.placings[0].written(upload[0], 0.1)
    limit_at = time.monotonic() + LATE_S
    while (upload[0].directory / report_name(0)).exists():
        assert time.monotonic() < limit_at, "rank 0 is through with its own files"
        time.sleep(0.01)
    assert not upload[0].settled.wait(0.2)
    assert steps.list_steps(nodes.shared) == []

    nodes.placings[0].ended = lambda ranks: [rank for rank in ranks if rank == 1]

    assert upload[0].settled.wait(LATE_S)
    assert upload[0].error is None
    assert in_shared(nodes) == ["step_00000100"]


def test_there_must_be_room_for_all_ranks_of_a_node_but_not_for_what_they_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalTier(tmp_path / "disk", keep=1)
    local.begin(1, "before", 0)
    status = os.statvfs(tmp_path)

    def statvfs(_path: object) -> os.statvfs_result:
        return os.statvfs_result((512, 512, *status[2:3], 2000, 2000, *status[5:]))  # a million bytes are free

    monkeypatch.setattr(os, "statvfs", statvfs)
    alone, eight = (Uploader(local, rank=0, leads=True, shared=tmp_path, pace=Pace(), ranks=ranks) for ranks in (1, 8))
    for each in (alone, eight):
        each._size = 200_000
    assert alone.begin(2, "a", leaving=False, left_s=None) is not None
    assert eight.begin(2, "b", leaving=False, left_s=None) is None, "to shared storage at once"
    assert not local.in_flight(2, "b").exists()
    lay(local.in_flight(2, "c"), {f"__{rank}_0.distcp": os.urandom(200_000) for rank in range(1, 6)})
    assert eight.begin(2, "c", leaving=False, left_s=None) is not None, "the others have written theirs"
    for each in (alone, eight):
        each.close(0.0)


def test_nothing_is_a_step_of_the_run_before_all_nodes_have_copied(nodes: Nodes) -> None:
    nodes.start(rate=300.0)
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files))
    while not all(local.steps() for local in nodes.locals):
        assert steps.list_steps(nodes.shared) == []
        time.sleep(0.005)
    assert not nodes.placings[0].wait(time.time())
    assert steps.list_steps(nodes.shared) == []
    for uploader in nodes.placings:
        uploader._pace.lift()  # as an emergency does
    assert nodes.placings[0].wait(time.time() + LATE_S)
    assert in_shared(nodes) == ["step_00000100"]


def test_what_was_written_to_shared_storage_at_once_needs_no_copy(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files, local=False))
    assert all(uploader.wait(time.time() + LATE_S) for uploader in nodes.placings)
    assert in_shared(nodes) == ["step_00000100"]
    assert all(local.steps() == [] for local in nodes.locals)


def test_a_damaged_part_is_never_committed_and_rank_0_says_why(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    upload = nodes.write(make(100, files), files | {"__1_0.distcp": b"?" * len(files["__1_0.distcp"])})
    nodes.hand_over(upload)
    for save in upload:
        assert save.settled.wait(LATE_S)
    assert in_shared(nodes) == []
    [why] = nodes.told
    assert "rank 1 could not copy" in why
    assert "bytes of chunk 0" in why


def test_where_no_room_is_left_the_word_that_a_rank_has_given_up_comes_without_its_reason(
    tmp_path: Path, mounted: Callable[[Path, str], Path]
) -> None:
    full = mounted(tmp_path / "full", "size=64k")
    mark_failed(full, 1, "the disk is gone")
    with pytest.raises(TierError, match="rank 1 could not copy: the disk is gone"):
        require_none_failed(full, os.listdir(full), "copy")
    with pytest.raises(OSError, match="No space"):
        (full / "all").write_bytes(bytes(2**20))
    mark_failed(full, 1, "another reason")
    with pytest.raises(TierError, match="rank 1 could not copy: the disk is gone"):
        require_none_failed(full, os.listdir(full), "copy")
    (full / "failed-1").unlink()
    (full / "more").write_bytes(bytes(4096))
    mark_failed(full, 2, "no room")
    with pytest.raises(TierError, match="rank 2 could not copy: the reason could not be written"):
        require_none_failed(full, os.listdir(full), "copy")


@pytest.mark.campaign
def test_where_copies_cannot_keep_up_the_newest_goes_and_the_rest_stays_on_the_disks(nodes: Nodes) -> None:
    saves = []
    for step in (100, 200, 300):
        files = content(step)
        saves.append(nodes.write(make(step, files), files))
    nodes.start(rate=300.0)  # the first one is on its way until the others are complete on the disks
    limit_at = time.monotonic() + LATE_S
    nodes.hand_over(saves[0])
    while not all(any((each.directory / name).exists() for name in each.files) for each in saves[0]):
        assert time.monotonic() < limit_at
        time.sleep(0.01)
    for upload in saves[1:]:
        nodes.hand_over(upload)
    while not all(any(ready.save.step == 300 for ready in list(each._waiting)) for each in nodes.placings):
        assert time.monotonic() < limit_at
        time.sleep(0.01)
    for uploader in nodes.placings:
        uploader._pace.lift()
    assert all(uploader.wait(time.time() + LATE_S) for uploader in nodes.placings)
    assert "step_00000300" in in_shared(nodes)
    assert "step_00000200" not in in_shared(nodes)
    assert nodes.told.count("left out: a newer save is waiting") == len(nodes.told) >= 1
    current = steps.current_lineage(steps.list_steps(nodes.shared), lineage.read(nodes.shared))
    assert current[0].step == 300
    assert {held.manifest.step for held in nodes.locals[0].steps()} >= {200, 300}


def test_a_slow_copy_delays_no_later_step_of_the_nodes_disks(nodes: Nodes) -> None:
    nodes.start(rate=10.0)
    for step in (100, 200, 300):
        files = content(step)
        nodes.hand_over(nodes.write(make(step, files), files))
    limit_at = time.monotonic() + LATE_S
    while any(local.steps()[:1] == [] or local.steps()[0].manifest.step != 300 for local in nodes.locals):
        assert time.monotonic() < limit_at
        time.sleep(0.01)
    assert steps.list_steps(nodes.shared) == []


def test_a_save_that_was_given_up_ends_on_all_ranks(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    upload = nodes.write(make(100, files), files, seal=False)
    nodes.hand_over(upload)
    assert not upload[0].settled.wait(0.1)
    for path in upload[0].directory.iterdir():
        path.unlink()
    upload[0].directory.rmdir()
    for save in upload:
        assert save.settled.wait(LATE_S)
    assert in_shared(nodes) == []


def test_the_disk_keeps_the_newest_and_whatever_shared_storage_lacks(nodes: Nodes) -> None:
    for step in (100, 200, 300, 400):
        files = content(step)
        held = make(step, files)
        nodes.write(held, files)
        nodes.locals[0].commit(held)
    save_ids = [held.manifest.save_id for held in nodes.locals[0].steps()]
    assert nodes.locals[0].prune([]) == [], "nothing is on shared storage"
    assert nodes.locals[0].prune([save_ids[2]]) == ["step_00000200", "step_00000100"]
    assert nodes.locals[0].prune([save_ids[0]]) == [], "two stay"
    assert nodes.locals[0].prune([], given_up=save_ids) == [], "the newest two, whatever becomes of them"
    assert [held.manifest.step for held in nodes.locals[0].steps()] == [400, 300]


# --- at a start -----------------------------------------------------------------------------------


def on_the_disks_only(nodes: Nodes, step: int = 100, **more: object) -> Held:
    files = content(step)
    held = make(step, files, **more)  # type: ignore[arg-type]
    nodes.write(held, files)
    for local in nodes.locals:
        local.commit(held)
    return held


def test_parts_of_all_nodes_make_a_step(nodes: Nodes) -> None:
    on_the_disks_only(nodes)
    assert nodes.gather() == "step_00000100"
    for name, data in content(100).items():
        assert (nodes.shared / "step_00000100" / name).read_bytes() == data
    recorded = lineage.read(nodes.shared)
    assert recorded is not None
    assert recorded.chain() == [make(100, content(100)).manifest.save_id]


def test_without_one_node_there_is_no_step_and_the_one_before_is_used(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    first = make(100, files)
    nodes.hand_over(nodes.write(first, files))
    assert nodes.placings[0].wait(time.time() + LATE_S)
    on_the_disks_only(nodes, 200, parent=first.manifest.save_id, ancestors=(first.manifest.save_id,))
    assert nodes.gather(lost=(1,)) is None
    assert in_shared(nodes)[-1] == "step_00000100"
    assert nodes.gather() == "step_00000200"


def test_with_a_copy_on_the_next_node_a_lost_node_loses_nothing(nodes: Nodes) -> None:
    held = on_the_disks_only(nodes)
    for rank, name in ((0, "__1_0.distcp"), (1, "__0_0.distcp"), (1, ".metadata")):
        nodes.locals[rank].receive(held, name, held.manifest.files[name], iter([content(100)[name]]))
    assert nodes.gather(lost=(1,)) == "step_00000100"


def test_a_part_that_is_damaged_is_taken_from_the_node_that_has_it_too(nodes: Nodes) -> None:
    held = on_the_disks_only(nodes)
    nodes.locals[1].receive(
        held, "__0_0.distcp", held.manifest.files["__0_0.distcp"], iter([content(100)["__0_0.distcp"]])
    )
    bad = nodes.locals[0].checkpoints / "step_00000100" / "__0_0.distcp"
    bad.write_bytes(b"?" * bad.stat().st_size)
    assert nodes.gather() == "step_00000100"
    assert (nodes.shared / "step_00000100" / "__0_0.distcp").read_bytes() == content(100)["__0_0.distcp"]


def test_what_was_copied_before_a_kill_is_not_copied_again(nodes: Nodes) -> None:
    held = on_the_disks_only(nodes)
    directory = nodes.commits.in_flight(100, held.manifest.save_id)
    (directory / "__0_0.distcp").write_bytes(content(100)["__0_0.distcp"])
    dead = dataclasses.replace(nodes.commits.environment, attempt=1, epoch=(7, 1))
    os.truncate(directory / "owner.json", 0)
    os.utime(directory, (0, 0))
    Commits(nodes.shared.parent, dead).clear_leftovers()
    assert not directory.exists()
    (nodes.locals[0].checkpoints / "step_00000100" / "__0_0.distcp").unlink()
    assert nodes.gather() == "step_00000100", "what no disk has any more was there"
    assert sorted(os.listdir(nodes.shared / "step_00000100")) == sorted([*content(100), "MANIFEST.json"])


def test_a_damaged_step_of_shared_storage_comes_back_from_the_disks_beside_it(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files))
    assert nodes.placings[0].wait(time.time() + LATE_S)
    bad = nodes.shared / "step_00000100" / "__1_0.distcp"
    bad.write_bytes(b"?" * bad.stat().st_size)
    brought = nodes.gather()
    assert brought is not None
    assert brought.startswith("step_00000100.")
    assert (nodes.shared / brought / "__1_0.distcp").read_bytes() == files["__1_0.distcp"]
    assert bad.exists(), "nothing is removed"


def test_a_newer_attempt_is_not_disturbed(nodes: Nodes) -> None:
    on_the_disks_only(nodes)

    def fenced() -> None:
        raise TierError("a newer attempt rules")

    place = find_place(0, 1, "n0", _Alone())
    gatherer = Gatherer(
        place=place, together=_Alone(), shared=DirectoryTier(nodes.shared), nodes=nodes.locals[:1], cold=None,
        fence=fenced, load=lambda *_: False, listen=None,
    )  # fmt: skip
    nodes.locals[0].receive(
        make(100, content(100)), "__1_0.distcp", make(100, content(100)).manifest.files["__1_0.distcp"],
        iter([content(100)["__1_0.distcp"]]),
    )  # fmt: skip
    with pytest.raises(TierError, match="newer attempt"):
        gatherer.newer_than(None)
    assert steps.list_steps(nodes.shared) == []


class _Alone:
    def share(self, value: object) -> object:
        return value

    def gather(self, value: object) -> list[object]:
        return [value]


def test_only_what_leads_on_from_where_the_run_is_counts(tmp_path: Path) -> None:
    def manifest(save_id: str, *ancestors: str | None, at: int = 30):  # type: ignore[no-untyped-def]
        return make(1, {}, save_id=save_id, ancestors=ancestors, created_at=f"2026-09-21T00:00:{at}+00:00").manifest

    assert counts(manifest("a", None), None), "a run that has committed nothing"
    for save_id, parent in (("a", None), ("b", "a")):
        lineage.append(
            tmp_path, lineage.Commit(at=1.0, step=1, save_id=save_id, parent=parent, directory=f"step_{save_id}")
        )
    now = lineage.read(tmp_path)
    assert counts(manifest("a", None), now), "a commit of the lineage: its copy here may be damaged"
    assert counts(manifest("c", "b", "a", None), now)
    assert counts(manifest("d", "c", "b", "a"), now), "one between was left out"
    assert not counts(manifest("c2", "a", None), now), "another way on from a"
    assert not counts(manifest("x", None), now)
    back_at = 1_789_948_815.0  # 2026-09-21T00:00:15
    lineage.append(tmp_path, lineage.Rollback(at=back_at, save_id="a", why="a loss spike"))
    now = lineage.read(tmp_path)
    assert not counts(manifest("b2", "a", None, at=10), now), "saved before the run went back"
    assert counts(manifest("b3", "a", None, at=20), now)
    assert not counts(manifest("c", "b", "a", None, at=10), now)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer.test_placing import Nodes
from tests.trainer.tier_steps import content, make
nodes = Nodes.__new__(Nodes)
left = int(sys.argv[2])
path = Path(sys.argv[1])
Nodes.__init__(nodes, path)
files = content(100)
upload = nodes.write(make(100, files), files)
def watch(event, arguments):
    global left
    touches = event in {"os.mkdir", "os.rename", "os.remove", "os.truncate"}
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if touches or (writes and str(path) in str(arguments[0])):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
nodes.start()
nodes.hand_over(upload)
import time
assert all(uploader.wait(time.time() + 90) for uploader in nodes.placings)
"""


@pytest.mark.campaign
def test_killed_at_any_moment_of_the_way_nothing_is_torn_and_what_the_disks_have_comes_back(tmp_path: Path) -> None:
    ended = []
    for left in range(0, 60, 2):
        path = tmp_path / str(left)
        path.mkdir()
        argv = [sys.executable, "-c", KILLED, str(path), str(left)]
        ended.append(subprocess.run(argv, timeout=150, check=False, cwd=Path(__file__).parents[2]).returncode)
        nodes = Nodes.__new__(Nodes)
        (path / "run" / "checkpoints").rename(path / "kept")
        Nodes.__init__(nodes, path)
        (path / "run" / "checkpoints").rmdir()
        (path / "kept").rename(path / "run" / "checkpoints")
        for step in steps.list_steps(nodes.shared):
            assert {name: (step.path / name).read_bytes() for name in content(100)} == content(100), left
        whole = all(local.steps() for local in nodes.locals) and not steps.list_steps(nodes.shared)
        brought = nodes.gather()
        if whole:
            assert brought == "step_00000100", left
        if ended[-1] == 0:
            break
        assert ended[-1] == -signal.SIGKILL
    assert ended[-1] == 0
    assert len(ended) > 5, "several moments"


def test_closing_lets_what_waits_arrive_within_its_time(nodes: Nodes) -> None:
    nodes.start()
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files))
    closing = [threading.Thread(target=uploader.close, args=(time.time() + LATE_S,)) for uploader in nodes.placings]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(LATE_S)
    assert in_shared(nodes) == ["step_00000100"]


def test_a_file_that_another_node_renames_while_rank_0_looks_costs_no_step(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"123")
    (tmp_path / "renamed.part").symlink_to("nowhere")  # it has a name, and cannot be looked at, as in between
    sizes = placing_module._Sizes(tmp_path, make(100, {"there": b"123"}).manifest.files, ())

    assert sizes.look()

    assert set(sizes.names) == {"there"}
    assert sizes.lacking() == []


def test_rank_0_sizes_a_file_once_when_it_is_whole_and_seldom_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at 1,000 files would cost shared storage 1,000 requests, twice a second."""
    sizes = placing_module._Sizes(tmp_path, make(100, {"a": b"123", "b": b"123"}).manifest.files, {"rank-1.json"})
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b.part").write_bytes(b"1")
    (tmp_path / "rank-1.json").touch()
    assert sizes.look()
    scan, sized = os.scandir, []

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self._entry = entry.name, entry

        def stat(self) -> os.stat_result:
            sized.append(self.name)
            return self._entry.stat()

    monkeypatch.setattr(os, "scandir", lambda path: [Entry(entry) for entry in scan(path)])

    (tmp_path / "b.part").write_bytes(b"12")
    assert not sizes.look()
    assert sized == []
    assert sizes.lacking() == ["b"]

    (tmp_path / "rank-1.json").unlink()
    assert sizes.look()
    (tmp_path / "b.part").rename(tmp_path / "b")
    assert sizes.look()
    assert sized == ["b"]
    assert sizes.lacking() == ["b"], "it has not its full size"
    (tmp_path / "b").write_bytes(b"123")
    assert sizes.look()
    assert sized == ["b", "b"]
    assert sizes.lacking() == []

    monkeypatch.setattr(placing_module, "SIZES_EVERY_S", 0.0)
    (tmp_path / "c.part").write_bytes(b"1")
    assert sizes.look()
    (tmp_path / "c.part").write_bytes(b"12")
    assert sizes.look(), "somebody gets on"
    assert set(sized[2:]) == {"c.part"}


def test_a_rank_beside_the_first_of_its_node_asks_the_nodes_disk_and_seldom_shared_storage(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing_module, "ASKED_EVERY_S", LATE_S)
    asked: list[int] = []
    read = placing_module.read_plain

    def counted(path: Path, *limits: int, within: Path) -> bytes:
        asked.append(threading.get_ident())
        return read(path, *limits, within=within)

    monkeypatch.setattr(placing_module, "read_plain", counted)
    nodes.start(one_node=True)
    files = content(100)
    nodes.hand_over(nodes.write(make(100, files), files))

    assert all(each.wait(time.time() + LATE_S) for each in nodes.placings)
    assert in_shared(nodes) == ["step_00000100"]
    assert set(asked) == {nodes.placings[0]._threads[0].ident}
