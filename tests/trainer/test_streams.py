"""What a GPU's streams are given, and in which order, with a fake of `torch.cuda` where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from stepkeeper_trainer.save import snapshot
from stepkeeper_trainer.save.replicas import InPlace
from stepkeeper_trainer.save.snapshot import GRAIN_BYTES, CudaLane, Devices, cuda_lane

MIB, GIB = 1024**2, 1024**3
HOST = torch.device("cpu")


class FakeCuda:
    """Stands for the driver: `order` is what the streams were given."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.free, self.unused, self.flushes = 0, 0, 0
        self.capturing = False
        self.training = FakeStream(self, "training")

    def Stream(self, _device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, "beside")

    def Event(self, *, blocking: bool) -> FakeEvent:  # noqa: N802
        assert blocking, "who waits for the device takes no core meanwhile"
        return FakeEvent(self)

    def current_stream(self, _device: torch.device | None = None) -> FakeStream:
        return self.training

    @contextlib.contextmanager
    def stream(self, _stream: FakeStream) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, _device: torch.device) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return self.free, 16 * GIB

    def memory_stats_as_nested_dict(self, _device: torch.device) -> dict[str, object]:
        return {
            "reserved_bytes": {"all": {"current": 8 * GIB + self.unused}},
            "active_bytes": {"all": {"current": 8 * GIB}},
            "num_alloc_retries": self.flushes,
        }


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.order.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.order.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.name = cuda, ""

    def record(self, stream: FakeStream) -> None:
        self.name = f"event {1 + sum(line.startswith('event') for line in self.cuda.order)}"
        self.cuda.order.append(f"{self.name} on {stream.name}")

    def synchronize(self) -> None:
        self.cuda.order.append(f"the host waits for {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "Stream", "Event", "current_stream", "stream", "device", "mem_get_info", "memory_stats_as_nested_dict",
        "is_current_stream_capturing",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    copy = torch._foreach_copy_

    def noted(places: list[torch.Tensor], tensors: list[torch.Tensor], **how: bool) -> None:
        where = "to the host" if how.get("non_blocking") else "within the device"
        fake.order.append(f"{[tensor.numel() for tensor in tensors]} {where}")
        copy(places, tensors, **how)

    def record_stream(_tensor: torch.Tensor, stream: FakeStream) -> None:
        fake.order.append(f"a buffer is used on {stream.name}")

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return fake


def devices(tensors: dict[str, torch.Tensor], *, overlap: bool = False) -> Devices:
    lane = CudaLane(HOST)
    found = Devices(lambda _device: lane, overlap=overlap)
    found.place(list(tensors), [torch.empty_like(tensor) for tensor in tensors.values()])
    return found


@torch.no_grad()
def test_all_that_reads_the_tensors_is_in_training_s_stream(cuda: FakeCuda) -> None:
    tensors = {"w": torch.rand(10), "m": torch.rand(GRAIN_BYTES).double()}
    cuda.free = snapshot.MARGIN_BYTES + GRAIN_BYTES
    found = devices(tensors)

    found.copy(list(tensors.values()), InPlace(), {})
    found.hold_training()
    cuda.order.append("training goes on")
    found.finish()

    assert cuda.order == [
        "training waits for beside",  # nothing still reads the memory of the buffer
        "a buffer is used on training",
        "[10] within the device",
        f"[{GRAIN_BYTES}] to the host",
        "beside waits for training",
        "[10] to the host",  # beside
        "event 1 on beside",
        "training goes on",
        "the host waits for event 1",
    ]
    assert all(torch.equal(place, tensor) for place, tensor in zip(found._places, tensors.values(), strict=True))


@torch.no_grad()
def test_with_overlap_the_next_forward_waits_for_buffers_only_and_the_optimizer_for_everything(cuda: FakeCuda) -> None:
    tensors = {"w": torch.rand(1000), "buffer": torch.rand(10), "m": torch.rand(2000)}
    found = devices(tensors, overlap=True)

    found.copy(list(tensors.values()), InPlace(), {}, frozenset({"buffer"}))
    cuda.order.append("forward")
    found.hold_training()
    cuda.order.append("optimizer")
    found.finish()

    assert cuda.order == [
        "beside waits for training",
        "[10] to the host",
        "event 1 on beside",
        "[1000, 2000] to the host",
        "event 2 on beside",
        "training waits for event 1",
        "forward",
        "training waits for event 2",
        "optimizer",
        "the host waits for event 2",
    ]


@torch.no_grad()
def test_an_optimizer_step_that_is_captured_waits_for_nothing(cuda: FakeCuda) -> None:
    """It is not run now, and waiting for what is not captured would break the capture."""
    tensors = {"w": torch.rand(1000)}
    found = devices(tensors, overlap=True)
    found.copy(list(tensors.values()), InPlace(), {})
    cuda.order.clear()

    cuda.capturing = True
    found.hold_training()
    assert cuda.order == []

    cuda.capturing = False
    found.hold_training()
    assert cuda.order == ["training waits for event 2"]


def test_what_the_allocator_keeps_of_one_snapshot_serves_the_next(cuda: FakeCuda) -> None:
    lane = CudaLane(HOST)
    cuda.free = 4 * GIB
    assert lane.spare_bytes() == 3 * GIB
    lane.buffer(512 * MIB, torch.uint8)

    cuda.free, cuda.unused = cuda.free - 512 * MIB, 512 * MIB
    assert lane.spare_bytes() == 3 * GIB


@pytest.mark.parametrize(("unused", "flushes"), [(0, 0), (GIB, 1)], ids=["empty_cache()", "training ran short"])
def test_what_the_allocator_has_given_back_since_is_not_counted_twice(
    cuda: FakeCuda, unused: int, flushes: int
) -> None:
    lane = CudaLane(HOST)
    cuda.free = 4 * GIB
    lane.spare_bytes()
    lane.buffer(512 * MIB, torch.uint8)

    cuda.unused, cuda.flushes = unused, flushes
    assert lane.spare_bytes() == 3 * GIB


@pytest.mark.usefixtures("cuda")
def test_only_gpus_have_streams() -> None:
    assert cuda_lane(HOST) is None
    assert isinstance(cuda_lane(torch.device("cuda", 1)), CudaLane)
