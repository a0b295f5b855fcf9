"""Whether the first two steps move through data whose position is not in the state, does not move, or runs ahead.

A part of the script's own is taken at its word where it moves as training does.  Two kinds do not, without any error:

* a data set or iterator that a loader's workers read: they have copies of it, and only these move;
* a sampler that counts as it is iterated: a loader with workers asks it for batches long before a step takes them.

Rank 0 looks alone, and asks no part for its state, as a `state_dict()` may wait for the other ranks.  It compares what
all ranks have gathered anyway: before the first step, and after it.
"""

from __future__ import annotations

import re
import weakref
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepkeeper_trainer.buffers import view_bytes
from stepkeeper_trainer.living import living
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.sampler import GlobalSampler
from stepkeeper_trainer.state.keys import TREE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from stepkeeper_trainer.state.tree import Stateful

KEEPERS = ("torchdata", "stepkeeper_trainer")  # packages whose parts move as training does
DEPTH_MAX = 5  # of a part below a data set
ITEMS_MAX = 64  # of a list or dictionary on the way
OBJECTS_MAX = 2000  # that are looked at for a part
COMPARED_BYTES_MAX = 64 * 1024  # of one tensor; a larger one may have moved
ADVICE = "give state={..., 'sampler': GlobalSampler(...)}, or torchdata's StatefulDataLoader as 'loader'"


class _Read(NamedTuple):
    """An iterator over a loader that lived as the first step ended."""

    reference: weakref.ref[Any]
    given: int
    """Batches, by then."""
    waiting: int
    """Batches that its workers had been asked for beyond these."""


class _Saved(NamedTuple):
    """What was gathered of a part."""

    rest: bytes
    """What is no tensor, as JSON."""
    tensors: dict[str, object]


class Position:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, parts: Mapping[str, Stateful], tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin right after a resume, with what the state holds beside model and optimizer, and what was gathered."""
        self._parts = parts
        self._steps = 0
        self._read: list[_Read] = []
        self._own = {name: part for name, part in parts.items() if _is_own(part)}
        self._saved: list[dict[str, _Saved | None]] = []  # of these, before the first step and after it
        self.gathered(tensors)
        self._counts = [self._count()]

    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins: after the first step for iterators, after the second for those read."""
        self._steps += 1
        if self._steps > 2:  # noqa: PLR2004
            return
        self._counts.append(self._count())
        if self._steps == 1:
            self._check_sampler(step)
            found = living(_BaseDataLoaderIter)
            self._read = [_Read(weakref.ref(each), _given(each), _waiting(each)) for each in found]
            return
        live = ((one, one.reference()) for one in self._read)
        read = [(one, each) for one, each in live if each is not None and _given(each) > one.given]
        if read:
            self._check_loader(step, read[0][1])
            if len(self._saved) == 2:  # noqa: PLR2004
                self._check_stands(step, [each for _, each in read])
                self._check_ahead(step, read)
        self._read, self._counts, self._saved, self._own = [], [], [], {}

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note what all ranks have gathered: before the first step, and after it."""
        self._saved.append({name: _saved_of(name, tensors) for name in self._own})

    def _check_sampler(self, step: int) -> None:
        samplers = [part for part in self._parts.values() if isinstance(part, GlobalSampler)]
        if samplers and samplers[0].steps_done < step:
            warn(
                "data_position_stands",
                step=step,
                why="the sampler has not moved in this step: a resume starts its data again",
                remedy="call sampler.advance(samples of all ranks) in each step, before step_done()",
            )

    def _check_loader(self, step: int, read: Any) -> None:
        if not all(_knows_no_data(part) for name, part in self._parts.items() if name != "scheduler"):
            return
        warn(
            "data_position_not_saved",
            step=step,
            loader=f"{type(read).__module__.split('.')[0]}'s DataLoader",
            why="it is read in each step, and the state has neither a sampler nor a loader: "
            "unless the script restores its own place in the data, a resume starts its data again",
            remedy=ADVICE,
        )

    def _check_stands(self, step: int, read: list[Any]) -> None:
        """Look at the script's own parts that workers of a loader read."""
        before, after = self._saved
        if any(map(_keeps, self._parts.values())) or any(before[name] != after[name] for name in self._own):
            return  # the position may be there
        for name, part in self._own.items():
            if before[name] is None:
                continue
            if any(_workers(each) and _reaches(getattr(each, "_dataset", None), part) for each in read):
                warn(
                    "data_position_stands",
                    step=step,
                    part=name,
                    kind=type(part).__name__,
                    why="a DataLoader's worker processes have copies of it, and this one has not moved: "
                    "unless the script restores its own place in the data, a resume starts its data again",
                    remedy=f"count in this process what training has used, or {ADVICE}",
                )

    def _check_ahead(self, step: int, read: list[tuple[_Read, Any]]) -> None:
        """Look for a sampler that was ahead of training after the first step, by just what a loader had asked for."""
        before, first, second = self._counts
        saved, then = self._saved
        for name, part in self._own.items():
            for one, each in read:
                if not one.waiting or not _reaches(getattr(each, "_index_sampler", None), part):
                    continue
                asked, given = one.given + one.waiting, _given(each) - one.given
                for count, was in before.get(name, {}).items():
                    half, whole = first[name].get(count, was), second[name].get(count, was)
                    moves = whole > half > was and (half - was) * given == (whole - half) * asked
                    if moves and _has(saved[name], was) and _has(then[name], half):
                        warn(
                            "data_position_ahead",
                            step=step,
                            part=name,
                            kind=type(part).__name__,
                            batches=one.waiting,
                            why=f"it counts batches as the loader asks for them ahead of training ({count}): "
                            "a resume leaves out those that were asked for and not used",
                            remedy=f"count in the training loop what a step has used, or {ADVICE}",
                        )
                        return

    def _count(self) -> dict[str, dict[str, int]]:
        """Return the whole numbers that the script's own parts have."""
        return {
            name: {key: value for key, value in getattr(part, "__dict__", {}).items() if type(value) is int}
            for name, part in self._own.items()
        }


def _saved_of(name: str, tensors: Mapping[str, torch.Tensor]) -> _Saved | None:
    """Return what was gathered of a part; None where ranks have it by names of their own."""
    blob = tensors.get(f"{TREE_PREFIX}{name}")
    if blob is None:
        return None
    of_part = {key: _bytes_of(each) for key, each in tensors.items() if key.startswith(f"{name}.")}
    return _Saved(bytes(view_bytes(blob)), of_part)


def _has(saved: _Saved | None, number: int) -> bool:
    """Whether a number is among what was gathered."""
    return saved is not None and re.search(rb"(?<![\w.])%d(?![\w.])" % number, saved.rest) is not None


def _bytes_of(tensor: torch.Tensor) -> object:
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.nbytes <= COMPARED_BYTES_MAX:
        return bytes(view_bytes(tensor.contiguous()))
    return object()  # another one each time: it may have moved


def _packages(part: object) -> set[str]:
    return {kind.__module__.split(".")[0] for kind in type(part).__mro__}


def _keeps(part: object) -> bool:
    """Whether a part is, or derives from, what moves as training does."""
    return not _packages(part).isdisjoint(KEEPERS)


def _is_own(part: object) -> bool:
    """Whether the script has made the type of a part, perhaps from a data set or sampler of torch."""
    return not _keeps(part) and type(part).__module__.split(".")[0] != "torch"


def _knows_no_data(part: object) -> bool:
    """Whether a part of the state can hold no position in the data: schedules, scalers, averages of weights."""
    module = type(part).__module__
    return isinstance(part, torch.nn.Module) or (
        module.split(".")[0] == "torch" and not module.startswith("torch.utils.data")
    )


def _reaches(root: object, wanted: object) -> bool:
    """Whether an object is another one, or has it in its attributes, or in theirs."""
    seen: dict[int, object] = {}  # held, so that no address is used twice
    level: list[object] = [root]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for each in level:
            if each is wanted:
                return True
            if id(each) not in seen and len(seen) < OBJECTS_MAX:
                seen[id(each)] = each
                below += _members(each)
        level = below
    return False


def _members(each: Any) -> Iterable[object]:
    """Return what an object has; of a function what it closes over, and of long lists nothing.

    The object's own code is not asked: one may stand for another that is far away, or gone.
    """
    kind = type(each)
    if kind is FunctionType:
        return tuple(_contents(each))
    if kind in (list, tuple, dict):
        return () if len(each) > ITEMS_MAX else tuple(each.values() if kind is dict else each)
    if issubclass(kind, ModuleType):
        return ()
    try:
        found = object.__getattribute__(each, "__dict__")
    except AttributeError:
        return ()
    return tuple(found.values()) if type(found) is dict else ()


def _contents(function: Any) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _given(iterator: Any) -> int:
    """Return how many batches an iterator has given."""
    return int(getattr(iterator, "_num_yielded", 0))


def _workers(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))


def _waiting(iterator: Any) -> int:
    """Return how many batches its workers have been asked for that it has not given."""
    return int(getattr(iterator, "_send_idx", 0)) - int(getattr(iterator, "_rcvd_idx", 0))
