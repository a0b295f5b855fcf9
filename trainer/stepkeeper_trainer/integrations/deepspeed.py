"""DeepSpeed's engine, in a loop of the script's own.

A script says with its own `save_checkpoint` where it saves, under which tags, and that it keeps no state of its own
there.  Until its first one in the run, and where it does keep some, which nobody else can know, it cannot be asked.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import deepspeed

from stepkeeper_trainer.formats.records import OwnSaves
from stepkeeper_trainer.integrations import chosen, remembered
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach, harmless, names_step

if TYPE_CHECKING:
    from types import ModuleType

NAME = "deepspeed"


@dataclass(slots=True, kw_only=True)
class Engine:
    """What is known of an engine of the script."""

    attachment: Attachment
    save_dir: str = ""  # of the first save
    elsewhere: bool = False  # whether another save went to another directory
    tag: str = ""  # with {step}
    named: bool = False  # whether the script names its tags itself
    saved_step: int | None = None
    unable: str = "the script has not called save_checkpoint yet, so where it saves is not known"


_engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()
_loads: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The directory of the checkpoint that an engine has loaded."""


def install(module: ModuleType) -> None:
    """Follow each engine's forwards, steps and saves."""
    engine_class = module.DeepSpeedEngine
    forward, step, save = engine_class.forward, engine_class.step, engine_class.save_checkpoint

    @functools.wraps(forward)
    def forward_behind_boundary(self: Any, *arguments: Any, **named: Any) -> Any:
        _boundary(self)
        return forward(self, *arguments, **named)

    @functools.wraps(step)
    def attach_and_step(self: Any, *arguments: Any, **named: Any) -> Any:
        _attach(self)
        stepped = step(self, *arguments, **named)
        if (known := _engines.get(self)) is not None:
            known.attachment.stepped(self.global_steps)
        return stepped

    @functools.wraps(save)
    def save_and_tell(self: Any, *arguments: Any, **named: Any) -> Any:
        saved = save(self, *arguments, **named)
        _saved(self, *arguments, **named)
        return saved

    load = engine_class.load_checkpoint

    @functools.wraps(load)
    def load_chosen(self: Any, load_dir: Any, tag: Any = None, *arguments: Any, **named: Any) -> Any:
        given = tag is not None
        tag = tag if given else chosen.guarded(lambda: _chosen(self, load_dir), None)
        _loads[self] = str(load_dir)
        if given or tag is None or self.load_universal_checkpoint() or not _is_universal(load_dir, tag):
            return load(self, load_dir, tag, *arguments, **named)
        config = self._config  # this one load is of a conversion, which the supervisor made for this number of ranks
        config.load_universal_checkpoint = True
        try:
            return load(self, load_dir, tag, *arguments, **named)
        finally:
            config.load_universal_checkpoint = False

    engine_class.forward, engine_class.step = forward_behind_boundary, attach_and_step
    engine_class.save_checkpoint, engine_class.load_checkpoint = save_and_tell, load_chosen


def _chosen(engine: Any, load_dir: Any) -> str | None:
    """Return the tag to load where the script names none: `latest` may name one that is torn.

    What the script has itself saved since is newer.  A script that loads Universal Checkpoints loads no others.
    """
    path = chosen.checkpoint(NAME)
    saved = any(known.saved_step is not None for known in _engines.values())
    if saved or not chosen.is_in(path, load_dir):
        return None
    if engine.load_universal_checkpoint() and not _is_universal(load_dir, os.path.basename(path)):
        return None
    return os.path.basename(chosen.use(NAME, path))


def _is_universal(load_dir: Any, tag: Any) -> bool:
    return os.path.isdir(os.path.join(load_dir, str(tag), "zero"))


def _boundary(engine: Any) -> None:
    """Before the first forward behind an optimizer step: the script has done all that belongs to that step."""
    known = _engines.get(engine)
    if known is None:
        return
    if engine.global_steps == known.attachment.step:  # accumulated gradients, or an evaluation
        known.attachment.alive()
        return
    if known.attachment.step_done(engine.global_steps) is Asked.NOTHING:
        return
    if known.saved_step == engine.global_steps:
        known.attachment.leave_if_asked(saved=True)
    elif unable := known.attachment.unable_anywhere(known.unable):
        known.attachment.not_saved(unable)
    elif known.attachment.open:
        known.attachment.saving()
        tag = known.tag.format(step=engine.global_steps) if known.named else None
        engine.save_checkpoint(known.save_dir, tag=tag)  # `_saved` tells of it


def _attach(engine: Any) -> None:
    """Attach before an engine's first step: a forward may be an evaluation before a Trainer's training."""
    if engine.optimizer is None or engine in _engines:
        return
    others = list(_engines.values())
    for other in others:
        other.attachment.withdraw("the script trains several engines, which belong together")

    def describe() -> Training:
        return Training(framework=NAME, version=f"deepspeed {deepspeed.__version__}", step=int(engine.global_steps))

    attachment = Attachment(Training(framework=NAME, version="")) if others else attach(NAME, describe)
    _engines[engine] = Engine(attachment=attachment)
    if not others and engine in _loads:
        _recall(_engines[engine], _loads[engine])


@harmless
def _recall(known: Engine, directory: str) -> None:
    """Take over from an earlier launch how the script saves to the directory that it has loaded from."""
    found = remembered.of(NAME, os.path.join(os.path.abspath(directory), "tag"))
    if found is None:
        return
    tag = (found.prefix.replace("{", "{{").replace("}", "}}"), found.suffix.replace("{", "{{").replace("}", "}}"))
    known.save_dir, known.named, known.unable = found.directory, found.named, ""
    known.tag = "{step}".join(tag) if found.named else ""


def _saved(engine: Any, save_dir: Any, tag: Any = None, client_state: Any = None, *_: Any, **__: Any) -> None:
    """Behind `save_checkpoint`: the next save that is asked for is like this one."""
    known = _engines.get(engine)
    if known is None:
        return
    _remember(engine, known, save_dir, tag, client_state)
    step = known.saved_step = engine.global_steps
    known.attachment.saved_to(f"{save_dir}/{tag if tag is not None else f'global_step{step}'}", step=step)


@harmless
def _remember(engine: Any, known: Engine, save_dir: Any, tag: Any, client_state: Any) -> None:
    step, directory = str(engine.global_steps), os.path.abspath(save_dir)
    known.save_dir = known.save_dir or directory
    known.elsewhere = known.elsewhere or directory != known.save_dir
    known.named, known.unable = tag is not None, ""
    if known.elsewhere:
        known.unable = f"the script saves to several directories: {known.save_dir} and, at step {step}, {directory}"
    elif names_step(directory, engine.global_steps):
        known.unable = f"the script's directory {directory} names step {step}: that of another step is not known"
    elif client_state:
        known.unable = "the script passes a client_state to save_checkpoint, which nobody else can make"
    if tag is not None:
        known.tag = str(tag).replace("{", "{{").replace("}", "}}").replace(step, "{step}")
        if known.tag.count("{step}") != 1:
            known.unable = f"the tag {str(tag)!r} of the script's save does not name step {step}"
    if known.attachment.rank or not known.attachment.open:
        return
    if known.unable:
        remembered.forget()
        return
    before, _, behind = str(tag).partition(step) if tag is not None else ("", "", "")
    kept = OwnSaves(framework=NAME, directory=known.save_dir, prefix=before, suffix=behind, named=known.named)
    remembered.keep(kept)
