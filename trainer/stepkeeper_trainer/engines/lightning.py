"""Lightning's Trainer with our checkpoints, under either of its package names.

A callback of the kind `Checkpoint`, so the Trainer makes none of its own.  We load where Lightning would restore its
loops and optimizers: models are wrapped by then, and no loop has begun.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from stepkeeper_trainer.engines.training import (
    Engine,
    check_doors,
    check_options,
    check_version,
    of_rank,
    own,
    refuse,
)
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.load.resume import LATEST
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.utilities import CombinedLoader
else:
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.utilities import CombinedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepkeeper_trainer.state.tree import Stateful

SINCE, BEFORE = (2, 6), (2, 7)
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
VALIDATION = "fit_loop.epoch_loop.val_loop"
VALIDATES = ("run", "increment_progress_to_evaluation_end")  # the second where a resume leaves a validation out
DOORS = (
    "_checkpoint_connector._loaded_checkpoint",
    "_checkpoint_connector.resume_start",
    "_checkpoint_connector.restore_callbacks",
    "_checkpoint_connector.restore_datamodule",
    "_checkpoint_connector.restore_loops",
    "_checkpoint_connector.restore_precision_plugin_state",
    "_checkpoint_connector.restore_training_state",
    "fit_loop._data_fetcher",
    "fit_loop._load_combined_loader_states",
    "fit_loop.epoch_loop.on_run_start",
    *(f"{VALIDATION}.{name}" for name in VALIDATES),
)


class StepkeeperCheckpoints(Checkpoint):
    """Saves and resumes by a `CheckpointManager`: `Trainer(callbacks=[StepkeeperCheckpoints()])`.

    It stands in the place of `ModelCheckpoint`.  `fit()` resumes from what `STEPKEEPER_RESUME_FROM` names
    (`stepkeeper run` sets it), else from `resume_from`, and `fit(ckpt_path=PATH)` from a step directory.  A plain
    `DataLoader` goes on behind the batches that were trained; one with a `state_dict` does so itself.
    """

    def __init__(
        self, *, resume_from: str | None = None, also: Mapping[str, Stateful] | None = None, **options: Any
    ) -> None:
        """Take what Lightning does not know.

        Args:
            resume_from: a step directory, or `latest`.
            also: further parts of the state by name, each with `state_dict` and `load_state_dict`.
            options: further arguments of `CheckpointManager`: `every` ("500 steps", "30 min"; as often as pays if it
                is not given), `run_dir`, `retention`, `save_within_s` (seconds) ...

        Raises:
            UsageError: this release of Lightning is not known, or an option is one that Lightning gives.
        """
        check_version(("lightning", "pytorch-lightning"), SINCE, BEFORE)
        self._resume_from, self._also = resume_from, dict(also or {})
        self._options = check_options({"every": "auto", **options})
        self._engine: Engine | None = None
        self._progress: _Progress | None = None
        self._step = 0
        self._random_due = False
        self._metrics: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of what loads checkpoints.

        Raises:
            UsageError: the Trainer is set up in a way that could not be kept exactly: which, and what to do.
        """
        if stage != "fit":
            return
        _check(trainer, pl_module)
        connector = trainer._checkpoint_connector  # noqa: SLF001  # there is no other door
        if self._engine is not None:
            raise UsageError("fit() was called a second time: with our checkpoints a process trains once")
        self._progress = _Progress(trainer)
        connector.resume_start = self._note_path
        connector.restore_training_state = lambda: self._begin(trainer)
        fit_loop = trainer.fit_loop
        validation = fit_loop.epoch_loop.val_loop
        for name in VALIDATES:
            setattr(validation, name, _leaving_no_trace(getattr(validation, name)))
        load_states, begin_epoch = fit_loop._load_combined_loader_states, fit_loop.epoch_loop.on_run_start  # noqa: SLF001
        progress = self._progress

        def load_and_note() -> None:
            load_states()
            if not fit_loop.is_resuming:
                progress.note_random()  # the iterator over the data is made right after it

        def note_and_begin(data_fetcher: Any) -> None:
            if fit_loop.epoch_progress.current.processed > 0 and not fit_loop.is_resuming:
                progress.note_random()  # the iterator over the data of another epoch is made in it
            begin_epoch(data_fetcher)

        fit_loop._load_combined_loader_states = load_and_note  # noqa: SLF001
        fit_loop.epoch_loop.on_run_start = note_and_begin

    def _note_path(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:  # noqa: FBT001
        """Take a step directory that the script names.

        Raises:
            UsageError: it is a checkpoint of Lightning's.
        """
        if not checkpoint_path:
            return
        if not (Path(checkpoint_path) / MANIFEST_NAME).exists():
            raise UsageError(
                f"fit(ckpt_path={str(checkpoint_path)!r}): not a step directory of ours; "
                f"StepkeeperCheckpoints(resume_from={LATEST!r}) takes the newest one of the run directory"
            )
        self._resume_from = str(checkpoint_path)

    def _begin(self, trainer: Any) -> None:
        """Make the manager and load, where Lightning would restore its loops and optimizers."""
        optimizers = trainer.optimizers
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        self._engine = Engine(
            {
                "model": trainer.strategy.model,
                **_numbered("optimizer", optimizers),
                **_numbered("scheduler", schedulers),
                "trainer": self._progress,
                **self._also,
            },
            total_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            resume_from=self._resume_from,
            options=self._options,
        )
        self._step = trainer.global_step
        self._random_due = self._step > 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the data go on where it was."""
        if self._random_due and self._progress is not None and self._engine is not None:
            self._random_due = self._progress.find_place(self._engine.manager.restore_random_state)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put back the random generators: making the iterator over the data has drawn from them."""
        if self._random_due and self._engine is not None:
            self._random_due = False
            self._engine.manager.restore_random_state()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Say that a step is complete; leave where the ranks are to stop."""
        if self._engine is None or trainer.global_step == self._step:
            return  # a batch whose gradients are accumulated
        self._step = trainer.global_step
        metrics, self._metrics = self._metrics, {}
        self._engine.step_done(metrics=metrics)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Say in a validation that this rank is well."""
        if self._engine is not None:
            self._engine.alive()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the metrics for the next step's record."""
        self._metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training has come to its end: its last step is saved, and durable, before the script goes on."""
        if self._engine is not None:
            self._engine.finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """A training that was finished already has no end of its own."""
        if self._engine is not None:
            self._engine.finish()


def _check(trainer: Any, module: Any) -> None:
    """Refuse what could not be kept exactly.

    Raises:
        UsageError: what, and what to do.
    """
    check_doors(trainer, DOORS)
    kind = type(trainer.strategy).__name__
    refuse(
        [
            (kind not in STRATEGIES, f"{kind}, which holds the state itself",
             f"use {', '.join(STRATEGIES)}, or let Lightning save its own under `stepkeeper run --attach auto`"),
            (not module.automatic_optimization, "manual optimization, which counts steps otherwise",
             "call CheckpointManager in it yourself"),
            (trainer.reload_dataloaders_every_n_epochs > 0, "reload_dataloaders_every_n_epochs", "set it to 0"),
        ]
    )  # fmt: skip


def _leaving_no_trace(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a validation that leaves the random generators as they were.

    One that a notice cuts off is not repeated, and Lightning leaves out one that was due where a resume begins, though
    it makes its iterators: the training's draws must not go by either.
    """

    @functools.wraps(validate)
    def validate_and_put_back(*arguments: Any, **named: Any) -> Any:
        before = random_state.collect()
        result = validate(*arguments, **named)
        random_state.restore(before)
        return result

    return validate_and_put_back


def _numbered(name: str, parts: list[Any]) -> dict[str, Any]:
    return {name if len(parts) == 1 else f"{name}_{number}": part for number, part in enumerate(parts)}


class _Progress:
    """A part of the state: what Lightning counts, what callbacks and the data module keep, and where the data is."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.note_random()

    def note_random(self) -> None:
        """Take down what this epoch's iterator over the data, and its shuffle, draw from."""
        self._epoch_random = torch.get_rng_state()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning puts into its own checkpoints, but for weights, optimizers and schedules."""
        trainer = self._trainer
        module, data, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": _version(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())},
        }
        if state := precision.state_dict():
            checkpoint[type(precision).__qualname__] = state
        if data is not None and (state := data.state_dict()):
            checkpoint[type(data).__qualname__] = state
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return {"lightning": checkpoint, "epoch_random": of_rank(self._epoch_random)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have Lightning take it back by its own methods."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector  # noqa: SLF001
        connector._loaded_checkpoint = state["lightning"]  # noqa: SLF001
        trainer.lightning_module.on_load_checkpoint(state["lightning"])
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        connector._loaded_checkpoint = {}  # noqa: SLF001
        self._epoch_random = own(state["epoch_random"])

    def reshard(self, states: list[dict[str, Any]], _rank: int, _world_size: int) -> dict[str, Any]:
        """Return the state for another number of ranks: rank 0's, as in Lightning's own checkpoints."""
        return states[0]

    def find_place(self, restore_random_state: Callable[[], None]) -> bool:
        """Make the iterator over the data anew, behind the batches of this epoch that were trained.

        Making it draws: in the middle of an epoch what its start has drawn is drawn again, and the random generators
        are put back afterwards.  At the start of an epoch it draws from the generators as they were.

        Returns:
            Whether the random generators are to be put back before the first batch.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        stateful = [hasattr(each, "load_state_dict") for each in loaders]
        if all(stateful):
            return True
        refuse([(any(stateful), "loaders of which only some have a state_dict", "use StatefulDataLoader for all")])
        progress = loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready
        for loader in loaders:
            _set_epoch(loader, loop.epoch_progress.current.processed)
        by_index = (
            len(loaders) == 1
            and type(getattr(loaders[0], "batch_sampler", None)) is BatchSampler
            and not isinstance(loaders[0].dataset, IterableDataset)
        )
        if by_index and done:
            sampler = loaders[0].batch_sampler
            sampler.sampler = _Behind(sampler.sampler, done * sampler.batch_size)
        if done:
            torch.set_rng_state(self._epoch_random)
        else:
            restore_random_state()
            self.note_random()
        fetcher = loop._data_fetcher  # noqa: SLF001
        iter(fetcher)
        for _ in range(0 if by_index else done):
            next(fetcher)
        if not by_index:
            fetcher.fetched -= done  # the loop adds them
        return done > 0


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell its samplers the epoch, as Lightning does before it makes an iterator."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class _Behind:
    """A sampler that leaves out its first indices, once."""

    def __init__(self, sampler: Any, leave_out: int) -> None:
        self._sampler, self._leave_out = sampler, leave_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        leave_out, self._leave_out = self._leave_out, 0
        return itertools.islice(iter(self._sampler), leave_out, None)


def _version() -> str:
    for name in ("lightning", "pytorch-lightning"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
