"""Stepkeeper's library inside the training ranks.

Make a `CheckpointManager`, call `resume()`, `step_done()` after each optimizer step, and `finish()` at the end:
docs/trainer-api.md has a complete script, and every name.  Names are loaded when they are first used, so that
`stepkeeper_trainer.formats` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepkeeper_trainer.api import CheckpointManager
    from stepkeeper_trainer.coordinate.groups import start_distributed
    from stepkeeper_trainer.errors import StepkeeperError
    from stepkeeper_trainer.load.dcp_reader import StepkeeperReader
    from stepkeeper_trainer.observe.trackers import MlflowTracker
    from stepkeeper_trainer.sampler import GlobalSampler, accumulation_steps
    from stepkeeper_trainer.save.dcp_writer import StepkeeperWriter
    from stepkeeper_trainer.tiers.tier import Tiers

try:
    from stepkeeper_trainer._version import version as __version__
except ImportError:  # a source tree that nobody has installed
    __version__ = "0.0.0+uninstalled"

__all__ = [
    "CheckpointManager",
    "GlobalSampler",
    "MeshLoader",
    "MlflowTracker",
    "StepkeeperError",
    "StepkeeperReader",
    "StepkeeperWriter",
    "Tiers",
    "__version__",
    "accumulation_steps",
    "start_distributed",
]

_HOME = {
    "GlobalSampler": "stepkeeper_trainer.sampler",
    "MeshLoader": "stepkeeper_trainer.sampler",
    "CheckpointManager": "stepkeeper_trainer.api",
    "StepkeeperError": "stepkeeper_trainer.errors",
    "MlflowTracker": "stepkeeper_trainer.observe.trackers",
    "StepkeeperReader": "stepkeeper_trainer.load.dcp_reader",
    "StepkeeperWriter": "stepkeeper_trainer.save.dcp_writer",
    "Tiers": "stepkeeper_trainer.tiers.tier",
    "accumulation_steps": "stepkeeper_trainer.sampler",
    "start_distributed": "stepkeeper_trainer.coordinate.groups",
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
