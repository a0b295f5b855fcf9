"""The arena: what is copied, where it lies, and what it costs."""

from __future__ import annotations

import io
import itertools
import threading

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper_trainer.errors import StateError
from stepkeeper_trainer.staging import MANY, PAGE_BYTES, Staging, lay_out
from stepkeeper_trainer.writer import Sheet, extents, write_sheet


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
    staging.seal([piece])
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
    before = threading.active_count()

    staging.copy(tensors)

    assert threading.active_count() == before
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


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"embedding is torch\.sparse_coo"):
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
    directory = tmp_path_factory.mktemp("sheet")

    written = write_sheet(directory, staging, Sheet("f", pieces), lambda: None)

    data = (directory / "f").read_bytes()
    assert written.entry.bytes == len(data)
    assert written.extents == extents(pieces)
    end = 0
    for piece, (start, length) in zip(pieces, written.extents, strict=True):
        assert start >= end
        end = start + length
        assert torch.equal(torch.load(io.BytesIO(data[start:end]), weights_only=True), tensors[piece.name])
    assert end == len(data)


def test_each_group_begins_on_a_page_and_archives_are_aligned() -> None:
    layout = lay_out({str(n): (torch.uint8, (n,)) for n in range(20)}, [["3", "1"], ["2"], []])

    assert [group[0].start % PAGE_BYTES for group in layout.groups if group] == [0, 0]
    assert set(layout.pieces) == {"1", "2", "3"}
    assert all(piece.data % 64 == 0 for piece in layout.pieces.values() if piece.frame.data_bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_run_beside_it_and_hold_what_was_there() -> None:
    tensors = {"model.w": torch.rand(1 << 24, device="cuda"), "model.buffer": torch.rand(10, device="cuda")}
    staging = Staging(device=True)
    staging.take(tensors)
    staging.regroup([list(tensors)])
    expected = {name: tensor.clone() for name, tensor in tensors.items()}

    staging.copy(tensors, frozenset({"model.buffer"}))
    staging.wait_before_change()
    for tensor in tensors.values():
        tensor.zero_()
    staging.finish()

    for name, value in expected.items():
        assert torch.equal(staged(staging, name), value.cpu())
