"""The arena: what is copied, where it lies, and what it costs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper_trainer.errors import StateError
from stepkeeper_trainer.save.snapshot import MANY
from stepkeeper_trainer.save.staging import PAGE_BYTES, Staging, lay_out
from stepkeeper_trainer.save.writer import (
    DIRECT_BYTES_MIN,
    SEAL_BYTES,
    WRITE_BYTES,
    FilePlan,
    places_in_file,
    seal,
    write_file,
)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.rand(7, 5),
        "b": torch.rand(6, 4).t(),
        "c": torch.tensor(3),
        "d": torch.zeros(0, 2),
        "e": torch.rand(300, dtype=torch.float64).to(torch.bfloat16),
        "f": torch.nn.Parameter(torch.rand(9)),
    }


def staged(staging: Staging, name: str) -> torch.Tensor:
    assert staging.layout is not None
    piece = staging.layout.pieces[name]
    assert list(seal(staging.arena.view, [piece.extent])) == [piece.end]
    return torch.load(io.BytesIO(bytes(staging.arena.view[piece.start : piece.end])), weights_only=True)


def taken(tensors: dict[str, torch.Tensor], groups: list[list[str]] | None = None) -> Staging:
    staging = Staging(device=False)
    staging.take(tensors)
    staging.regroup(groups if groups is not None else [list(tensors)])
    return staging


def test_what_is_staged_is_the_state_at_that_moment() -> None:
    tensors = state()
    staging = taken(tensors)
    staging.copy(tensors)
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()

    for name, value in expected.items():
        assert torch.equal(staged(staging, name), value), name
        assert not staging.arena.tensor.requires_grad


def test_many_small_tensors_are_copied_by_several_threads_and_all_arrive() -> None:
    torch.manual_seed(0)
    tensors = {str(n): torch.rand(1 + n % 50) for n in range(3 * MANY)}
    tensors["large"] = torch.rand(100_000)
    staging = taken(tensors)
    before = set(threading.enumerate())

    staging.copy(tensors)

    assert set(threading.enumerate()) <= before
    for name in ("0", "1", str(MANY), str(3 * MANY - 1), "large"):
        assert torch.equal(staged(staging, name), tensors[name])
    for _, place in zip(range(100), staging._places, strict=False):
        assert place.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s | {"a": torch.rand(7, 6)},
        lambda s: s | {"a": s["a"].double()},
        lambda s: s | {"new": torch.rand(1)},
        lambda s: {name: s[name] for name in list(s)[:-1]},
        lambda s: {name: s[name] for name in reversed(list(s))},
    ],
)
def test_another_layout_is_noticed(change) -> None:
    staging = taken(state())
    assert staging.fits(state(1)), "other numbers are no other layout"

    assert not staging.fits(change(state()))
    assert not staging.copy_if_it_fits(change(state()))
    assert staging.copy_if_it_fits(state(2))
    assert torch.equal(staged(staging, "a"), state(2)["a"])


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tensors_are_looked_at_while_they_are_copied(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = {str(n): torch.rand(1 + n % 50) for n in range(3 * MANY)}
        staging = taken(tensors)

        assert staging.copy_if_it_fits({name: tensor + 1 for name, tensor in tensors.items()})
        assert torch.equal(staged(staging, "77"), tensors["77"] + 1)
        for change in ({"77": torch.rand(3)}, {"77": tensors["77"].double()}, {"more": torch.rand(1)}):
            assert not staging.copy_if_it_fits(tensors | change)
        assert staging.copy_if_it_fits(tensors)
        for name in ("0", "1", str(MANY), str(3 * MANY - 1)):
            assert torch.equal(staged(staging, name), tensors[name])
    finally:
        torch.set_num_threads(before)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"embedding is a Tensor, torch\.sparse_coo"):
        taken({"embedding": torch.eye(3).to_sparse()})


def test_the_arena_is_kept_while_the_state_fits_and_holds_one_copy() -> None:
    tensors = {str(n): torch.rand(1 << 16) for n in range(40)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    staging = taken(tensors)
    pointer = staging.arena.tensor.data_ptr()

    for _ in range(3):
        staging.copy(tensors)
        staging.regroup([list(tensors)[20:], list(tensors)[:20]])

    assert staging.arena.tensor.data_ptr() == pointer
    assert staging.arena.bytes < 1.02 * size


def test_nothing_of_an_older_layout_is_left_in_the_gaps() -> None:
    tensors = {str(n): torch.full((n * 37 % 101 + 1,), 7, dtype=torch.uint8) for n in range(50)}
    staging = taken(tensors)
    staging.copy(tensors)
    staging.regroup([list(tensors)[::2], list(tensors)[1::2]])
    assert staging.layout is not None
    end = 0
    for group in staging.layout.groups:
        for piece in group:
            assert not any(staging.arena.view[end : piece.start])
            end = piece.end


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    chosen=st.sets(st.integers(0, 11)),
    cuts=st.sets(st.integers(1, 11), max_size=3),
)
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_any_choice_of_tensors_is_written_as_a_file_of_whole_archives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chosen: set[int], cuts: set[int]
) -> None:
    """Of what is staged a rank may write any part: the others write the rest."""
    tensors = {str(n): torch.arange(size, dtype=torch.int16) + n for n, size in enumerate(sizes)}
    names = list(tensors)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(names)), len(names)]
    staging = taken(tensors, [names[a:b] for a, b in itertools.pairwise(bounds)])
    staging.copy(tensors)
    assert staging.layout is not None
    pieces = tuple(staging.layout.pieces[name] for n, name in enumerate(names) if n in chosen)
    directory = tmp_path_factory.mktemp("plan")

    extents = tuple(piece.extent for piece in pieces)

    written = write_file(directory, staging.arena.view, FilePlan("f", extents), lambda: None)

    data = (directory / "f").read_bytes()
    assert written.entry.bytes == len(data)
    end = 0
    for piece, (start, length) in zip(pieces, places_in_file(extents), strict=True):
        assert start >= end
        end = start + length
        assert torch.equal(torch.load(io.BytesIO(data[start:end]), weights_only=True), tensors[piece.name])
    assert end == len(data)


@pytest.mark.parametrize("extra", [0, 1, PAGE_BYTES, WRITE_BYTES + 5])
def test_what_goes_past_the_page_cache_is_the_same_file(
    tmp_path: Path, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(extra)
    sizes = [*range(0, 2000, 13), SEAL_BYTES, SEAL_BYTES + 1, DIRECT_BYTES_MIN + extra]
    tensors = {str(n): torch.randint(0, 256, (size,), dtype=torch.uint8) for n, size in enumerate(sizes)}
    staging = taken(tensors, [["1"], [name for name in tensors if name != "1"]])
    staging.copy(tensors)
    assert staging.layout is not None
    extents = tuple(piece.extent for piece in staging.layout.groups[1])
    sync, direct = os.fsync, []

    def watched(descriptor: int) -> None:
        direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)

    through = write_file(tmp_path, staging.arena.view, FilePlan("through", extents), lambda: None)
    past = write_file(tmp_path, staging.arena.view, FilePlan("past", extents), lambda: None, direct=True)

    assert direct == [False, has_direct(tmp_path)]
    data = (tmp_path / "past").read_bytes()
    assert data == (tmp_path / "through").read_bytes()
    assert past.entry == through.entry
    assert past.entry.xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def has_direct(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        (directory / "probe").unlink(missing_ok=True)
    return True


@pytest.mark.parametrize("refusal", ["open", "write", "short"])
def test_where_direct_writes_are_refused_or_cut_short_ordinary_ones_follow(
    tmp_path: Path, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.randint(0, 256, (2 * WRITE_BYTES + 77,), dtype=torch.uint8)}
    staging = taken(tensors)
    staging.copy(tensors)
    assert staging.layout is not None
    plan = FilePlan("f", tuple(piece.extent for piece in staging.layout.groups[0]))
    write, control = os.write, fcntl.fcntl
    refused: list[int] = []

    def refusing_write(descriptor: int, data: memoryview) -> int:
        flags = control(descriptor, fcntl.F_GETFL)
        if refusal == "open" or refused or not flags & os.O_DIRECT:
            return write(descriptor, data)
        refused.append(descriptor)
        if refusal == "write":
            raise OSError(errno.EINVAL, "Invalid argument")
        control(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        count = write(descriptor, data[: PAGE_BYTES + 100])
        control(descriptor, fcntl.F_SETFL, flags)
        return count

    def refusing_control(descriptor: int, command: int, flags: int = 0) -> int:
        if refusal == "open" and flags & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(os, "write", refusing_write)
    monkeypatch.setattr(fcntl, "fcntl", refusing_control)

    written = write_file(tmp_path, staging.arena.view, plan, lambda: None, direct=True)

    assert refused
    assert written.entry.xxh3_128 == xxhash.xxh3_128_hexdigest((tmp_path / "f").read_bytes())


def test_each_group_begins_on_a_page_and_archives_are_aligned() -> None:
    layout = lay_out({str(n): (torch.uint8, (n,)) for n in range(20)}, [["3", "1"], ["2"], []])

    assert [group[0].start % PAGE_BYTES for group in layout.groups if group] == [0, 0]
    assert set(layout.pieces) == {"1", "2", "3"}
    assert all(piece.data % 64 == 0 for piece in layout.pieces.values() if piece.frame.data_bytes)


class FakeGpu:
    """Stands for the driver where there is none: notes on which device memory is registered."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.current = code, 0
        self.registered_on: list[int] = []

    def cudart(self) -> FakeGpu:
        return self

    @contextlib.contextmanager
    def device(self, device: torch.device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def cudaHostRegister(self, _pointer: int, _size: int, _flags: int) -> int:  # noqa: N802
        self.registered_on.append(self.current)
        return self.code

    def cudaHostUnregister(self, _pointer: int) -> int:  # noqa: N802
        return 0


class OnGpu(torch.Tensor):
    """A tensor that says that a GPU has it."""

    is_cuda = True
    device = torch.device("cuda", 3)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_pinned_by_the_gpu_that_has_the_tensors_and_what_cannot_be_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A thread has a current GPU of its own, the first: each rank of a node would make a context there."""
    gpu = FakeGpu(code)
    for name in ("cudart", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    tensors = {"cpu": torch.rand(3), "w": torch.rand(1000).as_subclass(OnGpu)}
    staging = Staging(device=True)
    staging.take(tensors)

    with caplog.at_level("WARNING"):
        staging.regroup([list(tensors)])

    assert gpu.registered_on == [3]
    assert ("staging_not_pinned" in caplog.text) == (code != 0)
