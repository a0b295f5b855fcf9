from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as some
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from stepkeeper.cli.main import main
from stepkeeper_trainer.coordinate.ending import leave
from stepkeeper_trainer.errors import DamagedError, ResumeError
from stepkeeper_trainer.formats import safetensors as format_
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry, Manifest, seal, step_name
from stepkeeper_trainer.formats.metadata import Extent, Piece, TensorEntry
from stepkeeper_trainer.formats.stored import StepBytes, StoredError, tensor_blocks
from stepkeeper_trainer.save.writer import HashingFile
from stepkeeper_trainer.store import export
from tests.ports import reserve
from tests.trainer import warm
from tests.trainer.weights import load_weights

SMALL_CHUNK = 4096


def entry_of(path: Path, chunk_bytes: int) -> FileEntry:
    if chunk_bytes == CHUNK_BYTES:
        copy = path.with_name("copy")
        with HashingFile(copy) as file:
            file.write(path.read_bytes())
        copy.unlink()
        return file.entry
    import xxhash  # noqa: PLC0415

    data = path.read_bytes()
    chunks = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    return FileEntry(
        bytes=len(data),
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
        chunk_bytes=chunk_bytes,
        chunks=tuple(map(xxhash.xxh3_128_hexdigest, chunks)),
    )


def seal_step(directory: Path, *, step: int = 300, chunk_bytes: int = SMALL_CHUNK) -> Path:
    """Add a manifest to what stock DCP wrote."""
    files = {path.name: entry_of(path, chunk_bytes) for path in sorted(directory.iterdir())}
    manifest = Manifest(step=step, tokens=1, world_size=1, created_at="2026-09-21", save_id="5afe" * 8, files=files)
    (directory / "MANIFEST.json").write_bytes(seal(manifest))
    return directory


def made_step(parent: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    directory = parent / step_name(300)
    dcp.save(dict(tensors), checkpoint_id=directory)
    return seal_step(directory, **options)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed.weight": torch.randn(100, 64),
        "model.head.weight": torch.randn(64, 100).t(),  # lies otherwise in memory
        "model.conv.weight": torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
        "model.norm.scale": torch.randn(64, dtype=torch.bfloat16),
        "model.half": torch.randn(7, 3).half(),
        "model.ids": torch.arange(11),
        "model.mask": torch.tensor([True, False, True]),
        "model.small": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "model.counts": torch.tensor([1, 2**16 - 1], dtype=torch.uint16),
        "model.wave": torch.randn(5, 2, dtype=torch.complex64).t(),
        "model.number": torch.tensor(3.25, dtype=torch.float64),
        "model.nothing": torch.zeros(0, 5),
        "optimizer.state.embed.weight.exp_avg": torch.zeros(100, 64),
    }


def wanted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def command(*argv: object) -> int:
    return main(["checkpoints", "export", *map(str, argv)])


# --- what is written ------------------------------------------------------------------------------


def test_the_safetensors_library_reads_back_every_bit(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    step = made_step(tmp_path, tensors)
    assert command(step, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"]
    same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), wanted(tensors))
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "stepkeeper.step": "300", "stepkeeper.save_id": "5afe" * 8}


def test_shards_stay_below_their_size_and_the_index_names_each_tensor(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    step = made_step(tmp_path, tensors)
    assert command(step, tmp_path / "out", "--max-shard-size", "20KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    assert sorted(os.listdir(tmp_path / "out")) == [*names, "model.safetensors.index.json"]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        shard = safetensors.torch.load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][tensor] == name for tensor in shard)
        size = sum(tensor.nbytes for tensor in shard.values())
        assert size <= 20_000 or len(shard) == 1
        found |= shard
    same(found, wanted(tensors))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_the_same_step_gives_the_same_bytes_and_the_digests_are_theirs(
    tmp_path: Path, tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    step = made_step(tmp_path, tensors)
    files = []
    for out in (tmp_path / "a", tmp_path / "b"):
        assert command(step, out, "--json", "--max-shard-size", "20KB") == 0
        files.append(json.loads(capsys.readouterr().out)["files"])
    assert files[0] == files[1]
    for file in files[0]:
        assert entry_of(tmp_path / "b" / file["name"], SMALL_CHUNK).xxh3_128 == file["xxh3_128"]


def test_numbers_are_aligned_as_readers_that_map_the_file_need_it(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    step = made_step(tmp_path, tensors)
    assert command(step, tmp_path / "out") == 0
    slots, _ = format_.read_header(tmp_path / "out" / "model.safetensors")
    assert all(slot.begin % format_.ITEM_BYTES[slot.dtype] == 0 for slot in slots.values())


@pytest.mark.parametrize("target", ["bf16", "fp16", "fp32"])
def test_floating_point_tensors_change_their_type_as_torch_does_it(
    tmp_path: Path, tensors: dict[str, torch.Tensor], target: str
) -> None:
    step = made_step(tmp_path, tensors)
    dtype = getattr(torch, export.DTYPES[target])
    assert command(step, tmp_path / "out", "--dtype", target) == 0
    floats = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    expected = {n: t.to(dtype) if t.dtype in floats else t for n, t in wanted(tensors).items()}
    same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_another_prefix_exports_something_else(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    step = made_step(tmp_path, tensors)
    assert command(step, tmp_path / "out", "--prefix", "optimizer.state.") == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert list(found) == ["embed.weight.exp_avg"]


def test_a_dry_run_shows_all_and_writes_nothing(
    tmp_path: Path, tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    step = made_step(tmp_path, tensors)
    before = sorted(os.listdir(tmp_path))
    assert command(step, tmp_path / "out", "--dry-run", "--dtype", "bf16") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in wanted(tensors))
    assert "embed.weight" in said
    assert "bfloat16" in said
    assert sorted(os.listdir(tmp_path)) == before


# --- pieces of several ranks ----------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64]


@some.composite
def cut_tensors(draw: some.DrawFn) -> tuple[torch.Tensor, list[list[int]], bool, int]:
    """A tensor, where it is cut along each dimension, whether pieces are transposed in memory, and bytes of a block."""
    shape = draw(some.lists(some.integers(1, 7), max_size=4))
    dtype = draw(some.sampled_from(DTYPES))
    cuts = [sorted({0, size, *draw(some.lists(some.integers(0, size), max_size=2))}) for size in shape]
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    if dtype is torch.complex64:
        tensor = torch.view_as_complex(torch.randn(*shape, 2))
    else:
        tensor = values.view(dtype).view(shape)
    return tensor, cuts, draw(some.booleans()), draw(some.sampled_from([1, 8, 40, 10_000]))


@pytest.mark.campaign
@settings(max_examples=150, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(cut=cut_tensors())
def test_any_grid_of_pieces_becomes_the_tensor_again(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[torch.Tensor, list[list[int]], bool, int]
) -> None:
    tensor, cuts, transposed, block_bytes = cut
    directory = tmp_path_factory.mktemp("pieces")
    pieces = []
    boxes = list(product(*(list(pairwise(cut)) for cut in cuts)))
    with open(directory / "__0_0.distcp", "wb") as file:
        for number, box in enumerate(reversed(boxes)):
            part = tensor[tuple(slice(low, high) for low, high in box)].clone()
            if transposed and number % 2 and part.dim() > 1:
                part = part.transpose(0, -1).contiguous().transpose(0, -1)
            start = file.tell()
            torch.save(part, file)
            extent = Extent("__0_0.distcp", start, file.tell() - start, False)  # noqa: FBT003
            pieces.append(Piece(tuple(low for low, _ in box), tuple(part.shape), extent))
    entry = TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(pieces))
    seal_step(directory, chunk_bytes=512)
    manifest = export.read_manifest(directory)
    with StepBytes(directory, manifest) as source:
        blocks = list(tensor_blocks(source, entry, block_bytes=block_bytes))
    assert b"".join(blocks) == bytes_of(tensor)
    assert all(len(block) <= max(block_bytes, tensor.element_size()) for block in blocks)


def sharded_story(rank: int, port: int, parent: Path) -> None:
    """One of two ranks: save tensors sharded along either dimension, export, load into sharded models."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    columns, rows = torch.randn(33, 17), torch.randn(33, 17)
    sharded = {
        "model.columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "model.rows": distribute_tensor(rows, mesh, [Shard(0)]),
    }
    step, out = parent / step_name(300), parent / "out"
    dcp.save(sharded, checkpoint_id=step)
    if rank == 0:
        assert len(list(step.glob("*.distcp"))) == 2
        assert command(seal_step(step), out) == 0
        same(safetensors.torch.load_file(out / "model.safetensors"), {"columns": columns, "rows": rows})
    dist.barrier()
    model = torch.nn.Module()
    model.columns = torch.nn.Parameter(distribute_tensor(torch.zeros(33, 17), mesh, [Shard(1)]))
    model.rows = torch.nn.Parameter(torch.zeros(33, 17))
    load_weights(model, out)
    assert torch.equal(model.columns.full_tensor(), columns)
    assert torch.equal(model.rows, rows)
    wide = torch.nn.Module()
    wide.rows = torch.nn.Parameter(torch.zeros(33, 17))  # sharded by FSDP, unevenly
    fully_shard(wide, mesh=mesh)
    load_weights(wide, out, strict=False)
    assert torch.equal(wide.rows.full_tensor(), rows)
    dist.destroy_process_group()
    leave(0)


def test_what_ranks_have_sharded_is_exported_whole_and_loads_into_sharded_models(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.trainer.test_export import sharded_story;"
        "sharded_story(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))"
    )
    port = str(reserve())
    ranks = [warm.Process([sys.executable, "-c", script, str(rank), port, str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_the_model_of_a_real_run_is_exported(uninterrupted: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    """Of two ranks with FSDP2, saved by the library itself; stock DCP is the judge."""
    newest = max((uninterrupted[0] / "checkpoints").glob("step_*"))
    assert command(newest, tmp_path / "out", "--max-shard-size", "100KB") == 0
    metadata = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    expected = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith("model.")
    }
    dcp.load(expected, checkpoint_id=newest)
    found: dict[str, torch.Tensor] = {}
    for path in format_.find_files(tmp_path / "out"):
        found |= safetensors.torch.load_file(path)
    same(found, wanted(expected))


# --- what is damaged ------------------------------------------------------------------------------


def test_any_flipped_byte_that_the_export_would_use_is_found_and_nothing_is_left(
    tmp_path: Path, tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    step = made_step(tmp_path, tensors)
    capsys.readouterr()
    for path in sorted(step.iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 9)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            code = command(step, tmp_path / "out")
            said = capsys.readouterr()
            if code == 0:  # a chunk of which nothing was needed: the optimizer's
                same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), wanted(tensors))
                (tmp_path / "out" / "model.safetensors").unlink()
                (tmp_path / "out").rmdir()
                assert path.suffix == ".distcp"
                assert at > len(data) * 0.4
            else:
                assert code == 41, (path, at)
                assert said.err.count("\n") == 1
        path.write_bytes(data)
    assert [path.name for path in tmp_path.iterdir()] == [step.name]


def test_a_truncated_file_and_a_missing_one_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    step = made_step(tmp_path, tensors)
    [data] = step.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1)
    assert command(step, tmp_path / "out") == 41
    assert data.name in capsys.readouterr().err
    data.unlink()
    assert command(step, tmp_path / "out") != 0
    assert data.name in capsys.readouterr().err


def test_the_pickle_beside_a_tensor_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/executed",)

    with open(tmp_path / "__0_0.distcp", "wb") as file:
        torch.save(Evil(), file)
    size = (tmp_path / "__0_0.distcp").stat().st_size
    piece = Piece((0,), (2,), Extent("__0_0.distcp", 0, size, False))  # noqa: FBT003
    seal_step(tmp_path)
    with StepBytes(tmp_path, export.read_manifest(tmp_path)) as source, pytest.raises(StoredError):
        list(tensor_blocks(source, TensorEntry("float32", (2,), (piece,))))
    assert not (tmp_path / "executed").exists()


def test_a_shape_that_reaches_beyond_its_data_is_refused(tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save(torch.zeros(2, 2), whole)
    with zipfile.ZipFile(whole) as honest, zipfile.ZipFile(tmp_path / "__0_0.distcp", "w") as lying:
        for name in honest.namelist():
            data = honest.read(name)
            lying.writestr(name, data.replace(b"K\x02K\x02\x86", b"K\x02K\x63\x86", 1))
    size = (tmp_path / "__0_0.distcp").stat().st_size
    piece = Piece((0, 0), (2, 99), Extent("__0_0.distcp", 0, size, False))  # noqa: FBT003
    seal_step(tmp_path)
    with (
        StepBytes(tmp_path, export.read_manifest(tmp_path)) as source,
        pytest.raises(StoredError, match="larger than"),
    ):
        list(tensor_blocks(source, TensorEntry("float32", (2, 99), (piece,))))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("--prefix", "weights."), 2, "they begin with model, optimizer"),
        (("--max-shard-size", "much"), 2, "is no size"),
        (("--dtype", "int4"), 2, "invalid choice"),
    ],
)
def test_what_cannot_be_exported_is_said(  # noqa: PLR0917 - fixtures
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    step = made_step(tmp_path, tensors)
    try:
        assert command(step, tmp_path / "out", *argv) == code
    except SystemExit as ended:
        assert ended.code == code  # noqa: PT017 - argparse's way
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_there_is_never_touched(
    tmp_path: Path, tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    step = made_step(tmp_path, tensors)
    out = tmp_path / "out"
    out.mkdir()
    assert command(step, out) == 0, "an empty directory may be there"
    before = (out / "model.safetensors").stat()
    assert command(step, out) == 2
    assert "is there already" in capsys.readouterr().err
    assert (out / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert command(step, tmp_path / "link") == 2


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = export.plan_export(made_step(tmp_path, tensors))
    monkeypatch.setattr(export, "SPARE_BYTES", 1 << 60)
    with pytest.raises(export.ExportError, match="bytes are free"):
        export.export(plan, tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 1


# --- killed at any moment -------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from stepkeeper_trainer.store import export
from tests.ports import reserve
from tests.trainer.weights import load_weights
left = int(sys.argv[3])
def watch(event, arguments):
    global left
    if event in {"open", "os.mkdir", "os.rename"} and ".export-" in str(arguments[0]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
plan = export.plan_export(Path(sys.argv[1]), shard_bytes_max=20_000)
sys.addaudithook(watch)
export.export(plan, Path(sys.argv[2]))
"""


@pytest.mark.campaign
def test_killed_at_any_moment_it_leaves_all_or_nothing_and_the_next_one_clears_up(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    step = made_step(tmp_path, tensors)
    parent = tmp_path / "outs"
    parent.mkdir()
    ends = []
    for left in range(20):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(step), str(parent / "out"), str(left)], timeout=60, check=False
        ).returncode
        ends.append(ended)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        assert not (parent / "out").exists()
        assert len(list(parent.iterdir())) <= 1, "what the one before left was cleared"
    assert len(ends) > 5, "several moments"
    assert ends[-1] == 0
    assert [path.name for path in parent.iterdir()] == ["out"]
    found: dict[str, torch.Tensor] = {}
    for path in format_.find_files(parent / "out"):
        found |= safetensors.torch.load_file(path)
    same(found, wanted(tensors))


def test_an_export_under_way_is_not_cleared_by_another(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    plan = export.plan_export(made_step(tmp_path, tensors), shard_bytes_max=20_000)

    def meanwhile(_bytes: int) -> None:
        nonlocal entered
        if not entered:
            entered = True
            with pytest.raises(export.ExportError, match="there already"):
                export.export(plan, tmp_path / "step_00000300")
            export.export(plan, tmp_path / "out2")
            export._clear_leftovers(tmp_path / "out")

    entered = False
    export.export(plan, tmp_path / "out", progress=meanwhile)
    assert entered
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "out2"))


def test_files_are_durable_before_the_name_is(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    step = made_step(tmp_path, tensors)
    log = tmp_path / "log"
    script = "import sys; from stepkeeper.cli.main import main; sys.exit(main(sys.argv[1:]))"
    traced = ["strace", "-f", "-y", "-e", "trace=fsync,rename,openat,write", "-o", str(log)]
    done = subprocess.run(
        [*traced, sys.executable, "-c", script, "checkpoints", "export", str(step), str(tmp_path / "out")],
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    calls = [
        line.split(maxsplit=1)[1]
        for line in log.read_text().splitlines()
        if ".out.export-" in line or str(tmp_path) in line
    ]
    order = [
        "write" if call.startswith("write(") and "model.safetensors" in call
        else "sync file" if call.startswith("fsync(") and "model.safetensors" in call
        else "rename" if call.startswith("rename(")
        else "sync directory" if call.startswith("fsync(") and ".export-" in call
        else "sync parent" if call.startswith("fsync(")
        else ""
        for call in calls
    ]  # fmt: skip
    steps = [what for what, _ in pairwise([*filter(None, order), ""])]
    unrepeated = [what for index, what in enumerate(steps) if index == 0 or what != steps[index - 1]]
    assert unrepeated == ["write", "sync file", "sync directory", "rename", "sync parent"]


@pytest.mark.campaign
def test_memory_stays_small_however_large_a_tensor_is(tmp_path: Path) -> None:
    big = torch.arange(100_000_000, dtype=torch.float32).view(10_000, 10_000)
    step = made_step(tmp_path, {"model.big": big, "model.small": torch.ones(4_000_000)}, chunk_bytes=CHUNK_BYTES)
    script = (
        "import sys; from pathlib import Path; from stepkeeper_trainer.store import export;"
        "export.export(export.plan_export(Path(sys.argv[1]), dtype='bf16'), Path(sys.argv[2]));"
        "assert 'torch' not in sys.modules;"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    began = time.monotonic()
    done = subprocess.run(  # its own high-water mark: `ru_maxrss` has our memory in it
        [sys.executable, "-c", script, str(step), str(tmp_path / "out")], timeout=240, capture_output=True, check=True
    )
    peak = int(done.stdout) * 1024
    print(f"peak {peak / 2**20:.0f} MiB, {400 / (time.monotonic() - began):.0f} MB/s")
    assert peak < 380 * 2**20
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("big")[1234], big[1234].bfloat16())


def test_the_command_line_needs_neither_torch_nor_numpy(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    step = made_step(tmp_path, tensors)
    script = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['safetensors'] = None\n"
        "from stepkeeper.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for number, more in enumerate(((), ("--dtype", "bf16"))):
        argv = ["checkpoints", "export", str(step), str(tmp_path / f"out{number}"), *more]
        subprocess.run([sys.executable, "-c", script, *argv], timeout=60, check=True)
    same(safetensors.torch.load_file(tmp_path / "out0" / "model.safetensors"), wanted(tensors))


# --- numbers --------------------------------------------------------------------------------------

EDGES = [
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF,
    0x00000001, 0x00007FFF, 0x00008000, 0x00018000, 0x00017FFF, 0x3F808000, 0x3F818000, 0x477FEFFF, 0x477FF000,
    0x477FE000, 0x387FC000, 0x387FE000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x7F7F8000,
]  # fmt: skip


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64", "float32"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float64"])
def test_numbers_are_rounded_as_torch_rounds_them(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(7)
    random = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator).to(torch.int32)
    edges = torch.tensor(EDGES, dtype=torch.int64).to(torch.int32)
    singles = torch.cat([random, edges]).view(torch.float32)
    values = singles.to(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    converters = [lambda data: format_.convert(data, source, target), export._converter(source, target)]
    for convert in converters:
        found = torch.frombuffer(bytearray(convert(bytearray(bytes_of(values)))), dtype=expected.dtype)
        nothing = expected.isnan()
        assert torch.equal(found.isnan(), nothing)
        assert bytes_of(found[~nothing]) == bytes_of(expected[~nothing])


# --- loading into a model -------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 4)
        self.second = torch.nn.Linear(4, 3).to(torch.bfloat16)
        self.register_buffer("seen", torch.tensor(7))


def exported(tmp_path: Path, model: torch.nn.Module, *more: str) -> Path:
    step = made_step(tmp_path, {f"model.{name}": value for name, value in model.state_dict().items()})
    assert command(step, tmp_path / "out", *more) == 0
    return tmp_path / "out"


def test_what_was_exported_is_loaded_into_a_model_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    out = exported(tmp_path, model, "--max-shard-size", "60")
    assert len(list(out.glob("*.safetensors"))) > 1
    load_weights(other, out)
    same(dict(other.state_dict()), dict(model.state_dict()))


def test_another_writers_file_loads_too(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "theirs.safetensors")
    load_weights(other, tmp_path / "theirs.safetensors")
    same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_model_that_does_not_fit_is_named_and_not_touched(tmp_path: Path) -> None:
    out = exported(tmp_path, Net())
    wider = Net()
    wider.first = torch.nn.Linear(6, 4)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(ResumeError, match=r"first\.weight has shape \[4, 5\], the model's \[4, 6\]"):
        load_weights(wider, out)
    same(dict(wider.state_dict()), before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    safetensors.torch.save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def _with_header(path: Path, header: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + length :])


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"weight":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}',  # bytes that belong to nothing
        '{"weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,36]}}',
        '{"weight":{"dtype":"F32","shape":[3,3],"data_offsets":[0,24]},"bias":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}}',
        '{"weight":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},"bias":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}}',
        '{"weight":{"dtype":"F32","shape":[-3,-2],"data_offsets":[0,24]},"bias":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}}',
        '{"weight":{"dtype":"Q1","shape":[3,2],"data_offsets":[0,24]},"bias":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}}',
        '{"weight":{"dtype":"U8","shape":[36],"data_offsets":[0,36]},"weight":{"dtype":"U8","shape":[36],"data_offsets":[0,36]}}',
        '{"weight":7}',
        "[" * 10_000,
    ],
)
def test_a_header_that_lies_is_refused(file: Path, header: str) -> None:
    _with_header(file, header)
    with pytest.raises(DamagedError, match=r"m\.safetensors"):
        load_weights(torch.nn.Linear(2, 3), file)


def test_truncated_files_and_indexes_that_lead_outside_are_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for size in (0, 4, 8, 60, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(DamagedError):
            load_weights(torch.nn.Linear(2, 3), file)
    index = tmp_path / "model.safetensors.index.json"
    for name in ('"../secret.safetensors"', '"/etc/passwd"', "7", '""'):
        index.write_text(f'{{"weight_map":{{"weight":{name}}}}}')
        with pytest.raises(DamagedError, match=r"no file beside it"):
            load_weights(torch.nn.Linear(2, 3), tmp_path)
    index.write_text('{"weight_map":{"weight":"gone.safetensors"}}')
    with pytest.raises(DamagedError, match=r"gone\.safetensors: cannot be read"):
        load_weights(torch.nn.Linear(2, 3), tmp_path)
