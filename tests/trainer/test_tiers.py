from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from stepkeeper_trainer.formats import lineage, steps
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.tiers import (
    DamagedCopyError,
    DirectoryTier,
    Held,
    Pace,
    Tier,
    TierError,
    copy_step,
    newest_anywhere,
    open_tier,
)
from stepkeeper_trainer.tiers.copying import CopyStoppedError, push
from tests.ports import reserve
from tests.trainer.s3_server import CONFIG, s3_server
from tests.trainer.tier_steps import CHUNK, entry


def make_step(
    checkpoints: Path,
    step: int,
    *,
    parent: str | None = None,
    save_id: str | None = None,
    name: str | None = None,
    minute: int = 0,
) -> Path:
    save_id = save_id or f"{step:08x}" + "ab" * 12
    dice = random.Random(step)  # noqa: S311
    files = {"__0_0.distcp": dice.randbytes(7 * CHUNK + 123), "__1_0.distcp": dice.randbytes(3 * CHUNK), "empty": b""}
    manifest = Manifest(
        step=step,
        tokens=step,
        world_size=2,
        framework="a test's",
        created_at=f"2026-09-21T00:{minute:02d}:{step // 100:02d}",
        save_id=save_id,
        parent=parent,
        files={name: entry(data) for name, data in files.items()},
    )
    directory = checkpoints / (name or f"step_{step:08d}")
    directory.mkdir(parents=True)
    for file, data in files.items():
        (directory / file).write_bytes(data)
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    commit = lineage.Commit(at=1.0, step=step, save_id=save_id, parent=parent, directory=directory.name)
    lineage.append(checkpoints, commit)
    return directory


def make_steps(checkpoints: Path, count: int) -> list[Path]:
    made: list[Path] = []
    parent = None
    for number in range(1, count + 1):
        made.append(make_step(checkpoints, number * 100, parent=parent))
        parent = steps.open_step(made[-1]).manifest.save_id  # type: ignore[union-attr]
    return made


@pytest.fixture
def local(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "nvme")


@pytest.fixture
def shared(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "lustre")


@dataclass
class Watched:
    """A tier that counts the chunks that are read from it, and fails or stops where a test says so."""

    inner: Tier
    read: list[tuple[str, int]] = field(default_factory=list)
    fail_after: int | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def chunks(self, held: Held, name: str, entry: FileEntry, first: int) -> Iterator[bytes]:
        for index, chunk in enumerate(self.inner.chunks(held, name, entry, first), first):
            if self.fail_after is not None and len(self.read) >= self.fail_after:
                raise OSError(errno.EIO, "Input/output error")
            self.read.append((name, index))
            yield chunk


CHUNKS = [("__0_0.distcp", index) for index in range(8)] + [("__1_0.distcp", index) for index in range(3)]

# --- from disk to disk ----------------------------------------------------------------------------


def test_a_copy_is_a_step_directory_of_the_same_bytes(local: DirectoryTier, shared: DirectoryTier) -> None:
    [made] = make_steps(local.checkpoints, 1)
    [held] = local.steps()
    pushed = copy_step(local, held, shared)
    copied = shared.checkpoints / str(pushed.directory)
    assert copied.name == made.name
    assert sorted(os.listdir(copied)) == sorted(os.listdir(made))
    assert all((copied / name).read_bytes() == (made / name).read_bytes() for name in os.listdir(made))
    assert verify(copied).ok
    assert steps.newest_verified(shared.checkpoints).chosen is not None
    assert pushed.bytes_copied == sum(entry.bytes for entry in held.manifest.files.values())
    assert sorted(os.listdir(shared.checkpoints)) == sorted(["lineage.jsonl", made.name])


def test_what_failed_goes_on_where_it_was(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    broken = Watched(local, fail_after=5)
    with pytest.raises(OSError, match="Input/output"):
        copy_step(broken, held, shared)
    assert shared.steps() == []
    again = Watched(local)
    pushed = copy_step(again, held, shared)
    assert again.read == CHUNKS[5:]
    assert pushed.bytes_there == 5 * CHUNK
    assert verify(shared.checkpoints / str(pushed.directory)).ok


def test_a_part_that_was_damaged_meanwhile_is_sent_again(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    with pytest.raises(OSError, match="Input/output"):
        copy_step(Watched(local, fail_after=5), held, shared)
    [part] = shared.checkpoints.rglob("*.part")
    data = part.read_bytes()
    part.write_bytes(data[: 2 * CHUNK + 7] + b"\0" * 50 + data[2 * CHUNK + 57 :] + b"left from another try" * 1000)
    again = Watched(local)
    pushed = copy_step(again, held, shared)
    assert again.read == CHUNKS[2:]
    assert verify(shared.checkpoints / str(pushed.directory)).ok


def test_a_damaged_source_is_never_committed_elsewhere(local: DirectoryTier, shared: DirectoryTier) -> None:
    [made] = make_steps(local.checkpoints, 1)
    [held] = local.steps()
    for at in (0, 4321, 7122):
        data = (made / "__0_0.distcp").read_bytes()
        (made / "__0_0.distcp").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedCopyError, match=rf"nvme/step_00000100/__0_0\.distcp: bytes of chunk {at // CHUNK}"):
            copy_step(local, held, shared)
        assert shared.steps() == []
        (made / "__0_0.distcp").write_bytes(data)
    (made / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(TierError, match="lacks 1 files"):
        copy_step(local, held, shared)
    (made / "__0_0.distcp").write_bytes(data)
    assert copy_step(local, held, shared).directory == made.name


def test_what_reads_back_otherwise_does_not_count(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()

    def disk_lies() -> None:
        [file] = shared.checkpoints.rglob("__1_0.distcp")
        os.pwrite(descriptor := os.open(file, os.O_WRONLY), b"?", 5)
        os.close(descriptor)

    with pytest.raises(DamagedCopyError, match="reads back otherwise"):
        copy_step(local, held, shared, before_commit=disk_lies)
    assert shared.steps() == []
    assert copy_step(local, held, shared).directory == "step_00000100"


def test_a_copy_that_is_there_is_not_made_again(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    copy_step(local, held, shared)
    again = Watched(local)
    assert copy_step(again, held, shared).directory == "step_00000100"
    assert again.read == []
    assert (shared.checkpoints / "lineage.jsonl").read_text().count("commit") == 1


def test_a_name_that_is_taken_is_left_alone(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    make_step(shared.checkpoints, 100, save_id="0ther" + "0" * 27)  # before a rollback
    before = (shared.checkpoints / "step_00000100" / "MANIFEST.json").read_bytes()
    [held] = local.steps()
    pushed = copy_step(local, held, shared)
    assert pushed.directory == f"step_00000100.{held.manifest.save_id[:8]}"
    assert (shared.checkpoints / "step_00000100" / "MANIFEST.json").read_bytes() == before


def test_steps_may_arrive_in_any_order_and_the_newest_save_is_the_head(
    local: DirectoryTier, shared: DirectoryTier
) -> None:
    make_steps(local.checkpoints, 3)
    third, second, first = local.steps()
    for held, newest in ((third, 300), (first, 300), (second, 300)):
        copy_step(local, held, shared)
        chosen = steps.newest_verified(shared.checkpoints).chosen
        assert chosen is not None
        assert chosen.step == newest
    assert [held.manifest.step for held in shared.steps()] == [300, 200, 100]
    # after a rollback to step 100 another step 200 is saved: later, though its number is lower
    again = make_step(
        local.checkpoints,
        200,
        parent=first.manifest.save_id,
        save_id="cd" * 16,
        name="step_00000200.cdcdcdcd",
        minute=1,
    )
    copy_step(local, local.held(again.name), shared)
    assert [held.manifest.save_id for held in shared.steps()] == ["cd" * 16, first.manifest.save_id]


def test_whoever_may_not_commit_any_more_does_not(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()

    def fenced() -> None:
        raise TierError("a newer attempt rules")

    with pytest.raises(TierError, match="newer attempt"):
        copy_step(local, held, shared, before_commit=fenced)
    assert shared.steps() == []


def test_a_stop_is_obeyed_between_chunks(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    watched = Watched(local)
    with pytest.raises(CopyStoppedError):
        copy_step(watched, held, shared, should_stop=lambda: len(watched.read) == 3)
    assert len(watched.read) == 3
    again = Watched(local)
    copy_step(again, held, shared)
    assert again.read == CHUNKS[2:]


def test_nodes_send_their_own_files_and_the_last_one_commits(tmp_path: Path, shared: DirectoryTier) -> None:
    """Each node's disk has the files of its own ranks; all have the manifest."""
    nodes = [DirectoryTier(tmp_path / f"node{number}") for number in range(2)]
    for number, node in enumerate(nodes):
        [made] = make_steps(node.checkpoints, 1)
        (made / f"__{1 - number}_0.distcp").unlink()
    [held] = nodes[0].steps()
    first = push(nodes[0], held, shared.staging(held), held.manifest.files)
    assert first.missing == ("__1_0.distcp",)
    with pytest.raises(TierError, match="1 files are missing"):
        shared.staging(held).commit()
    assert shared.steps() == []
    assert push(nodes[1], held, shared.staging(held), held.manifest.files).missing == ()
    assert shared.staging(held).commit() == "step_00000100"
    assert verify(shared.checkpoints / "step_00000100").ok


def test_old_stagings_are_cleared_and_those_in_use_are_not(local: DirectoryTier, shared: DirectoryTier) -> None:
    make_steps(local.checkpoints, 2)
    newer, older = local.steps()
    for held in (newer, older):
        with pytest.raises(OSError, match="Input/output"):
            copy_step(Watched(local, fail_after=2), held, shared)
    assert len(shared.clear(lambda save_id: save_id == newer.manifest.save_id)) == 1
    again = Watched(local)
    copy_step(again, newer, shared)
    assert len(again.read) == len(CHUNKS) - 2


KILLED = """
import os, signal, sys
from pathlib import Path
from stepkeeper_trainer.tiers import DirectoryTier, copy_step
left = int(sys.argv[3])
def watch(event, arguments):
    global left
    touches = event in {"os.mkdir", "os.rename", "os.remove", "os.truncate"}
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if touches or (writes and "lustre" in str(arguments[0])):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
source, target = DirectoryTier(Path(sys.argv[1])), DirectoryTier(Path(sys.argv[2]))
[held] = source.steps()
sys.addaudithook(watch)
copy_step(source, held, target)
"""


def test_killed_at_any_moment_it_leaves_a_whole_step_or_none_and_goes_on(
    local: DirectoryTier, shared: DirectoryTier
) -> None:
    make_steps(local.checkpoints, 1)
    shared.checkpoints.mkdir()
    ended = []
    for left in range(40):
        argv = [sys.executable, "-c", KILLED, str(local.checkpoints), str(shared.checkpoints), str(left)]
        ended.append(subprocess.run(argv, timeout=60, check=False).returncode)
        for step in steps.list_steps(shared.checkpoints):
            assert verify(step.path).ok, left
        if ended[-1] == 0:
            break
        assert ended[-1] == -signal.SIGKILL
    assert ended[-1] == 0
    assert len(ended) > 4, "several moments"
    [step] = shared.steps()
    assert step.directory == "step_00000100"


TRACED = """
import sys
from pathlib import Path
from stepkeeper_trainer.tiers import DirectoryTier, copy_step
from tests.ports import reserve
source, target = DirectoryTier(Path(sys.argv[1])), DirectoryTier(Path(sys.argv[2]))
copy_step(source, source.steps()[0], target)
"""


def test_all_is_durable_before_the_name_is_and_the_name_before_the_lineage(
    local: DirectoryTier, shared: DirectoryTier, tmp_path: Path
) -> None:
    """Kills cannot see a missing fsync: the order of system calls can."""
    make_steps(local.checkpoints, 1)
    log = tmp_path / "log"
    traced = ["strace", "-f", "-y", "-e", "trace=write,fsync,rename,openat,unlink", "-o", str(log)]
    argv = [*traced, sys.executable, "-c", TRACED, str(local.checkpoints), str(shared.checkpoints)]
    subprocess.run(argv, timeout=120, check=True, capture_output=True)
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(shared.checkpoints) in line]

    def last(call: str, *parts: str) -> int:
        found = [at for at, text in enumerate(calls) if text.startswith(call) and all(part in text for part in parts)]
        assert found, (call, parts)
        return found[-1]

    rename = last("rename(", "/.copy-step_00000100", 'lustre/step_00000100"')
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert last("write(", f"{name}.part>") < last("fsync(", f"{name}.part>") < last("rename(", f'/{name}"')
    assert last("fsync(", "empty.part>") < last("rename(", '/empty"')
    directory_synced = last("fsync(", "ababab>")
    assert last("rename(", '/__1_0.distcp"') < last("openat(", "MANIFEST.json", "O_CREAT")
    assert last("write(", "MANIFEST.json>") < last("fsync(", "MANIFEST.json>") < directory_synced < rename
    assert rename < last("fsync(", "lustre>")
    assert rename < last("write(", "lineage.jsonl>") < last("fsync(", "lineage.jsonl>")


# --- newest anywhere ------------------------------------------------------------------------------


def test_the_newest_whole_step_of_any_tier_is_brought_home(
    tmp_path: Path, local: DirectoryTier, shared: DirectoryTier
) -> None:
    make_steps(local.checkpoints, 3)
    for held in local.steps()[1:]:
        copy_step(local, held, shared)
    home = DirectoryTier(tmp_path / "home")
    found = newest_anywhere(home, [local, shared])
    assert (found.directory, found.came_from) == ("step_00000300", local.name)
    assert verify(home.checkpoints / "step_00000300").ok
    assert newest_anywhere(home, [local, shared]).came_from == home.name, "and then it is there"


def test_a_damaged_copy_is_passed_over_for_a_whole_one_of_the_same_step(
    local: DirectoryTier, shared: DirectoryTier
) -> None:
    make_steps(local.checkpoints, 2)
    for held in local.steps():
        copy_step(local, held, shared)
    bad = shared.checkpoints / "step_00000200" / "__0_0.distcp"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    found = newest_anywhere(shared, [local])
    assert found.came_from == local.name
    assert found.directory is not None
    assert found.directory.startswith("step_00000200.")
    assert verify(shared.checkpoints / found.directory).ok
    assert "bytes of chunk 7" in found.passed_over[0]
    assert bad.exists(), "nothing is removed"
    chosen = steps.newest_verified(shared.checkpoints).chosen
    assert chosen is not None
    assert chosen.path.name == found.directory


def test_where_the_newest_is_damaged_everywhere_the_one_before_is_taken(
    local: DirectoryTier, shared: DirectoryTier
) -> None:
    for tier in (local, shared):
        make_steps(tier.checkpoints, 2)
        (tier.checkpoints / "step_00000200" / "__1_0.distcp").unlink()
    found = newest_anywhere(shared, [local])
    assert found.directory == "step_00000100"
    assert len(found.passed_over) == 2


def test_what_was_rolled_back_is_not_taken(local: DirectoryTier, shared: DirectoryTier) -> None:
    made = make_steps(local.checkpoints, 3)
    first = steps.open_step(made[0]).manifest
    assert first is not None
    lineage.append(local.checkpoints, lineage.Rollback(at=2.0, save_id=first.save_id, why="a loss spike"))
    assert newest_anywhere(shared, [local]).directory == "step_00000100"
    assert newest_anywhere(shared, [], counts=lambda held: held.manifest.step < 100).directory is None


def test_a_tier_that_does_not_answer_is_told_and_the_others_are_used(
    local: DirectoryTier, shared: DirectoryTier, tmp_path: Path
) -> None:
    make_steps(local.checkpoints, 1)
    (tmp_path / "file").write_text("no directory")
    found = newest_anywhere(shared, [DirectoryTier(tmp_path / "file" / "checkpoints"), local])
    assert found.directory == "step_00000100"
    assert "file" in found.passed_over[0]


def test_the_pace_is_kept_by_all_together_and_idle_time_is_not_saved_up() -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(100.0, clock=lambda: now, sleep=sleep)
    for _ in range(10):
        pace.take(50)
    assert now == pytest.approx(5.0)
    now += 1000.0
    before = now
    for _ in range(10):
        pace.take(50)
    assert now - before == pytest.approx(4.0), "a second of the idle time counts"
    Pace(None, clock=lambda: now, sleep=sleep).take(10**12)
    assert now - before == pytest.approx(4.0)


# --- object storage: a real server of the S3 protocol ---------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


def cold_tier(endpoint: str, path: str, **options: object) -> Tier:
    config = {**CONFIG, "endpoint": endpoint, "client_options": {"allow_http": True}, **options}
    return open_tier(f"s3://bucket/{path}", **config)


def keys(endpoint: str, path: str) -> list[str]:
    import obstore  # noqa: PLC0415

    store = cold_tier(endpoint, path).store  # type: ignore[attr-defined]
    return sorted(each["path"] for page in obstore.list(store) for each in page)


@pytest.mark.parametrize("level", [None, 3])
def test_a_step_goes_into_an_object_store_and_comes_back(
    s3: str, local: DirectoryTier, shared: DirectoryTier, level: int | None
) -> None:
    [made] = make_steps(local.checkpoints, 1)
    [held] = local.steps()
    path = f"round-{level}"
    cold = cold_tier(s3, path, zstd_level=level)
    pushed = copy_step(local, held, cold)
    suffix = "" if level is None else ".zst"
    folder = f"step_00000100.{held.manifest.save_id[:8]}"
    names = ["MANIFEST.json", f"__0_0.distcp{suffix}", f"__1_0.distcp{suffix}", f"empty{suffix}"]
    assert keys(s3, path) == [f"{folder}/{name}" for name in names]
    assert cold.problems(cold.steps()[0], deep=True) == []
    found = newest_anywhere(shared, [cold])
    assert (found.directory, found.came_from) == ("step_00000100", cold.name)
    back = shared.checkpoints / "step_00000100"
    assert verify(back).ok
    assert all((back / name).read_bytes() == (made / name).read_bytes() for name in os.listdir(made))
    again = Watched(local)
    assert copy_step(again, held, cold).directory == pushed.directory
    assert again.read == []


def test_without_its_manifest_it_is_no_step_and_files_that_are_there_are_not_sent_again(
    s3: str, local: DirectoryTier
) -> None:
    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    cold = cold_tier(s3, "torn")
    with pytest.raises(OSError, match="Input/output"):
        copy_step(Watched(local, fail_after=9), held, cold)
    assert [key.rpartition("/")[2] for key in keys(s3, "torn")] == ["__0_0.distcp"], "no half of a file"
    assert cold.steps() == []
    again = Watched(local)
    copy_step(again, held, cold)
    assert again.read == CHUNKS[8:]
    assert [step.manifest.step for step in cold.steps()] == [100]


def test_a_damaged_source_leaves_no_object(s3: str, local: DirectoryTier) -> None:
    [made] = make_steps(local.checkpoints, 1)
    [held] = local.steps()
    data = (made / "__0_0.distcp").read_bytes()
    (made / "__0_0.distcp").write_bytes(data[:-1] + b"?")
    with pytest.raises(DamagedCopyError, match="bytes of chunk 7"):
        copy_step(local, held, cold_tier(s3, "damaged"))
    assert keys(s3, "damaged") == []


def test_an_object_that_was_changed_is_found_and_passed_over(
    s3: str, local: DirectoryTier, shared: DirectoryTier
) -> None:
    import obstore  # noqa: PLC0415

    make_steps(local.checkpoints, 2)
    cold = cold_tier(s3, "changed")
    for held in local.steps():
        copy_step(local, held, cold)
    [newest, _] = cold.steps()
    key = f"{newest.directory}/__0_0.distcp"
    data = bytearray(bytes(obstore.get(cold.store, key).bytes()))  # type: ignore[attr-defined]
    data[3333] ^= 4
    obstore.put(cold.store, key, bytes(data))  # type: ignore[attr-defined]
    assert cold.problems(newest, deep=False) == []
    assert "bytes of chunk 3" in cold.problems(newest, deep=True)[0]
    found = newest_anywhere(shared, [cold])
    assert found.directory == "step_00000100"
    assert "bytes of chunk 3" in found.passed_over[0]


def test_what_the_store_gives_back_otherwise_does_not_count(s3: str, local: DirectoryTier) -> None:
    import obstore  # noqa: PLC0415

    make_steps(local.checkpoints, 1)
    [held] = local.steps()
    cold = cold_tier(s3, "lies")

    def store_lies() -> None:
        key = next(key for key in keys(s3, "lies") if key.endswith("__1_0.distcp"))
        obstore.put(cold.store, key, b"?" * 3 * CHUNK)  # type: ignore[attr-defined]

    with pytest.raises(DamagedCopyError, match="bytes of chunk 0"):
        copy_step(local, held, cold, before_commit=store_lies)
    assert cold.steps() == []
    copy_step(local, held, cold)
    assert cold.problems(cold.steps()[0], deep=True) == []


def test_large_objects_go_in_parts(s3: str, tmp_path: Path, shared: DirectoryTier) -> None:
    directory = tmp_path / "big" / "step_00000100"
    directory.mkdir(parents=True)
    data = random.Random(3).randbytes(40 * 1024 * 1024 + 17)  # noqa: S311
    (directory / "__0_0.distcp").write_bytes(data)
    chunk_bytes = 16 * 1024 * 1024
    chunks = [xxhash.xxh3_128_hexdigest(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    big = FileEntry(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), chunks=tuple(chunks))
    manifest = Manifest(
        step=100, tokens=1, world_size=1, framework="a test's", created_at="now", save_id="ab" * 16,
        files={"__0_0.distcp": big},
    )  # fmt: skip
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    source = DirectoryTier(directory.parent)
    cold = cold_tier(s3, "big")
    copy_step(source, source.steps()[0], cold)
    assert newest_anywhere(shared, [cold]).directory == "step_00000100"
    assert (shared.checkpoints / "step_00000100" / "__0_0.distcp").read_bytes() == data


def test_a_store_that_is_not_there_is_told_in_one_line(local: DirectoryTier, shared: DirectoryTier) -> None:
    pytest.importorskip("obstore")
    make_steps(local.checkpoints, 1)
    retry = {"max_retries": 0}
    gone = cold_tier(f"http://127.0.0.1:{reserve()}", "x", retry_config=retry)
    with pytest.raises(TierError) as told:
        copy_step(local, local.steps()[0], gone)
    assert "\n" not in str(told.value)
    assert "s3://bucket/x" in str(told.value)
    found = newest_anywhere(shared, [gone, local])
    assert found.directory == "step_00000100"


def test_without_the_library_it_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from stepkeeper_trainer.tiers import TierError, open_tier\n"
        "assert 'torch' not in sys.modules\n"
        "try: open_tier('s3://bucket/x')\n"
        "except TierError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True).stdout
    assert "pip install 'stepkeeper[object]'" in said
    assert json.dumps(said).count("\\n") == 1


def test_a_disk_that_refuses_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, target = DirectoryTier(tmp_path / "a"), DirectoryTier(tmp_path / "b")
    make_step(source.checkpoints, 100)
    held = source.steps()[0]
    monkeypatch.setattr(os, "write", full)

    with pytest.raises(OSError, match="No space left") as failed:
        copy_step(source, held, target)

    assert Path(failed.value.filename).name in held.manifest.files
