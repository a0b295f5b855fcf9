"""Whether the first two steps move through data whose position is not in the state, does not move, or runs ahead.

A part of the script's own is taken at its word where it moves as training does.  Two kinds do not, without any error:

* a data set or iterator that a loader reads: its worker processes have copies of it, and only these move;
* a sampler that counts as it is iterated: a loader with workers asks it for batches long before a step takes them.

A script may leave out a step, as for a loss that is no number: its loop comes round without `step_done`.  The loader
has moved on then, and a `GlobalSampler` moves only as it is told.
"""

from __future__ import annotations

import gc
import weakref
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepkeeper_trainer.living import living
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.sampler import GlobalSampler, MeshLoader, MicroBatches
from stepkeeper_trainer.state.tree import split

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepkeeper_trainer.state.tree import Stateful

KEEPERS = ("torchdata", "datasets", "stepkeeper_trainer")  # packages whose parts move as training does
TRAINED = (torch.optim.Optimizer, torch.nn.Module, torch.nn.Parameter)
OBJECTS_MAX = 2000  # that are looked at for a part
DEPTH_MAX = 8  # of a part below a data set; an object's attributes may count twice
COMPARED_BYTES_MAX = 64 * 1024  # of one tensor; of a larger one its version counter
OPAQUE = (type, ModuleType, str, bytes, int, float, torch.Tensor)
ADVICE = "give state={..., 'sampler': GlobalSampler(...)}, or torchdata's StatefulDataLoader as 'loader'"


class _Read(NamedTuple):
    """An iterator over a loader that lived as the first step ended, and what it had given by then."""

    reference: weakref.ref[Any]
    given: int


class Position:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        """Begin right after a resume, with what the state holds beside model and optimizer."""
        self._parts = parts
        self._steps = 0
        self._read: list[_Read] = []
        self._own = {name: part for name, part in parts.items() if _is_own(part)}
        self._counts = [self._count()]
        self._were: dict[str, Any] = {}
        self._sampler = next((part for part in parts.values() if isinstance(part, GlobalSampler)), None)
        self._advanced = 0  # how often the sampler had, as the newest step ended
        self._followed: list[_Read] = []  # those that read for a `GlobalSampler`, as the newest step ended
        self._turns = 0  # of the loop since then

    def turn(self) -> None:
        """Take note that the loop comes round."""
        self._turns += 1

    def arrive(self, step: int) -> None:
        """Look around as `step_done` begins: after the first step for iterators, after the second for those read."""
        self._steps += 1
        self._check_left_out(step)
        if self._steps == 1:
            self._check_sampler(step)
            self._read = [_Read(weakref.ref(each), _given(each)) for each in living(_BaseDataLoaderIter)]
            self._follow(self._read)
            if self._read and self._own:
                self._were = self._look()
                self._counts.append(self._count())
        elif self._steps == 2:  # noqa: PLR2004
            live = ((one.reference(), one.given) for one in self._read)
            read = [each for each, given in live if each is not None and _given(each) > given]
            if read:
                self._check_loader(step, read[0])
                self._check_own(step, read)
                self._check_fetched(step, read)
            self._read, self._were, self._counts, self._own = [], {}, [], {}

    def _check_sampler(self, step: int) -> None:
        if self._sampler is not None and self._sampler.steps_done < step:
            warn(
                "data_position_stands",
                step=step,
                why="the sampler has not moved in this step: a resume starts its data again",
                remedy="call sampler.advance(samples of all ranks) in each step, before step_done()",
            )

    def _follow(self, read: list[_Read]) -> None:
        """Note where the sampler is, and what iterators that read for it have given by now."""
        if self._sampler is not None:
            self._advanced = self._sampler.steps_done
        live = ((one.reference, one.reference()) for one in read)
        self._followed = [_Read(reference, _given(each)) for reference, each in live if _reads_for(each, self._sampler)]

    def _check_left_out(self, step: int) -> None:
        """Look for batches that a loader has given in turns without `step_done`, and that the sampler was not told."""
        turns, self._turns = self._turns, 0
        if not self._followed or self._sampler is None:
            return
        moved = self._sampler.steps_done - self._advanced
        for reference, given in self._followed:
            iterator = reference()
            if iterator is None or turns < 2 or moved >= turns:  # noqa: PLR2004
                continue
            if _given(iterator) - given == turns * iterator._index_sampler.of_a_step:  # noqa: SLF001
                warn(
                    "data_position_behind",
                    step=step,
                    turns=turns - 1,
                    why="the loop has left out steps whose data the loader had given, and the sampler has not moved "
                    "for them: a resume takes other data from there on",
                    remedy="call sampler.advance(samples of all ranks) also where a step is left out",
                )
                self._followed = []
                return
        self._follow(self._followed)

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

    def _check_own(self, step: int, read: list[Any]) -> None:
        """Look at the script's own parts that a loader reads."""
        if not self._own or any(_keeps(part) for part in self._parts.values()):
            return
        moved = {name for name, state in self._look().items() if state != self._were.get(name)}
        if any(not _reaches(self._own[name], TRAINED) for name in moved):
            self._check_ahead(step, read, moved)
            return  # it may be the position; a schedule of the script's own is not
        for name, part in self._own.items():
            iterator = next((each for each in read if _reaches(each._dataset, part)), None)  # noqa: SLF001
            if iterator is None or name in moved or self._were.get(name) is None:
                continue
            where = "in its worker processes, which move copies of it" if _workers(iterator) else "in each step"
            warn(
                "data_position_stands",
                step=step,
                part=name,
                kind=type(part).__name__,
                why=f"a DataLoader reads it {where}, and its state in this process has not moved: "
                "unless the script restores its own place in the data, a resume starts its data again",
                remedy=f"count in this process what training has used, or {ADVICE}",
            )

    def _check_ahead(self, step: int, read: list[Any], moved: Iterable[str]) -> None:
        """Look for a sampler that was further ahead after one step than one step takes it, by what a loader asked."""
        self._counts.append(self._count())
        before, first, second = self._counts
        for name in moved:
            iterator = next((each for each in read if _reaches(each._index_sampler, self._own[name])), None)  # noqa: SLF001
            waiting = _waiting(iterator)
            for count, was in before.get(name, {}).items():
                one, two = first.get(name, {}).get(count, was), second.get(name, {}).get(count, was)
                if waiting and two > one and one - was == (two - one) * (1 + waiting):
                    warn(
                        "data_position_ahead",
                        step=step,
                        part=name,
                        kind=type(self._own[name]).__name__,
                        batches=waiting,
                        why=f"it counts batches as the loader asks for them ahead of training ({count}): "
                        "a resume leaves out those that were asked for and not used",
                        remedy=f"count in the training loop what a step has used, or {ADVICE}",
                    )
                    return

    def _check_fetched(self, step: int, read: list[Any]) -> None:
        """Look for a loader of the state that had given more by the first step than a step takes."""
        if step != 2:  # noqa: PLR2004  # after a resume it begins its count elsewhere
            return
        given = {id(one.reference()): one.given for one in self._read}
        loaders = {
            name: part
            for name, part in self._parts.items()
            if isinstance(part, MeshLoader) or "torchdata" in _packages(part)
        }
        for name, part in loaders.items():
            for each in read:
                ahead = 2 * given[id(each)] - _given(each)
                if ahead > 0 and _reaches(part, each):
                    warn(
                        "data_position_ahead",
                        step=step,
                        part=name,
                        kind=type(part).__name__,
                        batches=ahead,
                        why="it has given more than steps have used, as to a thread or for the next step: "
                        "a resume leaves out what was given and not used",
                        remedy="take each batch in the step that uses it, or give state={..., 'sampler': "
                        "GlobalSampler(...)}",
                    )
                    return

    def _look(self) -> dict[str, Any]:
        """Return what would be saved of the script's own parts; None where that cannot be compared."""
        return {name: state_of(part) for name, part in self._own.items()}

    def _count(self) -> dict[str, dict[str, int]]:
        """Return the whole numbers that the script's own parts have: an object is not asked before its first step."""
        return {
            name: {key: value for key, value in getattr(part, "__dict__", {}).items() if type(value) is int}
            for name, part in self._own.items()
        }


def state_of(part: Stateful) -> Any:
    """Return what would be saved of a part, to be compared; None where it cannot be asked."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        rest = split(part.state_dict(), "", tensors)
        return rest, [(name, _value_of(each)) for name, each in tensors.items()]
    except Exception:  # noqa: BLE001  # the script's code may raise anything; the save says so
        return None


def _value_of(tensor: torch.Tensor) -> Any:
    small = tensor.device.type == "cpu" and tensor.nbytes <= COMPARED_BYTES_MAX
    return tensor.tolist() if small else (tensor.data_ptr(), tensor._version)  # noqa: SLF001


def _packages(part: object) -> set[str]:
    return {kind.__module__.split(".")[0] for kind in type(part).__mro__}


def _keeps(part: object) -> bool:
    """Whether a part is, or derives from, what moves as training does."""
    return not _packages(part).isdisjoint(KEEPERS)


def moves_by_itself(part: object) -> bool:
    """Whether a part may read ahead, or begin its iterator when it is asked: loaders and data sets of packages."""
    return _keeps(part) and not isinstance(part, GlobalSampler)


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
    """Whether an object has another one, or one of some types, in its attributes, or in theirs."""
    seen: set[int] = set()
    level = [root]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for each in level:
            if each is wanted or (isinstance(wanted, tuple) and issubclass(type(each), wanted)):
                return True
            if id(each) in seen or issubclass(type(each), OPAQUE) or len(seen) > OBJECTS_MAX:
                continue
            seen.add(id(each))
            # a function knows all of its module
            below += gc.get_referents(*((each.__closure__ or ()) if type(each) is FunctionType else (each,)))
        level = below
    return False


def _reads_for(iterator: Any, sampler: GlobalSampler | None) -> bool:
    batches = getattr(iterator, "_index_sampler", None)
    return isinstance(batches, MicroBatches) and batches.sampler is sampler


def _given(iterator: Any) -> int:
    """Return how many batches an iterator has given."""
    return int(getattr(iterator, "_num_yielded", 0))


def _workers(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))


def _waiting(iterator: Any) -> int:
    """Return how many batches its workers have been asked for that it has not given."""
    return int(getattr(iterator, "_send_idx", 0)) - int(getattr(iterator, "_rcvd_idx", 0))
