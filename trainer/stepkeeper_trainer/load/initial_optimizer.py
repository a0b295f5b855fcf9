"""The optimizer's state beside initial weights, where it is asked for: its tensors, under DCP's names.

Options such as the learning rate stay those of the script.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stepkeeper_trainer.errors import ResumeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from stepkeeper_trainer.state.optimizer import OptimizerPart


@dataclass(slots=True)
class Moments:
    """What a checkpoint holds of an optimizer."""

    part: OptimizerPart
    skeleton: dict[str, Any]
    targets: dict[str, torch.Tensor] = field(default_factory=dict)  # by our names
    homes: dict[str, str] = field(default_factory=dict)  # our names to those of the checkpoint
    missing: list[str] = field(default_factory=list)  # parameters without a state

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Where each stored tensor goes to."""
        return {home: self.targets[name] for name, home in self.homes.items()}

    def apply(self) -> None:
        """Give the optimizer what was loaded.  Raises ResumeError."""
        self.part.apply(self.skeleton, self.targets)


def match_moments(part: OptimizerPart, stored: Mapping[str, Any]) -> Moments:
    """Find the states of an optimizer among stored tensors.

    Raises:
        ResumeError: there are none, or several places hold as many.
    """
    groups = part.collect({})["param_groups"]
    parameters = [name for group in groups for name in group["params"]]
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    prefix = _find_prefix(part.name, parameters, tensors)
    known = set(parameters)
    own: dict[str, TensorStorageMetadata] = {}
    columns: dict[str, list[str]] = {}
    homes: dict[str, str] = {}
    for home, entry in tensors.items():
        parameter, _, key = home.removeprefix(prefix).rpartition(".")
        if home.startswith(prefix) and parameter in known:
            name = f"{part.name}.state.{parameter}.{key}"
            own[name], homes[name] = entry, home
            columns.setdefault(key, []).append(parameter)
    skeleton = {"columns": columns, "rest": {}, "param_groups": groups, "outside": []}
    found = Moments(part, skeleton, part.targets(skeleton, own), homes)
    trained = [n for g, m in zip(groups, part.optimizer.param_groups, strict=True) for n in _trained(g, m)]
    filled = {name for names in columns.values() for name in names}
    found.missing = [f"{part.name}.state.{name}" for name in trained if name not in filled]
    return found


def _trained(group: Mapping[str, Any], members: Mapping[str, Any]) -> list[str]:
    return [n for n, p in zip(group["params"], members["params"], strict=True) if p.requires_grad]


def _find_prefix(part: str, parameters: Sequence[str], stored: Mapping[str, Any]) -> str:
    """Return what stands before the names of parameters in the optimizer's states."""
    count: Counter[str] = Counter()
    known = set(parameters)
    for name in stored:
        before, mark, rest = f".{name}".partition(".state.")
        if mark and rest.rpartition(".")[0] in known:
            count[f"{before}{mark}"[1:]] += 1
    most = max(count.values(), default=0)
    best = sorted(prefix for prefix, number in count.items() if number == most)
    if f"{part}.state." in best:
        return f"{part}.state."
    if len(best) != 1:
        found = f"in several places: {best}" if best else "nowhere"
        raise ResumeError(f"the initial weights hold states of {part} {found}; leave out with_optimizer")
    return best[0]
