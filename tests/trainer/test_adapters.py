"""What the adapters decide, with the least that they need of their frameworks; tests/frameworks has the real ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
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
