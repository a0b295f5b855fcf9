"""What did not change is linked: by observed history, and only where the bytes are the same."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper_trainer import Keeper, incremental, persist
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest
from stepkeeper_trainer.formats.steps import read_manifest, verify
from stepkeeper_trainer.incremental import COLD_AFTER, GROUPS_MAX, LINKS_MAX, History, Links

pytestmark = pytest.mark.usefixtures("one_process")

# --- which tensors are cold ----------------------------------------------------------------------------


def test_tensors_that_stay_the_same_get_a_file_of_their_own() -> None:
    history = History([10, 10, 10], bytes_min=15)

    changes = [history.observe([1, 2, n]) for n in range(COLD_AFTER + 1)]

    assert changes == [False] * COLD_AFTER + [True]
    assert (history.groups, history.hot) == ([[0, 1]], [2])
    assert not history.observe([1, 2, 99])


def test_a_few_bytes_are_not_worth_a_file() -> None:
    history = History([10, 10, 1000], bytes_min=100)
    for n in range(10):
        assert not history.observe([1, 2, n])
    assert history.groups == []


def test_a_tensor_that_thaws_is_hot_again_and_must_prove_itself_for_longer() -> None:
    history = History([100, 100], bytes_min=50)
    for n in range(COLD_AFTER + 1):
        history.observe([1, n])
    assert history.groups == [[0]]

    assert history.observe([2, 90])
    assert history.hot == [0, 1]
    waited = 0
    while not history.groups:
        waited += 1
        history.observe([2, 100 + waited])

    assert waited == 2 * COLD_AFTER


@given(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), max_size=40))
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_every_tensor_is_in_exactly_one_place_whatever_happens(saves: list[list[int]]) -> None:
    history = History([5] * 6, bytes_min=5)
    for digests in saves:
        before = [list(group) for group in history.groups]
        changed = history.observe(digests)
        placed = [n for group in [history.hot, *history.groups] for n in group]
        assert sorted(placed) == list(range(6))
        assert len(history.groups) <= GROUPS_MAX
        assert changed or history.groups == before
        assert all(history.groups)


# --- links -----------------------------------------------------------------------------------------------


def entry(size: int) -> FileEntry:
    return FileEntry(bytes=size, xxh3_128="ab")


def test_one_spot_of_disk_does_not_hold_up_every_step(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"12345")
    links = Links()
    shared = [links.link(tmp_path / "0", tmp_path / f"link{n}", entry(5)) for n in range(LINKS_MAX + 2)]

    assert shared == [True] * LINKS_MAX + [False, True], "one save in so many writes the file anew"


def test_a_file_of_another_size_or_gone_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")

    assert not Links().link(tmp_path / "a", tmp_path / "b", entry(5))
    assert not Links().link(tmp_path / "nothing", tmp_path / "b", entry(5))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.ENOTSUP])
def test_a_file_system_without_links_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    asked = []

    def refused(*_args: object, **_options: object) -> None:
        asked.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    links = Links()

    assert not links.link(tmp_path / "a", tmp_path / "b", entry(5))
    assert not links.link(tmp_path / "a", tmp_path / "c", entry(5))
    assert len(asked) == 1, "it is not tried again and again"


def test_a_full_disk_is_no_missing_link_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"12345")

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)

    with pytest.raises(OSError, match="No space"):
        Links().link(tmp_path / "a", tmp_path / "b", entry(5))


# --- whole saves -----------------------------------------------------------------------------------------


class Adapted:
    """A large frozen layer below a small one that learns."""

    def __init__(self, run_dir: Path, resume_from: str | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 2))
        self.model[0].requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.keeper = Keeper(
            model=self.model, optimizer=self.optimizer, run_dir=run_dir, resume_from=resume_from, retention="all"
        )
        self.run_dir = run_dir
        self.resumed = self.keeper.resume()

    def step_and_save(self) -> Path:
        self.model(torch.rand(3, 600)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.keeper.step_done(loss=1.0)
        self.keeper.save()
        saver = self.keeper._saver
        assert saver is not None
        assert saver.wait(time.time() + 90), saver.last
        return self.run_dir / f"checkpoints/step_{self.keeper.step:08d}"


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "COLD_BYTES_MIN", 1000)


def inodes(step: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in step.iterdir() if path.suffix == ".distcp"}


def frozen_file(step: Path) -> str:
    [name] = [name for name in inodes(step) if name != "__0_0.distcp"]
    return name


@pytest.mark.usefixtures("small_groups")
def test_a_frozen_layer_is_linked_and_verified_like_the_rest(tmp_path: Path) -> None:
    run = Adapted(tmp_path / "run")
    steps = [run.step_and_save() for _ in range(7)]
    name = frozen_file(steps[-1])

    assert inodes(steps[-1])[name] == inodes(steps[-2])[name] == inodes(steps[-3])[name]
    assert inodes(steps[-1])["__0_0.distcp"] != inodes(steps[-2])["__0_0.distcp"]
    assert read_manifest(steps[-1]).files[name] == read_manifest(steps[-2]).files[name]
    assert read_manifest(steps[-1]).files[name].bytes > 600 * 600 * 4
    assert all(verify(step).ok for step in steps)
    shutil.rmtree(steps[-2])
    assert verify(steps[-1]).ok, "what is linked outlives the step that it came from"
    loaded = {"model": {key: torch.zeros_like(value) for key, value in run.model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=steps[-1])
    assert all(torch.equal(loaded["model"][key], value) for key, value in run.model.state_dict().items())
    for step in steps[:-1]:
        shutil.rmtree(step, ignore_errors=True)
    assert Adapted(tmp_path / "run", "latest").resumed == 7


@pytest.mark.usefixtures("small_groups")
def test_a_layer_that_changes_after_all_is_written(tmp_path: Path) -> None:
    run = Adapted(tmp_path / "run")
    steps = [run.step_and_save() for _ in range(5)]
    name = frozen_file(steps[-1])
    with torch.no_grad():
        run.model[0].weight[3, 4] += 1

    changed = run.step_and_save()
    later = run.step_and_save()

    assert inodes(changed)[name] != inodes(steps[-1])[name]
    for step in (changed, later):
        assert verify(step).ok
        target = torch.zeros(600, 600)
        dcp.load({"model": {"0.weight": target}}, checkpoint_id=step)
        assert torch.equal(target, run.model[0].weight)


@pytest.mark.usefixtures("small_groups")
def test_nothing_is_linked_to_a_step_that_is_gone_or_was_never_committed(tmp_path: Path) -> None:
    run = Adapted(tmp_path / "run")
    steps = [run.step_and_save() for _ in range(5)]
    name = frozen_file(steps[-1])
    os.rename(steps[-1], tmp_path / "elsewhere")

    after = run.step_and_save()

    assert inodes(after)[name] != inodes(tmp_path / "elsewhere")[name]
    assert verify(after).ok


@pytest.mark.usefixtures("small_groups")
def test_the_manifest_before_is_read_once_a_save_however_many_files_may_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Adapted(tmp_path / "run")
    for number in range(8):
        if number == 4:
            run.optimizer.param_groups[0]["lr"] = 0.0  # the small layer stands still too, later than the large one
        run.step_and_save()
    reads: list[Path] = []

    def counted(directory: Path) -> Manifest:
        manifest = read_manifest(directory)
        reads.append(directory)
        return manifest

    monkeypatch.setattr(persist, "read_manifest", counted)
    step = run.step_and_save()

    assert sum(path.stat().st_nlink > 1 for path in step.glob("*.distcp")) > 1
    assert len(reads) == 1


@pytest.mark.usefixtures("small_groups")
def test_without_links_the_same_step_is_written_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    run = Adapted(tmp_path / "run")
    steps = [run.step_and_save() for _ in range(6)]
    name = frozen_file(steps[-1])

    assert len({inodes(step).get(name) for step in steps[-3:]}) == 3
    assert all(verify(step).ok for step in steps)
