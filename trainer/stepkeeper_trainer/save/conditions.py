"""What the losses depend on besides the state: recorded in the manifest, compared at resume."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from stepkeeper_trainer import __version__
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from stepkeeper_trainer.formats.manifest import Manifest


def versions() -> dict[str, str]:
    """Return the versions that wrote a checkpoint."""
    return {
        "torch": str(torch.__version__),
        "stepkeeper_trainer": __version__,
        "python": platform.python_version(),
    }


def conditions() -> dict[str, Any]:
    """Return what must be the same for losses to be the same bit for bit."""
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def warn_of_changes(manifest: Manifest, world_size: int) -> dict[str, tuple[Any, Any]]:
    """Log what differs from the checkpoint's conditions, and return it: name to (then, now)."""
    then = {
        **manifest.conditions,
        "world_size": manifest.world_size,
        "torch": manifest.versions.get("torch"),
    }
    now = {**conditions(), "world_size": world_size, "torch": str(torch.__version__)}
    changes = {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}
    for name, (before, after) in changes.items():
        warn("condition_changed", name=name, then=before, now=after, why="losses may differ in their last bits")
    return changes
