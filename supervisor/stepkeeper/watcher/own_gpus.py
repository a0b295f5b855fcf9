"""Which GPUs of its node a job holds: a fault of any other is no reason for the job to leave.

Slurm numbers GPUs as the driver does (`/dev/nvidia3` is 3), and tells each Slurm step which are its own; the driver
tells where each one sits.  Where that is not enough, every GPU fault of the node counts, and the log says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from stepkeeper.node.xid.parse import canonical
from stepkeeper.slurm.client import SlurmError

_OF_STEP = "SLURM_STEP_GPUS"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ANY = (_OF_STEP, "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_SHARDS_ON_NODE", _VISIBLE)
_NO_DEVICES = ("", "NoDevFiles")  # what older versions of Slurm call none
_DEVICE = re.compile(r"/dev/nvidia[0-9]+")
_OLD_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/")  # `MIG-GPU-.../1/0`: with the GPU that it is a slice of


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of the node, as the driver knows it."""

    pci: str
    uuid: str = ""
    minor: str = ""  # the number in the name of its device


class Concern(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a GPU's fault counts for the job, and why not."""

    counts: bool
    why: str = ""


class OwnGpus:
    """Decided once: what a job holds does not change while its watcher runs."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        counted: Callable[[], bool],
        proc: Path = Path("/proc"),
    ) -> None:
        """`counted` asks Slurm whether it knows of GPUs on this node; raises SlurmError, ValueError."""
        self._cards = cards(proc)
        self._counted = counted
        self._proc = proc
        self._unknown = ""
        self._held: frozenset[Card] | None = None
        self.holds_none = all(environment.get(name, "") in _NO_DEVICES for name in _ANY)  # as Slurm tells
        if not self.holds_none:
            self._held, self._unknown = _held(environment, self._cards)

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """Return where the job's GPUs sit; None where that is not known."""
        return None if self._held is None else tuple(sorted(card.pci for card in self._held))

    def concern(self, pci: str, uuid: str, processes: Iterable[int]) -> Concern:
        """Tell whether a fault of a GPU counts; with neither name it is the whole node's.

        Args:
            pci: where the GPU sits; or a switch, which serves all GPUs.
            uuid: which GPU it is.
            processes: of the job on this node.
        """
        if self.holds_none:
            return self._without_gpus(processes)
        if self._held is None:
            return Concern(counts=True, why=self._unknown)
        of = next((card for card in self._cards if card.pci == pci or (uuid and card.uuid == uuid)), None)
        if of is None or of in self._held:
            return Concern(counts=True)
        return Concern(counts=False, why=f"the job holds {', '.join(self.addresses or ()) or 'none'}")

    def _without_gpus(self, processes: Iterable[int]) -> Concern:
        try:
            if not self._counted():
                return Concern(counts=True, why="Slurm does not count the GPUs of this node: any may be the job's")
        except (SlurmError, ValueError) as error:
            return Concern(counts=True, why=f"whether Slurm counts the GPUs of this node is not known: {error}")
        if any(_has_gpu_open(self._proc / str(pid)) for pid in processes):
            return Concern(counts=True, why="the job was given no GPU, and a process of it uses one")
        return Concern(counts=False, why="the job holds no GPU")


def cards(proc: Path) -> tuple[Card, ...]:
    """Return the GPUs that the driver has; none where it does not tell."""
    found = []
    try:
        places = sorted((proc / "driver/nvidia/gpus").iterdir())
    except OSError:
        return ()
    for place in places:
        try:
            text = (place / "information").read_text(errors="replace")
        except OSError:
            continue
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        pci = canonical(fields.get("Bus Location", place.name))
        found.append(Card(pci=pci, uuid=fields.get("GPU UUID", ""), minor=fields.get("Device Minor", "")))
    return tuple(found)


def _held(environment: Mapping[str, str], known: tuple[Card, ...]) -> tuple[frozenset[Card] | None, str]:
    """Return the job's GPUs, or None and why they cannot be told."""
    visible = [word for word in environment.get(_VISIBLE, "").split(",") if word]
    slices = [word for word in visible if word.startswith("MIG-")]
    if slices:
        parents = [match[1] for word in slices if (match := _OLD_SLICE.match(word))]
        if len(parents) < len(slices):
            return None, "slices of GPUs do not tell which GPU they are of"
        visible = parents
    if visible and all(word.startswith("GPU-") for word in visible):
        return _all_of(visible, lambda card, word: bool(card.uuid) and card.uuid.startswith(word), known)
    numbers = [word for word in environment.get(_OF_STEP, "").split(",") if word]
    if not numbers:
        return None, f"Slurm has not told this Slurm step which GPUs are its own ({_OF_STEP})"
    return _all_of(numbers, lambda card, word: card.minor == word, known)


def _all_of(
    words: list[str], matches: Callable[[Card, str], bool], known: tuple[Card, ...]
) -> tuple[frozenset[Card] | None, str]:
    found = {word: card for word in words for card in known if matches(card, word)}
    missing = [word for word in words if word not in found]
    if missing:
        return None, f"the driver does not tell where GPU {', '.join(missing)} sits"
    return frozenset(found.values()), ""


def _has_gpu_open(process: Path) -> bool:
    try:
        return any(_DEVICE.fullmatch(os.readlink(link)) for link in (process / "fd").iterdir())
    except OSError:
        return False  # it has ended
