"""Copies to the cold tier by several ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.manifest import FileEntry
from stepkeeper_trainer.tiers import DirectoryTier, Held, Pace, Tier, open_tier
from stepkeeper_trainer.tiers.cold import ColdCopies, Going, forget_given_up, share_of
from stepkeeper_trainer.tiers.directory import LocalTier
from stepkeeper_trainer.tiers.survey import prune, superfluous
from stepkeeper_trainer.tiers.tier import Staging, TierError
from tests.trainer.s3_server import CONFIG, s3_server
from tests.trainer.tier_steps import LATE_S, content, entry, lay, make

RANKS = 2


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


def store(endpoint: str, path: str) -> Tier:
    config = {**CONFIG, "endpoint": endpoint, "client_options": {"allow_http": True}}
    return open_tier(f"s3://bucket/{path}", read_back=False, **config)


@pytest.fixture
def shared(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "run" / "checkpoints")


@pytest.fixture
def cold(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "cold")


def commit(shared: DirectoryTier, step: int, ranks: int = RANKS) -> Going:
    """Make a step of the run."""
    files = content(step, ranks)
    before = lineage.read(shared.checkpoints)
    parent = before.head if before is not None else None
    held = make(step, files, parent=parent)
    directory = shared.checkpoints / f"step_{step:08d}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    lay(directory, files)
    (directory / "MANIFEST.json").write_bytes(held.raw)
    lineage.append(
        shared.checkpoints,
        lineage.Commit(at=1.0, step=step, save_id=held.manifest.save_id, parent=parent, directory=directory.name),
    )
    return Going(step, held.manifest.save_id, directory)


def senders(cold: Tier, shared: DirectoryTier, **more: object) -> list[ColdCopies]:
    options = {"local": None, "pace": Pace(), "fence": lambda: None, "retry_s": 0.01} | more
    return [ColdCopies(cold, shared=shared, rank=rank, world_size=RANKS, **options) for rank in range(RANKS)]  # type: ignore[arg-type]


def send(copies: list[ColdCopies], *goings: Going, within_s: float = LATE_S) -> bool:
    for going in goings:
        for each in copies:
            each.offer(going)
    limit_at = time.time() + within_s
    through = [each.close(limit_at) for each in copies]
    return all(through)


def until(condition: Callable[[], object]) -> None:
    limit_at = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < limit_at
        time.sleep(0.01)


def same(tier: Tier, held: Held, step: int) -> bool:
    return all(
        b"".join(tier.chunks(held, name, held.manifest.files[name], 0)) == data for name, data in content(step).items()
    )


def test_every_rank_sends_its_own_files_and_the_object_store_has_a_step(s3: str, shared: DirectoryTier) -> None:
    going = commit(shared, 100)
    cold = store(s3, "two-ranks")
    copies = senders(cold, shared)
    assert send(copies, going)
    [held] = cold.steps()
    assert same(cold, held, 100)
    assert not [name for name in os.listdir(shared.checkpoints) if name.startswith(".cold-")]
    assert {name for rank in range(RANKS) for name in share_of(held, rank, RANKS)} == set(held.manifest.files)
    assert share_of(held, 1, RANKS) == ["__1_0.distcp"]
    assert len({name for rank in range(3) for name in share_of(held, rank, 3)}) == 3, "any number of ranks sends all"


def test_until_the_last_rank_has_sent_its_files_there_is_no_step(shared: DirectoryTier, cold: DirectoryTier) -> None:
    going = commit(shared, 100)
    [first, second] = senders(cold, shared)
    first.offer(going)
    while not list(cold.checkpoints.rglob("__0_0.distcp")):
        time.sleep(0.01)
    assert not first.close(time.time() + 0.3)
    assert cold.steps() == []
    again = senders(cold, shared)
    second.close(0.0)
    assert send(again, going)
    assert [held.manifest.step for held in cold.steps()] == [100]


def test_the_newest_step_goes_first_and_older_ones_are_left_out(shared: DirectoryTier, cold: DirectoryTier) -> None:
    goings = [commit(shared, step) for step in (100, 200, 300)]
    copies = senders(cold, shared)
    for each in copies:
        each._changed.acquire()  # they see all three at once
    for going in goings:
        for each in copies:
            each._waiting.append(going)
    for each in copies:
        each._changed.notify_all()
        each._changed.release()
    assert send(copies)
    assert [held.manifest.step for held in cold.steps()] == [300]


class Unreliable:
    """A tier that spoils or refuses what it is given, as often as told."""

    def __init__(self, inner: DirectoryTier, *, spoil: int = 0, refuse: int = 0) -> None:
        self.inner, self.spoil, self.refuse = inner, spoil, refuse
        self.one = threading.Lock()  # of several ranks' threads, and the test's own

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def staging(self, held: Held, **options: object) -> Staging:
        return _Unreliable(self, self.inner.staging(held, **options))  # type: ignore[arg-type, return-value]


class _Unreliable:
    def __init__(self, tier: Unreliable, inner: Staging) -> None:
        self._tier, self._inner = tier, inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def write(self, name: str, entry: FileEntry, first: int, chunks: Iterator[bytes]) -> None:
        with self._tier.one:
            refused = self._tier.refuse > 0
            self._tier.refuse -= refused
        if refused:
            raise TierError("503 Slow Down")
        self._inner.write(name, entry, first, chunks)
        with self._tier.one:
            spoiled = self._tier.spoil > 0
            self._tier.spoil -= spoiled
        if spoiled:
            [path] = self._tier.inner.checkpoints.rglob(name)
            path.write_bytes(b"?" * entry.bytes)


@pytest.mark.parametrize("trouble", [{"spoil": 2}, {"refuse": 3}])
def test_what_arrives_otherwise_or_not_is_sent_again(
    shared: DirectoryTier, cold: DirectoryTier, trouble: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    going = commit(shared, 100)
    assert send(senders(Unreliable(cold, **trouble), shared), going)  # type: ignore[arg-type]
    [held] = cold.steps()
    assert same(cold, held, 100)
    assert caplog.text.count("cold_copy_failed") >= 2


def test_a_tier_that_never_takes_anything_is_told_and_the_next_step_is_tried(
    shared: DirectoryTier, cold: DirectoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Unreliable(cold, refuse=1_000_000)
    copies = senders(bad, shared)  # type: ignore[arg-type]
    for each in copies:
        each.offer(commit(shared, 100))
    until(lambda: re.search("cold_copy_given_up .*rank=0", caplog.text) is not None)
    with bad.one:
        bad.refuse = 0
    assert send(copies, commit(shared, 200))
    assert [held.manifest.step for held in cold.steps()] == [200]


def test_a_step_that_rank_0_gave_up_before_the_others_saw_it_is_waited_for_by_nobody(
    shared: DirectoryTier, cold: DirectoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    going = commit(shared, 100)
    manifest = going.directory / "MANIFEST.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"torn")
    [first, second] = senders(cold, shared)
    first.offer(going)
    until(lambda: "cold_copy_given_up" in caplog.text)
    second.offer(going)
    assert second.close(time.time() + LATE_S), "nothing waits"
    first.close(0.0)
    manifest.write_bytes(whole)

    forget_given_up(shared.checkpoints)  # as the next launch does
    assert send(senders(cold, shared), going)

    assert [held.manifest.step for held in cold.steps()] == [100]
    assert not [name for name in os.listdir(shared.checkpoints) if name.startswith(".cold-")]


def test_a_rank_asks_for_its_own_files_only_however_many_ranks_there_are(
    s3: str, shared: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore  # noqa: PLC0415  # the fixture has skipped where it is not installed

    asked: list[str] = []
    head = obstore.head

    def counted(a_store: object, path: str, *arguments: object) -> object:
        asked.append(path)
        return head(a_store, path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore, "head", counted)
    counts = []
    for number, ranks in enumerate((2, 12), 1):
        going = commit(shared, 100 * number, ranks=ranks)
        board = shared.checkpoints / f".cold-{going.directory.name}.{going.save_id}"
        board.mkdir()
        asked.clear()
        one = ColdCopies(
            store(s3, f"asked-{ranks}"), shared=shared, local=None, rank=1, world_size=ranks, pace=Pace(),
            fence=lambda: None,
        )  # fmt: skip
        one.offer(going)
        until((board / "done-1").exists)
        one.close(0.0)
        assert {path.rpartition("/")[2].removesuffix(".zst") for path in asked} == {"__1_0.distcp"}
        counts.append(len(asked))

    assert counts[0] == counts[1], "12 ranks look at 12 files, and not at 144"


def test_a_damaged_file_of_the_nodes_disk_is_read_from_shared_storage(
    shared: DirectoryTier, cold: DirectoryTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    going = commit(shared, 100)
    local = LocalTier(tmp_path / "disk", keep=2)
    files = content(100)
    lay(local.begin(100, going.save_id, 0), files | {"__0_0.distcp": b"?" * len(files["__0_0.distcp"])})
    local.commit(make(100, files))
    assert send(senders(cold, shared, local=local), going)
    [held] = cold.steps()
    assert same(cold, held, 100)
    assert "local_copy_damaged" in caplog.text


def test_a_damaged_step_never_gets_to_the_cold_tier(
    shared: DirectoryTier, cold: DirectoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    going = commit(shared, 100)
    bad = going.directory / "__1_0.distcp"
    bad.write_bytes(b"?" * bad.stat().st_size)
    send(senders(cold, shared), going)
    assert cold.steps() == []
    assert "bytes of chunk 0" in caplog.text


def test_a_superseded_attempt_commits_nothing(shared: DirectoryTier, cold: DirectoryTier) -> None:
    def fenced() -> None:
        raise TierError("a newer attempt rules")

    send(senders(cold, shared, fence=fenced), commit(shared, 100))
    assert cold.steps() == []


# --- killed ---------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
from pathlib import Path
import obstore
from tests.trainer.test_cold import DirectoryTier, commit, send, senders, store
left = int(sys.argv[3])
def counted(name):
    real = getattr(obstore, name)
    def call(*arguments, **options):
        global left
        for when in ("before", "after"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "before":
                result = real(*arguments, **options)
        return result
    setattr(obstore, name, call)
counted("put")
shared = DirectoryTier(Path(sys.argv[1]))
[held] = shared.steps()
from stepkeeper_trainer.tiers.cold import Going
going = Going(held.manifest.step, held.manifest.save_id, shared.checkpoints / held.directory)
cold = store(sys.argv[2], sys.argv[4])
assert send(senders(cold, shared), going)
"""


@pytest.mark.campaign
def test_killed_before_or_after_any_object_there_is_a_whole_step_or_none_and_the_next_try_goes_on(
    s3: str, shared: DirectoryTier
) -> None:
    commit(shared, 100)
    ended: list[int] = []
    for left in range(20):
        path = f"killed-{left}"
        argv = [sys.executable, "-c", KILLED, str(shared.checkpoints), s3, str(left), path]
        ended.append(subprocess.run(argv, timeout=150, check=False, cwd=Path(__file__).parents[2]).returncode)
        cold = store(s3, path)
        for held in cold.steps():
            assert same(cold, held, 100), left
        if ended[-1] == 0:
            break
        assert ended[-1] == -signal.SIGKILL
        [held] = shared.steps()
        assert send(senders(cold, shared), Going(100, held.manifest.save_id, shared.checkpoints / held.directory))
        [there] = cold.steps()
        assert same(cold, there, 100), left
    assert ended[-1] == 0
    assert len(ended) == 9, "before and after each of three files and the manifest, and not at all"


# --- what stays -----------------------------------------------------------------------------------


def fill(cold: Tier, shared: DirectoryTier, *steps: int) -> None:
    for step in steps:
        assert send(senders(cold, shared), commit(shared, step))


def test_the_newest_and_the_pinned_stay(s3: str, shared: DirectoryTier) -> None:
    cold = store(s3, "keeping")
    fill(cold, shared, 100, 200, 300, 400)
    pinned = next(held.manifest.save_id for held in cold.steps() if held.manifest.step == 100)
    assert prune(cold, keep=None, pinned=[]) == []
    [removed] = prune(cold, keep=2, pinned=[pinned])
    assert removed.startswith("step_00000200.")
    assert [held.manifest.step for held in cold.steps()] == [400, 300, 100]
    assert superfluous(cold.steps(), keep=2, pinned=[]) == [cold.steps()[2]]


def test_nothing_goes_while_the_newest_lacks_a_file(shared: DirectoryTier, cold: DirectoryTier) -> None:
    fill(cold, shared, 100, 200)
    (cold.checkpoints / "step_00000200" / "__1_0.distcp").unlink()
    assert prune(cold, keep=1, pinned=[]) == []
    assert [held.manifest.step for held in cold.steps()] == [200, 100]


def test_what_a_kill_has_left_of_an_older_step_is_removed_and_what_may_be_on_its_way_stays(
    s3: str, shared: DirectoryTier, tmp_path: Path
) -> None:
    cold = store(s3, "swept")
    fill(cold, shared, 100, 200)
    older, newest = reversed(cold.steps())
    cold.remove_file(older.directory, "MANIFEST.json")  # type: ignore[attr-defined]  # as a removal that was cut short
    later, data = cold.staging(make(300, content(300))), content(300)["__0_0.distcp"]
    later.write("__0_0.distcp", entry(data), 0, iter([data]))
    assert prune(cold, keep=None, pinned=[]) == [older.directory]
    assert not cold.has_file(older, "__1_0.distcp", older.manifest.files["__1_0.distcp"])
    assert later.done("__0_0.distcp", entry(data))
    assert [held.directory for held in cold.steps()] == [newest.directory]

    other = DirectoryTier(tmp_path / "cold")
    fill(other, shared, 400)
    for name in (".copy-step_00000300.aa", ".trash-step_00000200", ".copy-step_00000500.bb"):
        (other.checkpoints / name).mkdir()
    assert sorted(prune(other, keep=1, pinned=[])) == [".copy-step_00000300.aa", ".trash-step_00000200"]
    assert (other.checkpoints / ".copy-step_00000500.bb").is_dir()


def test_a_rate_limit_holds_for_what_is_sent(shared: DirectoryTier, cold: DirectoryTier) -> None:
    pace = Pace(30_000.0)
    began = time.monotonic()
    assert send(senders(cold, shared, pace=pace), commit(shared, 100))
    sent = sum(map(len, content(100).values()))
    assert time.monotonic() - began >= sent / 30_000.0 - 1.0 - 0.01, "a second of idle time is made up for"
