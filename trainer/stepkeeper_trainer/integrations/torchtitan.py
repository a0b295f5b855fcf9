"""torchtitan: its loop calls the checkpoint manager's `save` at the end of each step."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach

if TYPE_CHECKING:
    from types import ModuleType

NAME = "torchtitan"
_attachments: WeakKeyDictionary[Any, Attachment] = WeakKeyDictionary()


def install(module: ModuleType) -> None:
    """Look at what is asked for where the loop may save, and hear the batches of a validation."""
    if hasattr(module, "CheckpointManager"):
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


def _attached(manager: Any, step: int) -> Attachment:
    """Return the attachment of a manager; it attaches at its first step."""

    def describe() -> Training:
        version = importlib.metadata.version("torchtitan")
        return Training(framework=NAME, version=f"torchtitan {version}", step=max(0, step - 1))

    if manager not in _attachments:
        _attachments[manager] = attach(NAME, describe)
    return _attachments[manager]
