"""What the adapters decide, with the least that they need of their frameworks; tests/frameworks has the real ones."""

from __future__ import annotations

import importlib
import shutil
import string
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from stepkeeper_trainer.integrations import attachment as attachments
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training

STEPS = 4


def adapter(name: str, monkeypatch: pytest.MonkeyPatch, **packages: dict[str, Any]) -> Any:
    """Import an adapter where its framework is a few names."""
    for package, names in packages.items():
        module = ModuleType(package.replace("__", "."))
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    full = f"stepkeeper_trainer.integrations.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    imported = importlib.import_module(full)
    monkeypatch.delitem(sys.modules, full)
    return imported


@pytest.fixture(autouse=True)
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave by `SystemExit` alone: what ends a rank that goes on all the same would end the tests, 20 s later."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(attachments, "leave", leave)


@pytest.fixture
def attachment() -> Iterator[Attachment]:
    """Return one of a process alone that was asked to stop."""
    attachment = Attachment(Training(framework="generic", version="generic 1", total_steps=STEPS))
    attachment.join(1)
    assert attachment._requests is not None
    attachment._requests.stop_asked = True
    yield attachment
    attachment.open = False
    attachment._requests.close()


def test_nobody_leaves_in_the_evaluation_behind_the_last_step_of_huggingface(
    attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = adapter("huggingface", monkeypatch, transformers={"TrainerCallback": object, "__version__": "5"})
    monkeypatch.setattr(module, "attach", lambda *_: attachment)
    callback = module.StepkeeperCallback(SimpleNamespace())
    args, control = SimpleNamespace(output_dir="out"), SimpleNamespace(should_save=False)
    state = SimpleNamespace(global_step=STEPS, max_steps=STEPS)

    callback.on_train_begin(args, state, control)
    callback.on_step_end(args, state, control)
    assert attachment.stopping
    callback.on_save(args, state, control)
    for _ in range(3):
        callback.on_prediction_step(args, state, control)

    assert attachment.open
    assert attachment._to_confirm is not None
    assert not attachment._to_confirm.emergency, "a supervisor would expect the ranks to leave within 15 s"


def test_nobody_leaves_in_the_validation_behind_the_last_step_of_lightning(
    attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"__version__": "2.6"}
    packages = {"lightning": {}, "lightning__pytorch": names, "lightning__pytorch__callbacks": {}}
    base = {"Callback": object}
    module = adapter("lightning", monkeypatch, **packages, lightning__pytorch__callbacks__callback=base)
    monkeypatch.setattr(module, "attach", lambda *_: attachment)
    io = SimpleNamespace(teardown=lambda: None)
    trainer = SimpleNamespace(
        global_step=STEPS - 1, max_steps=STEPS, checkpoint_callbacks=[], default_root_dir="out",
        num_val_batches=[3], save_checkpoint=lambda _: None, strategy=SimpleNamespace(checkpoint_io=io),
    )  # fmt: skip
    callback = module.StepkeeperCallback()

    callback.on_train_start(trainer, None)
    trainer.global_step = STEPS
    callback.on_train_batch_end(trainer, None)
    assert attachment.stopping
    for _ in range(3):
        callback.on_validation_batch_end(trainer, None)

    assert attachment.open
    assert attachment.step_done(STEPS) is Asked.STOP


class FakeEngine:
    """What the adapter needs of DeepSpeedEngine."""

    optimizer = object()

    def __init__(self) -> None:
        self.global_steps = 0
        self.saves: list[tuple[str, str | None]] = []

    def forward(self) -> None:
        pass

    def step(self) -> None:
        self.global_steps += 1

    def save_checkpoint(self, save_dir: str, tag: str | None = None) -> None:
        self.saves.append((save_dir, tag))

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        return (f"{load_dir}/{tag}" if tag else None), {}


@pytest.fixture
def deepspeed(attachment: Attachment, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert attachment._requests is not None
    attachment._requests.stop_asked = False
    module = adapter("deepspeed", monkeypatch, deepspeed={"__version__": "0.19"})
    attached: list[str] = []
    monkeypatch.setattr(module, "attach", lambda name, _: attached.append(name) or attachment)
    engine_class = type("Engine", (FakeEngine,), {})
    module.install(SimpleNamespace(DeepSpeedEngine=engine_class))
    return SimpleNamespace(engine=engine_class(), attached=attached)


def train(engine: FakeEngine, steps: int, directory: str) -> None:
    for _ in range(steps):
        engine.forward()
        engine.step()
        engine.save_checkpoint(directory.format(step=engine.global_steps))


@pytest.mark.parametrize(
    ("directories", "code"),
    [
        (["/runs/2/out", "/runs/2/out"], 75),
        (["/runs/out/checkpoint-{step}"], 1),
        (["/runs/out/checkpoint-{step:05}"], 1),
        (["/runs/best", "/runs/last"], 1),
        (["/runs/best", "/runs/last", "/runs/best"], 1),
    ],
)
def test_an_engine_is_asked_to_save_only_where_its_directory_is_known(
    directories: list[str], code: int, attachment: Attachment, deepspeed: Any
) -> None:
    engine = deepspeed.engine
    for directory in directories:
        train(engine, 2, directory)
    saves = len(engine.saves)
    engine.forward()
    engine.step()
    assert attachment._requests is not None
    attachment._requests.stop_asked = True

    with pytest.raises(SystemExit) as left:
        engine.forward()

    assert left.value.code == code
    assert len(engine.saves) == saves + (code == 75)
    if code == 75:
        assert engine.saves[-1] == ("/runs/2/out", None)


def test_an_engine_attaches_at_its_first_step_and_not_in_an_evaluation_before(deepspeed: Any) -> None:
    deepspeed.engine.forward()
    assert deepspeed.attached == []

    deepspeed.engine.step()
    deepspeed.engine.forward()
    assert deepspeed.attached == ["deepspeed"]


def test_an_evaluation_of_an_engine_is_no_silence(
    attachment: Attachment, deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    monkeypatch.setattr(attachment._reporter, "alive", lambda step, *_: said.append(step))
    deepspeed.engine.step()
    for _ in range(3):
        deepspeed.engine.forward()

    assert said == [1, 1]


def test_a_save_of_an_engine_is_said_under_its_own_step(attachment: Attachment, deepspeed: Any) -> None:
    train(deepspeed.engine, 3, "/runs/out")

    assert attachment._to_confirm is not None
    assert attachment._to_confirm.step == 3


def test_a_validation_of_torchtitan_is_no_silence(attachment: Attachment, monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapter("torchtitan", monkeypatch)
    monkeypatch.setattr(module, "attach", lambda *_: attachment)
    said: list[int] = []
    monkeypatch.setattr(attachment._reporter, "alive", lambda step, *_: said.append(step))
    assert attachment._requests is not None
    attachment._requests.stop_asked = False

    class Manager:
        enable, load_only = True, False

        def save(self, *_: object) -> bool:
            return False

        _should_save = save

        def _should_purge(self) -> bool:
            return False

    class Validator:
        def post_dataloading_process(self, batch: int) -> int:
            return batch

    module.install(SimpleNamespace(CheckpointManager=Manager))
    module.install(SimpleNamespace(Validator=Validator))
    manager = Manager()
    manager.save(1)
    assert [Validator().post_dataloading_process(batch) for batch in range(3)] == [0, 1, 2]

    assert said == [1, 1, 1]


def test_a_torchtitan_without_the_rules_that_are_wrapped_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapter("torchtitan", monkeypatch)

    class Manager:
        def save(self, *_: object) -> bool:
            return False

        _should_save = save

    save = Manager.save
    with pytest.raises(AttributeError, match="_should_purge"):  # which `hook` reports as `not attached`
        module.install(SimpleNamespace(CheckpointManager=Manager))

    assert Manager.save is save
    assert Manager._should_save is save


class FakeAccelerator:
    """What the adapter needs of Accelerator; a save is a file in a directory."""

    def __init__(self, *, automatic: bool = False) -> None:
        self.project_configuration = SimpleNamespace(automatic_checkpoint_naming=automatic)
        self.saves: list[str] = []
        self._optimizers: list[FakeOptimizer] = []

    def backward(self, loss: object) -> None:
        pass

    def save_state(self, output_dir: Any = None, **_: Any) -> None:
        if output_dir is not None:
            self.saves.append(Path(output_dir).name)
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            (Path(output_dir) / "model.safetensors").touch()

    def load_state(self, input_dir: Any = None) -> None:
        pass


class FakeOptimizer:
    gradient_state = SimpleNamespace(sync_gradients=True)

    def step(self) -> None:
        pass


class FakeLoader:
    batch_sampler = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


class Loop:
    """A script with a loop of its own: `accumulated` backward passes a step."""

    def __init__(self, module: Any, *, accumulated: int = 1, automatic: bool = False) -> None:
        accelerator_class = type("Accelerator", (FakeAccelerator,), {})
        optimizer_class = type("Optimizer", (FakeOptimizer,), {})
        self.batches, dispatcher_class = (type("Loader", (FakeLoader,), {}) for _ in range(2))
        loaders = {"DataLoaderShard": self.batches, "DataLoaderDispatcher": dispatcher_class}
        module.accelerate.data_loader = SimpleNamespace(**loaders)
        module.install(SimpleNamespace(Accelerator=accelerator_class, AcceleratedOptimizer=optimizer_class))
        self.accelerator, self.accumulated = accelerator_class(automatic=automatic), accumulated
        self.optimizer_class = optimizer_class
        self.optimizers: list[FakeOptimizer] = []
        self.prepare()
        self.steps = 0

    def prepare(self) -> FakeOptimizer:
        """Make one more optimizer, and have Accelerate prepare it."""
        optimizer = self.optimizer_class()
        self.optimizers.append(optimizer)
        self.accelerator._optimizers.append(optimizer)
        return optimizer

    def replace_optimizer(self) -> FakeOptimizer:
        """Have Accelerate release all that it has prepared, as `free_memory` does; return the optimizer of before."""
        [before] = self.optimizers
        self.optimizers.clear()
        self.accelerator._optimizers = []
        self.prepare()
        return before

    def train(self, steps: int, behind: Callable[[int], None] = lambda _: None) -> None:
        done = 0
        for batch in self.batches():
            self.accelerator.backward(batch)
            if (batch + 1) % self.accumulated:
                continue
            if done == steps:
                return
            for optimizer in self.optimizers:
                optimizer.step()
            done += 1
            self.steps += 1
            behind(self.steps)


@pytest.fixture
def out() -> Iterator[Path]:
    """Return a directory to save to: no number of its path is that of a step, as in `tmp_path` of some sessions."""
    letters = uuid.uuid4().hex.translate(str.maketrans(string.digits, "ghijklmnop"))
    directory = Path(tempfile.gettempdir(), letters)
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def accelerate(attachment: Attachment, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = adapter("accelerate", monkeypatch, accelerate={"__version__": "1.15"})
    monkeypatch.setattr(module, "attach", lambda *_: attachment)
    requests = attachment._requests
    assert requests is not None

    def ask(stop: bool) -> None:  # noqa: FBT001 - of a test
        requests.stop_asked = stop

    ask(stop=False)
    module.ask = ask
    return module


Save = Callable[[Loop, Path, int], None]


def named(pattern: str) -> Save:
    """Save at each third step; `{batch}` and `{epoch}` are counted from 1, too."""

    def save(loop: Loop, out: Path, step: int) -> None:
        if step % 3 == 0:
            name = pattern.format(step=step, batch=step * loop.accumulated, epoch=step // 3, before=step - 1)
            loop.accelerator.save_state(out / name)

    return save


def automatically(loop: Loop, _out: Path, step: int) -> None:
    if step % 3 == 0:
        loop.accelerator.save_state()


def with_a_file(loop: Loop, out: Path, step: int) -> None:
    if step % 3 == 0:
        loop.accelerator.save_state(out / f"step_{step}")
        (out / f"step_{step}" / "sampler.json").touch()


def never(_loop: Loop, _out: Path, _step: int) -> None:
    pass


@pytest.mark.parametrize(
    ("accumulated", "save", "expected"),
    [
        (1, named("step_{step}"), "step_8"),
        (1, named("checkpoint-{step:05}-last"), "checkpoint-00008-last"),
        (4, named("step_{step}"), "step_8"),
        (4, named("step_{batch}"), "step_32"),
        (1, named("epoch_{epoch}"), None),
        (1, named("last"), None),
        (1, named("step_{before}"), None),
        (1, named("{step}/step_{step}"), None),
        (1, named("saves-{epoch}/step_{step}"), None),
        (1, with_a_file, None),
        (1, automatically, None),
        (1, never, None),
    ],
)
def test_a_loop_of_accelerate_saves_only_what_and_where_the_script_would(
    accumulated: int, save: Save, expected: str | None, accelerate: Any, out: Path
) -> None:
    loop = Loop(accelerate, accumulated=accumulated, automatic=save is automatically)

    def behind(step: int) -> None:
        save(loop, out, step)
        accelerate.ask(step == 8)

    with pytest.raises(SystemExit) as left:
        loop.train(20, behind)

    assert left.value.code == (75 if expected else 1)
    assert loop.steps == 8
    if expected:
        assert loop.accelerator.saves[-1] == expected


def test_a_resumed_loop_of_accelerate_goes_on_counting_where_its_checkpoint_was(accelerate: Any, out: Path) -> None:
    loop = Loop(accelerate)
    loop.accelerator.load_state(out / "step_100")

    def behind(step: int) -> None:
        if step == 3:
            loop.accelerator.save_state(out / f"step_{100 + step}")
        accelerate.ask(step == 5)

    with pytest.raises(SystemExit):
        loop.train(20, behind)

    assert loop.accelerator.saves == ["step_103", "step_105"]


def test_steps_of_several_optimizers_are_one_step_once_each_has_done_it(accelerate: Any, out: Path) -> None:
    loop = Loop(accelerate)
    loop.prepare()

    def behind(step: int) -> None:
        if step == 3:
            loop.accelerator.save_state(out / f"step_{step}")
        accelerate.ask(step == 5)

    with pytest.raises(SystemExit):
        loop.train(20, behind)

    assert loop.accelerator.saves == ["step_3", "step_5"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_optimizer_that_was_replaced_is_waited_for_no_more(kept: bool, accelerate: Any, out: Path) -> None:  # noqa: FBT001
    """The script may keep it, as for its weights; the new one may have its address."""
    loop = Loop(accelerate)
    before: list[FakeOptimizer] = []

    def behind(step: int) -> None:
        if step in (3, 6):
            replaced = loop.replace_optimizer()
            before.extend([replaced] if kept else [])
        if step % 4 == 0:
            loop.accelerator.save_state(out / f"step_{step}")
        accelerate.ask(step == 10)

    with pytest.raises(SystemExit) as left:
        loop.train(20, behind)

    assert left.value.code == 75
    assert loop.accelerator.saves == ["step_4", "step_8", "step_10"]


def test_an_optimizer_that_takes_part_from_some_step_on_is_waited_for(accelerate: Any, out: Path) -> None:
    loop = Loop(accelerate)

    def behind(step: int) -> None:
        if step == 2:
            loop.prepare()
        if step == 4:
            loop.accelerator.save_state(out / f"step_{step}")
        accelerate.ask(step == 7)

    with pytest.raises(SystemExit) as left:
        loop.train(20, behind)

    assert left.value.code == 75
    assert loop.accelerator.saves == ["step_4", "step_7"]


def test_an_optimizer_lives_no_longer_than_the_script_wants(accelerate: Any) -> None:
    loop = Loop(accelerate)
    loop.train(3)

    replaced = weakref.ref(loop.replace_optimizer())

    assert replaced() is None


@pytest.mark.parametrize(
    ("directories", "code"),
    [({3: "of 3", 6: "of 3"}, 75), ({3: "of 3", 6: "of 6"}, 1), ({3: "of 3", 6: "elsewhere"}, 1), ({3: "of 3"}, 1)],
)
def test_a_number_of_the_directory_is_none_of_a_step_where_it_stays(
    directories: dict[int, str], code: int, accelerate: Any, out: Path
) -> None:
    loop = Loop(accelerate)

    def behind(step: int) -> None:
        if step in directories:
            loop.accelerator.save_state(out / directories[step] / f"step_{step}")
        accelerate.ask(step == 8)

    with pytest.raises(SystemExit) as left:
        loop.train(20, behind)

    assert left.value.code == code
    assert loop.accelerator.saves == [f"step_{step}" for step in directories] + ["step_8"] * (code == 75)


def test_a_loop_of_accelerate_without_a_prepared_loader_is_left_alone(attachment: Attachment, accelerate: Any) -> None:
    loop = Loop(accelerate)
    for _ in range(100):
        loop.accelerator.backward(0)
        loop.optimizers[0].step()

    assert not attachment.open


@pytest.mark.parametrize(
    ("directory", "may"),
    [
        ("/scratch/run/epoch_5", True),
        ("/scratch/epoch05/states", True),
        ("/scratch/ep5", True),
        ("/tmp/s5dx70q4/out", False),
        ("/scratch/run-15", False),
        ("/scratch/run-50", False),
    ],
)
def test_a_directory_may_name_the_step_at_the_end_of_a_word(directory: str, *, may: bool) -> None:
    assert attachments.names_step(directory, 5) == may
