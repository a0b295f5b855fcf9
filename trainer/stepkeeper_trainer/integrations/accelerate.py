"""Accelerate, in a loop of the script's own.

A script says with its own `save_state` where it saves, and by the number in that name how it counts its steps.  Until
its first one in the run it cannot be asked; nor where nobody else can know what belongs to its checkpoints.  The end
of a step is where the script asks a data loader, which Accelerate has prepared, for the next batch: the data position
is right there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate

from stepkeeper_trainer.formats.records import OwnSaves
from stepkeeper_trainer.integrations import chosen, remembered
from stepkeeper_trainer.integrations.attachment import Asked, Attachment, Training, attach, harmless, names_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

NAME = "accelerate"
STEPS_WITHOUT_BATCH_MAX = 16
_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")  # the last number of a name
_OF_OTHER_RANKS = re.compile(r"random_states_\d+\.pkl")
_NOT_YET = "the script has not called save_state yet, so where it saves is not known"


@dataclass(slots=True)
class Saves:
    """How the script saves, as far as its calls of `save_state` show it."""

    accelerator: Any = None
    directory: str = ""
    prefix: str = ""
    suffix: str = ""
    digits: int = 0  # of the number, with zeros before it
    base: int = 0  # number of the checkpoint that counting began with
    by_backward: bool = False  # the number counts backward passes, not optimizer steps
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # further ones
    newest: Path | None = None  # whose further files are still to be looked for
    written: frozenset[str] = frozenset()  # by `save_state` in it
    further: str = ""  # a file that the script itself adds to its checkpoints
    unable: str = _NOT_YET

    def path(self, number: int) -> str:
        """Return what the script would call the checkpoint of a step."""
        return os.path.join(self.directory, f"{self.prefix}{number:0{self.digits}d}{self.suffix}")


@dataclass(slots=True)
class Loop:
    """What is known of the script's loop."""

    attachment: Attachment | None = None
    thread: int = 0  # that trains
    steps: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    """Of each optimizer, since the last boundary."""
    ahead: int = 0  # the most steps of one optimizer, since the last boundary
    done: int = 0  # steps until the last boundary, since the script loaded a checkpoint
    accelerators: set[Any] = field(default_factory=set)  # whose `backward` was called since the last boundary
    backwards: int = 0  # since the script loaded a checkpoint
    loaded: int = 0  # number of that checkpoint
    pending: int = 0  # optimizer steps since the last boundary
    saves: Saves = field(default_factory=Saves)
    saved: int | None = None  # number of the newest checkpoint
    asked: bool = False  # the save at hand is ours

    @property
    def number(self) -> int:
        """Return the step at hand, as the script counts."""
        counted = self.backwards if self.saves.by_backward else self.steps_done
        return (self.loaded if self.saves.unable == _NOT_YET else self.saves.base) + counted

    @property
    def steps_done(self) -> int:
        """Return how many steps were done since the script loaded a checkpoint."""
        return self.done + self.ahead

    @property
    def between_steps(self) -> bool:
        """Tell whether all optimizers in use have done as many steps.

        One that its Accelerator has released is not in use.  When Python frees it differs from rank to rank, so that
        decides nothing.
        """
        prepared = {id(each) for accelerator in self.accelerators for each in getattr(accelerator, "_optimizers", ())}
        in_use = [steps for each, steps in self.steps.items() if not prepared or id(each) in prepared]
        return all(steps == self.ahead for steps in in_use)

    def pass_boundary(self) -> None:
        """Count from here."""
        self.done, self.ahead, self.pending = self.steps_done, 0, 0
        self.accelerators.clear()
        for optimizer in self.steps:
            self.steps[optimizer] = 0


_loop = Loop()


def install(module: ModuleType) -> None:
    """Follow optimizer steps, backward passes, saves and batches."""
    accelerator_class, optimizer_class = module.Accelerator, module.AcceleratedOptimizer
    step, backward = optimizer_class.step, accelerator_class.backward
    save, load = accelerator_class.save_state, accelerator_class.load_state

    @functools.wraps(step)
    def attach_and_step(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.gradient_state.sync_gradients:
            _attach()
        stepped = step(self, *arguments, **named)
        if self.gradient_state.sync_gradients:
            _stepped(self)
        return stepped

    @functools.wraps(backward)
    def backward_and_count(self: Any, *arguments: Any, **named: Any) -> Any:
        _loop.backwards += 1
        if _loop.attachment is None or _loop.attachment.open:
            _loop.accelerators.add(self)
        return backward(self, *arguments, **named)

    @functools.wraps(save)
    def save_and_tell(self: Any, output_dir: Any = None, *arguments: Any, **named: Any) -> Any:
        before = _listed(output_dir) if _is_attached() else {}
        saved = save(self, output_dir, *arguments, **named)
        if _is_attached():
            _saved(self, output_dir, before, (arguments, named))
        return saved

    @functools.wraps(load)
    def load_and_count(self: Any, input_dir: Any = None, *arguments: Any, **named: Any) -> Any:
        named_by_script = input_dir
        input_dir = chosen.guarded(lambda: _chosen(self, named_by_script), named_by_script)
        loaded = load(self, input_dir, *arguments, **named)
        _loaded(self, input_dir)
        return loaded

    optimizer_class.step, accelerator_class.backward = attach_and_step, backward_and_count
    accelerator_class.save_state, accelerator_class.load_state = save_and_tell, load_and_count
    for loader_class in (accelerate.data_loader.DataLoaderShard, accelerate.data_loader.DataLoaderDispatcher):
        _follow_batches(loader_class)


def _chosen(accelerator: Any, input_dir: Any) -> Any:
    """Return what `load_state` loads; None: by Accelerate's own rule, the highest number."""
    path = chosen.checkpoint(NAME)
    project = accelerator.project_configuration
    automatic = os.path.join(project.project_dir or "", "checkpoints")
    if input_dir is not None or not path:
        return input_dir
    if project.automatic_checkpoint_naming and not chosen.is_in(path, automatic):
        return None
    return chosen.use(NAME, path)


def _follow_batches(loader_class: Any) -> None:
    iterate = loader_class.__iter__

    @functools.wraps(iterate)
    def iterate_with_boundaries(self: Any) -> Iterator[Any]:
        begun, given, batches = _loop.backwards, 0, iterate(self)
        while True:
            if _is_attached() and threading.get_ident() == _loop.thread:
                _boundary(self, evaluating=given > 0 and begun == _loop.backwards)
            try:
                batch = next(batches)
            except StopIteration:
                return
            given += 1
            yield batch

    loader_class.__iter__ = iterate_with_boundaries


def _is_attached() -> bool:
    return _loop.attachment is not None and _loop.attachment.open


def _attach() -> None:
    """Attach before the first step: a Trainer that uses Accelerate has attached by then."""
    if _loop.attachment is not None:
        return

    def describe() -> Training:
        return Training(framework=NAME, version=f"accelerate {accelerate.__version__}", step=_loop.loaded)

    _loop.attachment = attach(NAME, describe)
    _loop.thread = threading.get_ident()


def _stepped(optimizer: Any) -> None:
    attachment = _loop.attachment
    if attachment is None or not attachment.open:
        return
    _loop.steps[optimizer] = steps = _loop.steps.get(optimizer, 0) + 1
    _loop.ahead = max(_loop.ahead, steps)
    _loop.pending += 1
    if _loop.between_steps:
        attachment.stepped(_loop.number)
    if _loop.pending > STEPS_WITHOUT_BATCH_MAX * len(_loop.steps):
        attachment.withdraw(
            f"in {STEPS_WITHOUT_BATCH_MAX} steps, the script has asked no data loader of Accelerate for a batch between"
            " two steps of all its optimizers: the end of its step is not known"
        )


@harmless
def _boundary(loader: Any, *, evaluating: bool) -> None:
    """Before a batch: the script has done all that belongs to the step before."""
    attachment = _loop.attachment
    assert attachment is not None, "the caller looks"
    _look_for_further_files()
    if not _loop.pending or not _loop.between_steps:
        even = getattr(getattr(loader, "batch_sampler", None), "even_batches", True)
        attachment.evaluates(lambda: _save(attachment), alike=evaluating and not _loop.pending and even, last=False)
        return
    _loop.pass_boundary()
    if attachment.step_done(_loop.number) is not Asked.NOTHING:
        _save(attachment)


def _save(attachment: Attachment) -> None:
    """Save as the script would, on all ranks or none; leave where they were asked to stop."""
    saves, number = _loop.saves, _loop.number
    if _loop.saved == number:
        attachment.leave_if_asked(saved=True)
        return
    unable = attachment.unable_anywhere(saves.unable or saves.further)
    if not attachment.open:
        return
    if unable:
        attachment.not_saved(unable)
        return
    attachment.saving()
    arguments, named = saves.arguments
    _loop.asked = True
    try:
        saves.accelerator.save_state(saves.path(number), *arguments, **named)  # `_saved` tells of it
    finally:
        _loop.asked = False


def _saved(accelerator: Any, output_dir: Any, before: dict[str, int], arguments: Any) -> None:
    if not _loop.asked:
        _learn(accelerator, output_dir, before, arguments)
    number = _loop.number
    if _loop.attachment is None or output_dir is None or os.path.abspath(output_dir) != _loop.saves.path(number):
        return  # it names no step
    _loop.saved = number
    _loop.attachment.saved_to(str(output_dir), step=number)


@harmless
def _learn(accelerator: Any, output_dir: Any, before: dict[str, int], arguments: Any) -> None:
    """Take over from a save of the script what the next one is called, and what it consists of."""
    saves = _loop.saves
    if accelerator.project_configuration.automatic_checkpoint_naming or output_dir is None:
        saves.unable = "automatic names count saves: which step such a number means to the script is not known"
        return
    directory, name = os.path.split(os.path.abspath(output_dir))
    found = _NUMBER.fullmatch(name)
    counted = _counted(int(found[2])) if found else None
    if found is None or counted is None:
        if saves.unable or (found is not None and (directory, found[1]) == (saves.directory, saves.prefix)):
            saves.unable = f"{name} counts neither steps nor backward passes, so the name of another step is not known"
        return
    if saves.directory not in ("", directory):
        saves.unable = f"the script saves to several directories: {saves.directory} and {directory}"
        return
    if not saves.directory and names_step(directory, int(found[2])):
        saves.directory = directory  # the next save shows whether that number changes
        saves.unable = f"the directory {directory} names the step of {name}, so that of another step is not known"
        return
    saves.accelerator, saves.directory, saves.prefix, saves.suffix = accelerator, directory, found[1], found[3]
    saves.digits = len(found[2]) if found[2].startswith("0") else 0
    saves.base, saves.by_backward = counted
    saves.arguments, saves.unable = arguments, ""
    if _loop.attachment is not None and _loop.attachment.rank == 0:
        after = _listed(output_dir)
        saves.written = frozenset(each for each, changed in after.items() if changed != before.get(each))
        saves.newest = Path(output_dir)


def _counted(number: int) -> tuple[int, bool] | None:
    """Return where counting began, and whether backward passes are counted; None where the number counts neither."""
    for base in (_loop.loaded, 0):
        for counted, by_backward in ((_loop.steps_done, False), (_loop.backwards, True)):
            if number == base + counted:
                return base, by_backward
    return None


def _loaded(accelerator: Any, input_dir: Any) -> None:
    """Count from the checkpoint that the script has loaded: its number is that of its step."""
    found = _NUMBER.fullmatch(os.path.basename(os.path.abspath(input_dir))) if input_dir is not None else None
    _loop.loaded = int(found[2]) if found else 0
    _loop.pass_boundary()
    _loop.steps.clear()
    _loop.done, _loop.backwards, _loop.saved = 0, 0, None
    _loop.saves = Saves()
    if found is not None:
        _recall(accelerator, os.path.abspath(input_dir), found)


@harmless
def _recall(accelerator: Any, path: str, found: re.Match[str]) -> None:
    """Take over from an earlier launch how the script saves, where the loaded checkpoint is one of those saves."""
    known = remembered.of(NAME, path)
    if known is None or (known.prefix, known.suffix) != (found[1], found[3]):
        return
    saves = _loop.saves
    saves.accelerator, saves.directory, saves.prefix, saves.suffix = accelerator, known.directory, found[1], found[3]
    saves.digits, saves.base, saves.by_backward = known.digits, _loop.loaded, known.counts_backwards
    saves.arguments, saves.unable = ((), dict(known.options)), ""


def _remember() -> None:
    """Keep how the script saves for later launches, where they could save like that."""
    saves = _loop.saves
    positional, options = saves.arguments
    plain = all(isinstance(each, bool | int | float | str | None) for each in options.values())
    if saves.unable or saves.further or positional or not plain or saves.base != _loop.loaded:
        remembered.forget()
        return
    remembered.keep(
        OwnSaves(
            framework=NAME,
            directory=saves.directory,
            prefix=saves.prefix,
            suffix=saves.suffix,
            digits=saves.digits,
            counts_backwards=saves.by_backward,
            options=options,
        )
    )


@harmless
def _look_for_further_files() -> None:
    """Behind a save of the script's: what it adds to the checkpoint itself would be missing in one of ours."""
    saves = _loop.saves
    newest, saves.newest = saves.newest, None
    if newest is None:
        return
    found = sorted(set(_listed(newest)) - saves.written)
    added = [each for each in found if not _OF_OTHER_RANKS.fullmatch(each)]
    saves.further = f"the script itself adds {added[0]} to its checkpoints, which nobody else can make" if added else ""
    _remember()


def _listed(directory: Any) -> dict[str, int]:
    """Return the names in a directory, and when each was changed."""
    with contextlib.suppress(OSError, TypeError):
        return {each.name: each.stat().st_mtime_ns for each in os.scandir(directory)}
    return {}
