"""Plain `torch.distributed.checkpoint` with `StepkeeperReader` and `StepkeeperWriter`, and stock DCP beside them."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from stepkeeper_trainer import CheckpointManager, StepkeeperReader, StepkeeperWriter
from stepkeeper_trainer.errors import DamagedError, ResumeError, RunDirectoryError, SupersededError, UsageError
from stepkeeper_trainer.formats import lease, lineage
from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.messages import Committed, decode_from_rank
from stepkeeper_trainer.formats.steps import newest_verified, verify
from stepkeeper_trainer.load.reader import ALONE
from tests.trainer import dcp_scenes, steps_by_dcp
from tests.trainer.forked import ROOT
from tests.trainer.scenes import Stage

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.filterwarnings("ignore")]
SCENES = "tests.trainer.dcp_scenes"
flattens_tied = pytest.mark.skipif(
    not dcp_scenes.FLATTENS_TIED, reason="set_state_dict of this torch cannot load flattened states of tied parameters"
)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def save(run_dir: Path, step: int, state: dict[str, Any] | None = None, **options: Any) -> Path:
    """Save by plain DCP in this process."""
    writer = StepkeeperWriter(run_dir, step=step, **options)
    dcp.save(state or {"w": torch.full((4, 3), float(step))}, storage_writer=writer, **ALONE)
    return run_dir / f"checkpoints/step_{step:08d}"


def load(directory: Path, *names: str, **options: Any) -> dict[str, Any]:
    state: dict[str, Any] = {name: torch.zeros(4, 3) for name in names or ("w",)}
    dcp.load(state, storage_reader=StepkeeperReader(directory), **ALONE, **options)
    return state


# The reader -------------------------------------------------------------------------------------------------------


def test_the_reader_loads_what_stock_dcp_wrote_and_a_manifest_seals(tmp_path: Path) -> None:
    saved = {"w": torch.arange(1000.0).reshape(10, 100), "bits": torch.tensor([True, False])}
    steps_by_dcp.save(tmp_path / "step_00000001", saved, chunk_bytes=512)

    state = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load(state, storage_reader=StepkeeperReader(tmp_path / "step_00000001"), **ALONE)

    assert all(torch.equal(state[name], saved[name]) for name in saved)


@pytest.mark.campaign
def test_every_flipped_byte_that_is_used_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "run", 1, {"w": torch.ones(4, 3), "unused": torch.ones(9_000_000)})
    file = directory / "__0_0.distcp"
    size = file.stat().st_size
    for at in range(0, 1000, 97):
        flip(file, at)
        with pytest.raises(CheckpointException) as caught:
            load(directory)
        cause = caught.value.failures[0][0]
        assert isinstance(cause, DamagedError)
        assert f"{file}: bytes of chunk 0 (from byte 0) are wrong" in str(caught.value)  # what a traceback prints
        flip(file, at)
    flip(file, size - 10)  # of a chunk of which nothing is needed
    assert torch.equal(load(directory)["w"], torch.ones(4, 3))


def test_damage_to_manifest_and_metadata_is_an_error_of_the_constructor(tmp_path: Path) -> None:
    directory = save(tmp_path / "run", 1)

    for name, error, said in ((".metadata", DamagedError, "are wrong"), ("MANIFEST.json", ResumeError, "damaged")):
        flip(directory / name, 40)
        with pytest.raises(error, match=said):
            StepkeeperReader(directory)
        flip(directory / name, 40)
    with pytest.raises(ResumeError, match="no such step directory"):
        StepkeeperReader(tmp_path / "nothing")
    with pytest.raises(ResumeError, match="never committed"):
        StepkeeperReader(tmp_path / "run")


def test_a_partial_load_leaves_what_is_not_stored(tmp_path: Path) -> None:
    directory = save(tmp_path / "run", 1)

    state = load(directory, "w", "other", planner=DefaultLoadPlanner(allow_partial_load=True))

    assert torch.equal(state["w"], torch.ones(4, 3))
    assert torch.equal(state["other"], torch.zeros(4, 3))
    with pytest.raises(CheckpointException, match="Missing key"):
        load(directory, "w", "other")
    found = _load_state_dict_from_keys({"w"}, storage_reader=StepkeeperReader(directory))
    assert torch.equal(found["w"], torch.ones(4, 3))


def test_a_value_that_names_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'run-by-a-load'}",)

    directory = tmp_path / "step_00000001"
    dcp.save({"w": torch.ones(4, 3), "bad": Payload()}, checkpoint_id=directory, **ALONE)
    steps_by_dcp.commit(directory)

    with pytest.raises(CheckpointException, match="bad is a value that only unpickling can load") as caught:
        dcp.load({"bad": None}, storage_reader=StepkeeperReader(directory), **ALONE)

    assert isinstance(caught.value.failures[0][0], DamagedError)
    assert not (tmp_path / "run-by-a-load").exists()
    assert torch.equal(load(directory)["w"], torch.ones(4, 3))


@pytest.mark.parametrize(
    ("ranks", "reader", "background"),
    [
        ((2, 1), "ours", ""),
        ((1, 2), "ours", ""),
        ((2, 2), "stock", "thread"),
        pytest.param((2, 2), "ours", "process", marks=pytest.mark.campaign),
    ],
)
def test_what_some_ranks_saved_by_plain_dcp_is_loaded_by_others(
    stage: Stage, tmp_path: Path, ranks: tuple[int, int], reader: str, background: str
) -> None:
    saved, loaded = ranks
    ended = stage.play(f"{SCENES}:save", tmp_path / "run", ranks=saved, background=background)
    assert ended.codes == [0] * saved, ended.said
    step = tmp_path / "run/checkpoints/step_00000007"
    assert verify(step).ok, verify(step).problems
    assert read_manifest(step).world_size == saved

    ended = stage.play(f"{SCENES}:load", step, ranks=loaded, reader=reader)

    assert ended.codes == [0] * loaded, ended.said
    assert ended.said.count("wrong: []") == loaded


def test_all_ranks_hear_of_damage_that_one_of_them_reads(stage: Stage, tmp_path: Path) -> None:
    assert stage.play(f"{SCENES}:save", tmp_path / "run", ranks=2).codes == [0, 0]
    step = tmp_path / "run/checkpoints/step_00000007"
    flip(step / "__1_0.distcp", 700)

    ended = stage.play(f"{SCENES}:load", step, ranks=2)

    assert ended.codes == [3, 3], ended.said
    assert ended.said.count("__1_0.distcp: bytes of chunk 0 (from byte 0) are wrong") == 2
    assert stage.play(f"{SCENES}:load", step, ranks=2, reader="stock").codes != [3, 3], "stock refuses it by now"


# The writer -------------------------------------------------------------------------------------------------------


def test_saves_of_plain_dcp_are_steps_of_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for step in (1, 2, 3):
        save(run_dir, step, tokens=10 * step, loss=1.0 / step)

    checkpoints = run_dir / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["lineage.jsonl", *(f"step_0000000{n}" for n in (1, 2, 3))]
    newest = newest_verified(checkpoints).chosen
    assert newest is not None
    assert newest.manifest is not None
    assert (newest.step, newest.manifest.tokens, newest.manifest.loss) == (3, 30, 1 / 3)
    assert newest.manifest.parent == read_manifest(checkpoints / "step_00000002").save_id
    state = {"w": torch.zeros(4, 3)}
    steps_by_dcp.stock_load(newest.path, state)
    assert torch.equal(state["w"], torch.full((4, 3), 3.0))

    if sys.version_info < (3, 11):
        return  # the command needs a newer Python
    command = [sys.executable, "-m", "stepkeeper", "checkpoints"]
    said = subprocess.run([*command, "ls", run_dir, "--json"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert len(json.loads(said.stdout)) >= 1, said.stdout
    latest = subprocess.run([*command, "latest", run_dir], capture_output=True, text=True, check=True, cwd=ROOT)
    assert latest.stdout.strip() == str(newest.path)
    verified = subprocess.run([*command, "verify", newest.path], capture_output=True, text=True, check=False, cwd=ROOT)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_every_kind_of_tensor_and_value_comes_back(tmp_path: Path) -> None:
    from tests.trainer.worlds import equal, kinds  # noqa: PLC0415

    values = {"epoch": 3, "nothing": None, "names": ["a"], "deep": {"betas": (0.9, 0.95)}, "raw": b"\0\1"}
    model = torch.nn.Linear(3, 2)
    directory = save(tmp_path / "run", 1, {"kinds": kinds(), "own": values, "model": model.state_dict()})
    assert verify(directory).ok, verify(directory).problems

    for reader in (StepkeeperReader(directory), dcp.FileSystemReader(directory)):
        empty = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in kinds().items()}
        state: dict[str, Any] = {
            "kinds": empty,
            "own": dict.fromkeys(values) | {"deep": {"betas": ()}},
            "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        }
        dcp.load(state, storage_reader=reader, **ALONE)
        assert [name for name, value in kinds().items() if not equal(state["kinds"][name], value)] == []
        assert state["own"] == values
        assert torch.equal(state["model"]["weight"], model.weight)


def test_a_value_that_a_load_would_have_to_execute_is_refused_at_the_save(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:failing", tmp_path / "run", ranks=2)

    assert ended.codes == [0, 0], ended.said
    assert "code is a value that only unpickling can load" in ended.said
    names = sorted(os.listdir(tmp_path / "run/checkpoints"))
    assert names == ["lineage.jsonl", "step_00000001", "step_00000003"], "nothing is left of the save that failed"


@pytest.mark.parametrize(
    ("victim", "point"),
    [(1, "before writing"), (0, "after writing"), (0, "before the commit"), (1, "after writing")],
)
def test_a_save_in_which_a_rank_is_killed_never_counts(stage: Stage, tmp_path: Path, victim: int, point: str) -> None:
    run_dir = tmp_path / "run"

    ended = stage.play(f"{SCENES}:killed", run_dir, ranks=2, victim=victim, point=point)

    assert ended.codes[victim] == -9, ended.said
    choice = newest_verified(run_dir / "checkpoints")
    assert choice.chosen is not None
    assert choice.chosen.step == 1
    save(run_dir, 2)  # the next launch clears up, and goes on
    there = set(os.listdir(run_dir / "checkpoints")) - {
        ".verified"
    }  # made by verifying files that are some seconds old
    assert there == {"lineage.jsonl", "step_00000001", "step_00000002"}
    assert read_manifest(run_dir / "checkpoints/step_00000002").parent == choice.chosen.manifest.save_id  # type: ignore[union-attr]


def test_a_save_of_an_earlier_step_is_a_rollback(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for step in (1, 2, 3):
        save(run_dir, step)

    save(run_dir, 2)

    newest = newest_verified(run_dir / "checkpoints").chosen
    assert newest is not None
    assert newest.manifest is not None
    assert newest.path.name == f"step_00000002.{newest.manifest.save_id[:8]}"
    assert newest.manifest.parent == read_manifest(run_dir / "checkpoints/step_00000001").save_id


def test_the_step_that_a_supervisor_resumes_from_is_the_parent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for step in (1, 2):
        save(run_dir, step)
    code = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "from stepkeeper_trainer import StepkeeperWriter\n"
        "dcp.save({'w': torch.ones(1)}, storage_writer=StepkeeperWriter(sys.argv[1], step=9))\n"
    )
    first = run_dir / "checkpoints/step_00000001"
    environment = os.environ | {"STEPKEEPER_RESUME_FROM": str(first), "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}

    subprocess.run([sys.executable, "-c", code, run_dir], env=environment, check=True, timeout=120)

    assert read_manifest(run_dir / "checkpoints/step_00000009").parent == read_manifest(first).save_id


@pytest.mark.campaign
def test_fsdp1_goes_on_to_the_last_bit(stage: Stage, tmp_path: Path) -> None:
    """The manager refuses it: only collectives of all ranks give its state."""
    ended = stage.play(f"{SCENES}:fsdp1", tmp_path / "run", ranks=2)

    assert ended.codes == [0, 0], ended.said


def test_a_supervisor_hears_of_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as watcher:
        watcher.bind("")
        watcher.settimeout(0.0)
        monkeypatch.setenv("STEPKEEPER_SOCKET", "@" + watcher.getsockname()[1:].decode())
        monkeypatch.setenv("STEPKEEPER_ATTEMPT", "2")
        monkeypatch.setenv("STEPKEEPER_LAUNCH", "3")

        directory = save(tmp_path / "run", 5)

        said = decode_from_rank(watcher.recv(65536))
        assert isinstance(said, Committed)
        manifest = read_manifest(directory)
        assert (said.step, said.save_id, said.directory) == (5, manifest.save_id, directory.name)
        assert (said.launch, said.bytes) == ("2.3", sum(each.bytes for each in manifest.files.values()))
        with pytest.raises(BlockingIOError):  # a script that says nothing else is not taken to be silent
            watcher.recv(65536)


def test_an_attempt_that_a_newer_one_has_replaced_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_dir = tmp_path / "run"
    save(run_dir, 1)
    held = lease.read(run_dir)
    assert held is not None
    assert held.epoch == (7, 0)
    writer = StepkeeperWriter(run_dir, step=2)
    lease.write(run_dir, lease.Lease(job_id=7, restart_count=1, attempt=1, node="n2", pid=1, taken_at=0.0))

    with pytest.raises(CheckpointException, match=r"job 7 .restart 1, on n2. has taken over") as caught:
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, **ALONE)

    assert isinstance(caught.value.failures[0][0], SupersededError)
    known = lineage.read(run_dir / "checkpoints")
    assert known is not None
    assert len(known.commits) == 1
    assert not (run_dir / "checkpoints/step_00000002").exists()


@pytest.mark.campaign
def test_two_trainings_do_not_share_a_run_directory(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom stepkeeper_trainer import StepkeeperWriter\n"
        "StepkeeperWriter(sys.argv[1], step=1)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", code, run_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"process {other.pid} on .* trains in it"):
            StepkeeperWriter(run_dir, step=1)
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(60) == 0
    save(run_dir, 1)


def test_wrong_use_is_refused_by_name(tmp_path: Path) -> None:
    writer = StepkeeperWriter(tmp_path / "run/", step=1)
    with pytest.raises(UsageError, match="leave it out"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=tmp_path / "elsewhere", **ALONE)
    dcp.save({"w": torch.ones(1)}, storage_writer=writer, **ALONE)
    with pytest.raises(CheckpointException, match="one for each save"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, **ALONE)
    with pytest.raises(UsageError, match="step=-1"):
        StepkeeperWriter(tmp_path / "run", step=-1)
    if not ALONE:
        return  # an older torch has no such argument
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save(
            {"w": torch.ones(1)},
            storage_writer=StepkeeperWriter(tmp_path / "run/checkpoints", step=2),
            **ALONE,
            use_collectives=False,
        )


@pytest.mark.skipif(not ALONE, reason="the planner of this torch keeps no plans")
def test_a_planner_that_keeps_its_plans_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = StepkeeperWriter(tmp_path / "run", step=step)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if step == 1:
            dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=planner, **ALONE)
        else:
            with pytest.raises(CheckpointException, match="plan caching"):
                dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=planner, **ALONE)


# Stock DCP, from our own steps ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step directory that keepers of two ranks have saved."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    ended = stage.play("tests.trainer.worlds:save", run_dir, ranks=2)
    assert ended.codes == [0, 0], ended.said
    return run_dir / "checkpoints/step_00000001"


@pytest.mark.parametrize(
    ("flat", "reader", "ranks"),
    [
        pytest.param(True, "stock", 2, marks=flattens_tied),
        (False, "stock", 1),
        pytest.param(True, "ours", 1, marks=flattens_tied),
        (False, "ours", 2),
    ],
)
def test_a_full_state_dict_of_model_and_optimizer_is_loaded_from_a_step_of_ours(
    stage: Stage, kept: Path, *, flat: bool, reader: str, ranks: int
) -> None:
    ended = stage.play(f"{SCENES}:load", kept, ranks=ranks, flat=flat, reader=reader, manager=True)

    assert ended.codes == [0] * ranks, ended.said
    assert ended.said.count("wrong: []") == ranks
    assert verify(kept).ok


def test_what_a_part_holds_besides_tensors_is_loaded_by_stock_dcp(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5, "betas": (0.5, 0.75)}, {"params": [model.bias], "name": "biases"}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 2.0])
    own = Part(
        {"deep": {"list": [1, 2], "dicts": [{"a": 1}, {"a": torch.ones(1)}], 3: None}, "raw": b"\1", "t": (1, "x")}
    )
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": own},
        every=None,
        run_dir=tmp_path / "run",
    )
    manager.resume()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager.step_done(loss=1.0)
    assert manager.finish() is not None
    step = tmp_path / "run/checkpoints/step_00000001"
    assert verify(step).ok, verify(step).problems

    wanted: dict[str, Any] = {"scheduler": scheduler.state_dict(), "own": own.state_dict()}
    expected = flatten_state_dict(wanted)[0]
    expected |= {
        "optimizer.param_groups.0.params": ["weight"],
        "optimizer.param_groups.bias.lr": 0.5,
        "optimizer.param_groups.1.name": "biases",
        "optimizer.param_groups.weight.betas": (0.5, 0.75),
    }
    for reader in (dcp.FileSystemReader(step), StepkeeperReader(step)):
        state = dict(expected)
        state = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else "?" for k, v in state.items()}
        dcp.load(state, storage_reader=reader, **ALONE)
        assert state == expected


def test_equal_values_share_their_bytes_and_places_stay_from_step_to_step(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    manager = CheckpointManager({"model": model, "optimizer": optimizer}, every=1, run_dir=tmp_path / "run")
    manager.resume()
    for step in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.125 / step
        manager.step_done(loss=1.0)
    manager.finish()

    metadata = []
    for step in (1, 2):
        directory = tmp_path / f"run/checkpoints/step_{step:08d}"
        assert (directory / "values.bin").stat().st_size < 20_000
        save_id = read_manifest(directory).save_id.encode()
        metadata.append((directory / ".metadata").read_bytes().replace(save_id, b"x" * 32))
        state = {"optimizer.param_groups.49.bias.lr": 0.0}
        dcp.load(state, checkpoint_id=directory, **ALONE)
        assert state == {"optimizer.param_groups.49.bias.lr": 0.125 / step}
    assert metadata[0] == metadata[1]


def test_a_value_that_is_called_as_a_tensor_is_changes_nothing(tmp_path: Path) -> None:
    def build(resume_from: str | None) -> tuple[Part, CheckpointManager]:
        model, own = torch.nn.Linear(2, 2), Part({"a": {"b": torch.ones(3)}, "a.b": 5})
        options: dict[str, Any] = {"run_dir": tmp_path / "run", "resume_from": resume_from}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return own, CheckpointManager(
            {"model": model, "optimizer": optimizer, "own": own}, **({"every": None} | options)
        )

    _, manager = build(None)
    manager.resume()
    manager.step_done(loss=1.0)
    manager.finish()
    step = tmp_path / "run/checkpoints/step_00000001"
    assert verify(step).ok, verify(step).problems
    state = {"own.a.b": torch.zeros(3)}
    steps_by_dcp.stock_load(step, state)
    assert torch.equal(state["own.a.b"], torch.ones(3))
    own, manager = build("latest")
    own.value = {}
    assert manager.resume() == 1
    assert own.value["a.b"] == 5
    assert torch.equal(own.value["a"]["b"], torch.ones(3))


class Part:
    """A part of the state."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state


@pytest.mark.campaign
@pytest.mark.skipif(not ALONE, reason="the page is for a newer torch")
def test_the_snippets_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    page = (ROOT / "docs/dcp.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(snippets) == 3

    for snippet in snippets:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_save_that_fails_rolls_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of an earlier step: only once it is whole, the later ones no longer count."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        dcp.save({"w": torch.full((4,), step)}, storage_writer=StepkeeperWriter(run, step=step), **ALONE)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (2, 1):
        with monkeypatch.context() as patch:
            patch.setattr("stepkeeper_trainer.save.commit.gather", full)
            with pytest.raises(CheckpointException):
                dcp.save({"w": torch.zeros(4)}, storage_writer=StepkeeperWriter(run, step=step), **ALONE)
        chosen = newest_verified(run / "checkpoints", cached=False).chosen
        assert chosen is not None
        assert chosen.step == 3

    dcp.save({"w": torch.zeros(4)}, storage_writer=StepkeeperWriter(run, step=2), **ALONE)
    chosen = newest_verified(run / "checkpoints", cached=False).chosen
    assert chosen is not None
    assert chosen.step == 2
