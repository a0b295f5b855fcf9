"""What the adapters decide, with the least that they need of their frameworks; tests/frameworks has the real ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
