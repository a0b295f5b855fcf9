"""torchtitan: its loop calls the checkpoint manager's `save` at the end of each step."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from types import ModuleType

NAME = "torchtitan"
_STEP = re.compile(r"step-(\d+)")  # as it searches itself
_MARKERS = (".metadata", "model.safetensors.index.json")
_attachments: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()


def install(module: ModuleType) -> None:
    """Look at what is asked for where the loop may save, and hear the batches of a validation."""
    if hasattr(module, "CheckpointManager"):
        _guard_whole_ones(module.CheckpointManager)
        _follow_saves(module.CheckpointManager)
    else:
        _attach_to_validation(module.Validator)


def _attach_to_validation(validator_class: Any) -> None:
    prepare = validator_class.post_dataloading_process

    @functools.wraps(prepare)
    def prepare_and_tell(self: Any, *arguments: Any, **named: Any) -> Any:
        for attachment in list(_attachments.values()):
            attachment.alive()
        return prepare(self, *arguments, **named)

    validator_class.post_dataloading_process = prepare_and_tell


def _follow_saves(manager_class: Any) -> None:
    save, should_save = manager_class.save, manager_class._should_save  # noqa: SLF001  # its own rule: there is no other door

    @functools.wraps(save)
    def save_as_asked(self: Any, curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002
        attachment = _attached(self, curr_step)
        asked = attachment.step_done(curr_step)
        unable = "" if self.enable and not self.load_only else "its checkpoints are disabled"
        if asked is not Asked.NOTHING and unable:
            attachment.not_saved(unable)
            asked = Asked.NOTHING
        wanted[self] = asked is not Asked.NOTHING and not last_step
        if wanted[self]:
            attachment.saving()
        saved = save(self, curr_step, last_step)
        if wanted[self] and attachment.stopping:
            self.maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        if saved and not last_step:  # the last one may be of the model alone, and the loop ends with it
            attachment.saved_to(os.path.join(self.folder, f"step-{curr_step}"))
        if last_step:
            attachment.ended(curr_step)
        return saved

    @functools.wraps(should_save)
    def should_save_as_asked(self: Any, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002
        return bool(wanted.get(self) or should_save(self, curr_step, last_step))

    wanted: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
    manager_class.save, manager_class._should_save = save_as_asked, should_save_as_asked  # noqa: SLF001  # as above


def _guard_whole_ones(manager_class: Any) -> None:
    """Have its retention wait while it would keep torn directories alone: it counts them as checkpoints."""
    should_purge = manager_class._should_purge  # noqa: SLF001  # its own rule: there is no other door

    @functools.wraps(should_purge)
    def should_purge_and_keeps_one(self: Any) -> bool:
        return bool(should_purge(self)) and _keeps_one(str(self.folder), int(self.keep_latest_k))

    manager_class._should_purge = should_purge_and_keeps_one  # noqa: SLF001  # as above


def _keeps_one(folder: str, count: int) -> bool:
    """Tell whether one of the newest directories is whole by its marker; what cannot be looked at is as without us."""
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := _STEP.search(name))]
    except OSError:
        return True
    kept = [os.path.join(folder, name) for _, name in sorted(found)[-count:]]
    if any(os.path.exists(os.path.join(path, marker)) for path in kept for marker in _MARKERS):
        return True
    warn("retention_waits", framework=NAME, directory=folder, why="the newest directories are not complete")
    return False


def _attached(manager: Any, step: int) -> Attachment:
    """Return the attachment of a manager; it attaches at its first step."""

    def describe() -> Training:
        version = importlib.metadata.version("torchtitan")
        return Training(framework=NAME, version=f"torchtitan {version}", step=max(0, step - 1))

    if manager not in _attachments:
        _attachments[manager] = attach(NAME, describe)
    return _attachments[manager]
