"""torchtitan with our checkpoints: a checkpoint manager as its Trainer builds them from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer.base import BaseCheckpointManager

from stepkeeper_trainer.engines.training import Engine, check_version, refuse
from stepkeeper_trainer.errors import UsageError

SINCE, BEFORE = (0, 3), (0, 4)


class StepkeeperCheckpointManager(BaseCheckpointManager):
    """`config.checkpoint = StepkeeperCheckpointManager.Config(enable=True)`.

    `interval` says how often to save, in steps, and `keep_latest_k` how many of the newest steps are kept.  Training
    resumes from what `STEPKEEPER_RESUME_FROM` names (`stepkeeper run` sets it), else from `initial_load_path`, and
    otherwise begins.  The last step is saved whole, as all others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's own settings, and those that the manager needs besides."""

        last_save_model_only: bool = False
        """Refused: the last step is saved whole."""

        initial_load_model_only: bool = False
        """Refused without `initial_load_path`: see torchtitan."""

        run_dir: str = ""
        """The run directory; `STEPKEEPER_RUN_DIR` where it is empty, else the dump folder with `folder`."""

        total_steps: int | None = None
        """`training.steps`: at the last one nobody leaves.  Without it the loop says which one is the last."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Take the parts of the state, as torchtitan's Trainer gives them; nothing is loaded yet.

        Raises:
            UsageError: this release of torchtitan is not known, or a setting could not be kept: which, and what to do.
        """
        self.enable, self.save_future = config.enable, None
        self._engine: Engine | None = None
        if not config.enable:
            return
        check_version(("torchtitan",), SINCE, BEFORE)
        refuse(
            [
                (config.last_save_model_only, "last_save_model_only, from which nothing resumes", "set it to False"),
                (config.last_save_in_hf, "last_save_in_hf", "`stepkeeper checkpoints export` makes it of a step"),
                (config.create_seed_checkpoint, "create_seed_checkpoint", "make it with torchtitan's own manager"),
                (config.load_only, "load_only", "use torchtitan's own manager"),
                (bool(config.exclude_from_loading), "exclude_from_loading", "leave it empty"),
                (config.initial_load_in_hf, "initial_load_in_hf", "give initial_load_path a DCP directory"),
                (config.keep_latest_k < 0, "keep_latest_k below 0", "give how many steps to keep"),
            ]
        )
        self._config, self._folder = config, base_folder
        inner = getattr(optimizers, "optimizers", None)
        self._parts = {
            **{_numbered("model", n, len(model_parts)): part for n, part in enumerate(model_parts)},
            **(
                {_numbered("optimizer", n, len(inner)): part for n, part in enumerate(inner)}
                if isinstance(inner, list)
                else {"optimizer": optimizers}
            ),
            "lr_scheduler": lr_schedulers,
            "dataloader": dataloader,
            **states,
        }
        self._first = model_parts[0]

    def _load(self, step: int = -1) -> bool:
        """Make the manager, and load what this launch resumes from; true where there is such a step."""
        if step != -1:
            raise UsageError(f"checkpoint.load_step={step}: leave it out and set STEPKEEPER_RESUME_FROM to the step")
        config, options = self._config, {}
        if config.run_dir:
            options["run_dir"] = config.run_dir
        elif not os.environ.get("STEPKEEPER_RUN_DIR"):
            options["run_dir"] = os.path.join(self._folder, config.folder)
        retention = f"newest {config.keep_latest_k}" if config.keep_latest_k else "all"
        self._engine = Engine(
            self._parts,
            total_steps=config.total_steps,
            resume_from=config.initial_load_path,
            options={"every": config.interval, "retention": retention, **options},
        )
        manager = self._engine.manager
        if manager.step:
            handle = self._first.register_forward_pre_hook(lambda *_: put_back())

            def put_back() -> None:  # making the iterator over the data has drawn from the generators
                handle.remove()
                manager.restore_random_state()

        return manager.step > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002
        """Say that a step is complete: it is saved where that is due; leave where the ranks are to stop."""
        if self._engine is None:
            raise UsageError("save() came before load(): torchtitan's Trainer calls load() first")
        manager = self._engine.manager
        first = self._config.enable_first_step_checkpoint and curr_step == 1
        if last_step:
            manager.step_done()
            self._engine.finish()
            return True
        self._engine.step_done()
        if first:
            self._engine.save()
        return manager.saved_step == curr_step

    def _maybe_wait_for_staging(self) -> None:
        """The state may change at once: the manager orders its copies before that."""

    def _wait_for_saving(self) -> None:
        """There is no future to wait for: the manager ends its saves itself."""

    def _close(self) -> None:
        """Say that training has ended, where it was at its last step already when it began."""
        if self._engine is not None and not self._engine.ended:
            total = self._config.total_steps
            if total is not None and self._engine.manager.step >= total:
                self._engine.finish()


def _numbered(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name}_{number}"
