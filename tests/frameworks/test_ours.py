"""Frameworks whose checkpoints are ours: killed in a save, stopped by a notice, and resumed with the same losses."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stepkeeper_trainer
from stepkeeper.cli.main import main
from stepkeeper_trainer.engines.training import check_doors, check_options, check_version, refuse
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import messages as words
from stepkeeper_trainer.formats.steps import list_steps
from tests.frameworks import environments, playing
from tests.frameworks.playing import Framework, Kill
from tests.frameworks.test_attach import Watcher, at_step

real = pytest.mark.frameworks
STEPS, EVERY = 12, 5  # step 10 is the end of an epoch for Hugging Face and Lightning; with accumulation, steps 5 and 10
NEXT = "checkpoints/.tmp-step_0000001?.*"  # the second save, or a later one
IMPORTS = {
    "huggingface": ["transformers.trainer", "accelerate"],
    "lightning": ["lightning"],
    "torchtitan": ["torchtitan.components.checkpoint"],
}
VARIANTS = [
    ("huggingface", ""),
    ("huggingface", "accumulating"),
    ("huggingface", "evaluating"),
    ("lightning", ""),
    ("lightning", "sharded"),
    ("lightning", "accumulating"),
    ("lightning", "evaluating"),
    ("lightning", "shuffled"),
    ("lightning", "streaming"),
    ("torchtitan", ""),
]
Play = Callable[..., tuple[list[int], Path]]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str], Framework]]:
    """Return what starts a framework: the processes stay until the module ends."""
    started: dict[str, Framework] = {}
    ours = Path(stepkeeper_trainer.__file__).parent.parent
    with contextlib.ExitStack() as stack:

        def begin(name: str) -> Framework:
            if name not in started:
                python = environments.require(name)
                further = {"PYTHONPATH": f"{ours}:{playing.SCRIPTS}", "TEST_STEP_S": "0.05"}
                warm = playing.warm(python, f"{name}_ours.py", IMPORTS[name], [], further=further)
                started[name] = stack.enter_context(warm)
            return started[name]

        yield begin


class Runs:
    """Launches of one script, in one directory after another."""

    def __init__(
        self, framework: Framework, variant: str, root: Path, *, steps: int = STEPS, every: int = EVERY
    ) -> None:
        self.framework, self.root = framework, root
        self.arguments = ["--steps", str(steps), "--every", str(every), "--variant", variant]

    def play(self, out: str, name: str, **more: Any) -> list[int]:
        return self.framework.play(self.root / out, self.root / name, arguments=self.arguments, **more)

    def resume(self, out: str, name: str, step: str | Path) -> list[int]:
        return self.play(out, name, further={"STEPKEEPER_RESUME_FROM": str(step)})

    def losses(self, name: str) -> list[dict[int, str]]:
        """Return those of each rank; where gradients are accumulated, of the last batch of each step."""
        return [playing.losses(self.root / name, rank) for rank in range(2)]

    def log(self, name: str) -> str:
        return "".join(Path(f"{self.root / name}.log.{rank}").read_text()[-3000:] for rank in range(2))

    def steps(self, out: str) -> dict[int, Path]:
        return {step.manifest.step: step.path for step in list_steps(self.root / out / "checkpoints") if step.manifest}


def after(step: int, whole: list[dict[int, str]]) -> list[dict[int, str]]:
    return [{at: loss for at, loss in each.items() if at > step} for each in whole]


@real
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_losses_go_on_bit_for_bit_from_each_step(
    name: str, variant: str, start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(start(name), variant, tmp_path)
    assert runs.play("out", "whole") == [0, 0], runs.log("whole")
    whole = runs.losses("whole")
    assert set(whole[0]) == set(range(1, STEPS + 1))
    steps = runs.steps("out")
    assert len(steps) >= 2, runs.log("whole")
    assert max(steps) == STEPS

    for step, path in steps.items():
        assert main(["checkpoints", "verify", str(path)]) == 0, capsys.readouterr().out
        if step < STEPS:
            again = f"from-{step}"
            assert runs.resume(again, f"{again}-losses", path) == [0, 0], runs.log(f"{again}-losses")
            assert runs.losses(f"{again}-losses") == after(step, whole), f"after step {step}"
    if name == "huggingface":  # what it has logged goes on too
        ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.end.0"))]
        assert len(ends) == len(steps)
        assert ends.count(ends[0]) == len(ends), ends

    before = set(runs.steps("out"))
    assert runs.resume("out", "finished", "latest") == [0, 0], runs.log("finished")
    assert not Path(f"{tmp_path / 'finished'}.0").exists(), "a finished training took another step"
    assert set(runs.steps("out")) == before
    assert json.loads((tmp_path / "out/outcome.json").read_text())["outcome"] == "finished"


@real
def test_an_epochs_shuffle_is_known_after_a_resume_at_its_start_too(start, tmp_path: Path) -> None:
    """Each rank's sampler draws the order from the random generators: here of an epoch that a resume begins."""
    runs = Runs(start("lightning"), "shuffled", tmp_path, steps=17)
    assert runs.play("out", "whole") == [0, 0], runs.log("whole")
    whole = runs.losses("whole")

    assert runs.resume("first", "first-losses", runs.steps("out")[10]) == [0, 0], runs.log("first-losses")
    assert runs.losses("first-losses") == after(10, whole)
    assert runs.resume("second", "second-losses", runs.steps("first")[15]) == [0, 0], runs.log("second-losses")
    assert runs.losses("second-losses") == after(15, whole)


@real
@pytest.mark.parametrize(
    "kill",
    [
        Kill(1, "open", f"{NEXT}/__1_0.distcp"),
        Kill(0, "fsync", f"{NEXT}/__0_0.distcp"),
        Kill(0, "open", f"{NEXT}/.metadata"),
        Kill(0, "rename", NEXT),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", list(IMPORTS))
def test_a_run_that_died_in_a_save_goes_on_from_the_step_before(
    name: str, kill: Kill, start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(start(name), "", tmp_path)
    assert runs.play("whole-out", "whole") == [0, 0], runs.log("whole")

    codes = runs.play("out", "killed", kill=kill)

    assert codes != [0, 0], "the kill did not happen"
    capsys.readouterr()
    assert main(["checkpoints", "latest", str(tmp_path / "out/checkpoints")]) == 0, capsys.readouterr().err
    newest = Path(capsys.readouterr().out.strip())
    [step] = [at for at, path in runs.steps("out").items() if path.samefile(newest)]
    assert EVERY <= step < STEPS
    assert runs.resume("out", "again", "latest") == [0, 0], runs.log("again")
    assert runs.losses("again") == after(step, runs.losses("whole")), f"after step {step}"
    assert max(runs.steps("out")) == STEPS


@real
@pytest.mark.parametrize(("name", "variant"), [each for each in VARIANTS if each[1] != "streaming"])
def test_a_notice_has_all_ranks_save_one_step_and_leave(name: str, variant: str, start, tmp_path: Path) -> None:
    steps, every = (30, 8) if variant == "evaluating" else (30, 1000)
    runs = Runs(start(name), variant, tmp_path, steps=steps, every=every)
    assert runs.play("whole-out", "whole") == [0, 0], runs.log("whole")
    in_evaluation = Path(f"{tmp_path / 'stopped'}.evaluating")
    when = (lambda _: in_evaluation.exists()) if variant == "evaluating" else at_step(7)
    with Watcher(tmp_path.name, when) as watcher:
        codes = runs.play("out", "stopped", further=watcher.environment(tmp_path / "out"))
        time.sleep(0.1)

    assert codes == [75, 75], runs.log("stopped")
    [*_, stopped] = watcher.of(words.Stopped)
    saved = [each.step for each in watcher.of(words.Committed) if each.emergency]
    assert stopped.step in saved
    if variant == "evaluating":
        assert every <= saved[0] <= every + 2, "the notice in an evaluation was answered later"
    assert stopped.step in runs.steps("out")
    assert {max(each) for each in runs.losses("stopped")} == {stopped.step}
    assert runs.resume("out", "again", "latest") == [0, 0], runs.log("again")
    assert runs.losses("again") == after(stopped.step, runs.losses("whole"))


@real
def test_a_script_that_asks_for_the_newest_checkpoint_gets_ours_and_a_trainers_own_is_refused(
    start, tmp_path: Path
) -> None:
    runs = Runs(start("huggingface"), "", tmp_path)
    assert runs.play("out", "whole") == [0, 0], runs.log("whole")
    path = runs.steps("out")[10]
    assert runs.play("from", "again", resume=str(path)) == [0, 0], runs.log("again")
    assert runs.losses("again") == after(10, runs.losses("whole"))
    (tmp_path / "checkpoint-10").mkdir()

    codes = runs.play("other", "refused", resume=str(tmp_path / "checkpoint-10"))

    assert codes != [0, 0]
    assert "not a step directory of ours" in runs.log("refused")


@real
def test_a_configuration_that_cannot_be_kept_is_refused_by_name(start, tmp_path: Path) -> None:
    runs = Runs(start("huggingface"), "refused", tmp_path)

    codes = runs.play("out", "refused")

    assert codes != [0, 0]
    assert "load_best_model_at_end" in runs.log("refused")
    assert "retention" in runs.log("refused")


def test_another_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"msgspec .*from 99 to before 100; install one of those"):
        check_version(("no-such-package-here", "msgspec"), (99,), (100,))
    with pytest.raises(UsageError, match="no-such-package-here is not installed"):
        check_version(("no-such-package-here",), (1,), (2,))
    check_version(("msgspec",), (0,), (99,))


def test_a_framework_without_what_is_needed_of_its_inside_is_refused_by_name() -> None:
    class Trainer:
        class Loop:
            run = print

        loop = Loop()

    check_doors(Trainer(), ["loop.run"])
    with pytest.raises(UsageError, match=r"a Trainer of tests that has no loop\.skip, other\.run"):
        check_doors(Trainer(), ["loop.run", "loop.skip", "other.run"])


def test_what_the_framework_says_is_not_the_scripts_to_say() -> None:
    with pytest.raises(UsageError, match="total_steps="):
        check_options({"total_steps": 3})
    assert check_options({"run_dir": "x"}) == {"every": None, "run_dir": "x"}
    with pytest.raises(UsageError, match="with A: do B; with C: do D"):
        refuse([(True, "A", "do B"), (False, "no", "no"), (True, "C", "do D")])


def test_engines_import_no_framework(tmp_path: Path) -> None:
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    code = (
        "import sys, stepkeeper_trainer.engines, stepkeeper_trainer.engines.training\n"
        "assert not {'transformers', 'lightning', 'torchtitan'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, env=os.environ, timeout=120)
    assert done.returncode == 0
