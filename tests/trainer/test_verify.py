"""Reading step directories: on threads, past the page cache, in shards, and not again when nothing has changed."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from pathlib import Path

import msgspec
import pytest
import xxhash

from stepkeeper_trainer.formats import reading as reading_module
from stepkeeper_trainer.formats import verify as verifying
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, read_manifest, seal
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.steps import newest_verified
from stepkeeper_trainer.formats.verify import (
    CACHE_NAME,
    Cache,
    ShardVerdict,
    Verdict,
    join_shards,
    verify,
    verify_shard,
)
from tests import dcp_files
from tests.trainer import flipping
from tests.trainer.memory import peak_growth

CHUNK = 64 * 1024
LONG_AGO = time.time() - 1000


def make_big(
    checkpoints: Path, step: int = 1, *, files: int = 5, chunks: int = 6, seed: int = 0, rest: int = 777
) -> Path:
    """Commit a step directory of several files with several chunks; the last chunk of each is shorter."""
    directory = checkpoints / f"step_{step:08d}"
    directory.mkdir(parents=True)
    size = (chunks - 1) * CHUNK + rest
    names = [f"__{i}_0.distcp" for i in range(files)]
    contents = {name: _bytes(size, seed=(seed, i)) for i, name in enumerate(names)}
    pieces = [dcp_files.Piece((i * size,), (size,), name, 0, size) for i, name in enumerate(names)]
    contents[".metadata"] = dcp_files.metadata({"weights": pieces})
    for name, data in contents.items():
        (directory / name).write_bytes(data)
        _age(directory / name)
    manifest = Manifest(
        step=step,
        tokens=0,
        world_size=1,
        created_at="",
        save_id=f"{step:08x}{seed:024x}",
        files={name: _entry(data) for name, data in contents.items()},
    )
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    return directory


def _bytes(size: int, seed: tuple[int, int]) -> bytes:
    return random.Random(f"{seed}").randbytes(size)  # noqa: S311  # no secret


def _entry(data: bytes) -> FileEntry:
    chunks = tuple(xxhash.xxh3_128_hexdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
    return FileEntry(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), chunk_bytes=CHUNK, chunks=chunks)


def _age(path: Path) -> None:
    os.utime(path, (LONG_AGO, LONG_AGO))


def flip(path: Path, at: int) -> None:
    """Change a byte in place, and put the times that a program can set back."""
    before = path.stat()
    flipping.flip(path, at)
    put_back(path, before)


def put_back(path: Path, before: os.stat_result) -> None:
    """Put back the times of a file, in another tick of the kernel's clock than its last change.

    The ctime tells of a change from the next tick on, which may take 10 ms: a quick machine has verified it by then.
    """
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        time.sleep(0.001)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def total(step: Path) -> int:
    return sum(entry.bytes for entry in read_manifest(step).files.values())


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are younger than what is remembered: wait for nothing."""
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", -1e9)


READINGS = [
    Reading(threads=1),
    Reading(threads=7),
    Reading(from_disk=True),
    Reading(bytes_per_s=1e9),
    Reading(threads=3, first_only=True),
]
any_reading = pytest.mark.parametrize("reading", READINGS, ids=["1 thread", "7 threads", "disk", "limit", "first"])


@any_reading
def test_every_byte_is_read_once_however_it_is_read(tmp_path: Path, reading: Reading) -> None:
    step = make_big(tmp_path)

    verdict = verify(step, reading=reading)

    assert verdict.problems == ()
    assert verdict.bytes_read == total(step)


@any_reading
def test_one_wrong_byte_anywhere_is_named(tmp_path: Path, reading: Reading) -> None:
    step = make_big(tmp_path)
    size = os.path.getsize(step / "__0_0.distcp")
    for name, at in [("__0_0.distcp", 0), ("__2_0.distcp", CHUNK - 1), ("__2_0.distcp", CHUNK), ("__4_0.distcp", -1)]:
        flip(step / name, at % size)

        [problem] = verify(step, reading=reading).problems

        assert problem.endswith(
            f"{name}: bytes of chunk {at % size // CHUNK} (from byte {at % size // CHUNK * CHUNK}) are wrong"
        )
        flip(step / name, at % size)
    assert verify(step, reading=reading).ok


def test_all_wrong_files_are_named_or_only_the_first_where_one_is_enough(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    for name in ("__1_0.distcp", "__3_0.distcp"):
        flip(step / name, 5)
        flip(step / name, 2 * CHUNK)

    problems = verify(step).problems

    assert [p.split("/")[-1] for p in problems] == [
        "__1_0.distcp: bytes of chunk 0 (from byte 0) are wrong (and 1 more places)",
        "__3_0.distcp: bytes of chunk 0 (from byte 0) are wrong (and 1 more places)",
    ]
    first = verify(step, reading=Reading(threads=1, first_only=True))
    assert len(first.problems) == 1
    assert first.bytes_read < total(step)


def test_a_limit_on_bytes_per_second_is_kept_by_all_threads_together(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    seconds = 0.6

    began = time.monotonic()
    assert verify(step, reading=Reading(threads=4, bytes_per_s=total(step) / seconds)).ok

    assert time.monotonic() - began > seconds / 2  # the last pieces of each thread are not waited for


def test_verification_stops_when_asked_and_says_so(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    asked = threading.Event()

    verdict = verify(step, should_stop=lambda: asked.is_set() or bool(asked.set()))

    assert not verdict.ok
    assert "stopped at byte" in verdict.problems[0]


def test_memory_does_not_grow_with_the_step(tmp_path: Path) -> None:
    step = tmp_path / "step_00000001"
    step.mkdir()
    size = 256 * 1024 * 1024
    with (step / "__0_0.distcp").open("wb") as file:
        file.truncate(size)
    plan = dcp_files.metadata({"a": [dcp_files.Piece((0,), (size,), "__0_0.distcp")]})
    (step / ".metadata").write_bytes(plan)
    zero = xxhash.xxh3_128_hexdigest(bytes(size // 4))  # 64 MiB a chunk
    entry = FileEntry(bytes=size, xxh3_128="0" * 32, chunk_bytes=size // 4, chunks=(zero,) * 4)
    files = {"__0_0.distcp": entry, ".metadata": _entry(plan)}
    manifest = Manifest(step=1, tokens=0, world_size=1, created_at="", save_id="a" * 32, files=files)
    (step / "MANIFEST.json").write_bytes(seal(manifest))

    verdicts: list[Verdict] = []
    taken = peak_growth(lambda: verdicts.append(verify(step, reading=Reading(threads=8))))

    assert verdicts[0].ok
    assert taken < 64 * 1024 * 1024


def test_reading_from_the_disk_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """It reads what the disk has: pages in memory, right as they may be, prove nothing of it."""
    step = make_big(tmp_path, files=2, chunks=40)
    path = step / "__0_0.distcp"
    with path.open("rb") as file:
        os.fsync(file.fileno())
    before = _bytes_from_disk()

    assert verify(step, reading=Reading(from_disk=True)).ok

    read = _bytes_from_disk() - before
    if _counts_what_comes_from_disk(path):
        assert read >= 2 * 40 * CHUNK * 0.9
    assert verify(step).ok


def _bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _counts_what_comes_from_disk(path: Path) -> bool:
    """Tell whether a read past the page cache shows: there is a disk, and the kernel counts what comes from it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    before = _bytes_from_disk()
    try:
        with mmap.mmap(-1, CHUNK) as pages:
            os.readv(descriptor, [pages])
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return _bytes_from_disk() - before >= CHUNK


def test_odd_chunk_sizes_are_read_from_the_disk_too(tmp_path: Path) -> None:
    from tests.trainer.test_formats import make_step  # noqa: PLC0415  # chunks of eight bytes

    step = make_step(tmp_path, 1)
    assert verify(step, reading=Reading(from_disk=True)).ok
    flip(step / "__0_0.distcp", 30)
    assert not verify(step, reading=Reading(from_disk=True)).ok


# What was found right is not read again ---------------------------------------------------------------------------


@pytest.mark.usefixtures("settled")
def test_what_was_right_is_not_read_again_until_it_is_touched(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    cache = Cache(tmp_path)
    assert verify(step, cache=cache).bytes_read == total(step)

    again = verify(step, cache=cache)
    assert (again.ok, again.bytes_read, again.bytes_known) == (True, 0, total(step))

    flip(step / "__2_0.distcp", 1000)  # the times that a program can set are as before
    touched = verify(step, cache=cache)
    assert "__2_0.distcp: bytes of chunk 0" in touched.problems[0]
    assert touched.bytes_read == os.path.getsize(step / "__2_0.distcp")
    assert not verify(step, cache=cache).ok, "what is wrong is not remembered as right"
    assert not verify(step).ok
    assert newest_verified(tmp_path).chosen is None


def swap(step: Path) -> None:
    a, b, aside = step / "__0_0.distcp", step / "__1_0.distcp", step.parent / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def replace(step: Path) -> None:
    path = step / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    before = path.stat()
    path.unlink()
    path.write_bytes(data)
    put_back(path, before)  # the number of the file that is gone may be this one's


def other_claims(step: Path) -> None:
    """The files are as they were; a manifest that was put there says that other bytes are right."""
    manifest = read_manifest(step)
    entry = msgspec.structs.replace(manifest.files["__0_0.distcp"], chunks=("0" * 32,) * 6)
    files = {**manifest.files, "__0_0.distcp": entry}
    (step / "MANIFEST.json").write_bytes(seal(msgspec.structs.replace(manifest, files=files)))


def manifest_of_another_save(step: Path) -> None:
    other = make_big(step.parent / "other", seed=1)
    (step / "MANIFEST.json").write_bytes((other / "MANIFEST.json").read_bytes())


def lose(step: Path) -> None:
    (step / "__0_0.distcp").unlink()


def add(step: Path) -> None:
    (step / "extra").write_bytes(b"")


def cut(step: Path) -> None:
    os.truncate(step / "__0_0.distcp", 100)


CHANGES = [swap, replace, other_claims, manifest_of_another_save, lose, add, cut]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_remembered_makes_a_changed_step_right(tmp_path: Path, change: object) -> None:
    step = make_big(tmp_path)
    assert verify(step, cache=Cache(tmp_path)).ok

    change(step)  # type: ignore[operator]

    assert not verify(step, cache=Cache(tmp_path)).ok
    assert newest_verified(tmp_path).chosen is None


def test_a_file_that_may_still_change_within_its_own_tick_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", 3600.0)  # however slow this machine is
    step = make_big(tmp_path)

    assert verify(step, cache=Cache(tmp_path)).ok

    assert verify(step, cache=Cache(tmp_path)).bytes_read == total(step)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["torn", "writable by others", "a link", "of a newer format", "a directory"])
def test_a_record_that_is_not_to_be_trusted_is_no_record(tmp_path: Path, damage: str) -> None:
    step = make_big(tmp_path)
    assert verify(step, cache=Cache(tmp_path)).ok
    [record] = (tmp_path / CACHE_NAME).iterdir()
    match damage:
        case "torn":
            os.truncate(record, 50)
        case "writable by others":
            record.chmod(0o666)
        case "a link":
            record.rename(tmp_path / "elsewhere")
            record.symlink_to(tmp_path / "elsewhere")
        case "of a newer format":
            record.write_bytes(record.read_bytes().replace(b'"format":1', b'"format":2'))
        case _:
            record.unlink()
            record.mkdir()

    assert verify(step, cache=Cache(tmp_path)).bytes_read == total(step)


@pytest.mark.usefixtures("settled")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_record_of_somebody_else_is_no_record(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    assert verify(step, cache=Cache(tmp_path)).ok
    [record] = (tmp_path / CACHE_NAME).iterdir()
    os.chown(record, 12345, 12345)

    assert verify(step, cache=Cache(tmp_path)).bytes_read == total(step)


def test_where_nothing_can_be_recorded_it_is_verified_all_the_same(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    (tmp_path / CACHE_NAME).write_text("a file is in the way")

    assert verify(step, cache=Cache(tmp_path)).ok


@pytest.mark.usefixtures("settled")
def test_a_file_that_another_step_shares_is_read_once(tmp_path: Path) -> None:
    """As an incremental save makes them: a link changes the ctime, for both names."""
    first, second = make_big(tmp_path, 1), make_big(tmp_path, 2)
    for i in range(4):
        (second / f"__{i}_0.distcp").unlink()
        os.link(first / f"__{i}_0.distcp", second / f"__{i}_0.distcp")
    assert verify(second, cache=Cache(tmp_path)).bytes_read == total(second)

    older = verify(first, cache=Cache(tmp_path))

    own = [first / "__4_0.distcp", first / ".metadata"]
    assert (older.ok, older.bytes_read) == (True, sum(os.path.getsize(path) for path in own))


@pytest.mark.usefixtures("settled")
def test_a_plan_that_does_not_cover_is_never_remembered_as_right(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    plan = dcp_files.metadata({"weights": [dcp_files.Piece((0,), (100,), "__0_0.distcp", 0, 100)]}, size=(101,))
    (step / ".metadata").write_bytes(plan)
    manifest = read_manifest(step)
    files = {**manifest.files, ".metadata": _entry(plan)}
    (step / "MANIFEST.json").write_bytes(seal(msgspec.structs.replace(manifest, files=files)))
    for _ in range(3):
        for deep in (True, False):
            verdict = verify(step, deep=deep, cache=Cache(tmp_path))
            assert "hold 100 of its 101 numbers" in verdict.problems[0]


@pytest.mark.usefixtures("settled")
def test_a_plan_that_was_checked_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_big(tmp_path)
    parsed: list[int] = []
    real = verifying.parse_of
    monkeypatch.setattr(verifying, "parse_of", lambda *given: (parsed.append(1), real(*given))[1])

    assert verify(step, cache=Cache(tmp_path)).ok
    assert verify(step, deep=False, cache=Cache(tmp_path)).ok
    assert len(parsed) == 1
    flip(step / ".metadata", 60)
    assert not verify(step, deep=False, cache=Cache(tmp_path)).ok


# Shared by several readers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 7, 64])
def test_shares_are_even_and_together_each_byte_is_read_once(tmp_path: Path, of: int) -> None:
    step = make_big(tmp_path, files=8, chunks=8)
    shards = [verify_shard(step, index, of) for index in range(of)]

    verdict = join_shards(step, shards)

    assert verdict.problems == ()
    assert verdict.bytes_read == total(step)
    largest = max(shard.bytes_read for shard in shards)
    assert largest <= total(step) / of + 2 * CHUNK


def test_a_wrong_byte_is_found_by_exactly_one_share(tmp_path: Path) -> None:
    step = make_big(tmp_path)
    flip(step / "__3_0.distcp", 3 * CHUNK)

    shards = [verify_shard(step, index, 4) for index in range(4)]

    assert sum(bool(shard.problems) for shard in shards) == 1
    [problem] = join_shards(step, shards).problems
    assert "__3_0.distcp: bytes of chunk 3" in problem


@pytest.mark.usefixtures("settled")
def test_joined_shards_are_remembered_and_missing_or_foreign_ones_are_not(tmp_path: Path) -> None:
    step, cache = make_big(tmp_path), Cache(tmp_path)
    shards = [verify_shard(step, index, 3) for index in range(3)]

    assert "a shard is missing" in join_shards(step, shards[:2], cache=cache).problems[0]
    assert "a shard is missing" in join_shards(step, [*shards[:2], shards[1]], cache=cache).problems[0]
    foreign = [*shards[:2], ShardVerdict(2, 3, (), 10**6, "x", "x", 0.0)]
    assert "the same manifest" in join_shards(step, foreign, cache=cache).problems[0]
    assert verify(step, cache=cache).bytes_read == total(step)
    (tmp_path / CACHE_NAME / os.listdir(tmp_path / CACHE_NAME)[0]).unlink()

    assert join_shards(step, shards, cache=cache).ok
    assert verify(step, cache=cache).bytes_read == 0

    flip(step / "__0_0.distcp", 1)
    (tmp_path / CACHE_NAME / os.listdir(tmp_path / CACHE_NAME)[0]).unlink()
    join_shards(step, shards, cache=cache)
    assert not verify(step, cache=cache).ok, "files that are not those that were read are not remembered"


def test_a_mistake_of_ours_in_a_thread_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_big(tmp_path)

    def broken(_self: object, _index: int) -> tuple[str | None, int]:
        raise ZeroDivisionError

    monkeypatch.setattr(reading_module._TaskReader, "_chunk", broken)

    with pytest.raises(ZeroDivisionError):
        verify(step)
