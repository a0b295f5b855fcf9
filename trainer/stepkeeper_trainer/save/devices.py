"""Copies of what devices hold, each in the order of that device's own stream; what the host holds is copied at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepkeeper_trainer.save.copying import Copier
from stepkeeper_trainer.save.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from stepkeeper_trainer.save.replicas import InPlace
    from stepkeeper_trainer.save.streams import Lane, Mark


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device holds."""

    numbers: list[int]  # of the places
    snapshot: Snapshot


class Devices:
    """Copies tensors from wherever they are to their places, one state at a time."""

    def __init__(self, lane_of: Callable[[torch.device], Lane | None], *, overlap: bool = False) -> None:
        """Prepare; `lane_of` returns the streams of a device, and None for the host.

        With `overlap` the copies run beside training, which must call `hold_training` before it changes anything.
        """
        self._lane_of, self._overlap = lane_of, overlap
        self._lanes: dict[torch.device, Lane | None] = {}
        self._marks: tuple[Mark, ...] = ()  # when all have been reached, the places hold everything
        self._held: list[torch.UntypedStorage] = []  # of what is copied beside training: `.data =` must not free it
        self.place([], [])

    def place(self, names: list[str], places: list[torch.Tensor]) -> None:
        """Know where each tensor is copied to."""
        self._names, self._places = names, places
        self._seen: list[torch.device] = []  # where the tensors were when `_parts` was made
        self._parts: dict[torch.device, _Part] = {}
        self._host = Copier([], [])

    def copy(
        self,
        tensors: list[torch.Tensor],
        in_place: InPlace,
        compared: Mapping[str, torch.Tensor],
        early: frozenset[str] = frozenset(),
    ) -> None:
        """Copy tensors, in the order of their places, and look at what is only compared.

        With `overlap` those of `early` may change as soon as this returns.

        Raises:
            RuntimeError: a device has failed.
        """
        self.finish()
        self._divide([tensor.device for tensor in tensors], {tensor.device for tensor in compared.values()})
        in_place.look(compared)
        for device, part in self._parts.items():
            own = [tensors[n] for n in part.numbers]
            looked = {name: tensor for name, tensor in compared.items() if tensor.device == device}
            if self._overlap:
                self._held += [tensor.untyped_storage() for tensor in (*own, *looked.values())]
            self._marks += (self._take(part, own, in_place, looked, early),)
        self._host.copy(tensors)

    def hold_training(self) -> None:
        """Let each device finish its copies before what training gives it next, where they run beside training."""
        if self._overlap:
            for mark in self._marks:
                mark.hold_training()

    def finish(self) -> None:
        """Wait until the places hold everything, and let go of what was copied.

        Raises:
            RuntimeError: a device has failed.
        """
        try:
            for mark in self._marks:
                mark.wait()
        finally:
            self._marks, self._held = (), []

    def _take(
        self,
        part: _Part,
        tensors: list[torch.Tensor],
        in_place: InPlace,
        looked: dict[str, torch.Tensor],
        early: frozenset[str],
    ) -> Mark:
        if not self._overlap:
            return part.snapshot.take(tensors, lambda: in_place.issue(looked))
        return part.snapshot.take_overlapping(
            tensors,
            {at for at, number in enumerate(part.numbers) if self._names[number] in early},
            lambda is_early: in_place.issue({n: t for n, t in looked.items() if (n in early) is is_early}),
        )

    def _divide(self, devices: list[torch.device], others: Iterable[torch.device]) -> None:
        """Know which tensors each device holds: a script may move them between two saves."""
        if devices != self._seen:
            numbers: dict[torch.device, list[int]] = {}
            for number, device in enumerate(devices):
                numbers.setdefault(device, []).append(number)
            host = [n for device, each in numbers.items() if self._lane(device) is None for n in each]
            self._host = Copier([self._places[n] for n in host], host)
            self._parts = {}
            for device, each in numbers.items():
                self._add_part(device, each)
            self._seen = devices
        for device in others:
            if device not in self._parts:
                self._add_part(device, [])

    def _add_part(self, device: torch.device, numbers: list[int]) -> None:
        lane = self._lane(device)
        if lane is not None:
            self._parts[device] = _Part(numbers, Snapshot(lane, [self._places[n] for n in numbers]))

    def _lane(self, device: torch.device) -> Lane | None:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]
