"""Snapshots of what a device holds: what is copied where, in which order, and what is held and released.

Here the host stands for the device; tests/trainer/test_gpu.py does the same on a real one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from stepkeeper_trainer.save.replicas import InPlace
from stepkeeper_trainer.save.snapshot import (
    CHUNK_BYTES,
    GRAIN_BYTES,
    MARGIN_BYTES,
    PIECE_BYTES,
    Chunk,
    Devices,
    Snapshot,
    allowed_during_capture,
    choose,
    divide,
    spare,
)
from stepkeeper_trainer.state import random_state
from tests.trainer.host_lane import HostLane

GIB = 1024**3
PLENTY = 64 * GIB
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


# --- what is copied beside -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 200)), max_size=60))
def test_each_tensor_is_in_one_chunk_of_its_type_and_only_a_large_one_exceeds_the_limit(
    kinds: list[tuple[torch.dtype, int]],
) -> None:
    chunks = divide(kinds, chunk_bytes=256)

    assert sorted(number for chunk in chunks for number in chunk.numbers) == list(range(len(kinds)))
    for chunk in chunks:
        assert {kinds[number][0] for number in chunk.numbers} == {chunk.dtype}
        assert chunk.count == sum(kinds[number][1] for number in chunk.numbers)
        assert len(chunk.numbers) == 1 or chunk.count * chunk.dtype.itemsize <= 256
    for dtype in DTYPES:
        sizes = [kinds[n][1] for chunk in chunks if chunk.dtype is dtype for n in chunk.numbers]
        assert sizes == sorted(sizes), "the smallest first"


def test_few_chunks_hold_many_tensors() -> None:
    many = [(torch.float32, 2**18)] * 20_000  # 1 MiB each
    large = [(torch.bfloat16, 2**25)] * 300  # 64 MiB each

    assert len(divide(many)) == -(-20_000 // 256)
    assert len(divide(large)) == 300 // 4
    assert len(divide([(torch.float32, CHUNK_BYTES)])) == 1, "four times a chunk, in one of its own"


@given(st.lists(st.integers(1, 40 * GRAIN_BYTES), max_size=20), st.integers(0, 100 * GRAIN_BYTES))
def test_what_is_copied_beside_never_takes_more_than_the_device_can_spare(sizes: list[int], bytes_: int) -> None:
    chunks = [Chunk(torch.uint8, (number,), size) for number, size in enumerate(sizes)]

    beside, directly = choose(chunks, bytes_)

    assert sorted([*beside, *directly], key=lambda chunk: chunk.numbers) == chunks
    assert sum(chunk.bytes for chunk in beside) <= bytes_
    left = bytes_ - sum(chunk.bytes for chunk in beside)
    assert all(chunk.bytes > left for chunk in directly), "nothing goes through training's stream that would have fit"


@pytest.mark.parametrize(
    ("free", "total", "kept", "expected"),
    [
        pytest.param(40 * GIB, 80 * GIB, 0, 36 * GIB, id="a twentieth of a large device is left"),
        pytest.param(5 * GIB, 8 * GIB, 0, 5 * GIB - MARGIN_BYTES, id="a gibibyte of a small one"),
        pytest.param(MARGIN_BYTES - 1, 16 * GIB, 0, 0, id="nothing to spare"),
        pytest.param(0, 80 * GIB, 0, 0, id="nothing free"),
        pytest.param(4 * GIB, 80 * GIB, 20 * GIB, 20 * GIB, id="what the snapshot before has left is used again"),
    ],
)
def test_a_snapshot_takes_only_memory_that_training_does_not_have(
    free: int, total: int, kept: int, expected: int
) -> None:
    assert spare(free=free, total=total, kept=kept) == expected


# --- copying -------------------------------------------------------------------------------------------------------


def state() -> list[torch.Tensor]:
    torch.manual_seed(0)
    numbers = torch.randint(0, 200, (64,), dtype=torch.uint8)
    return [
        torch.rand(7, 5),
        torch.rand(6, 4).t(),
        torch.tensor(3),
        torch.nn.Parameter(torch.rand(9)),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(300).to(torch.bfloat16),
        torch.view_as_complex(torch.rand(8, 2)).conj(),
        torch.rand(PIECE_BYTES // 4096 + 3, 2048).t(),  # gathered in pieces where it is not copied within
        numbers.view(torch.uint16),  # of a type that torch copies one by one
        numbers.view(torch.float8_e4m3fn),
    ]


def places_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def same(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(
            place.view(torch.uint8) if place.dim() else place, other.view(torch.uint8) if other.dim() else other
        )
        for place, other in zip(places, (each.resolve_conj().contiguous() for each in tensors), strict=True)
    )


@pytest.mark.parametrize("spare_bytes", [0, 6 * GRAIN_BYTES, PLENTY], ids=["nothing", "some", "all"])
@torch.no_grad()
def test_every_tensor_arrives_however_much_memory_the_device_has(spare_bytes: int) -> None:
    tensors = state()
    places, lane = places_of(tensors), HostLane(spare_bytes)

    Snapshot(lane, places).take(tensors, lambda: None)

    assert same(places, tensors)
    assert len(lane.buffers) == {0: 0, 6 * GRAIN_BYTES: 5, PLENTY: 6}[spare_bytes]
    assert all(buffer() is None for buffer in lane.buffers), "the device has its memory back"


@pytest.mark.parametrize("memory", [0, 3 * GIB // 1024, 1], ids=["at once", "after some", "of one byte"])
@torch.no_grad()
def test_where_the_device_has_less_memory_than_it_said_the_rest_goes_to_the_host_at_once(memory: int) -> None:
    tensors = state()
    places, lane = places_of(tensors), HostLane(PLENTY, memory=memory)

    Snapshot(lane, places).take(tensors, lambda: None)

    assert same(places, tensors)
    assert (len(lane.buffers) > 0) == (memory > 1)


@torch.no_grad()
def test_copies_within_the_device_come_first_and_the_way_to_the_host_is_training_s_until_it_goes_on() -> None:
    tensors = [torch.rand(10), torch.rand(GRAIN_BYTES).double()]
    places, lane = places_of(tensors), HostLane(GRAIN_BYTES)
    seen: list[bool] = []

    def look() -> None:
        lane.order.append("look")
        seen.extend(same([place], [tensor]) for place, tensor in zip(places, tensors, strict=True))

    mark = Snapshot(lane, places).take(tensors, look)
    mark.wait()

    assert lane.order == [
        "buffer",
        "look",
        "beside follows training",
        "beside",
        "mark 0",
        "training",
        "the host waits for mark 0",
    ]
    assert seen == [False, True], "the large one has gone to the host, the small one waits on the device"
    assert same(places, tensors)


@torch.no_grad()
def test_after_an_error_no_copy_goes_on_to_memory_that_is_used_again() -> None:
    tensors = state()
    lane = HostLane(PLENTY)

    def look() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        Snapshot(lane, places_of(tensors)).take(tensors, look)

    assert lane.order[-3:] == ["beside follows training", "mark 0", "the host waits for mark 0"]
    assert all(buffer() is None for buffer in lane.buffers)


# --- of all devices ------------------------------------------------------------------------------------------------


def devices(lane: HostLane | None, tensors: dict[str, torch.Tensor], *, overlap: bool = False) -> Devices:
    found = Devices(lambda _device: lane, overlap=overlap)
    found.place(list(tensors), places_of(list(tensors.values())))
    return found


@torch.no_grad()
def test_what_the_host_holds_is_copied_at_once() -> None:
    tensors = dict(enumerate_names(state()))
    found = devices(None, tensors)

    found.copy(list(tensors.values()), InPlace(), {})

    assert same(found._places, list(tensors.values()))
    assert found._marks == ()


@torch.no_grad()
def test_in_training_s_order_nothing_waits_and_nothing_of_the_script_is_held() -> None:
    """A script that offloads its weights right after a step gets the memory of the device back."""
    tensors = {"w": torch.nn.Parameter(torch.rand(1000))}
    expected, storage = tensors["w"].clone(), StorageWeakRef(tensors["w"].untyped_storage())
    lane = HostLane(PLENTY)
    found = devices(lane, tensors)

    found.copy(list(tensors.values()), InPlace(), {})
    tensors["w"].data = torch.zeros(1000)

    assert storage.expired()
    found.hold_training()
    found.finish()
    assert lane.order[-1] == "the host waits for mark 0"
    assert not any(line.startswith("training waits") for line in lane.order)
    assert torch.equal(found._places[0], expected)


@torch.no_grad()
def test_with_overlap_what_is_copied_is_held_until_it_is_and_training_waits_where_it_says_so() -> None:
    tensors = {"w": torch.nn.Parameter(torch.rand(1000)), "buffer": torch.rand(10)}
    storage = StorageWeakRef(tensors["w"].untyped_storage())
    lane = HostLane()
    found = devices(lane, tensors, overlap=True)

    found.copy(list(tensors.values()), InPlace(), {}, frozenset({"buffer"}))
    tensors["w"].data = torch.zeros(1000)

    assert not storage.expired(), "the copy may be going on"
    order = ["beside follows training", "beside", "mark 0", "mark 1", "training", "training waits for mark 0"]
    assert lane.order == order
    lane.order.clear()
    found.hold_training()
    found.finish()
    assert lane.order == ["training waits for mark 1", "the host waits for mark 1"]
    assert storage.expired()
    lane.order.clear()
    found.hold_training()
    found.finish()
    assert lane.order == []


@torch.no_grad()
def test_an_error_of_a_device_is_raised_once_and_the_next_save_begins_anew() -> None:
    tensors = {"w": torch.rand(10)}
    lane = HostLane(PLENTY)
    found = devices(lane, tensors, overlap=True)
    found.copy(list(tensors.values()), InPlace(), {})
    lane.marks[-1].error = RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        found.finish()

    tensors["w"] += 1
    found.copy(list(tensors.values()), InPlace(), {})
    found.finish()
    assert torch.equal(found._places[0], tensors["w"])


@torch.no_grad()
def test_a_save_that_nobody_finished_is_waited_for_before_its_places_are_used_again() -> None:
    tensors = {"w": torch.rand(10)}
    lane = HostLane(PLENTY)
    found = devices(lane, tensors)
    found.copy(list(tensors.values()), InPlace(), {})
    lane.order.clear()

    found.copy(list(tensors.values()), InPlace(), {})

    assert lane.order[0] == "the host waits for mark 0"


def enumerate_names(tensors: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(str(number), tensor) for number, tensor in enumerate(tensors)]


# --- threads and generators ----------------------------------------------------------------------------------------


def test_a_thread_may_wait_for_a_device_whether_or_not_there_is_a_driver() -> None:
    with allowed_during_capture():
        pass
    with pytest.raises(RuntimeError, match="lost"), allowed_during_capture():
        raise RuntimeError("lost")


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n - 1))))
def test_a_generator_is_found_again_by_its_place_after_the_current_gpu(where: tuple[int, int, int]) -> None:
    count, current, device = where

    name = random_state.name_of(device, current, count)

    assert random_state.device_of(name, current, count) == device
    assert (name == "cuda") == (device == current), "as checkpoints have always named it"


def test_a_rank_that_gets_other_gpus_of_its_node_goes_on_with_its_own_generators() -> None:
    assert random_state.name_of(5, 4, 8) == "cuda+1"
    assert random_state.device_of("cuda+1", 0, 8) == 1
    assert random_state.device_of("cuda+1", 0, 1) is None, "it sees one GPU only"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_a_checkpoint_that_was_made_on_gpus_restores_the_other_generators_where_there_is_none() -> None:
    found = random_state.collect() | {name: torch.zeros(16, dtype=torch.uint8) for name in ("cuda", "cuda+1")}
    expected = torch.rand(3)

    random_state.restore(found)

    assert torch.equal(torch.rand(3), expected)
