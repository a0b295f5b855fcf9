"""What a save promises: no error is lost, no plan made twice, never two at once, and whose state it takes."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.coordinate.boundary import take_over
from stepkeeper_trainer.errors import ResumeError, UsageError
from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.messages import SaveRequest, encode
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.save import persist, planner, saver
from stepkeeper_trainer.save import save as saves
from stepkeeper_trainer.state import Counters, TrainingState
from stepkeeper_trainer.state.keys import read_old
from tests.trainer.ranks import watcher_socket

pytestmark = pytest.mark.usefixtures("one_process")


class Loop:
    """Many tensors, one optimizer step at a time."""

    def __init__(self, run_dir: Path, *, count: int = 8, size: int = 64, more: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(size)) for _ in range(count)])
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = optimizer
        state = {"model": self.model, "optimizer": optimizer} | (more or {})
        self.manager = CheckpointManager(state, run_dir=run_dir, **({"every": None} | options))
        self.resumed = self.manager.resume()
        self.run_dir = run_dir

    @property
    def saver(self) -> saver.Saver:
        assert self.manager._saver is not None
        return self.manager._saver

    @property
    def last(self) -> saves.Save:
        assert self.saver.last is not None
        return self.saver.last

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for parameter in self.model:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.manager.step_done(loss=1.0)

    def save(self) -> str | None:
        """Save and return the error."""
        self.manager.save()
        assert self.last.settled.wait(90)
        return self.last.error

    def committed(self) -> list[int]:
        return sorted(step.step for step in list_steps(self.run_dir / "checkpoints"))


class Gate:
    """Holds the data files' fsync until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        sync = os.fsync

        def held(descriptor: int) -> None:
            if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
                self.reached.set()
                assert self.open.wait(90)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", held)


# --- errors --------------------------------------------------------------------------------------------


def _full(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    write = os.write

    def refused(descriptor: int, data: Any) -> int:
        if re.search(pattern, os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refused)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_error_of_any_thread_is_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Stock DCP with several threads reports success and leaves a step that lacks the file."""
    monkeypatch.setattr(persist, "FILE_BYTES_MIN", 1000)
    loop = Loop(tmp_path / "run", size=4096)
    loop.step(2)
    assert loop.save() is None
    whole = read_manifest(tmp_path / "run/checkpoints/step_00000002")
    assert len([name for name in whole.files if name.endswith(".distcp")]) == 4
    with monkeypatch.context() as patch:
        _full(patch, rf"__0_{number}\.distcp")
        loop.step()
        assert "No space left" in str(loop.save())
    assert loop.committed() == [2]

    loop.step()

    assert loop.save() is None
    assert loop.committed() == [2, 4]
    assert all(verify(step.path).ok for step in list_steps(tmp_path / "run/checkpoints"))


def test_a_large_share_is_split_so_that_no_file_is_too_large_to_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist, "FILE_BYTES_MIN", 1000)
    monkeypatch.setattr(persist, "FILE_BYTES_MAX", 20_000)
    loop = Loop(tmp_path / "run", size=4096)
    loop.step(2)
    assert loop.save() is None

    whole = read_manifest(tmp_path / "run/checkpoints/step_00000002")
    files = {name: entry.bytes for name, entry in whole.files.items() if name.endswith(".distcp")}
    assert len(files) > persist.FILES_MAX
    assert max(files.values()) < 3 * 20_000, "a tensor is not cut"
    assert verify(tmp_path / "run/checkpoints/step_00000002").ok


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_stock_dcp_loses_the_error_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the writer is our own; when this fails, torch has mended pytorch#191391."""
    write = torch.save

    def refused(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments, **options)

    monkeypatch.setattr(torch, "save", refused)
    writer = dcp.FileSystemWriter(tmp_path / "stock", thread_count=4)

    dcp.save({str(n): torch.rand(10) for n in range(8)}, storage_writer=writer)

    monkeypatch.undo()
    assert (tmp_path / "stock/.metadata").exists()
    with pytest.raises(BaseException, match=r"KeyError|'"):  # torch's own is a BaseException
        dcp.load({str(n): torch.rand(10) for n in range(8)}, checkpoint_id=tmp_path / "stock")


def test_an_exception_that_is_none_ends_the_save_and_not_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP's own is a BaseException: `except Exception` does not see it."""
    loop = Loop(tmp_path / "run")
    loop.step()

    def refused(*_arguments: Any, **_options: Any) -> None:
        raise CheckpointException("odd", {0: (ValueError("plans differ"), None)})  # type: ignore[dict-item]

    with monkeypatch.context() as patch:
        patch.setattr(planner, "create_default_local_save_plan", refused)
        assert loop.saver._prepared.wait(60.0)
        loop.saver._planner.share = None
        assert loop.save() == "plans differ"
    loop.step()
    assert loop.save() is None
    assert loop.committed() == [2]


@pytest.mark.parametrize("what", ["metadata", "MANIFEST", r"rank-0\.json"])
def test_a_full_disk_at_the_small_files_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    loop = Loop(tmp_path / "run")
    loop.step()
    with monkeypatch.context() as patch:
        _full(patch, what)
        assert "No space left" in str(loop.save())
    assert loop.committed() == []
    assert not list((tmp_path / "run/checkpoints").glob(".tmp-*")), "the space is given back"
    loop.step()
    assert loop.save() is None


def test_memory_that_is_not_there_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path / "run")

    def refused(*_arguments: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refused)
        loop.step()
        assert "Cannot allocate memory" in str(loop.save())
    loop.step()
    assert loop.save() is None


# --- plans and layouts -----------------------------------------------------------------------------------


def test_a_plan_is_made_once_and_again_when_the_state_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    make = planner.create_default_local_save_plan
    monkeypatch.setattr(
        planner, "create_default_local_save_plan", lambda *arguments: plans.append(1) or make(*arguments)
    )
    loop = Loop(tmp_path / "run")
    for _ in range(4):
        loop.step()
        assert loop.save() is None
    assert len(plans) == 1, "made beside the first step"
    metadata = [(step.path / ".metadata").read_bytes() for step in list_steps(tmp_path / "run/checkpoints")]
    ids = [step.manifest.save_id.encode() for step in list_steps(tmp_path / "run/checkpoints") if step.manifest]
    assert len({data.replace(save_id, b"") for data, save_id in zip(metadata, ids, strict=True)}) == 1
    assert len(set(metadata)) == 4

    loop.model.append(torch.nn.Parameter(torch.rand(5)))
    loop.optimizer.add_param_group({"params": [loop.model[-1]]})
    loop.step()
    assert loop.save() is None

    assert len(plans) == 2
    newest = list_steps(tmp_path / "run/checkpoints")[0]
    target = torch.zeros(5)
    dcp.load({"model": {"8": target}}, checkpoint_id=newest.path)
    assert torch.equal(target, loop.model[-1])


def test_the_state_is_that_of_the_boundary_though_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path / "run")
    loop.step(2)
    expected = [parameter.detach().clone() for parameter in loop.model]
    loop.manager.save()
    loop.step(3)
    gate.open.set()
    assert loop.last.settled.wait(90)

    target = {str(n): torch.zeros(64) for n in range(8)}
    dcp.load({"model": target}, checkpoint_id=tmp_path / "run/checkpoints/step_00000002")

    assert all(torch.equal(target[str(n)], value) for n, value in enumerate(expected))


def test_extra_memory_is_one_copy_of_the_state(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", size=1 << 16)
    for _ in range(3):
        loop.step()
        assert loop.save() is None
    size = sum(tensor.nbytes for tensor in loop.manager._state.collect().values())

    assert size <= loop.saver._staging.arena.bytes < 1.05 * size


# --- while one is in flight ------------------------------------------------------------------------------


def _events(caplog: pytest.LogCaptureFixture, *names: str) -> list[tuple[str, str]]:
    found = [re.match(r"(\w+) .*?step=(\d+)", text) for text in caplog.messages]
    return [(match[1], match[2]) for match in found if match and match[1] in names]


def test_a_periodic_save_that_meets_another_begins_when_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Due at 2, 4, 6; the disk holds the first one until step 6 is done."""
    caplog.set_level(logging.INFO)
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path / "run", every=2)
    loop.step(6)
    gate.open.set()
    assert loop.last.settled.wait(90)
    loop.step()  # the one that waited begins at once
    assert loop.last.settled.wait(90)

    assert loop.committed() == [2, 7]
    assert len(list((tmp_path / "run/checkpoints").glob(".tmp-*"))) == 0
    assert _events(caplog, "save_waits") == [("save_waits", "4")]


def test_a_limit_that_is_none_is_refused(tmp_path: Path) -> None:
    for wrong in (0.0, -1.0, float("inf"), "600"):
        with pytest.raises(UsageError, match=f"save_within_s={wrong!r}: give a number of seconds above 0"):
            Loop(tmp_path / "run", save_within_s=wrong)


@pytest.mark.parametrize(("left_s", "cancelled"), [(180.0, True), (1200.0, False)])
def test_an_emergency_gives_up_the_save_in_flight_only_if_there_is_no_time_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, *, cancelled: bool
) -> None:
    gate = Gate(monkeypatch)

    def let_go() -> None:
        """Have the disk answer once the save was given up; where that is not to be, in a moment."""
        limit_at = time.monotonic() + (20.0 if cancelled else 0.3)
        while first.cancelled is None and time.monotonic() < limit_at:
            time.sleep(0.01)
        gate.open.set()

    with watcher_socket(f"takeover-{time.monotonic_ns()}") as sock:
        monkeypatch.setenv("STEPKEEPER_SOCKET", "@" + sock.getsockname()[1:].decode())
        loop = Loop(tmp_path / "run", every=2, total_steps=100)
        _, address = sock.recvfrom(2048)
        loop.step(2)
        first = loop.last
        assert gate.reached.wait(90)
        loop.saver.persist_s = 100.0  # what saves have taken so far
        request = SaveRequest(request_id=1, stop=True, deadline_at=time.time() + left_s)
        sock.sendto(encode(request), address)
        threading.Thread(target=let_go, daemon=True).start()
        loop.step()
        code = loop.manager.finish()

    assert code == 75
    assert loop.committed() == ([3] if cancelled else [2, 3])
    assert (first.cancelled is not None) is cancelled
    assert (first.error is not None) is cancelled


# --- whose state -----------------------------------------------------------------------------------------


def _pair() -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 1)})
    return model, {
        "body": torch.optim.AdamW(model["body"].parameters(), lr=0.1),
        "head": torch.optim.SGD(model["head"].parameters(), lr=torch.tensor(0.2), momentum=0.9),
    }


def _train(
    model: Any, optimizers: dict[str, torch.optim.Optimizer], manager: CheckpointManager, steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model["head"](model["body"](torch.rand(4, 3))).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        manager.step_done(loss=loss.detach())
        losses.append(loss.item())
    return losses


def test_several_optimizers_an_average_and_a_scaler_come_back(tmp_path: Path) -> None:
    def build(resume_from: str | None) -> tuple[Any, dict[str, torch.optim.Optimizer], Any, Any, CheckpointManager]:
        model, optimizers = _pair()
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        manager = CheckpointManager(
            {"model": model, **optimizers, "average": average, "scaler": scaler},
            every=None,
            run_dir=tmp_path / "run",
            resume_from=resume_from,
        )
        manager.resume()
        return model, optimizers, average, scaler, manager

    model, optimizers, average, scaler, manager = build(None)
    _train(model, optimizers, manager, 2)
    average.update_parameters(model)
    _train(model, optimizers, manager, 1)
    average.update_parameters(model)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 3.0})
    manager.save()
    assert manager.wait_saved(90)
    expected = _train(model, optimizers, manager, 4)

    other, restored, again, scaler_again, second = build("latest")

    assert second.step == 3
    assert scaler_again.get_scale() == 3.0
    for ours, theirs in zip(again.state_dict().values(), average.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert _train(other, restored, second, 4) == expected
    model, optimizers = _pair()
    names = {"trunk": optimizers["body"], "head": optimizers["head"]}
    parts: Any = {"average": average, "scaler": scaler}
    manager = CheckpointManager(
        {"model": model, **names, **parts}, every=None, run_dir=tmp_path / "run", resume_from="latest"
    )
    with pytest.raises(ResumeError, match="parts are not this script's"):
        manager.resume()


def test_the_first_versions_optimizer_state_still_loads() -> None:
    """Step directories stay readable for ever."""
    model, optimizers = _pair()
    sgd = optimizers["head"]
    state = TrainingState({"model": model, "optimizer": sgd}, counters=Counters(), rank=0)
    [part] = state.optimizers.values()
    name = "optimizer.state.head.weight.momentum_buffer"
    tree = {
        "state": {"head.weight": {"momentum_buffer": {"$tensor": name}, "step": 3}},
        "param_groups": [{"params": ["head.weight", "head.bias"], "lr": 0.5, "betas": {"$tuple": [1, 2]}}],
    }

    found = read_old({"optimizer": tree, "others": {}, "world_size": 1}, {}, 0, 1, state.parts)
    part.apply(found["optimizer"], {name: torch.ones(1, 3)})

    [weight] = sgd.state
    assert weight is model["head"].weight  # type: ignore[index]
    assert sgd.state[weight]["step"] == 3
    assert torch.equal(sgd.state[weight]["momentum_buffer"], torch.ones(1, 3))
    assert sgd.param_groups[0]["betas"] == (1, 2)


class Position:
    """A loader of which each rank has its own state."""

    per_rank = True

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.raw = b"\x00\xffstate"
        self.seen = torch.arange(at).numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "raw": self.raw, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.raw, self.seen = state["at"], state["raw"], state["seen"]


def test_the_state_of_one_rank_comes_back_to_as_many_ranks_only(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", more={"loader": Position(5)})
    loop.step()
    assert loop.save() is None
    position = Position()

    assert Loop(tmp_path / "run", more={"loader": position}, resume_from="latest").resumed == 1

    assert (position.at, position.raw, position.seen.tolist()) == (5, b"\x00\xffstate", [0, 1, 2, 3, 4])
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(64)) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "loader": Position()},
        every=None,
        run_dir=tmp_path / "run",
        resume_from="latest",
    )
    manager._state.world_size = 3  # as if there were more ranks now
    with pytest.raises(ResumeError, match=r"3 ranks cannot resume what 1 saved: .*loader.*resume on 1 ranks"):
        manager.resume()


def test_torchdatas_loader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def build(resume_from: str | None) -> tuple[Loop, Any]:
        loader = loaders.StatefulDataLoader(list(range(40)), batch_size=4, num_workers=0)
        return Loop(tmp_path / "run", more={"loader": loader}, resume_from=resume_from), loader

    loop, loader = build(None)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    loop.step()
    assert loop.save() is None

    _, loader = build("latest")

    assert seen + [batch.tolist() for batch in loader] == [list(range(n, n + 4)) for n in range(0, 40, 4)]


@pytest.mark.parametrize(
    ("left_s", "in_flight_s", "new_s", "expected"),
    [
        (100, 20, 30, False),  # both fit
        (50, 25, 30, True),  # only one does, and the newer state is better
        (35, 25, 30, False),  # the new one may well be too late: what is nearly there is kept
        (10, 5, 30, False),
        (10, 0, 0, False),  # nothing is known of what saves take
    ],
)
def test_the_save_in_flight_is_given_up_where_only_the_new_one_fits(
    left_s: float, in_flight_s: float, new_s: float, *, expected: bool
) -> None:
    assert take_over(left_s=left_s, in_flight_s=in_flight_s, new_s=new_s) is expected
