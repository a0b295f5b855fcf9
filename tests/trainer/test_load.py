"""Loading: bit for bit what was saved, in any cut, and never an unchecked byte."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from stepkeeper_trainer.errors import DamagedError
from stepkeeper_trainer.formats import items
from stepkeeper_trainer.formats.manifest import ManifestError, read_manifest
from stepkeeper_trainer.formats.metadata import parse
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.load import worker as working
from stepkeeper_trainer.load.reader import CheckedReader, load
from stepkeeper_trainer.load.worker import Limits, Wanted, fill
from tests.ports import reserve
from tests.trainer import warm
from tests.trainer.flipping import flip
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.memory import peak_growth
from tests.trainer.ranks import Ranks, finish, losses
from tests.trainer.steps_by_dcp import commit, save, stock_load

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def random_bits(dtype: torch.dtype, *size: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(size) < 0.5
    count = int(torch.tensor(size).prod()) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(size)


def all_kinds() -> dict[str, torch.Tensor]:
    """Of every type, of many shapes, smaller and larger than a chunk, and laid out in odd ways."""
    torch.manual_seed(0)
    state = {str(dtype): random_bits(dtype, 5, 7) for dtype in DTYPES}
    state |= {f"large {dtype}": random_bits(dtype, 300, 401) for dtype in (torch.float32, torch.uint8, torch.float64)}
    state |= {
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "one row": random_bits(torch.float32, 1, 50_000),
        "deep": random_bits(torch.bfloat16, 3, 4, 5, 6, 7),
        "transposed": random_bits(torch.float32, 40, 30).t(),
        "large transposed": random_bits(torch.float32, 300, 200).t(),
        "slice of a larger one": random_bits(torch.float32, 100, 10)[20:40],
        "every other": random_bits(torch.float32, 100, 10)[::2],
    }
    return state


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and bytes(one.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
        other.contiguous().view(-1).view(torch.uint8).numpy()
    )


def empty_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}


LIMITS = [Limits(threads=1), Limits(threads=5), Limits(memory_bytes=1)]


@pytest.mark.parametrize("limits", LIMITS, ids=["1 thread", "5 threads", "no memory"])
@pytest.mark.parametrize("chunk_bytes", [1000, 65_536, 16 * 1024 * 1024])
def test_every_bit_comes_back(tmp_path: Path, limits: Limits, chunk_bytes: int) -> None:
    state = all_kinds()
    manifest = save(tmp_path, state, chunk_bytes=chunk_bytes, threads=2)
    found = empty_like(state)

    load(CheckedReader(tmp_path, manifest), found, None, limits=limits)

    assert [name for name in state if not same_bits(state[name], found[name])] == []


def test_stock_and_ours_load_the_same(tmp_path: Path) -> None:
    state = all_kinds()
    manifest = save(tmp_path, state)
    ours, stock = empty_like(state), empty_like(state)

    load(CheckedReader(tmp_path, manifest), ours, None)
    stock_load(tmp_path, stock)

    assert all(same_bits(ours[name], stock[name]) for name in state)


def test_a_target_of_another_type_or_layout_gets_the_numbers(tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 200), "b": torch.randn(5, 4)}
    manifest = save(tmp_path, state)
    found = {"a": torch.zeros(200, 300, dtype=torch.float64).t(), "b": torch.zeros(4, 5, dtype=torch.bfloat16).t()}

    load(CheckedReader(tmp_path, manifest), found, None)

    assert torch.equal(found["a"], state["a"].double())
    assert torch.equal(found["b"], state["b"].bfloat16())


BOXES = [
    ((0, 0, 0), (60, 50, 40)),
    ((7, 0, 0), (20, 50, 40)),
    ((59, 0, 0), (1, 50, 40)),
    ((3, 10, 0), (1, 7, 40)),
    ((3, 10, 5), (1, 1, 9)),
    ((0, 10, 0), (60, 7, 40)),
    ((5, 0, 39), (50, 50, 1)),
    ((5, 6, 7), (8, 9, 10)),
]


@pytest.mark.parametrize("layout", ["as it is", "transposed"])
@pytest.mark.parametrize("chunk_bytes", [1000, 65_536, 16 * 1024 * 1024])
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_any_box_of_a_tensor_can_be_read(
    tmp_path: Path, box: tuple[tuple[int, ...], tuple[int, ...]], chunk_bytes: int, layout: str
) -> None:
    offsets, sizes = box
    whole = torch.randn(40, 50, 60).transpose(0, 2) if layout == "transposed" else torch.randn(60, 50, 40)
    manifest = save(tmp_path, {"a": whole}, chunk_bytes=chunk_bytes)
    [piece] = parse((tmp_path / ".metadata").read_bytes()).tensors["a"].pieces
    assert piece.extent is not None
    target = torch.zeros(sizes)

    read = fill(
        tmp_path,
        manifest,
        [
            Wanted(
                name="a",
                file=piece.extent.file,
                start=piece.extent.start,
                length=piece.extent.length,
                sizes=piece.sizes,
                dtype=torch.float32,
                box_offsets=offsets,
                box_sizes=sizes,
                target=target,
            )
        ],
    )

    expected = whole
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        expected = expected.narrow(dim, offset, size)
    assert torch.equal(target, expected)
    if layout == "as it is" and chunk_bytes == 1000:
        rows = sizes[0] * 50 * 40 * 4
        assert read <= rows + 4 * chunk_bytes, "chunks of which nothing is needed are not read"


def test_every_wrong_byte_that_is_read_is_found_before_it_is_used(tmp_path: Path) -> None:
    state = all_kinds()
    manifest = save(tmp_path, state)
    [file] = [tmp_path / name for name in manifest.files if name.endswith(".distcp")]
    size = os.path.getsize(file)
    for at in [0, size - 1, *range(100, size, size // 29)]:
        flip(file, at)
        found = empty_like(state)

        with pytest.raises(DamagedError, match=f"bytes of chunk {at // 65_536} "):
            load(CheckedReader(tmp_path, manifest), found, None)

        for name, value in found.items():
            sound = same_bits(value, state[name]) or not value.view(-1).view(torch.uint8).any()
            # what was copied came from chunks that were right: a part of the truth, and the rest untouched
            touched = value.contiguous().view(-1).view(torch.uint8) != 0
            truth = state[name].contiguous().view(-1).view(torch.uint8)
            assert sound or torch.equal(value.contiguous().view(-1).view(torch.uint8)[touched], truth[touched])
        flip(file, at)
    for name in (".metadata",):
        flip(tmp_path / name, 50)
        with pytest.raises(DamagedError, match="metadata"):
            load(CheckedReader(tmp_path, manifest), empty_like(state), None)


def test_a_wrong_byte_in_a_chunk_of_which_nothing_is_needed_does_not_matter(tmp_path: Path) -> None:
    state = {"a": torch.randn(100_000), "b": torch.randn(100_000)}
    manifest = save(tmp_path, state)
    b = parse((tmp_path / ".metadata").read_bytes()).tensors["b"].pieces[0].extent
    assert b is not None
    flip(tmp_path / b.file, b.start + b.length // 2)
    found = {"a": torch.zeros(100_000)}

    load(CheckedReader(tmp_path, manifest), found, None)

    assert torch.equal(found["a"], state["a"])


@pytest.mark.parametrize("change", ["missing", "truncated", "longer", "a link"])
def test_a_file_that_is_not_as_it_was_is_named(tmp_path: Path, change: str) -> None:
    state = {"a": torch.randn(1000)}
    manifest = save(tmp_path, state)
    path = tmp_path / "__0_0.distcp"
    match change:
        case "missing":
            path.unlink()
        case "truncated":
            os.truncate(path, 100)
        case "longer":
            with path.open("ab") as file:
                file.write(b"x")
        case _:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to("elsewhere")

    with pytest.raises(DamagedError, match="__0_0"):
        load(CheckedReader(tmp_path, manifest), empty_like(state), None)


def test_a_file_that_changes_while_its_head_is_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a large archive is looked at before its chunk is checked: it must turn out to be the same."""
    state = {"a": torch.randn(100_000)}
    manifest = save(tmp_path, state)
    peek = working.Source.peek

    def other(self: working.Source, at: int, count: int) -> bytes:
        data = bytearray(peek(self, at, count))
        data[data.index(b"data/0FB") + 10] ^= 1  # of the filler, of which nothing depends
        return bytes(data)

    monkeypatch.setattr(working.Source, "peek", other)

    with pytest.raises(DamagedError, match="changed while"):
        load(CheckedReader(tmp_path, manifest), empty_like(state), None)


def test_memory_beyond_the_tensors_is_bounded(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randint(0, 9, (32, 1024, 512), dtype=torch.int32) for i in range(2)}  # 64 MiB each
    manifest = save(tmp_path, state, chunk_bytes=1024 * 1024)
    found = {name: torch.ones_like(value) for name, value in state.items()}
    # columns, so that no run of bytes goes straight to its place
    wide = {name: torch.ones(512, 1024, 32, dtype=torch.int32).transpose(0, 2) for name in state}
    limits = Limits(threads=4, memory_bytes=16 * 1024 * 1024)
    for target in (found, wide):
        taken = peak_growth(lambda target=target: load(CheckedReader(tmp_path, manifest), target, None, limits=limits))
        assert taken < 40 * 1024 * 1024

    assert all(torch.equal(found[name], state[name]) and torch.equal(wide[name], state[name]) for name in state)
    stock = peak_growth((tmp_path / "__0_0.distcp").read_bytes)
    assert stock > 100 * 1024 * 1024, "the measure sees what is taken"


def test_a_pickled_item_is_never_loaded(tmp_path: Path) -> None:
    manifest = save(tmp_path, {"a": torch.zeros(2), "code": object})  # type: ignore[dict-item]

    with pytest.raises(DamagedError, match="pickle, which is never loaded"):
        load(CheckedReader(tmp_path, manifest), {"code": object}, None)  # type: ignore[dict-item]


class Touch:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.flag}",)


@pytest.mark.parametrize("large", [False, True])
def test_an_archive_that_names_code_is_refused_and_not_run(tmp_path: Path, *, large: bool) -> None:
    """As if somebody could write the files and their manifest too."""
    step = tmp_path / "step"
    manifest = save(step, {"a": torch.zeros(100_000 if large else 1000)})
    archive = io.BytesIO()
    torch.save(Touch(tmp_path / "executed"), archive)
    extent = parse((step / ".metadata").read_bytes()).tensors["a"].pieces[0].extent
    assert extent is not None
    with (step / extent.file).open("r+b") as file:
        file.seek(extent.start)
        file.write(archive.getvalue() + bytes(extent.length - len(archive.getvalue())))
    (step / "MANIFEST.json").unlink()
    manifest = commit(step)

    with pytest.raises(DamagedError):
        load(CheckedReader(step, manifest), {"a": torch.zeros(100_000 if large else 1000)}, None)

    assert not (tmp_path / "executed").exists()


def test_the_metadata_of_a_load_is_never_executed(tmp_path: Path) -> None:
    from tests.trainer.test_verify_metadata import ATTACKS  # noqa: PLC0415  # they are many

    save(tmp_path / "step", {"a": torch.zeros(2)})
    for attack, make in ATTACKS.items():
        if attack == "extension code":
            continue
        (tmp_path / "step/.metadata").write_bytes(make(tmp_path / "executed"))
        (tmp_path / "step/MANIFEST.json").unlink()
        with pytest.raises(DamagedError):
            CheckedReader(tmp_path / "step", commit(tmp_path / "step")).read_metadata()
        assert not (tmp_path / "executed").exists()


def test_a_mistake_of_ours_in_a_thread_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{i}": torch.randn(100_000) for i in range(8)}
    manifest = save(tmp_path, state)
    main = threading.current_thread()

    def broken(*_: object) -> None:
        if threading.current_thread() is not main:
            raise ZeroDivisionError

    monkeypatch.setattr(working, "copy_bytes", broken)

    with pytest.raises(ZeroDivisionError):
        load(CheckedReader(tmp_path, manifest), empty_like(state), None, limits=Limits(threads=4))


def test_every_cut_of_a_head_is_an_error() -> None:
    archive = io.BytesIO()
    torch.save(torch.randn(3, 4), archive)
    data = archive.getvalue()
    whole = items.read_head(data)

    assert (whole.dtype, whole.size, whole.contiguous) == ("float32", (3, 4), True)
    assert data[whole.head_bytes :].startswith(archive.getvalue()[whole.head_bytes : whole.head_bytes + 48])
    for end in range(whole.head_bytes - 80):
        with pytest.raises(items.ItemError):
            items.read_head(data[:end])
    for at in range(whole.head_bytes):
        for bit in (1, 0x10, 0x80):
            try:
                items.read_head(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            except items.ItemError:
                continue


def test_a_manifest_that_names_huge_chunks_takes_no_memory(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(2)}, chunk_bytes=1 << 40)

    with pytest.raises(ManifestError, match="Expected `int` <= 268435456"):
        read_manifest(tmp_path)


# Several ranks ----------------------------------------------------------------------------------------------------


def ranks(count: int, what: str, directory: Path) -> tuple[list[int], list[str]]:
    """Run ranks of `tests.trainer.sharded`; return their exit codes and what they printed."""
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve()),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    with contextlib.ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        processes = [
            warm.Process(
                [sys.executable, "-m", "tests.trainer.sharded", what, str(directory)],
                env={**os.environ, **own, "RANK": str(rank)},
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for log in logs:
            log.seek(0)
        return codes, [log.read() for log in logs]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded") / "step_00000001"
    codes, said = ranks(2, "save", directory)
    assert codes == [0, 0], said
    return directory


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.campaign), 3])
def test_any_number_of_ranks_loads_what_two_have_saved(of_two_ranks: Path, world_size: int) -> None:
    codes, said = ranks(world_size, "load", of_two_ranks)

    assert codes == [0] * world_size, said


def test_damage_that_one_rank_sees_stops_all(of_two_ranks: Path, tmp_path: Path) -> None:
    step = tmp_path / "step_00000001"
    shutil.copytree(of_two_ranks, step)
    rows = parse((step / ".metadata").read_bytes()).tensors["rows"].pieces[1].extent  # the second rank's
    assert rows is not None
    flip(step / rows.file, rows.start + rows.length // 2)

    codes, said = ranks(2, "load", step)

    assert codes == [3, 3], said
    assert all(f"{rows.file}: bytes of chunk" in text for text in said)


@needs_fsdp
def test_ranks_choose_the_newest_whole_step_together(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    expected = finish(2, run_dir, steps=12)
    newest, *_ = list_steps(run_dir / "checkpoints")
    assert newest.step == 12
    data = max(newest.path.glob("*.distcp"), key=os.path.getsize)
    flip(data, os.path.getsize(data) // 2)

    with Ranks(2, run_dir, "--resume-from=latest", steps=12) as again:
        assert again.wait() == [0, 0], again.output()
        said = again.output()

    assert "step_skipped" in said
    assert newest.path.name in said
    assert "bytes of chunk 0" in said
    assert losses(run_dir) == expected
