"""Lightning's Trainer, under either of its package names."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.integrations import chosen
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach, with_each

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import __version__ as lightning_version
    from lightning.pytorch.callbacks.callback import Callback
else:
    from pytorch_lightning import __version__ as lightning_version
    from pytorch_lightning.callbacks.callback import Callback

if TYPE_CHECKING:
    from types import ModuleType

NAME = "lightning"
FILE = "stepkeeper-step={step}.ckpt"


class StepkeeperCallback(Callback):
    """Saves and stops on request, at the end of a step or between two batches of a validation."""

    def __init__(self) -> None:
        """Do nothing before training begins."""
        self._attachment = Attachment(Training(framework=NAME, version=""))
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the process group is there, and the state is resumed."""
        self._step = trainer.global_step

        def describe() -> Training:
            return Training(
                framework=NAME,
                version=f"lightning {lightning_version}",
                step=trainer.global_step,
                total_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            )

        self._attachment = attach(NAME, describe)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Save at the step that all ranks agree on."""
        if trainer.global_step == self._step:
            return  # a batch whose gradients are accumulated
        self._step = trainer.global_step
        asked = self._attachment.step_done(self._step)
        if asked is not Asked.NOTHING:
            self._save(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """In a validation the state is that of the step before: save it, and leave; behind the last step, go on."""
        unknown = float("inf") in trainer.num_val_batches  # the ranks may have different numbers of batches
        self._attachment.evaluates(lambda: self._save(trainer), alike=not unknown, last=self._is_last(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training has come to its end."""
        self._attachment.ended(trainer.global_step)

    def _save(self, trainer: Any) -> None:
        """Have the Trainer save where the script's own checkpoints are; leave where the ranks were asked to stop."""
        path = os.path.join(directory(trainer), FILE.format(step=self._step))
        self._attachment.saving()
        trainer.save_checkpoint(path)
        if self._attachment.stopping:
            trainer.strategy.checkpoint_io.teardown()  # an asynchronous one returns before its file is there
        self._attachment.saved_to(path, last=self._is_last(trainer))

    def _is_last(self, trainer: Any) -> bool:
        """Tell whether all steps are done: training comes to its end, and nobody leaves."""
        return 0 < int(trainer.max_steps) <= self._step


def directory(trainer: Any) -> str:
    """Return where the script's own checkpoints go; the same on all ranks."""
    own = [each.dirpath for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]
    return str(own[0] if own else trainer.default_root_dir)


def install(module: ModuleType) -> None:
    """Give each Trainer that a script makes our callback, and the chosen checkpoint where its `fit` names none."""
    with_each(module.Trainer, _add)
    fit = module.Trainer.fit
    place = list(inspect.signature(fit).parameters).index("ckpt_path")

    @functools.wraps(fit)
    def fit_from_chosen(self: Any, *arguments: Any, **named: Any) -> Any:
        if len(arguments) < place and named.get("ckpt_path") is None:
            named["ckpt_path"] = chosen.guarded(lambda: _chosen(self), None)
        return fit(self, *arguments, **named)

    module.Trainer.fit = fit_from_chosen


def _chosen(trainer: Any) -> str | None:
    """Return what a `fit` without a checkpoint resumes from; None: it begins anew, as one that only tries settings."""
    path = chosen.checkpoint(NAME)
    tries = trainer.fast_dev_run or any(getattr(each, "_early_exit", False) for each in trainer.callbacks)
    return chosen.use(NAME, path) if path and not tries else None


def _add(trainer: Any) -> None:
    """Add it behind the script's own callbacks, and before those that save."""
    if any(isinstance(each, StepkeeperCallback) for each in trainer.callbacks):
        return
    savers = trainer.checkpoint_callbacks
    place = next((at for at, each in enumerate(trainer.callbacks) if each in savers), len(trainer.callbacks))
    trainer.callbacks.insert(place, StepkeeperCallback())
