"""Hugging Face's Trainer with our checkpoints: it decides when to save, and goes through its data as ever.

The Trainer computes where its data goes on before it makes its optimizer, and we load into what it has made.  So its
own preparation is called a little earlier, and its position is computed once the state is loaded.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from stepkeeper_trainer.engines.training import (
    Engine,
    Options,
    check_doors,
    check_options,
    check_version,
    numbers_of,
    of_rank,
    own,
    refuse,
)
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.load.resume import LATEST
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepkeeper_trainer.state.tree import Stateful

SINCE, BEFORE = (5, 23), (6,)
DOORS = (
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_rng_state",
    "_save_checkpoint",
    "_evaluate",
    "_load_callback_state",
)
SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Of losses; a Trainer has them when its training has begun."""


def save_with_stepkeeper(trainer: Any, *, also: Mapping[str, Stateful] | None = None, **options: Any) -> None:
    """Have this Trainer save and resume by a `CheckpointManager`; call it on all ranks, before `trainer.train()`.

    The Trainer's `save_strategy` and `save_steps` say when.  `train()` resumes from what `STEPKEEPER_RESUME_FROM`
    names (`stepkeeper run` sets it), `train(resume_from_checkpoint=True)` from the newest step of the run directory,
    and `train(resume_from_checkpoint=PATH)` from a step directory.  `checkpoint-*` directories are not written.

    Args:
        trainer: a `transformers.Trainer`, or what derives from it (TRL).
        also: further parts of the state by name, each with `state_dict` and `load_state_dict`, such as an average of
            the weights.
        options: further arguments of `CheckpointManager`: `run_dir`, `retention`, `every` (saves besides the
            Trainer's), `save_within_s` (seconds) ...

    Raises:
        UsageError: this release of transformers is not known, or the Trainer is set up in a way that could not be kept
            exactly: which, and what to do.
    """
    check_version(("transformers",), SINCE, BEFORE)
    check_doors(trainer, DOORS)
    _check(trainer)
    _Saves(trainer, dict(also or {}), check_options(options)).install()


def _check(trainer: Any) -> None:
    """Refuse what could not be kept exactly.

    Raises:
        UsageError: what, and what to do.
    """
    args = trainer.args
    attach = "let the Trainer save its own checkpoints under `stepkeeper run --attach auto`"
    refuse(
        [
            (trainer.is_deepspeed_enabled, "DeepSpeed, which holds the state itself", attach),
            (trainer.is_fsdp_enabled, "FSDP of Accelerate, which wraps the state", attach),
            (args.n_gpu > 1, f"DataParallel over {args.n_gpu} GPUs", "start one rank a GPU with torchrun"),
            (args.load_best_model_at_end, "load_best_model_at_end, which reads checkpoint-* directories",
             'set it to False and give retention="best eval_loss 1": `checkpoints export` makes safetensors of it'),
            (args.save_only_model, "save_only_model, from which nothing resumes", "set it to False"),
            (args.auto_find_batch_size, "auto_find_batch_size, which starts over", "set per_device_train_batch_size"),
            (args.ignore_data_skip, "ignore_data_skip, which trains on the same data again", "set it to False"),
            (args.push_to_hub and str(args.hub_strategy.value) != "end", f"hub_strategy={args.hub_strategy.value!r}",
             'set hub_strategy="end"'),
        ]
    )  # fmt: skip


class _Saves(TrainerCallback):
    """Of one Trainer: a callback, and what stands in for some of its methods."""

    def __init__(self, trainer: Any, also: dict[str, Any], options: Options) -> None:
        self._trainer, self._also, self._options = trainer, also, options
        self._engine: Engine | None = None
        self._resume_from: str | None = None
        self._model: Any = None
        self._position = _Position(trainer)
        self._metrics: dict[str, float] = {}
        self._begun_with = (0, 0)  # epochs done, and batches of the next one

    def install(self) -> None:
        """Stand in for the methods of this Trainer that save, load and say where it goes on."""
        trainer = self._trainer
        if any(isinstance(each, _Saves) for each in trainer.callback_handler.callbacks):
            raise UsageError("save_with_stepkeeper(trainer) was called twice: call it once")
        trainer.add_callback(self)
        self._init, self._prepare = trainer._init_training_state, trainer._prepare_for_training  # noqa: SLF001
        trainer._init_training_state = self._begin  # noqa: SLF001  # its own steps: there is no other door
        trainer._prepare_for_training = self._prepared  # noqa: SLF001
        trainer._run_epoch = functools.partial(self._run_epoch, trainer._run_epoch)  # noqa: SLF001
        trainer._load_rng_state = self._restore_random_state  # noqa: SLF001
        trainer._save_checkpoint = self._save  # noqa: SLF001
        trainer._evaluate = functools.partial(self._evaluate, trainer._evaluate)  # noqa: SLF001
        trainer.train = functools.partial(self._train, trainer.train)

    # --- what stands in for methods of the Trainer ----------------------------------------------------

    def _train(
        self, train: Any, resume_from_checkpoint: Any = None, trial: Any = None, *rest: Any, **named: Any
    ) -> Any:
        searching = self._trainer.hp_search_backend is not None or trial is not None
        refuse([(searching, "a search of hyperparameters", "search without it, then train with it")])
        _check(self._trainer)  # arguments may have changed since
        if self._engine is not None:
            raise UsageError("train() was called a second time: with our checkpoints a process trains once")
        self._resume_from = _step_directory(resume_from_checkpoint)
        return train(None, None, *rest, **named)

    def _begin(self, max_steps: int, steps_per_epoch: int, epochs: int, _: Any, trial: Any) -> tuple[int, int]:
        trainer = self._trainer
        self._init(max_steps, steps_per_epoch, epochs, None, trial)
        self._model, _nothing = self._prepare(max_steps, None, None)
        optimizer = trainer.optimizer
        self._engine = Engine(
            {
                "model": trainer.model_wrapped,
                "optimizer": getattr(optimizer, "optimizer", optimizer),  # Accelerate's is around torch's
                "scheduler": trainer.lr_scheduler,
                "scaler": getattr(trainer.accelerator, "scaler", None),
                "trainer": self._position,
                **self._also,
            },
            total_steps=max_steps,
            resume_from=self._resume_from,
            options=self._options,
        )
        done = trainer.state.global_step
        batches = done % steps_per_epoch * trainer.args.gradient_accumulation_steps
        self._begun_with = (done // steps_per_epoch, batches)
        return self._begun_with

    def _prepared(self, _max_steps: int, train_dataloader: Any, _: Any) -> tuple[Any, Any]:
        self._trainer.callback_handler.train_dataloader = train_dataloader
        return self._model, train_dataloader

    def _run_epoch(self, run_epoch: Any, **arguments: Any) -> None:
        trainer = self._trainer
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True  # it was finished already
            return
        resumed = {"resume_from_checkpoint": "ours"} if trainer.state.global_step else {}
        run_epoch(**arguments | resumed)

    def _restore_random_state(self, _: Any) -> None:
        assert self._engine is not None, "an epoch follows its beginning"
        self._engine.manager.restore_random_state()

    def _save(self, _model: Any, _trial: Any) -> None:
        assert self._engine is not None, "an epoch follows its beginning"
        self._trainer.store_flos()
        self._position.note()
        self._engine.save()

    @staticmethod
    def _evaluate(evaluate: Any, *arguments: Any, **named: Any) -> Any:
        """Let an evaluation draw from the random generators without a trace: one that a notice cuts off is lost."""
        before = random_state.collect()
        metrics = evaluate(*arguments, **named)
        random_state.restore(before)
        return metrics

    # --- the callback ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has begun to sum up losses anew: put back what it had summed up."""
        check_doors(self._trainer, SUMS)
        self._position.put_sums_back()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say that a step is complete; leave where the ranks are to stop."""
        assert self._engine is not None, "a step follows its beginning"
        self._position.note()
        metrics, self._metrics = self._metrics, {}
        tokens = int(state.num_input_tokens_seen) - self._engine.manager.tokens
        self._engine.step_done(tokens=max(0, tokens), metrics=metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the numbers for the next step's record."""
        self._metrics |= numbers_of(logs or {})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say in an evaluation that this rank is well."""
        if self._engine is not None:
            self._engine.alive()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training has come to its end: its last step is saved, and durable, before the script goes on."""
        if self._engine is not None:
            self._position.note()
            self._engine.finish()


class _Position:
    """A part of the state: what the Trainer counts and logs, as it was at the end of the last step."""

    COUNTED = ("epoch", "global_step", "num_input_tokens_seen", "total_flos")
    BEST = ("best_metric", "best_global_step")

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._noted: dict[str, Any] = {}
        self._log = ""  # as JSON lines: it grows, and is asked for in each step
        self._lines = 0
        self._sums: dict[str, Any] | None = None  # to put back

    def note(self) -> None:
        """Take down what it is now."""
        trainer, state = self._trainer, self._trainer.state
        if len(state.log_history) < self._lines:
            self._log, self._lines = "", 0
        new = state.log_history[self._lines :]
        self._log += "".join(f"{json.dumps(each)}\n" for each in new)
        self._lines += len(new)
        exportable = [each for each in (*trainer.callback_handler.callbacks, trainer.control) if hasattr(each, "state")]
        callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks
        self._noted = {
            **{name: getattr(state, name) for name in (*self.COUNTED, *self.BEST)},
            "log": self._log,
            "callbacks": json.dumps(callbacks),
            "loss": of_rank(trainer._tr_loss.detach().clone()),  # noqa: SLF001  # since the last log
            "flos": float(trainer.current_flos),  # of this rank, since they were last added up
            "total_loss": float(trainer._total_loss_scalar),  # noqa: SLF001
            "logged_step": trainer._globalstep_last_logged,  # noqa: SLF001
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken down last; nothing before the first step."""
        return dict(self._noted)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back, but for the sums of losses, which the Trainer clears after that."""
        trainer = self._trainer
        for name in (*self.COUNTED, *self.BEST):
            setattr(trainer.state, name, state[name])
        trainer.state.log_history = [json.loads(line) for line in state["log"].splitlines()]
        trainer.state.stateful_callbacks = json.loads(state["callbacks"])
        trainer._load_callback_state()  # noqa: SLF001
        self._noted, self._sums = dict(state), state
        self._log, self._lines = state["log"], len(trainer.state.log_history)

    def reshard(self, states: list[dict[str, Any]], rank: int, _world_size: int) -> dict[str, Any]:
        """Return the state for another number of ranks: rank 0's, with the sums of all ranks spread evenly."""
        first = dict(states[0])
        first["loss"] = of_rank(torch.stack([own(each["loss"]) for each in states]).mean())
        first["flos"] = sum(each["flos"] for each in states) if rank == 0 else 0.0
        return first

    def put_sums_back(self) -> None:
        """Put back the sums of losses that were not logged yet."""
        trainer, sums = self._trainer, self._sums
        if sums is None:
            return
        trainer.current_flos = sums["flos"]
        trainer._tr_loss = own(sums["loss"]).to(trainer._tr_loss.device)  # noqa: SLF001
        trainer._total_loss_scalar = sums["total_loss"]  # noqa: SLF001
        trainer._globalstep_last_logged = sums["logged_step"]  # noqa: SLF001
        trainer._initial_global_step = 0  # noqa: SLF001  # the mean loss is that of the whole training
        self._sums = None


def _step_directory(wanted: Any) -> str | None:
    """Return what `train(resume_from_checkpoint=...)` means for the manager.

    Raises:
        UsageError: it is a checkpoint of the Trainer's own.
    """
    if wanted in (None, False):
        return None
    if wanted is True or wanted == LATEST:
        return LATEST
    path = Path(os.fspath(wanted))
    if not (path / MANIFEST_NAME).exists():
        raise UsageError(
            f"train(resume_from_checkpoint={str(path)!r}): not a step directory of ours; resume_from_checkpoint=True "
            "takes the newest one of the run directory, and from_pretrained() the weights of a Trainer's checkpoint"
        )
    return str(path)
