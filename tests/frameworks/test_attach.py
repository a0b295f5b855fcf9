"""A notice to unmodified scripts of real frameworks: all ranks save one step and leave; a resume goes on there."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from stepkeeper.cli.main import main
from stepkeeper.config.rank_settings import attach_variables
from stepkeeper.config.settings import RunSettings
from stepkeeper.watcher.ranks import RankSocket
from stepkeeper_trainer.formats import messages as words
from stepkeeper_trainer.formats import records
from stepkeeper_trainer.integrations import hook
from tests.frameworks import environments, playing
from tests.frameworks.playing import Framework

pytestmark = pytest.mark.frameworks

SITE = Path(hook.__file__).parent / "site"
STEPS = 200
WITHIN_S = 120.0


class Watcher:
    """The watcher's own socket, and a notice as soon as something has been seen."""

    def __init__(self, name: str, until: Callable[[list[words.FromRank]], bool], *, stop: bool = True) -> None:
        self.address, self.said = f"@{name}-{os.getpid()}", list[words.FromRank]()
        self._socket, self._until, self._stop = RankSocket(self.address), until, stop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._socket.close()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            self._hear()
            if self._until(self.said):
                self._socket.send("0.0", words.SaveRequest(request_id=1, stop=self._stop, launch="0.0", why="a test"))
        self._hear()  # what ranks that have ended had said

    def _hear(self) -> None:
        while (received := self._socket.receive()) is not None:
            self.said.append(received[0])

    def of(self, kind: type[words.FromRank]) -> list[words.FromRank]:
        return [message for message in self.said if isinstance(message, kind)]

    def environment(self, run_directory: Path) -> dict[str, str]:
        run_directory.mkdir(exist_ok=True)
        return {
            "STEPKEEPER_SOCKET": self.address, "STEPKEEPER_RUN_DIR": str(run_directory), "STEPKEEPER_RUN_ID": "x",
            "STEPKEEPER_ATTEMPT": "0", "STEPKEEPER_LAUNCH": "0",
        }  # fmt: skip


def at_step(step: int) -> Callable[[list[words.FromRank]], bool]:
    return lambda said: any(isinstance(each, words.Progress) and each.step >= step for each in said)


class Case:
    """One framework; `notice_at`: the step of the notice; `evaluates_at`: that before its evaluation."""

    def __init__(
        self, name: str, script: str, imports: list[str], notice_at: int = 7, evaluates_at: int = STEPS // 2
    ) -> None:
        self.name, self.script, self.imports, self.notice_at = name, script, imports, notice_at
        self.evaluates_at = evaluates_at


CASES = {
    "huggingface": Case("huggingface", "huggingface_script.py", ["transformers.trainer", "accelerate"]),
    "lightning": Case("lightning", "lightning_script.py", ["lightning"]),
    # it has saved once by then: only from that it is known where
    "deepspeed": Case("deepspeed", "deepspeed_script.py", ["deepspeed"], STEPS // 2 + 7),
    "accelerate": Case(
        "huggingface", "accelerate_script.py", ["accelerate"], STEPS // 2 + 7, evaluates_at=STEPS // 2 + 10
    ),
    "torchtitan": Case("torchtitan", "torchtitan_script.py", ["torchtitan.components.checkpoint"]),
}


@pytest.fixture(scope="module")
def play() -> Iterator[Callable[[str], Framework]]:
    """Return what starts a framework with the hook in it, as a rank's Python has it."""
    started: dict[str, Framework] = {}
    # these environments lack our packages: they are lent
    further = attach_variables(RunSettings(attach="auto")) | {"PYTHONPATH": f"{SITE}:{playing.SCRIPTS}"}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Framework:
            if name not in started:
                case = CASES[name]
                python = environments.require(case.name)
                warm = playing.warm(python, case.script, case.imports, [], further=further)
                started[name] = stack.enter_context(warm)
            return started[name]

        yield start


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def latest(out: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    main(["checkpoints", "latest", str(out), "--json"])
    return json.loads(capsys.readouterr().out)


def logs(losses: Path) -> str:
    return "".join(Path(f"{losses}.log.{rank}").read_text()[-10000:] for rank in range(2))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("huggingface", ""),
        ("huggingface", "evaluating"),
        ("huggingface", "compiling"),
        ("lightning", "ddp"),
        ("lightning", "sharded"),
        ("lightning", "evaluating"),
        ("lightning", "compiling"),
        ("deepspeed", "0"),
        ("deepspeed", "2"),
        ("deepspeed", "3"),
        ("accelerate", ""),
        ("accelerate", "accumulating"),
        ("accelerate", "evaluating"),
        ("torchtitan", ""),
    ],
)
def test_a_notice_has_all_ranks_save_one_step_from_which_the_losses_go_on(
    name: str, variant: str, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    framework = play(name)
    more = ["--steps", str(STEPS), "--every", str(STEPS // 2), "--variant", variant]
    whole, losses, again = (tmp_path / each for each in ("whole", "losses", "again"))
    assert framework.play(tmp_path / "whole-out", whole, arguments=more) == [0, 0], logs(whole)
    seen = Path(f"{losses}.{variant}")
    when = (lambda _: seen.exists()) if variant in ("evaluating", "compiling") else at_step(CASES[name].notice_at)
    out = tmp_path / "out"
    with Watcher(tmp_path.name, when) as watcher:
        codes = framework.play(out, losses, arguments=more, further=watcher.environment(tmp_path / "run"))

    assert codes == [75, 75], logs(losses)
    [stopped] = watcher.of(words.Stopped)
    [committed] = [each for each in watcher.of(words.Committed) if each.emergency]
    assert committed.step == stopped.step
    assert committed.framework == name
    assert Path(committed.directory).exists()
    hellos = list(watcher.of(words.Hello))
    assert {each.rank for each in hellos} == {0, 1}
    assert all(each.framework and not each.unable for each in hellos)
    if variant == "evaluating":
        assert stopped.step == CASES[name].evaluates_at, "it left before the evaluation, or after it"
    if variant == "compiling":
        assert stopped.step <= 2, "it trained on: the ranks agree one step late at most"
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "stopped"
    found = latest(out, capsys)
    assert found["chosen"]["step"] == stopped.step, found
    assert {max(playing.losses(losses, rank)) for rank in range(2)} == {stopped.step}

    codes = framework.play(out, again, resume=found["chosen"]["directory"], arguments=more)

    assert codes == [0, 0], logs(again)
    for rank in range(2):
        expected = {step: loss for step, loss in playing.losses(whole, rank).items() if step > stopped.step}
        assert playing.losses(again, rank) == expected, f"rank {rank} after {stopped.step}"


def with_torn_ones(out: Path) -> list[str]:
    """Make what a run that got further has left of two saves; return the arguments of one that keeps two."""
    for step in (10, 12):
        (out / f"checkpoint/step-{step}").mkdir(parents=True)
        (out / f"checkpoint/step-{step}/__0_0.distcp").write_bytes(b"half")
    return ["--steps", "8", "--every", "2", "--variant", "keeping"]


IN_THE_NEXT_SAVE = playing.Kill(1, "write", "checkpoint/step-6/__1_0.distcp")


def test_torchtitan_alone_removes_its_only_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts torn directories, and removes what it has just saved: the next start begins anew."""
    python = environments.require("torchtitan")
    out, case = tmp_path / "out", CASES["torchtitan"]
    more = with_torn_ones(out)
    with playing.warm(python, case.script, case.imports, []) as framework:
        codes = framework.play(out, tmp_path / "losses", arguments=more, kill=IN_THE_NEXT_SAVE)
    assert codes != [0, 0], "the kill did not happen"
    assert latest(out, capsys)["chosen"] is None, "it keeps whole ones by itself: there is nothing left to guard"


def test_torchtitans_retention_waits_where_it_would_keep_torn_ones_alone(
    play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    more = with_torn_ones(out)
    with Watcher(tmp_path.name, lambda _: False) as watcher:
        further = watcher.environment(tmp_path / "run")
        start = play("torchtitan").play
        codes = start(out, tmp_path / "losses", arguments=more, further=further, kill=IN_THE_NEXT_SAVE)

    assert codes != [0, 0], "the kill did not happen"
    assert latest(out, capsys)["chosen"]["step"] == 4
    assert "retention_waits" in logs(tmp_path / "losses")


@pytest.mark.parametrize(("name", "variant"), [("deepspeed", "2"), ("accelerate", ""), ("accelerate", "accumulating")])
def test_a_notice_between_a_resume_and_the_next_save_of_the_script_is_answered(
    name: str, variant: str, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launch before has learned where the script saves."""
    framework = play(name)
    more = ["--steps", str(STEPS), "--every", str(STEPS // 2), "--variant", variant]
    whole, losses, again, last = (tmp_path / each for each in ("whole", "losses", "again", "last"))
    assert framework.play(tmp_path / "whole-out", whole, arguments=more) == [0, 0], logs(whole)
    out, run, stopped = tmp_path / "out", tmp_path / "run", 0
    for path, notice_at in ((losses, CASES[name].notice_at), (again, CASES[name].notice_at + 5)):
        resume = latest(out, capsys)["chosen"]["directory"] if stopped else ""
        with Watcher(f"{tmp_path.name}-{path.name}", at_step(notice_at)) as watcher:
            codes = framework.play(out, path, resume=resume, arguments=more, further=watcher.environment(run))
        assert codes == [75, 75], logs(path)
        [committed] = [each for each in watcher.of(words.Committed) if each.emergency]
        assert committed.step > stopped, "nothing new was saved"
        stopped = committed.step
        assert stopped % (STEPS // 2), "it was the script's own save"

    resume = latest(out, capsys)["chosen"]["directory"]
    assert framework.play(out, last, resume=resume, arguments=more) == [0, 0], logs(last)

    for rank in range(2):
        expected = {step: loss for step, loss in playing.losses(whole, rank).items() if step > stopped}
        assert playing.losses(last, rank) == expected, f"rank {rank} after {stopped}"


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_notice_in_the_evaluation_behind_the_last_step_has_that_step_saved(
    name: str, play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Trainer saves behind the evaluation, and the notice may be over by then."""
    losses, out = tmp_path / "losses", tmp_path / "out"
    more = ["--steps", "10", "--every", "10", "--variant", "dying"]
    with Watcher(tmp_path.name, lambda _: Path(f"{losses}.evaluating").exists()) as watcher:
        codes = play(name).play(out, losses, arguments=more, further=watcher.environment(tmp_path / "run"))

    assert set(codes) <= {3, -9}, logs(losses)  # when one rank has ended badly, the other one is killed
    found = latest(out, capsys)["chosen"]
    assert found["step"] == 10, logs(losses)

    again = tmp_path / "again"  # Hugging Face alone does step 11
    more[-1] = "evaluating"
    with Watcher(f"{tmp_path.name}-again", lambda _: False) as watcher:
        further = watcher.environment(tmp_path / "run-again")
        codes = play(name).play(out, again, resume=found["directory"], arguments=more, further=further)

    assert codes == [0, 0], logs(again)
    assert not list(tmp_path.glob("again.[01]")), "it did a step more"
    assert Path(f"{again}.evaluating").exists() == (name == "huggingface"), "Lightning repeats no validation"


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_save_that_is_asked_for_is_made_and_the_training_finishes(name: str, play, tmp_path: Path) -> None:
    framework = play(name)
    losses = tmp_path / "losses"
    more = ["--steps", str(STEPS), "--every", "100000"]
    with Watcher(tmp_path.name, at_step(5), stop=False) as watcher:
        codes = framework.play(tmp_path / "out", losses, arguments=more, further=watcher.environment(tmp_path / "run"))

    assert codes == [0, 0], logs(losses)
    saved = watcher.of(words.Committed)
    assert saved, "nothing was saved"
    assert saved[0].step < STEPS
    assert Path(saved[0].directory).exists()
    assert [each.step for each in watcher.of(words.Finished)] == [STEPS]
    assert not (tmp_path / "run/outcome.json").exists(), "its exit code was not known"
    trained = records.read_trained(tmp_path / "run")
    assert trained is not None
    assert (trained.launch, trained.step) == ("0.0", STEPS)


def test_training_has_ended_whatever_the_script_does_then(play, tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    more = ["--steps", "6", "--every", "100000", "--variant", "failing"]
    with Watcher(tmp_path.name, lambda _: False) as watcher:
        further = watcher.environment(tmp_path / "run")
        codes = play("huggingface").play(tmp_path / "out", losses, arguments=more, further=further)

    assert codes == [3, 3], logs(losses)
    trained = records.read_trained(tmp_path / "run")
    assert trained is not None
    assert trained.step == 6


@pytest.mark.parametrize(
    ("script", "every", "why"),
    [
        (("deepspeed", "0"), 100000, "has not called save_checkpoint yet"),
        (("accelerate", ""), 100000, "has not called save_state yet"),
        (("accelerate", "further"), STEPS // 2, "itself adds epochs.txt to its checkpoints"),
    ],
)
def test_a_script_whose_checkpoints_are_not_known_leaves_without_a_save(
    script: tuple[str, str], every: int, why: str, play, tmp_path: Path
) -> None:
    losses = tmp_path / "losses"
    name, variant = script
    more = ["--steps", str(STEPS), "--every", str(every), "--variant", variant]
    with Watcher(tmp_path.name, at_step(5 if every > STEPS else every + 5)) as watcher:
        further = watcher.environment(tmp_path / "run")
        codes = play(name).play(tmp_path / "out", losses, arguments=more, further=further)

    assert codes == [1, 1], logs(losses)
    [failed] = watcher.of(words.SaveFailed)
    assert why in failed.error


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_a_loop_of_the_scripts_own_ends_by_its_exit_code(name: str, play, tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    more = ["--steps", "10", "--every", "5", "--variant", "0"]
    with Watcher(tmp_path.name, lambda _: False) as watcher:
        further = watcher.environment(tmp_path / "run")
        codes = play(name).play(tmp_path / "out", losses, arguments=more, further=further)

    assert codes == [0, 0], logs(losses)
    hellos = [each for each in watcher.of(words.Hello) if each.rank == 0]
    assert [each.unable for each in hellos if each.unable] == ["the script has ended"]
    assert hellos[-1].unable


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("huggingface", ("", "")),
        ("lightning", ("ddp", "")),
        ("deepspeed", ("2", "{out}/")),  # it names the directory, and DeepSpeed reads `latest` there
        ("accelerate", ("", "step_4")),
    ],
)
def test_a_script_that_names_no_checkpoint_resumes_from_the_one_that_was_chosen(
    name: str, script: tuple[str, str], play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    framework, (variant, resume) = play(name), script
    more = ["--steps", "6", "--every", "2", "--variant", variant]
    out, whole, again, anew = (tmp_path / each for each in ("out", "whole", "again", "anew"))
    assert framework.play(out, whole, arguments=more) == [0, 0], logs(whole)
    newest = Path(latest(out, capsys)["chosen"]["directory"])
    if newest.is_file():
        newest.write_bytes(newest.read_bytes()[:-100])
    else:
        max((each for each in newest.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size).unlink()
    found = latest(out, capsys)["chosen"]
    assert found["step"] == 4
    chosen = {hook.CHECKPOINT_VARIABLE: f"{name}:{found['directory']}"}
    how = {"resume": resume.format(out=out), "arguments": more}

    with Watcher(tmp_path.name, lambda _: False) as watcher:
        further = watcher.environment(tmp_path / "run")
        assert framework.play(out, again, further=further | chosen, **how) == [0, 0], logs(again)

    assert "resumes_from_chosen" in logs(again)
    for rank in range(2):
        expected = {step: loss for step, loss in playing.losses(whole, rank).items() if step > 4}
        assert playing.losses(again, rank) == expected
    if name == "huggingface":  # a training of another directory is another one
        elsewhere = {"arguments": more, "further": further | chosen}
        assert framework.play(tmp_path / "elsewhere", anew, **elsewhere) == [0, 0], logs(anew)
        assert playing.losses(anew, 0) == playing.losses(whole, 0)
