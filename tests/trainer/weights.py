"""A model filled with the weights of another program, as a run's first launch fills it."""

from __future__ import annotations

from pathlib import Path

import torch

from stepkeeper_trainer.coordinate.agreement import Agreement
from stepkeeper_trainer.coordinate.groups import new_group
from stepkeeper_trainer.load.initial import load_initial
from stepkeeper_trainer.state import Counters, TrainingState


def load_weights(model: torch.nn.Module, source: Path, *, strict: bool = True) -> None:
    group = new_group(60.0)
    state = TrainingState({"model": model}, counters=Counters(), rank=0)
    load_initial(source, state, Agreement(group, within_s=60.0), strict=strict)
