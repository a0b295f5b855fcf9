"""A CheckpointManager in this very process: what a loop sees of it."""
# ruff: noqa: S311, NPY002

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Proposal
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.errors import (
    DamagedError,
    ResumeError,
    RunDirectoryError,
    SaveError,
    StateError,
    StepkeeperError,
    SupersededError,
    UsageError,
)
from stepkeeper_trainer.formats import lease, lineage, messages
from stepkeeper_trainer.formats.manifest import read_manifest, seal
from stepkeeper_trainer.formats.records import read_outcome
from stepkeeper_trainer.formats.steps import list_steps, newest_verified, open_step
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.observe import metrics as records
from stepkeeper_trainer.observe.metrics import Later, Number
from stepkeeper_trainer.store.run_directory import default_run_directory
from tests.trainer.ranks import losses, watcher_socket

pytestmark = pytest.mark.usefixtures("one_process")


class Loop:
    """A small training loop whose every step draws from every generator."""

    def __init__(
        self, run_dir: Path, *, width: int = 4, fingerprint: str = "data", more: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.sampler = GlobalSampler(7, seed=3, fingerprint=fingerprint)
        self.manager = CheckpointManager(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "sampler": self.sampler}
            | (more or {}),
            run_dir=run_dir,
            **({"every": None} | options),
        )
        self.width = width

    def step(self) -> tuple[float, bool]:
        return self.step_with()

    def step_with(self, **said: Any) -> tuple[float, bool]:
        noise = random.random() + float(np.random.rand()) + random.gauss(0, 1)
        x = torch.rand(5, self.width) + noise + sum(self.sampler.micro_batch(0, 2))
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.advance(2)
        lr = self.scheduler.get_last_lr()[0]
        done = self.manager.step_done(loss=loss.detach(), tokens=10, lr=lr, **said)
        return loss.item(), done

    def run(self, until: int) -> list[float]:
        found = []
        while self.manager.step < until:
            found.append(self.step()[0])
        return found

    def saved(self) -> None:
        """Wait for the save in flight."""
        assert self.manager.wait_saved(90)

    def others(self, others: _Others) -> None:
        """Have other ranks, in the place of none."""
        self.manager._agreement = self.manager._boundary.agreement = others  # type: ignore[assignment]


def names(run_dir: Path) -> list[str]:
    return [step.path.name for step in reversed(list_steps(run_dir / "checkpoints"))]


def save_at(run_dir: Path, step: int, **options: object) -> Loop:
    loop = Loop(run_dir, **options)
    loop.manager.resume()
    loop.run(step)
    loop.manager.save()
    loop.saved()
    return loop


def test_everything_comes_back(tmp_path: Path) -> None:
    first = save_at(tmp_path / "run", 3)
    expected = first.run(8)

    second = Loop(tmp_path / "run", resume_from="latest")
    random.random(), torch.rand(3), np.random.rand()
    assert second.manager.resume() == 3

    assert second.manager.tokens == 30
    assert second.run(8) == expected
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    assert second.optimizer.state_dict()["param_groups"] == first.optimizer.state_dict()["param_groups"]
    assert second.sampler.state_dict() == first.sampler.state_dict()
    assert list(second.manager._counters.history) == list(first.manager._counters.history)
    for ours, theirs in zip(second.model.state_dict().values(), first.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_save_before_the_first_step_touches_nothing_and_can_be_resumed(tmp_path: Path) -> None:
    """torch's own get_state_dict takes a fake AdamW step there."""

    def run(name: str, *, save: bool, resume_from: str | None = None) -> list[float]:
        random.seed(0)
        np.random.seed(0)
        loop = Loop(tmp_path / name, resume_from=resume_from)
        assert loop.manager.resume() == 0
        if save:
            loop.manager.save()
            assert not loop.optimizer.state
            loop.saved()
        return loop.run(5)

    expected = run("plain", save=False)

    assert run("saved", save=True) == expected
    random.seed(9)
    assert run("saved", save=False, resume_from="latest") == expected


def test_stock_torch_reads_the_directory(tmp_path: Path) -> None:
    loop = save_at(tmp_path / "run", 3)
    [step] = list_steps(tmp_path / "run/checkpoints")
    model = {name: torch.zeros_like(value) for name, value in loop.model.state_dict().items()}
    moment = torch.zeros(3, 4)

    dcp.load({"model": model, "optimizer": {"state": {"0.weight": {"exp_avg": moment}}}}, checkpoint_id=step.path)

    for name, value in loop.model.state_dict().items():
        assert torch.equal(model[name], value), name
    assert torch.equal(moment, loop.optimizer.state[loop.model[0].weight]["exp_avg"])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a supervisor needs Python 3.11")
def test_a_supervisor_of_0_1_0_finds_every_byte_of_a_step_right(tmp_path: Path, monkeypatch) -> None:
    """It would call values damaged that share bytes, and start the training from the beginning."""
    monkeypatch.setenv("STEPKEEPER_SOCKET", "@nobody-listens")
    save_at(tmp_path / "under-0.1.0", 3)
    monkeypatch.setenv("STEPKEEPER_RELEASE", "1.0.0")
    save_at(tmp_path / "under-this-one", 3)

    assert _what_0_1_0_finds_wrong(tmp_path / "under-0.1.0/checkpoints/step_00000003") == "()"
    assert "share bytes" in _what_0_1_0_finds_wrong(tmp_path / "under-this-one/checkpoints/step_00000003")


def _what_0_1_0_finds_wrong(step: Path) -> str:
    [wheel] = (Path(__file__).parents[1] / "fixtures/releases").glob("stepkeeper-0.1.0-*.whl")
    act = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "from pathlib import Path\n"
        "from stepkeeper_trainer.formats.verify import verify\n"
        f"print(verify(Path({str(step)!r})).problems)\n"
    )
    found = subprocess.run([sys.executable, "-c", act], capture_output=True, text=True, timeout=60, check=True)
    return found.stdout.strip()


def test_a_step_directory_holds_tensors_and_plain_data_and_what_its_manifest_says(tmp_path: Path) -> None:
    save_at(tmp_path / "run", 3)
    [step] = list_steps(tmp_path / "run/checkpoints")
    reader = dcp.FileSystemReader(step.path)
    metadata = reader.read_metadata()
    values = [n for n, e in metadata.state_dict_metadata.items() if not isinstance(e, TensorStorageMetadata)]
    places = {name: metadata.storage_data[MetadataIndex(name)] for name in values}
    data = (step.path / "values.bin").read_bytes()
    assert {place.relative_path for place in places.values()} == {"values.bin"}
    for place in places.values():
        torch.load(io.BytesIO(data[place.offset : place.offset + place.length]), weights_only=True)
    assert {
        "keeper.json",
        "keeper.loss_history",
        "rng.rank_00000.torch",
    } <= metadata.state_dict_metadata.keys()

    manifest = read_manifest(step.path)

    assert sorted(os.listdir(step.path)) == [
        ".metadata",
        "MANIFEST.json",
        "__0_0.distcp",
        "values.bin",
    ]
    assert (manifest.step, manifest.tokens, manifest.world_size, manifest.parent) == (3, 30, 1, None)
    assert {"threads", "cpu_capability"} <= manifest.conditions.keys()
    assert manifest.state["optimizer"] is True
    assert manifest.state["sampler"] is True
    assert verify(step.path).ok


def test_a_replay_after_a_rollback_gets_a_name_of_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = save_at(run_dir, 2)
    first.run(4)
    first.manager.save()
    first.saved()

    second = Loop(run_dir, resume_from=run_dir / "checkpoints/step_00000002")
    assert second.manager.resume() == 2
    assert newest_verified(run_dir / "checkpoints").chosen.step == 2  # type: ignore[union-attr]
    second.run(4)
    second.manager.save()
    second.saved()

    assert names(run_dir)[:2] == ["step_00000002", "step_00000004"]
    replayed = names(run_dir)[2]
    assert replayed.startswith("step_00000004.")
    chosen = newest_verified(run_dir / "checkpoints").chosen
    assert chosen is not None
    assert chosen.path.name == replayed
    known = lineage.read(run_dir / "checkpoints")
    assert known is not None
    assert [known.commits[save_id].directory for save_id in known.chain()] == [replayed, "step_00000002"]


def test_a_start_from_the_very_start_leaves_the_past_behind_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    save_at(run_dir, 3)
    assert "started_beside_steps" not in caplog.text
    Loop(run_dir).manager.resume()
    assert "started_beside_steps newest=3" in caplog.text
    assert newest_verified(run_dir / "checkpoints").chosen is None

    save_at(run_dir, 2)

    assert newest_verified(run_dir / "checkpoints").chosen.step == 2  # type: ignore[union-attr]
    assert len(names(run_dir)) == 2


def test_a_commit_that_nobody_recorded_is_recorded_at_resume(tmp_path: Path) -> None:
    """The writer died between the rename and the lineage."""
    run_dir = tmp_path / "run"
    loop = save_at(run_dir, 2)
    loop.run(4)
    loop.manager.save()
    loop.saved()
    path = run_dir / "checkpoints" / lineage.LINEAGE_NAME
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    assert Loop(run_dir, resume_from="latest").manager.resume() == 4

    known = lineage.read(run_dir / "checkpoints")
    assert known is not None
    assert [known.commits[i].step for i in known.chain()] == [4, 2]


def test_a_step_of_another_run_can_be_the_start(tmp_path: Path) -> None:
    save_at(tmp_path / "one", 3)

    loop = Loop(tmp_path / "two", resume_from=tmp_path / "one/checkpoints/step_00000003")
    assert loop.manager.resume() == 3
    loop.run(4)
    loop.manager.save()
    loop.saved()

    assert newest_verified(tmp_path / "two/checkpoints").chosen.step == 4  # type: ignore[union-attr]
    assert read_manifest(tmp_path / "two/checkpoints/step_00000004").parent is None


def test_every_flipped_byte_is_found_before_it_reaches_the_model(tmp_path: Path) -> None:
    save_at(tmp_path / "run", 1)
    step = tmp_path / "run/checkpoints/step_00000001"
    whole = {name: (step / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    for name, data in whole.items():
        for at in random.sample(range(len(data)), 4):
            (step / name).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            loop = Loop(tmp_path / "other", resume_from=step)
            before = {key: value.clone() for key, value in loop.model.state_dict().items()}
            with pytest.raises(DamagedError, match=f"{name}: bytes of chunk 0"):
                loop.manager.resume()
            assert all(torch.equal(before[key], value) for key, value in loop.model.state_dict().items())
        (step / name).write_bytes(data)
    assert Loop(tmp_path / "other", resume_from=step).manager.resume() == 1


def test_a_pickle_in_the_manifested_directory_is_not_run_by_loading_an_item(tmp_path: Path) -> None:
    """A pickle in the place of a tensor is refused, though the manifest is right; one beside them is never read."""
    run_dir = tmp_path / "run"
    save_at(run_dir, 1)
    step = run_dir / "checkpoints/step_00000001"
    reader = dcp.FileSystemReader(step)
    metadata = reader.read_metadata()
    for name, refused in (
        ("evil", None),
        ("model.0.weight", "lacks .'model.0.weight'"),
        ("keeper.json", "pickle"),
    ):
        metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        _reseal(step)
        if refused is None:
            assert Loop(run_dir, resume_from=step).manager.resume() == 1
        else:
            with pytest.raises(StepkeeperError, match=refused):
                Loop(run_dir, resume_from=step).manager.resume()


def _reseal(step: Path) -> None:
    import msgspec  # noqa: PLC0415
    import xxhash  # noqa: PLC0415

    manifest = read_manifest(step)
    data = (step / ".metadata").read_bytes()
    digest = xxhash.xxh3_128_hexdigest(data)
    entry = msgspec.structs.replace(manifest.files[".metadata"], bytes=len(data), xxh3_128=digest, chunks=(digest,))
    (step / "MANIFEST.json").write_bytes(
        seal(msgspec.structs.replace(manifest, files={**manifest.files, ".metadata": entry}))
    )
    assert open_step(step).problem is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"width": 5}, "shape"),
        ({"fingerprint": "other data"}, "fingerprint"),
        ({"more": {"ema": GlobalSampler(1, seed=0)}}, "ema"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, object], what: str) -> None:
    save_at(tmp_path / "run", 1)

    with pytest.raises(ResumeError, match=what):
        Loop(tmp_path / "run", resume_from="latest", **change).manager.resume()


def test_latest_passes_over_what_is_damaged_and_starts_anew_where_nothing_is_left(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    loop = save_at(run_dir, 1)
    loop.run(2)
    loop.manager.save()
    loop.saved()
    os.truncate(run_dir / "checkpoints/step_00000002/__0_0.distcp", 1000)
    assert Loop(run_dir, resume_from="latest").manager.resume() == 1
    (run_dir / "checkpoints/step_00000001/MANIFEST.json").unlink()

    assert Loop(run_dir, resume_from="latest").manager.resume() == 0

    assert sorted(names(run_dir)) == ["step_00000001", "step_00000002"], "nothing is deleted"
    with pytest.raises(ResumeError, match="never committed"):
        Loop(run_dir, resume_from=run_dir / "checkpoints/step_00000001").manager.resume()


def test_a_newer_attempt_fences_off_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_dir = tmp_path / "run"
    loop = Loop(run_dir)
    loop.manager.resume()
    held = lease.read(run_dir)
    assert held is not None
    assert held.epoch == (7, 1), "without a supervisor the library takes the lease"
    lease.write(run_dir, lease.Lease(job_id=7, restart_count=2, attempt=2, node="n", pid=1, taken_at=0.0))

    loop.run(2)
    with pytest.raises(SaveError, match="has taken over"):
        loop.manager.finish()

    assert names(run_dir) == []
    assert read_outcome(run_dir) is None
    with pytest.raises(SupersededError):
        Loop(run_dir)


def test_never_two_saves_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    reached, released = threading.Event(), threading.Event()

    def held(descriptor: int) -> None:
        if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            reached.set()
            released.wait(90)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    loop = Loop(tmp_path / "run", every=1)
    loop.manager.resume()
    loop.run(20)
    assert reached.wait(90)
    assert len(list((tmp_path / "run/checkpoints").glob(".tmp-*"))) == 1
    released.set()
    loop.saved()
    loop.step()
    loop.saved()

    assert names(tmp_path / "run") == ["step_00000001", "step_00000021"]


class _Others:
    """Other ranks, whose word on every question is the same."""

    group = _group = None  # no connections to them
    within_s = 60.0

    def __init__(self, *, busy: bool, sequence: int) -> None:
        self.busy, self.sequence = busy, sequence

    def read(self, propose: Callable[[], Proposal]) -> Proposal:
        own = propose()
        return replace(own, busy=own.busy or self.busy, sequence=max(own.sequence, self.sequence))

    def settle(self, _call: Call, values: list[int], *, within_s: float) -> list[int]:
        assert within_s > 0
        if len(values) < 6:  # not about a save
            return values
        return [max(pair) for pair in zip(values, [int(self.busy), self.sequence, 0, 0, 0, 0], strict=True)]

    def issue(self, own: Proposal) -> None: ...

    def close(self) -> None: ...

    raise_together = Agreement.raise_together


def test_a_save_is_begun_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    """Another rank has a stuck save: this one begins none either, and the next gets the same name on both."""
    loop = Loop(tmp_path / "run", total_steps=4)
    loop.manager.resume()
    others = _Others(busy=True, sequence=7)
    loop.others(others)
    loop.run(1)

    loop.manager.save()
    assert loop.manager._saver is not None
    assert loop.manager._saver.last is None
    loop.run(2)
    assert loop.manager._saver.last is None

    others.busy = False
    loop.run(3)
    loop.saved()
    assert loop.manager._saver.sequence == 8, "one more than any rank has begun"
    others.sequence = 12
    loop.manager.save()
    loop.saved()
    assert loop.manager._saver.sequence == 13
    loop.run(4)
    assert loop.manager.finish() == 0
    assert loop.manager._saver.sequence == 14
    assert [read_manifest(tmp_path / "run/checkpoints" / name).step for name in names(tmp_path / "run")] == [3, 3, 4]


def test_a_stop_begins_no_save_where_another_rank_cannot(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", save_within_s=0.2, attach_signals=True)
    loop.manager.resume()
    loop.others(_Others(busy=True, sequence=1))
    os.kill(os.getpid(), signal.SIGTERM)

    assert loop.step()[1]
    assert loop.manager.finish() == 1

    assert names(tmp_path / "run") == []


def test_a_stop_waits_for_the_save_in_flight_and_then_saves_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.2 if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}") else 0)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    loop = Loop(tmp_path / "run", every=2, attach_signals=True)
    loop.manager.resume()
    loop.run(2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert loop.step()[1]

    assert loop.manager.finish() == 75

    assert names(tmp_path / "run") == ["step_00000002", "step_00000003"]


def test_a_stop_ends_at_its_deadline_though_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    hangs = threading.Event()

    def hung(descriptor: int) -> None:
        if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            hangs.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", hung)
    with watcher_socket(f"deadline-{time.monotonic_ns()}") as sock:
        monkeypatch.setenv("STEPKEEPER_SOCKET", "@" + sock.getsockname()[1:].decode())
        loop = Loop(tmp_path / "run")
        _, address = sock.recvfrom(2048)
        loop.manager.resume()
        loop.step()
        deadline_at = time.time() + 1.0
        request = messages.SaveRequest(request_id=1, stop=True, deadline_at=deadline_at)
        sock.sendto(messages.encode(request), address)
        assert loop.step()[1]

        code = loop.manager.finish()

    assert code == 1, "75 means that the state is saved"
    assert -1.0 < time.time() - deadline_at < 30.0, "not when the disk answers"
    said = read_outcome(tmp_path / "run")
    assert said is not None
    assert (said.outcome, said.save_id) == ("stopped", None)
    hangs.set()
    assert loop.manager._saver is not None
    loop.manager._saver.wait(time.time() + 90)


def test_metrics_on_a_full_disk_cost_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path / "run")
    loop.manager.resume()
    loop.run(1)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if "metrics" in os.readlink(f"/proc/self/fd/{descriptor}"):
            write(descriptor, bytes(data)[:3])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    loop.run(3)
    monkeypatch.setattr(os, "write", write)
    loop.run(4)
    loop.manager.save()
    loop.saved()

    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


class _Gpu(Later):
    """A number that is known only when it is asked for."""

    asked = 0

    def __init__(self, value: Number) -> None:
        super().__init__(value)
        self.ready = value is None

    def read(self) -> float | None:
        _Gpu.asked += not self.ready
        return super().read()


def test_losses_of_a_gpu_are_read_a_step_later_and_all_of_them_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "Later", _Gpu)
    monkeypatch.setattr(_Gpu, "asked", 0)
    loop = Loop(tmp_path / "run", total_steps=6)
    loop.manager.resume()
    found = loop.run(1)
    assert _Gpu.asked == 0, "not at the step itself"
    found += loop.run(3)
    assert _Gpu.asked == 2 * 2, "loss and learning rate of steps 1 and 2"

    loop.manager.save()
    loop.saved()

    assert {step: float(loss) for step, loss in losses(tmp_path / "run").items()} == dict(enumerate(found, 1))
    assert read_manifest(tmp_path / "run/checkpoints/step_00000003").loss == found[-1]
    found += loop.run(6)
    assert loop.manager.finish() == 0
    assert {step: float(loss) for step, loss in losses(tmp_path / "run").items()} == dict(enumerate(found, 1))
    assert [loss for _, loss in loop.manager._counters.history] == found


def test_a_number_is_copied_so_that_the_script_may_write_over_its_own() -> None:
    total = torch.tensor(1.5)
    later = Later(total)
    total.zero_()

    assert later.ready
    assert later.read() == 1.5
    assert (Later(None).read(), Later(0.25).read()) == (None, 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_number_on_a_gpu_is_copied_where_the_stream_is_now() -> None:
    total = torch.tensor(1.5, device="cuda")
    later = Later(total)
    total.zero_()

    assert not later.ready
    assert later.read() == 1.5


def test_a_failed_save_is_made_up_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    full = True

    def maybe_full(descriptor: int) -> None:
        if full and ".tmp-step" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", maybe_full)
    loop = Loop(tmp_path / "run", total_steps=2, every=2)
    loop.manager.resume()
    loop.run(2)
    loop.manager.wait_saved(90)
    assert "No space left" in str(loop.manager._saver.last.error)  # type: ignore[union-attr]
    full = False

    assert loop.manager.finish() == 0

    assert names(tmp_path / "run") == ["step_00000002"]
    said = read_outcome(tmp_path / "run")
    assert said is not None
    assert (said.outcome, said.step) == ("finished", 2)
    assert said.save_id == read_manifest(tmp_path / "run/checkpoints/step_00000002").save_id


def test_an_unwritable_directory_is_a_failed_save_and_no_failed_training(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    loop = save_at(run_dir, 1)
    os.rename(run_dir / "checkpoints", run_dir / "away")
    (run_dir / "checkpoints").write_text("in the way")

    loop.run(2)
    loop.manager.save()
    loop.manager.wait_saved(90)
    loop.run(3)

    assert "checkpoints: Not a directory" in str(loop.manager._saver.last.error)  # type: ignore[union-attr]
    (run_dir / "checkpoints").unlink()
    os.rename(run_dir / "away", run_dir / "checkpoints")
    assert all(verify(step.path).ok for step in list_steps(run_dir / "checkpoints"))


def test_a_signal_in_evaluation_ends_in_a_saved_stop(tmp_path: Path) -> None:
    """`alive` agrees on nothing: the step that follows does."""
    loop = Loop(tmp_path / "run", total_steps=10, attach_signals=True, attach_hooks=False)
    loop.manager.resume()
    loop.run(2)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):
        loop.manager.alive()

    assert loop.step()[1]
    assert loop.manager.finished
    assert loop.manager.finish() == 75

    said = read_outcome(tmp_path / "run")
    assert said is not None
    assert (said.outcome, said.step, said.save_id is not None) == ("stopped", 3, True)


def test_a_finished_run_says_so_again_without_a_new_save(tmp_path: Path) -> None:
    for _ in range(2):
        loop = Loop(tmp_path / "run", total_steps=2, resume_from="latest")
        loop.manager.resume()
        loop.run(2)
        assert loop.manager.finished
        assert loop.manager.finish() == 0

    assert names(tmp_path / "run") == ["step_00000002"]


def test_an_own_signal_handler_is_still_called(tmp_path: Path) -> None:
    called = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: called.append(number))
    loop = Loop(tmp_path / "run", attach_signals=True)
    loop.manager.resume()

    os.kill(os.getpid(), signal.SIGUSR1)

    assert called == [signal.SIGUSR1]
    assert loop.step()[1], "alone, the library stops too"


def test_a_parameter_without_gradient_has_no_optimizer_state_after_resume_either(tmp_path: Path) -> None:
    def build(resume_from: str | None) -> tuple[torch.nn.Module, torch.optim.Optimizer, CheckpointManager]:
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        manager = CheckpointManager(
            {"model": model, "optimizer": optimizer}, every=None, run_dir=tmp_path / "run", resume_from=resume_from
        )
        manager.resume()
        return model, optimizer, manager

    model, optimizer, manager = build(None)
    model["used"](torch.ones(1, 2)).sum().backward()  # type: ignore[index]
    optimizer.step()
    manager.step_done()
    manager.finish()

    other, restored, _ = build("latest")

    assert {id(p) for p in restored.state} == {id(p) for p in other["used"].parameters()}  # type: ignore[index]


def test_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"file": Path("x")}

        def load_state_dict(self, _state: dict[str, object]) -> None:
            raise AssertionError

    loop = Loop(tmp_path / "run", more={"odd": Odd()})

    with pytest.raises(StateError, match=r"odd\.file"):
        loop.manager.resume()


def test_a_loop_that_forgets_to_resume_is_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")

    with pytest.raises(UsageError, match="resume"):
        loop.step()


def test_a_run_that_names_no_directory_gets_one_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["code/train.py"])
    model = torch.nn.Linear(1, 1)

    manager = CheckpointManager({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, every=None)

    assert manager.run_dir == tmp_path / "runs/train"
    assert (tmp_path / "runs/train/checkpoints").is_dir()
    assert f"run_directory_chosen path={tmp_path}/runs/train " in caplog.text
    assert "STEPKEEPER_RUN_DIR" in caplog.text


@pytest.mark.parametrize(
    ("script", "job", "name"),
    [
        ("/a/train.py", {}, "train"),
        ("/a/gpt/__main__.py", {}, "gpt"),
        ("-c", {}, "run"),
        ("", {}, "run"),
        ("train.py", {"SLURM_JOB_ID": "7"}, "train-7"),
        ("train.py", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "train-7"),
    ],
)
def test_the_default_run_directory_goes_by_the_job_or_the_script(script: str, job: dict[str, str], name: str) -> None:
    assert default_run_directory(read_environment(job), script) == Path.cwd() / "runs" / name


def test_where_no_run_directory_can_be_made_the_message_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    model = torch.nn.Linear(1, 1)

    with pytest.raises(RunDirectoryError, match=r"runs: File exists; give CheckpointManager\(run_dir=...\)"):
        CheckpointManager({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, every=None)
