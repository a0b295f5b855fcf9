"""What goes wrong with stock DCP is shown to go wrong, and shown not to here: docs/checkpoint-guarantees.md lists it.

Each flaw is asserted on the torch that is installed: when a test of `stock` fails, torch has mended it.
Damage to files is in `test_damage`, fsyncs in `test_durability`, `.metadata` in `test_verify_metadata`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.errors import DamagedError, ResumeError, StepkeeperError
from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.steps import list_steps, newest_verified, verify
from stepkeeper_trainer.load.reader import CheckedReader, load
from tests.trainer.forked import ROOT, Story
from tests.trainer.fsdp import needs_fsdp
from tests.trainer.scenes import Stage
from tests.trainer.steps_by_dcp import commit, stock_load
from tests.trainer.test_keeper import Loop, save_at

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore"),  # stock's own, of which there are many
]
Library = Literal["stock", "stepkeeper"]
both = pytest.mark.parametrize("library", ["stock", "stepkeeper"])
SCENES = "tests.trainer.stock_scenes"
PAGE = ROOT / "docs/checkpoint-guarantees.md"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


def stock_save(directory: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, checkpoint_id=directory, **options)


def test_the_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(\w+)\.(test_\w+)`", PAGE.read_text()))

    assert named
    for module, test in named:
        places = (ROOT / "tests").rglob(f"{module}.py")
        assert any(f"def {test}(" in path.read_text() for path in places), f"{module}.{test}"
    own = set(re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.MULTILINE))
    assert own - {test for _, test in named} == {"test_the_page_names_tests_that_exist"}, "the page misses some"


# --- what is on disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["stock", pytest.param("stepkeeper", marks=needs_fsdp)])
def test_a_rank_dies_while_the_same_directory_is_saved_again(stage: Stage, tmp_path: Path, library: Library) -> None:
    """Stock writes over the older save, file by file: half of each is left, and it loads."""
    run_dir = tmp_path / "run"
    if library == "stock":
        ended = stage.play(f"{SCENES}:killed_while_overwriting", run_dir, ranks=2)
        assert ended.codes[1] == -9, ended.said
        found = {"part.0": torch.zeros(1000), "part.1": torch.zeros(1000)}
        stock_load(run_dir, found)
        assert {float(value[0]) for value in found.values()} == {1.0, 2.0}, "of two saves, without a word"
        return
    assert stage.story(Story(run_dir=str(run_dir), steps=2)).codes == [0, 0]
    before = {path: path.read_bytes() for path in (run_dir / "checkpoints/step_00000002").iterdir()}
    again = Story(run_dir=str(run_dir), steps=4, resume_from="latest", hit="written", rank=1, save_within_s=3.0)
    ended = stage.story(again)
    assert ended.codes[1] == -9, ended.said

    assert {path: path.read_bytes() for path in before} == before, "no file of a committed step is ever opened again"
    chosen = newest_verified(run_dir / "checkpoints").chosen
    assert chosen is not None
    assert chosen.step == 2


@both
def test_files_of_a_larger_save_stay_where_a_smaller_one_is_written(tmp_path: Path, library: Library) -> None:
    state = {str(n): torch.rand(10) for n in range(4)}
    if library == "stock":
        for threads in (4, 1):
            writer = dcp.FileSystemWriter(tmp_path, thread_count=threads)
            dcp.save(state, storage_writer=writer)
        named = {info.relative_path for info in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()}
        assert {path.name for path in tmp_path.glob("*.distcp")} - named, "files that belong to nothing"
        return
    loop = save_at(tmp_path, 1)
    loop.manager.save()  # the same step again
    loop.saved()

    assert {step.path.name for step in list_steps(tmp_path / "checkpoints")} == {
        "step_00000001",
        f"step_00000001.{loop.manager._saver.parent[:8]}",  # type: ignore[union-attr,index]
    }
    for step in list_steps(tmp_path / "checkpoints"):
        assert step.manifest is not None
        assert {path.name for path in step.path.iterdir()} == {*step.manifest.files, "MANIFEST.json"}


@both
def test_a_torn_newest_save_hides_the_whole_one_before_it(tmp_path: Path, library: Library) -> None:
    loop = save_at(tmp_path / "run", 1)
    loop.step()
    loop.manager.save()
    loop.saved()
    newer, older = list_steps(tmp_path / "run/checkpoints")
    (newer.path / ".metadata").unlink()
    if library == "stock":
        highest = max((tmp_path / "run/checkpoints").glob("step_*"))
        with pytest.raises(CheckpointException):
            stock_load(highest, {"model.0.weight": torch.zeros(3, 4)})
        return

    assert Loop(tmp_path / "run", resume_from="latest").manager.resume() == older.step


@both
def test_nothing_says_whether_a_set_of_safetensors_is_whole(tmp_path: Path, library: Library) -> None:
    """DCP's Hugging Face writer leaves no marker: a lost file is a smaller model."""
    if library == "stock":
        hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="this torch has no such writer")
        names = {"a": 1, "b": 2}
        writer = hf.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=names, save_distributed=True)
        dcp.save({name: torch.ones(3) for name in names}, storage_writer=writer)
        max(tmp_path.iterdir()).unlink()
        assert set(hf.HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata) == {"a"}
        return
    save_at(tmp_path / "run", 1)
    [step] = list_steps(tmp_path / "run/checkpoints")
    max(step.path.glob("*.distcp")).unlink()

    assert not verify(step.path, deep=False).ok


# --- errors ------------------------------------------------------------------------------------------------------


@both
def test_a_failed_load_passes_by_except_exception(tmp_path: Path, library: Library) -> None:
    """So a script's fall-back to an older step is never reached."""

    def attempt() -> str:
        try:
            if library == "stock":
                stock_load(tmp_path / "nowhere", {"w": torch.zeros(2)})
            else:
                Loop(tmp_path / "run", resume_from=tmp_path / "nowhere").manager.resume()
        except Exception:  # noqa: BLE001  # as a script would
            return "fell back"
        return "loaded"

    if library == "stock":
        with pytest.raises(BaseException, match="No such file"):
            attempt()
        return
    assert attempt() == "fell back"
    assert issubclass(ResumeError, StepkeeperError)


@pytest.mark.parametrize("place", ["planning", "staging", "reports"])
def test_dcps_exception_in_the_very_first_save_is_an_event_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever it comes up: the step is done, training goes on, and the next save is good."""
    loop = Loop(tmp_path)
    loop.manager.resume()

    def refused(*_: object, **__: object) -> None:
        raise CheckpointException("odd", {0: (ValueError("plans differ"), None)})  # type: ignore[dict-item]

    target = {
        "planning": "planner.Planner.agree",
        "staging": "staging.Staging.copy_if_it_fits",
        "reports": "commit.gather",
    }
    with monkeypatch.context() as patch:
        patch.setattr(f"stepkeeper_trainer.save.{target[place]}", refused)
        loop.run(1)
        loop.manager.save()
        saver = loop.manager._saver
        assert saver is not None
        assert not saver.wait(time.time() + 90)
        assert saver.last is not None
        assert saver.last.error == "plans differ"
    loop.run(2)
    loop.manager.save()
    loop.saved()

    assert [step.step for step in list_steps(tmp_path / "checkpoints")] == [2]


@both
def test_a_save_that_failed_in_the_background_says_nothing(stage: Stage, tmp_path: Path, library: Library) -> None:
    """Who asks stock's future is told; a script that goes on saving is not, and ends well with nothing saved."""
    ended = stage.play(f"{SCENES}:fails_in_the_background", tmp_path / "run", library=library)

    assert ended.codes == [0], ended.said
    if library == "stock":
        assert not ended.said
    else:
        assert re.search(r"save_failed step=1 .*Not a directory", ended.said), ended.said


# --- ranks -------------------------------------------------------------------------------------------------------


@both
def test_what_each_rank_has_for_itself_becomes_that_of_rank_0(stage: Stage, tmp_path: Path, library: Library) -> None:
    """Stock drops a key that several ranks have: all of them load one generator."""
    ended = stage.play(f"{SCENES}:generators", tmp_path / "run", ranks=2, library=library)

    assert ended.codes == [0, 0], ended.said
    found = re.findall(r"^rank \d: (.*)", ended.said, re.MULTILINE)
    assert found == (["the same", "another"] if library == "stock" else ["the same", "the same"])


@both
def test_a_save_in_its_thread_meets_trainings_own_collectives(stage: Stage, tmp_path: Path, library: Library) -> None:
    """Stock plans over the default group: where a rank's thread is late, collectives of two kinds meet."""
    limits = {"group_s": 3.0, "limit_s": 12.0} if library == "stock" else {}  # stock is to hang no longer than that
    ended = stage.play(f"{SCENES}:interleaved", tmp_path / "run", ranks=2, library=library, **limits)

    good = [re.search(rf"rank {rank}: sum 3.0\n.*rank {rank}: saved", ended.said, re.DOTALL) for rank in (0, 1)]
    if library == "stock":
        assert not all(good), ended.said
    else:
        assert all(good), ended.said
        assert ended.codes == [0, 0]


@pytest.mark.campaign
@both
def test_a_rank_that_was_late_once_costs_all_later_saves(stage: Stage, tmp_path: Path, library: Library) -> None:
    """A gloo group that has timed out stays broken; and no save of stock has a time limit of its own."""
    if library == "stock":
        ended = stage.play(f"{SCENES}:late_once", tmp_path, ranks=2, stop_s=4.0)
        outcomes = re.findall(r"^rank 0: save (\d) (good|failed)", ended.said, re.MULTILINE)
        assert outcomes == [("0", "good"), ("1", "failed"), ("2", "failed"), ("3", "failed")], ended.said
        return
    late = Story(
        run_dir=str(tmp_path / "run"),
        hit="written",
        rank=1,
        how="stop",
        stop_s=10.0,
        save_within_s=6.0,
        steps=8,
        every=2,
    )
    ended = stage.story(late)

    assert ended.codes == [0, 0], ended.said
    assert re.findall(r"^\[0\] save_failed step=(\d+)", ended.said, re.MULTILINE)[0] == "2"
    assert newest_verified(tmp_path / "run/checkpoints").chosen.step == 8  # type: ignore[union-attr]


# --- state -------------------------------------------------------------------------------------------------------


def linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((2, 3), float(step + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@both
def test_a_save_before_the_first_step_changes_training(tmp_path: Path, library: Library) -> None:
    """Stock takes a step with zero gradients to learn what the optimizer will have."""
    expected, optimizer = linear()
    train(expected, optimizer, 3)
    model, optimizer = linear()
    if library == "stock":
        get_optimizer_state_dict(model, optimizer)
        assert float(optimizer.state[model.weight]["step"]) == 1.0
    else:
        manager = CheckpointManager({"model": model, "optimizer": optimizer}, every=None, run_dir=tmp_path)
        manager.resume()
        manager.save()
        assert not optimizer.state

    train(model, optimizer, 3)

    assert torch.equal(model.weight, expected.weight) == (library == "stepkeeper")  # type: ignore[arg-type]


@both
def test_gradients_at_hand_cost_the_optimizers_state_at_resume(tmp_path: Path, library: Library) -> None:
    """Where a script has warmed up before it loads, stock finds no state to load into, and says nothing."""
    model, optimizer = linear()
    if library == "stepkeeper":
        manager = CheckpointManager({"model": model, "optimizer": optimizer}, every=None, run_dir=tmp_path)
        manager.resume()
        train(model, optimizer, 3)
        manager.step_done(loss=0.0)
        manager.save()
        assert manager._saver is not None
        assert manager._saver.wait(time.time() + 90)
    else:
        train(model, optimizer, 3)
        stock_save(tmp_path, {"optimizer": get_optimizer_state_dict(model, optimizer)})
    fresh, fresh_optimizer = linear()
    fresh(torch.ones(2, 3)).sum().backward()

    if library == "stock":
        state = get_optimizer_state_dict(fresh, fresh_optimizer)
        stock_load(tmp_path, {"optimizer": state})  # type: ignore[dict-item]
        set_optimizer_state_dict(fresh, fresh_optimizer, state)
        assert not fresh_optimizer.state, "the moments are gone"
        return
    CheckpointManager(
        {"model": fresh, "optimizer": fresh_optimizer}, every=None, run_dir=tmp_path, resume_from="latest"
    ).resume()
    assert torch.equal(
        fresh_optimizer.state[fresh.weight]["exp_avg"],  # type: ignore[index]
        optimizer.state[model.weight]["exp_avg"],  # type: ignore[index]
    )


@both
def test_a_model_that_lacks_a_layer_loads_the_rest(tmp_path: Path, library: Library) -> None:
    """Stock loads what it is asked for; that the checkpoint has more is not said."""
    if library == "stock":
        stock_save(tmp_path, {"first": torch.ones(2), "second": torch.ones(2)})
        found = {"first": torch.zeros(2)}
        stock_load(tmp_path, found)
        assert torch.equal(found["first"], torch.ones(2))
        return
    save_at(tmp_path, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    manager = CheckpointManager(
        {"model": model, "optimizer": torch.optim.AdamW(model.parameters())},
        every=None,
        run_dir=tmp_path,
        resume_from="latest",
    )

    with pytest.raises(ResumeError, match=r"2\.bias"):
        manager.resume()


# --- memory, threads, processes ----------------------------------------------------------------------------------


class Gated(FileSystem):
    """Storage that writes once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert self.open.wait(90)
        with super().create_stream(path, mode) as stream:
            yield stream


@both
def test_slow_storage_piles_up_copies_of_the_state(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in stock keeps a save from being begun, and staged, while others are in flight."""
    gate = Gated()
    if library == "stock":
        saves = []
        for number in range(3):
            writer = dcp.FileSystemWriter(tmp_path / str(number))
            writer.fs = gate
            saves.append(dcp.async_save({"w": torch.ones(4)}, storage_writer=writer))
        assert sum(not save.done() for save in saves) == 3
        gate.open.set()
        for save in saves:
            save.result(90)
        return
    sync = os.fsync

    def gated(descriptor: int) -> None:
        if ".distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert gate.open.wait(90)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", gated)
    loop = Loop(tmp_path / "run", every=1)
    loop.manager.resume()
    loop.run(4)
    saver = loop.manager._saver
    assert saver is not None
    assert (saver.busy, saver.sequence) == (True, 1), "the first one is in flight, and no other was begun"
    gate.open.set()
    loop.saved()


@pytest.mark.campaign
@both
def test_a_hung_save_keeps_the_process_from_ending(stage: Stage, tmp_path: Path, library: Library) -> None:
    """The interpreter joins stock's thread: a job that is out of time hangs on until it is killed."""
    ended = stage.play(f"{SCENES}:left_alone", tmp_path / "run", library=library)

    assert ended.codes == [0], ended.said
    assert (tmp_path / "run/waited").exists() == (library == "stock")


@pytest.mark.campaign
@both
def test_a_save_process_that_was_killed_is_never_replaced(stage: Stage, tmp_path: Path, library: Library) -> None:
    """Ours are made by a thread of the rank; after one that failed the next is good."""
    scene = "without_its_daemon" if library == "stock" else "no_daemon"
    ended = stage.play(f"{SCENES}:{scene}", tmp_path / "run", limit_s=200.0)  # a process of stock's imports torch again

    outcomes = re.findall(r"^save (\d) (good|failed)", ended.said, re.MULTILINE)
    if library == "stock":
        assert outcomes[0] == ("0", "good"), ended.said
        assert ("1", "good") not in outcomes, ended.said
        assert ("2", "good") not in outcomes, ended.said
    else:
        assert outcomes == [("0", "good"), ("1", "failed"), ("2", "good")], ended.said
        assert "children: []" in ended.said


# --- code in data ------------------------------------------------------------------------------------------------


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> object:
        return Path.touch, (self.flag,)


@both
def test_an_item_that_is_no_tensor_is_code_at_load(tmp_path: Path, library: Library) -> None:
    flag = tmp_path / "executed"
    stock_save(tmp_path / "step_00000001", {"extra": Touch(flag)})
    assert not flag.exists()
    if library == "stock":
        stock_load(tmp_path / "step_00000001", {"extra": None})  # type: ignore[dict-item]
        assert flag.exists()
        return
    commit(tmp_path / "step_00000001")
    reader = CheckedReader(tmp_path / "step_00000001", read_manifest(tmp_path / "step_00000001"))

    with pytest.raises(DamagedError, match="pickle"):
        load(reader, {"extra": None}, None)  # type: ignore[dict-item]

    assert not flag.exists()
