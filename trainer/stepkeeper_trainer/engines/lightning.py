"""Lightning's Trainer with our checkpoints, under either of its package names.

A callback of the kind `Checkpoint`, so the Trainer makes none of its own.  We load where Lightning would restore its
loops and optimizers: models are wrapped by then, and no loop has begun.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from stepkeeper_trainer.engines.training import Engine, check_options, check_version, of_rank, own, refuse
from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME
from stepkeeper_trainer.load.resume import LATEST
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.trainer import call
else:
    from lightning_fabric.utilities.data import _set_sampler_epoch
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.trainer import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepkeeper_trainer.state.tree import Stateful

SINCE, BEFORE = (2, 6), (2, 7)
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
DOORS = ("resume_start", "restore_training_state", "restore_callbacks", "restore_loops", "_get_loops_state_dict")


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
        self._random_before: dict[str, Any] | None = None  # a validation
        self._metrics: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the place of what loads checkpoints.

        Raises:
            UsageError: the Trainer is set up in a way that could not be kept exactly: which, and what to do.
        """
        if stage != "fit":
            return
        connector = trainer._checkpoint_connector  # noqa: SLF001  # there is no other door
        _check(trainer, pl_module)
        if self._engine is not None:
            raise UsageError("fit() was called a second time: with our checkpoints a process trains once")
        self._progress = _Progress(trainer)
        connector.resume_start = self._note_path
        connector.restore_training_state = lambda: self._begin(trainer)
        fit_loop = trainer.fit_loop
        load_states = fit_loop._load_combined_loader_states  # noqa: SLF001

        def load_and_note() -> None:
            load_states()
            assert self._progress is not None, "setup has made it"
            self._progress.epoch_random = torch.get_rng_state()  # the iterator over the data is made right after it

        fit_loop._load_combined_loader_states = load_and_note  # noqa: SLF001

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
            if trainer.enable_validation:  # at the end of an epoch it comes first: the save was before it
                self._random_before = random_state.capture()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Take down what a shuffle of this epoch is drawn from."""
        if trainer.current_epoch > 0 and self._progress is not None:
            self._progress.epoch_random = torch.get_rng_state()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put back the random generators: making the iterator over the data has drawn from them."""
        if self._random_due and self._engine is not None:
            self._random_due = False
            self._engine.manager.restore_random_state()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Say that a step is complete; leave where the ranks are to stop."""
        if trainer.enable_validation:  # it begins right behind this, and makes its iterators before it says so
            self._random_before = random_state.capture()
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
        """Keep the metrics for the next step's record.

        A validation draws from the random generators without a trace: one that a notice cuts off is not repeated.
        """
        if self._random_before is not None:
            random_state.restore(random_state.as_tensors(self._random_before))
            self._random_before = None
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
    kind = type(trainer.strategy).__name__
    missing = [name for name in DOORS if not callable(getattr(trainer._checkpoint_connector, name, None))]  # noqa: SLF001
    refuse(
        [
            (bool(missing), f"a Trainer without {', '.join(missing)}", "use Lightning's own"),
            (kind not in STRATEGIES, f"{kind}, which holds the state itself",
             f"use {', '.join(STRATEGIES)}, or let Lightning save by itself under `stepkeeper run --attach auto`"),
            (not module.automatic_optimization, "manual optimization, which counts steps otherwise",
             "call CheckpointManager in it yourself"),
            (trainer.reload_dataloaders_every_n_epochs > 0, "reload_dataloaders_every_n_epochs", "set it to 0"),
        ]
    )  # fmt: skip


def _numbered(name: str, parts: list[Any]) -> dict[str, Any]:
    return {name if len(parts) == 1 else f"{name}_{number}": part for number, part in enumerate(parts)}


class _Progress:
    """A part of the state: what Lightning counts, what callbacks and the data module keep, and where the data is."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch_random = torch.get_rng_state()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning puts into its own checkpoints, but for weights, optimizers and schedules."""
        trainer = self._trainer
        connector, module, data = trainer._checkpoint_connector, trainer.lightning_module, trainer.datamodule  # noqa: SLF001
        precision = trainer.precision_plugin
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": _version(),
            "loops": connector._get_loops_state_dict(),  # noqa: SLF001
            "callbacks": call._call_callbacks_state_dict(trainer),  # noqa: SLF001
        }
        if state := precision.state_dict():
            checkpoint[type(precision).__qualname__] = state
        if data is not None and (state := data.state_dict()):
            checkpoint[type(data).__qualname__] = state
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)  # noqa: SLF001
        module.on_save_checkpoint(checkpoint)
        return {"lightning": checkpoint, "epoch_random": of_rank(self.epoch_random)}

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
        self.epoch_random = own(state["epoch_random"])

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
        loop = self._trainer.fit_loop
        loaders = loop._combined_loader.flattened  # noqa: SLF001
        stateful = [hasattr(each, "load_state_dict") for each in loaders]
        if all(stateful):
            return True
        refuse([(any(stateful), "loaders of which only some have a state_dict", "use StatefulDataLoader for all")])
        progress = loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready
        for loader in loaders:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        by_index = (
            len(loaders) == 1
            and type(getattr(loaders[0], "batch_sampler", None)) is BatchSampler
            and not isinstance(loaders[0].dataset, IterableDataset)
        )
        if by_index and done:
            sampler = loaders[0].batch_sampler
            sampler.sampler = _Behind(sampler.sampler, done * sampler.batch_size)
        if done:
            torch.set_rng_state(self.epoch_random)
        else:
            restore_random_state()
        fetcher = loop._data_fetcher  # noqa: SLF001
        iter(fetcher)
        for _ in range(0 if by_index else done):
            next(fetcher)
        if not by_index:
            fetcher.fetched -= done  # the loop adds them
        return done > 0


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
