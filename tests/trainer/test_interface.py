"""What a script may give a CheckpointManager, what it may call when, and what that leaves alone."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stepkeeper_trainer import CheckpointManager, GlobalSampler
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.examples.transformer import ModelSize, Transformer
from stepkeeper_trainer.formats.manifest import read_manifest
from stepkeeper_trainer.formats.steps import list_steps
from stepkeeper_trainer.formats.verify import verify
from stepkeeper_trainer.load.reader import ALONE
from tests.trainer import old_parts
from tests.trainer.ranks import ROOT
from tests.trainer.scenes import Stage

pytestmark = pytest.mark.usefixtures("one_process")

SCENES = "tests.trainer.interface_scenes"
OLD_RUN = ROOT / "tests/fixtures/run-0.1"


class Counter:
    """Something of the script's own."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make(run_dir: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(state, run_dir=run_dir, storage_test="off", **({"every": None} | options))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as found:
        yield found


# --- the state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.b", "", "keeper", "ranks", "rng", "a/b", "$a", "a\nb", 3])
def test_a_name_that_cannot_begin_keys_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"state={{{name!r}: ...}}: a name is text without")):
        make(tmp_path / "run", {name: Counter()})


def test_a_value_that_has_no_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rate is a float: give a module, an optimizer, or something with state_dict"):
        make(tmp_path / "run", {"rate": 0.1})


def test_several_modules_and_optimizers_have_any_names(tmp_path: Path) -> None:
    """Two networks with an optimizer each, as in adversarial training; names of the one are words of the library."""

    def build() -> dict[str, Any]:
        one, other = torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        return {
            "model": torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
            "generator": one,
            "optimizer": other,
            "best guess": torch.optim.AdamW(one.parameters(), lr=0.02),
            "others": Counter(4),
        }

    def step(state: dict[str, Any]) -> None:
        state["optimizer"](state["generator"](torch.rand(5, 3))).square().mean().backward()
        for name in ("model", "best guess"):
            state[name].step()
            state[name].zero_grad()

    first = build()
    manager = make(tmp_path / "run", first, total_steps=2)
    manager.resume()
    for _ in manager.steps():
        step(first)
        manager.step_done()
    assert manager.finish() == 0
    second = build()
    second["others"].value = 0

    again = make(tmp_path / "run", second, resume_from="latest")

    assert again.resume() == 2
    assert old_parts.digests(second) == old_parts.digests(first)
    [newest, *_] = list_steps(tmp_path / "run/checkpoints")
    assert verify(newest.path).ok
    keys = dcp.FileSystemReader(newest.path).read_metadata().state_dict_metadata
    assert {"generator.weight", "optimizer.0.weight", "best guess.state.weight.exp_avg"} <= keys.keys()
    manifest = read_manifest(newest.path)
    assert manifest.state["modules"] == ["generator", "optimizer"]
    third = build()
    del third["others"]
    with pytest.raises(Exception, match=r"lacks none and has \['others'\]"):
        make(tmp_path / "run", third, resume_from="latest").resume()


def test_a_state_needs_neither_a_module_nor_an_optimizer(tmp_path: Path) -> None:
    counter = Counter()
    manager = make(tmp_path / "run", {"count": counter}, total_steps=3, attach_signals=True)
    manager.resume()
    for _ in manager.steps():
        counter.value += 5
        manager.step_done(loss=0.5)
    assert manager.finish() == 0
    again = Counter()

    assert make(tmp_path / "run", {"count": again}, resume_from="latest").resume() == 3

    assert again.value == 15


# --- the loop and its end ------------------------------------------------------------------------------


def test_steps_goes_on_where_the_run_is_and_repeats_a_step_that_was_not_done(tmp_path: Path) -> None:
    counter = Counter()
    manager = make(tmp_path / "run", {"count": counter}, total_steps=4)
    with pytest.raises(UsageError, match="resume"):
        next(manager.steps())
    manager.resume()
    found, skipped = [], False
    for step in manager.steps():
        found.append(step)
        if step == 2 and not skipped:
            skipped = True
            continue
        manager.step_done()
    assert found == [0, 1, 2, 2, 3]
    assert manager.finished
    assert manager.finish() == 0

    again = make(tmp_path / "run", {"count": counter}, total_steps=6, resume_from="latest")
    again.resume()

    seen = []
    for step in again.steps():
        seen.append(step)
        again.step_done()
    assert seen == [4, 5]


def test_a_stop_ends_the_loop_and_makes_finished_true(tmp_path: Path) -> None:
    manager = make(tmp_path / "run", {"count": Counter()}, total_steps=100, attach_signals=True)
    manager.resume()
    for step in manager.steps():
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.step_done()
    assert (manager.step, manager.finished) == (3, True)

    assert manager.finish() == 75


@pytest.mark.parametrize("method", ["finish", "step_done", "save", "alive", "restore_random_state", "resume", "steps"])
def test_after_finish_no_method_can_be_called(tmp_path: Path, method: str) -> None:
    manager = make(tmp_path / "run", {"count": Counter()}, total_steps=1)
    manager.resume()
    manager.step_done()
    assert manager.finish() == 0

    with pytest.raises(UsageError):
        list(manager.steps()) if method == "steps" else getattr(manager, method)()

    again = make(tmp_path / "run", {"count": Counter()}, resume_from="latest")
    assert again.resume() == 1, "another one can be made in the same process"


# --- what it leaves alone ------------------------------------------------------------------------------


def _hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return how many hooks a module and an optimizer have."""
    of_module = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_optimizer = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return sum(len(getattr(model, name)) for name in of_module), sum(
        len(getattr(optimizer, name)) for name in of_optimizer
    )


def _process() -> list[object]:
    """Return what a process has one of."""
    return [signal.getsignal(number) for number in signal.valid_signals()] + [sys.excepthook]


@pytest.mark.parametrize("where", ["alone", "in a job", "supervised", "refused in a job"])
def test_handlers_and_hooks_are_attached_where_somebody_sends_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if "in a job" in where:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
    if where == "supervised":
        monkeypatch.setenv("STEPKEEPER_SOCKET", "@nobody")
    options: dict[str, Any] = {"attach_signals": False} if where == "refused in a job" else {}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, hooks = _process(), _hooks(model, optimizer)
    handlers, hook = before[:-1], before[-1]

    manager = make(tmp_path / "run", {"model": model, "optimizer": optimizer}, total_steps=1, **options)
    manager.resume()

    attached = where in ("in a job", "supervised")
    assert (_process()[:-1] != handlers) is attached
    assert (_hooks(model, optimizer) != hooks) is attached
    assert (_process()[-1] is not hook) is (where == "supervised")
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    manager.step_done()
    assert manager.finish() == 0
    assert _process()[:-1] == handlers, "signals are the script's again"


def test_a_copy_of_a_module_without_hooks_has_none(tmp_path: Path) -> None:
    """An average of weights, for example, is a copy; it can be pickled."""
    model = torch.nn.Linear(2, 2)
    make(tmp_path / "run", {"model": model}).resume()

    assert _hooks(copy.deepcopy(model), torch.optim.SGD(model.parameters()))[0] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_without_hooks_weights_may_change_as_soon_as_a_save_has_begun(tmp_path: Path) -> None:
    """Copies are ordered before whatever training issues next."""
    model = torch.nn.Linear(16384, 16384, device="cuda")
    manager = make(tmp_path / "run", {"model": model})
    manager.resume()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    manager.step_done()
    assert manager._saver is not None
    manager._saver.wait_prepared(time.time() + 90)

    manager.save()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)

    assert manager.wait_saved(90)
    [step] = list_steps(tmp_path / "run/checkpoints")
    saved = torch.zeros(16384, 16384)
    dcp.load({"model": {"weight": saved}}, checkpoint_id=step.path, **ALONE)
    assert bool((saved == 1.0).all())


SCRIPT = """
import sys, torch
sys.path[:0] = [sys.argv[1] + "/trainer", sys.argv[1]]
from stepkeeper_trainer import CheckpointManager
from stepkeeper_trainer.errors import DamagedError

model = torch.nn.Linear(2, 2)
manager = CheckpointManager({"model": model}, run_dir=sys.argv[2], every=None, storage_test="off", **eval(sys.argv[3]))
manager.resume()
manager.step_done(loss=1.0)
manager.save()
raise DamagedError("a test") if sys.argv[4] == "ours" else ValueError("a test")
"""


@pytest.mark.parametrize("kind", ["ours", pytest.param("the script's", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("attached", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_an_exception_that_nobody_catches(tmp_path: Path, kind: str, *, attached: bool) -> None:
    """Attached: a save in flight is committed, and an error of the library has its code and no traceback."""
    options = {"attach_excepthook": True} if attached else {}
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "STEPKEEPER_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path / "run"), repr(options), kind],
        capture_output=True, text=True, timeout=180, check=False, env=own,
    )  # fmt: skip

    assert done.returncode == (65 if attached and kind == "ours" else 1), done.stderr
    assert ("Traceback" in done.stderr) is not (attached and kind == "ours"), done.stderr
    assert "a test" in done.stderr
    if attached:
        assert [step.step for step in list_steps(tmp_path / "run/checkpoints")] == [1]


# --- several ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "method", "told"),
    [
        ([1], "finish", r"step_done\(\) on ranks 0 to 2; finish\(\) on rank 1\."),
        ([0, 1], "finish", r"step_done\(\) on rank 2; finish\(\) on ranks 0 to 1\."),
        ([2], "save", r"step_done\(\) on ranks 0 to 1; save\(\) on rank 2\."),
    ],
)
def test_ranks_in_different_methods_all_get_one_error_at_once(
    stage: Stage, tmp_path: Path, others: list[int], method: str, told: str
) -> None:
    """Far ahead of any time limit, and with the same words, which name the ranks and the methods."""
    ended = stage.play(f"{SCENES}:uneven", tmp_path / "run", ranks=3, group_s=300.0, others=others, method=method)

    assert ended.codes == [64, 64, 64], ended.said
    found = re.findall(r"^rank (\d) after ([\d.]+) s: (.*)$", ended.said, re.MULTILINE)
    assert {rank for rank, _, _ in found} == {"0", "1", "2"}, ended.said
    assert len({words for _, _, words in found}) == 1, "all say the same"
    assert re.search(told, found[0][2]), found[0][2]
    assert max(float(seconds) for _, seconds, _ in found) < 60.0, "and nobody waits for a limit"


def test_a_rank_that_does_not_come_is_named(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:late", tmp_path / "run", ranks=3, group_s=8.0, who=1, seconds=12.0)

    assert ended.codes == [1, 0, 1], ended.said
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 did not come to step_done() within 8 s" in ended.said


@pytest.mark.parametrize("when", [pytest.param("resume", marks=pytest.mark.campaign), "first step"])
def test_what_one_rank_cannot_save_ends_all_ranks_at_once_with_the_same_words(
    stage: Stage, tmp_path: Path, when: str
) -> None:
    """Though the process of that rank lives on for 20 s, and before anything is committed."""
    ended = stage.play(f"{SCENES}:refused_on_one_rank", tmp_path / "run", ranks=3, group_s=300.0, when=when)

    assert ended.codes == [78, 78, 78], ended.said
    found = re.findall(r"^rank (\d) after ([\d.]+) s: (.*)$", ended.said, re.MULTILINE)
    [words] = {words for _, _, words in found}
    assert words.startswith("rank 1: box.value is a range, which is neither a tensor nor JSON: leave it out of state")
    assert max(float(seconds) for _, seconds, _ in found) < 15.0
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_a_state_that_cannot_be_had_fails_that_save_on_all_ranks_and_not_training(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:no_state_for_a_while", tmp_path / "run", ranks=2, group_s=300.0)

    assert ended.codes == [0, 0], ended.said
    assert "box: its state_dict() raised RuntimeError: no index yet" in ended.said
    assert [step.name for step in sorted((tmp_path / "run").glob("checkpoints/step_*"))] == [
        "step_00000001", "step_00000003",
    ]  # fmt: skip


def test_a_rank_that_ends_is_no_riddle_of_gloos(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:one_ends", tmp_path / "run", ranks=2, group_s=300.0)

    assert ended.codes == [1, 9], ended.said
    assert re.search(
        r"rank 0: another rank ended while this one waited for it in step_done\(\): its own last lines say why; "
        r"gloo says: .*(Connection closed by peer|reset by peer)",
        ended.said,
    ), ended.said


def test_signal_handlers_of_the_script_run_while_a_rank_is_waited_for(stage: Stage, tmp_path: Path) -> None:
    ended = stage.play(f"{SCENES}:signalled", tmp_path / "run", ranks=3, group_s=600.0, limit_s=200.0)

    assert ended.codes == [0, 0, 0], ended.said


@pytest.mark.parametrize("exits", [10, pytest.param(50, marks=pytest.mark.campaign)])
def test_a_process_exits_with_the_code_of_finish_each_time(stage: Stage, tmp_path: Path, exits: int) -> None:
    """Through the end of the interpreter, after collectives over gloo: a thread of torch's that is left would abort."""
    codes: list[int] = []
    began_at = time.monotonic()
    while len(codes) < exits:
        ended = stage.play(f"{SCENES}:stopped", tmp_path / f"run{len(codes)}", ranks=5, group_s=120.0)
        assert ended.codes == [75] * 5, f"after {len(codes)} in {time.monotonic() - began_at:.0f} s: {ended.said}"
        codes += ended.codes


# --- what older versions wrote -------------------------------------------------------------------------


def test_a_step_with_keys_of_the_old_interface_is_loaded_under_plain_names(stage: Stage, tmp_path: Path) -> None:
    """`others.average`, `optimizers.body`: every bit of every part, also of those of which each rank has its own."""
    shutil.copytree(old_parts.FIXTURE / "checkpoints", tmp_path / "run/checkpoints")

    ended = stage.play(f"{SCENES}:goes_on_from_old_parts", tmp_path / "run", ranks=2, limit_s=240.0)

    assert ended.codes == [0, 0], ended.said
    for rank in (0, 1):
        expected = json.loads((old_parts.FIXTURE / f"expected-{rank}.json").read_text())
        (found,) = re.findall(rf"^resumed on {rank}: (.*)$", ended.said, re.MULTILINE)
        if not ALONE:
            del expected["scheduler"]  # those of an older torch have other keys
        assert expected.items() <= json.loads(found).items()
        assert json.loads(found).keys() - expected.keys() <= {"scheduler"}
        (saved,) = re.findall(rf"^saved on {rank}: (.*)$", ended.said, re.MULTILINE)
        (again,) = re.findall(rf"^again on {rank}: (.*)$", ended.said, re.MULTILINE)
        assert again == saved, "the next step has the new keys"
    assert "replicas_differ" not in ended.said
    newest = list_steps(tmp_path / "run/checkpoints")[0].path
    keys = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    assert {"expert.weight", "ranks.rank_00001.expert.weight", "of expert.state.expert.weight.exp_avg"} <= keys.keys()
    assert [key for key in keys if "others" in key or "optimizers" in key] == []
    told = stage.play(f"{SCENES}:goes_on_from_old_parts", tmp_path / "alone", ranks=1, start=str(newest))
    assert told.codes == [66], "experts of two ranks are not those of one"
    assert re.search(r"1 ranks cannot resume what 2 saved: ranks hold different values of .*expert\.weight", told.said)


def test_a_step_of_the_first_release_is_loaded_under_plain_names(tmp_path: Path) -> None:
    """It has two ranks' shards of the reference script, which one process takes; torch itself reads the same values."""
    shutil.copytree(OLD_RUN / "checkpoints", tmp_path / "run/checkpoints")
    [step] = [found.path for found in list_steps(tmp_path / "run/checkpoints")]
    saved = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    expected = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(("model.", "optimizer."))
    }
    dcp.load(expected, checkpoint_id=step, **ALONE)
    model = Transformer(ModelSize(layers=2, width=32, heads=2, context=32, dropout=0.1), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0),
        "sampler": GlobalSampler(124999, seed=7, fingerprint="2633c5caa95983c2ff2fa456bf9d61ca/32"),
    }

    assert make(tmp_path / "run", state, resume_from="latest").resume() == 18

    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer.state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.detach(), expected[name]), name
    assert state["sampler"].state_dict()["consumed"] == 144
    assert state["scheduler"].state_dict()["_last_lr"] == [0.0007268612642442657]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
