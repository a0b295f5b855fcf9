"""Hugging Face's Trainer, and what is one inside: TRL, axolotl, LLaMA-Factory."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import transformers
from transformers import TrainerCallback

from stepkeeper_trainer.integrations import chosen
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach, with_each

if TYPE_CHECKING:
    from types import ModuleType

NAME = "huggingface"


class StepkeeperCallback(TrainerCallback):
    """Saves and stops on request at the end of a step and, given the trainer, between two batches of an evaluation."""

    def __init__(self, trainer: Any | None = None) -> None:
        """Take the trainer: a callback cannot reach it otherwise."""
        self._trainer = trainer
        self._attachment = Attachment(Training(framework=NAME, version=""))
        self._training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Attach: the process group is there, and the state is resumed."""

        def describe() -> Training:
            searching = bool(state.is_hyper_param_search)
            return Training(
                framework=NAME,
                version=f"transformers {transformers.__version__}",
                step=state.global_step,
                total_steps=state.max_steps,
                unable="a search of hyperparameters cannot be resumed" if searching else "",
            )

        self._attachment = attach(NAME, describe)
        self._training = True
        if self._attachment.open and _is_last(state):
            self._do_no_further_step(control)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Have the Trainer save at the step that all ranks agree on; `on_save` leaves."""
        asked = self._attachment.step_done(state.global_step)
        if asked is not Asked.NOTHING:
            control.should_save = True
        if asked is Asked.STOP and state.global_step < state.max_steps:
            control.should_evaluate = False
        self._say_saving(control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The Trainer may save here too.  An evaluation of the last step that a notice interrupted is repeated."""
        if control.should_training_stop and _is_last(state) and not _is_evaluated(args, state):
            control.should_evaluate = True
        self._say_saving(control)
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """In an evaluation the state is that of the step before: save it, and leave; behind the last step, go on."""
        trainer: Any = self._trainer
        last = _is_last(state)

        def save() -> None:
            self._attachment.saving()
            trainer._save_checkpoint(trainer.model_wrapped, None)  # noqa: SLF001  # as its own loop does
            trainer.callback_handler.on_save(args, state, control)  # which ends in ours
            control.should_save = False  # the Trainer would write over it at the end of the evaluation

        in_training = trainer is not None and self._training
        self._attachment.evaluates(save, alike=in_training, last=last)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has saved on this rank; where the ranks were asked to stop, they leave."""
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self._attachment.saved_to(path, last=_is_last(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training has come to its end."""
        self._training = False
        if self._trainer is not None:
            vars(self._trainer).pop("get_batch_samples", None)
        self._attachment.ended(state.global_step)

    def _do_no_further_step(self, control: Any) -> None:
        """End a training that resumes at its last step: the Trainer looks for its end behind a further step only."""
        control.should_training_stop = True
        if self._trainer is not None:
            self._trainer.get_batch_samples = lambda *_, **__: ([], None)

    def _say_saving(self, control: Any) -> None:
        if control.should_save:
            self._attachment.saving()


def _is_last(state: Any) -> bool:
    """Tell whether all steps are done: training comes to its end, and nobody leaves."""
    return 0 < int(state.max_steps) <= int(state.global_step)


def _is_evaluated(args: Any, state: Any) -> bool:
    """Tell whether the state at hand was evaluated, or is not to be: the Trainer evaluates the last step always."""
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
        return True
    own = (each for each in state.log_history if each.get("step") == state.global_step)
    return any(key.startswith("eval_") for each in own for key in each)


def install(module: ModuleType) -> None:
    """Give each Trainer that a script makes our callback, and the chosen checkpoint where its `train` names none."""
    with_each(module.Trainer, _add)
    train = module.Trainer.train

    @functools.wraps(train)
    def train_from_chosen(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *arguments: Any, **named: Any
    ) -> Any:
        if trial is None:
            named_by_script = resume_from_checkpoint
            resume_from_checkpoint = chosen.guarded(lambda: _chosen(self, named_by_script), named_by_script)
        return train(self, resume_from_checkpoint, trial, *arguments, **named)

    module.Trainer.train = train_from_chosen


def _chosen(trainer: Any, wanted: Any) -> Any:
    """Return what a training resumes from; `True` is the newest by its number, which may be torn."""
    path = chosen.checkpoint(NAME)
    if wanted not in (None, True) or not chosen.is_in(path, trainer.args.output_dir):
        return wanted
    return chosen.use(NAME, path)


def _add(trainer: Any) -> None:
    handler = trainer.callback_handler
    if not any(isinstance(each, StepkeeperCallback) for each in handler.callbacks):
        trainer.add_callback(StepkeeperCallback(trainer))
