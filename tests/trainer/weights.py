"""A model filled with the weights of another program, as a run's first launch fills it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from stepkeeper_trainer.coordinate.agreement import Agreement
from stepkeeper_trainer.load.initial import load_initial
from stepkeeper_trainer.state import Counters, TrainingState


def load_weights(model: torch.nn.Module, source: Path, *, strict: bool = True) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    state = TrainingState({"model": model}, counters=Counters(), rank=0)
    load_initial(source, state, Agreement(group, within_s=60.0), strict=strict)
