"""On a real GPU: what a script does right after a step changes no byte of what is saved, and a resume is exact.

One process and one GPU; skipped where there is none.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.save import snapshot
from stepkeeper_trainer.save.replicas import Hash, hash_bytes, hash_rows
from stepkeeper_trainer.save.staging import Staging
from stepkeeper_trainer.state import random_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("one_process"),
]

WIDTH = 4096  # of a layer: 64 MiB, which take the device a millisecond on their way to the host
SAVED, STEPS = 3, 6
NOTHING_SPARE = 1 << 50


def manage(model: torch.nn.Module, optimizer: torch.optim.Optimizer, run_dir: Path, **options: Any) -> Any:
    """Make what a script makes; the only place here that knows how."""
    from stepkeeper_trainer import CheckpointManager  # noqa: PLC0415

    state = {"model": model, "optimizer": optimizer}
    return CheckpointManager(state=state, run_dir=run_dir, every=SAVED, **options)


def make_model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH)
    ).cuda()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    batch = torch.rand(32, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a copy of all that is saved of them, by the names in a checkpoint."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def saved(run_dir: Path, like: dict[str, torch.Tensor], step: int = SAVED) -> dict[str, torch.Tensor]:
    """Read tensors of a step as torch itself reads them."""
    found = {name: torch.full_like(tensor, 77) for name, tensor in like.items()}
    dcp.load(found, checkpoint_id=run_dir / "checkpoints" / f"step_{step:08d}", no_dist=True)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.fixture(params=["within the device", "straight to the host"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a tensor: with memory of the device to spare, and without."""
    if request.param == "straight to the host":
        monkeypatch.setattr(snapshot, "MARGIN_BYTES", NOTHING_SPARE)
    return request.param


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- changes right after a step ------------------------------------------------------------------------------------


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(-1)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(-2)


def swap_data(model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """What was there is freed, and its memory is written again at once."""
    for parameter in model.parameters():
        shape = parameter.shape
        parameter.data = torch.empty(0, device="cuda")
        parameter.data = torch.full(shape, -3.0, device="cuda")


def evaluate_with_average(model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            average = parameter * 0.5
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)


def offload(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.to("cpu")
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    torch.cuda.empty_cache()
    torch.full((WIDTH, WIDTH, 8), -4.0, device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-4)


@pytest.mark.parametrize(
    "change", [fill, swap_data, evaluate_with_average, offload], ids=lambda change: change.__name__
)
@pytest.mark.usefixtures("way")
def test_what_a_script_does_right_after_a_step_is_not_in_what_was_saved(
    change: Callable[[torch.nn.Module, torch.optim.Optimizer], None], tmp_path: Path
) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = manage(model, optimizer, tmp_path, total_steps=SAVED)
    manager.resume()
    for step in range(1, SAVED + 1):
        train_step(model, optimizer, step)
        if step == SAVED:
            expected = tensors_of(model, optimizer)
            torch.cuda._sleep(50_000_000)  # the device is busy: nothing is copied before the script goes on
        manager.step_done()
    change(model, optimizer)
    manager.finish()

    assert_same(saved(tmp_path, expected), expected)


@pytest.mark.usefixtures("way")
def test_a_cuda_graph_that_is_replayed_right_after_a_step_is_not_in_what_was_saved(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch = torch.rand(32, WIDTH, device="cuda")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(batch).square().mean().backward()
        optimizer.step()
    manager = manage(model, optimizer, tmp_path, total_steps=SAVED)
    manager.resume()
    for step in range(1, SAVED + 1):
        graph.replay()
        if step == SAVED:
            expected = tensors_of(model, optimizer)
        manager.step_done()
    for _ in range(3):
        graph.replay()
    manager.finish()

    assert_same(saved(tmp_path, expected), expected)


# --- exact resumes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}], ids=str
)
def test_a_run_that_was_resumed_is_the_run_that_was_not(options: dict[str, bool], tmp_path: Path) -> None:
    """Dropout draws from the GPU's generator, and the moments and their steps are where the options put them."""

    def run(directory: Path, *, until: int, **more: Any) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        manager = manage(model, optimizer, directory, total_steps=until, **more)
        for step in range(manager.resume() + 1, until + 1):
            manager.step_done(loss=train_step(model, optimizer, step))
        manager.finish()
        return tensors_of(model, optimizer)

    expected = run(tmp_path / "whole", until=STEPS)

    run(tmp_path / "parts", until=SAVED)
    torch.manual_seed(123)
    found = run(tmp_path / "parts", until=STEPS, resume_from="latest")

    assert_same(found, expected)
    assert_same(saved(tmp_path / "parts", expected, STEPS), expected)


def test_the_generators_of_the_gpus_in_use_are_restored_and_no_other_gpu_is_touched() -> None:
    torch.rand(8, device="cuda")
    found = random_state.collect()
    expected = torch.rand(8, device="cuda")

    random_state.restore(found)

    assert torch.equal(torch.rand(8, device="cuda"), expected)
    others = [n for n in range(torch.cuda.device_count()) if n != torch.cuda.current_device()]
    assert [name for name in found if name.startswith("cuda")] == ["cuda"]
    assert not any(torch._C._cuda_hasPrimaryContext(n) for n in others)


# --- staging by itself ---------------------------------------------------------------------------------------------


def staged(staging: Staging, name: str) -> bytes:
    assert staging.layout is not None
    piece = staging.layout.pieces[name]
    return bytes(staging.arena.view[piece.data : piece.tail])


def ready(tensors: dict[str, torch.Tensor], *, overlap: bool = False) -> Staging:
    staging = Staging(device=True, overlap=overlap)
    staging.take(tensors)
    staging.regroup([list(tensors)], compared=list(tensors))
    return staging


def mixed() -> dict[str, torch.Tensor]:
    numbers = torch.randint(0, 200, (1 << 20,), dtype=torch.uint8, device="cuda")
    return {
        "large": torch.rand(1 << 24, device="cuda"),
        "turned": torch.rand(3000, 2000, device="cuda").t(),
        "channels last": torch.rand(64, 64, 3, 3, device="cuda").to(memory_format=torch.channels_last),
        "half": torch.rand(999, device="cuda").to(torch.bfloat16),
        "bytes": numbers,
        "eight bits": numbers.view(torch.float8_e4m3fn),
        "unsigned": numbers.view(torch.uint32),
        "complex": torch.rand(500, dtype=torch.complex64, device="cuda").conj(),
        "scalar": torch.tensor(3.0, device="cuda"),
        "of the host": torch.rand(1000),
        **{f"small {n}": torch.rand(1 + n % 50, device="cuda") for n in range(3000)},
    }


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_of_every_kind_arrive_and_the_device_has_its_memory_back(overlap: bool) -> None:  # noqa: FBT001
    tensors = mixed()
    staging = ready(tensors, overlap=overlap)
    expected = {name: tensor.cpu().resolve_conj().contiguous() for name, tensor in tensors.items()}
    hashes = {
        name: Hash(hash_bytes(view_bytes(hash_rows(tensor))).value, "rows")
        for name, tensor in expected.items()
        if name in staging.large(expected) and name != "of the host"
    }
    before = torch.cuda.memory_allocated()

    for _ in range(2):
        assert staging.copy_if_it_fits(tensors, frozenset({"half"}))
        staging.wait_before_change()
        staging.finish()
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # the allocator looks which of its events have passed
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
    for name, tensor in tensors.items():
        if name not in ("eight bits", "unsigned"):  # views of "bytes"
            tensor.zero_()

    for name, tensor in expected.items():
        assert staged(staging, name) == bytes(view_bytes(tensor)), name
    assert {name: staging.hash_of(name) for name in hashes} == hashes


def test_with_overlap_a_storage_that_the_script_frees_is_copied_before_it_is_used_again() -> None:
    tensors = {"w": torch.nn.Parameter(torch.rand(1 << 26, device="cuda"))}
    staging = ready(tensors, overlap=True)
    expected = tensors["w"].detach().cpu()
    torch.cuda._sleep(50_000_000)

    assert staging.copy_if_it_fits(tensors)
    tensors["w"].data = torch.empty(0, device="cuda")
    others = [torch.full((1 << 26,), -1.0, device="cuda") for _ in range(3)]
    staging.finish()

    assert staged(staging, "w") == bytes(view_bytes(expected))
    del others


def test_a_capture_goes_on_while_the_save_s_thread_waits_for_the_device() -> None:
    """In the mode that torch captures in, a wait of another thread breaks the capture, if it is not told apart."""
    tensors = {"w": torch.rand(1 << 26, device="cuda")}
    staging = ready(tensors)
    errors: list[BaseException] = []

    def finish() -> None:
        try:
            staging.finish()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    expected = tensors["w"].cpu()
    graph, factor = torch.cuda.CUDAGraph(), torch.ones(1, device="cuda")
    side = torch.cuda.Stream()
    factor.mul_(1)  # the kernel is loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # a quarter of a second, in training's stream
    assert staging.copy_if_it_fits(tensors)
    thread = threading.Thread(target=finish)
    with torch.cuda.stream(side):
        graph.capture_begin()  # torch.cuda.graph would first wait for the device
        thread.start()
        factor.mul_(2)
        thread.join(30)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()

    assert not thread.is_alive()
    assert errors == []
    assert factor.item() == 2
    assert staged(staging, "w") == bytes(view_bytes(expected))


def test_a_tensor_that_is_moved_to_the_host_is_hashed_there() -> None:
    tensors = {"w": torch.rand(1 << 20, device="cuda")}
    staging = ready(tensors)
    assert staging.copy_if_it_fits(tensors)
    staging.finish()
    on_device = staging.hash_of("w")

    moved = {"w": tensors["w"].cpu() + 1}
    assert staging.copy_if_it_fits(moved)
    staging.finish()

    assert on_device is not None
    assert on_device.by == "rows"
    assert staging.hash_of("w") == hash_bytes(view_bytes(moved["w"]))
