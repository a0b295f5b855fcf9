"""A script's state as an older version saved it, with `others.NAME` and `optimizers.NAME` for its keys.

    PYTHONPATH=OLD/trainer:. RANK=0 WORLD_SIZE=2 MASTER_PORT=29511 python -m tests.trainer.old_parts DIRECTORY

and the same with RANK=1 make `tests/fixtures/old-parts` with the library of commit 0575754 in OLD.  It is never made
again by a later one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from stepkeeper_trainer import GlobalSampler
from tests.trainer.any_state import leaves

FIXTURE = Path(__file__).parents[1] / "fixtures/old-parts"
STEPS = 3


class Expert(torch.nn.Module):
    """Each rank has other weights, and another extra state."""

    def __init__(self, place: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(place)
            self.weight = torch.nn.Parameter(torch.rand(4))
        self.place = torch.tensor([place])

    def get_extra_state(self) -> dict[str, Any]:
        return {"place": self.place, "word": f"of {self.place.item()}"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def build(seed: int, rank: int) -> dict[str, Any]:
    """Return what the script has, with other values for another seed."""
    expert = Expert(100 * seed + rank)
    torch.manual_seed(seed)
    random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    adam = torch.optim.AdamW(model[0].parameters(), lr=0.05)
    sgd = torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1 * seed, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    return {
        "model": model,
        "body": adam,
        "head": sgd,
        "scheduler": torch.optim.lr_scheduler.StepLR(adam, step_size=2),
        "sampler": GlobalSampler(20, seed=4),
        "average": average,
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        "expert": expert,
        "of expert": torch.optim.AdamW(expert.parameters(), lr=0.01),
    }


def step(parts: dict[str, Any]) -> float:
    """Train on samples of the sampler, with noise of each generator."""
    x = torch.rand(6, 4) + random.random() + sum(parts["sampler"].micro_batch(0, 6))  # noqa: S311
    loss = parts["model"](x).square().mean()
    loss.backward()
    parts["expert"](x).square().mean().backward()
    for name in ("body", "head", "of expert"):
        parts[name].step()
        parts[name].zero_grad()
    parts["scheduler"].step()
    parts["average"].update_parameters(parts["model"])
    parts["sampler"].advance(6)
    return float(loss.detach())


def digests(parts: dict[str, Any]) -> dict[str, str]:
    """Return a hash of every bit of each part, and of the generators."""
    extra = parts["expert"].get_extra_state() if "expert" in parts else None
    values = {**parts, "extra": extra, "torch": torch.get_rng_state(), "python": random.getstate()}
    found = {}
    for name, value in values.items():
        digest = hashlib.blake2b(digest_size=8)
        for leaf in leaves(value):
            digest.update(leaf)
        found[name] = digest.hexdigest()
    return found


def main(directory: str) -> None:
    """Save by the old library, as a script of that time did."""
    library = importlib.import_module("stepkeeper_trainer")
    rank = library.start_distributed().rank
    parts = build(1, rank)
    named = {name: parts[name] for name in ("average", "scaler", "expert")}
    keeper = library.Keeper(
        model=parts["model"],
        optimizer={name: parts[name] for name in ("body", "head", "of expert")},
        scheduler=parts["scheduler"],
        sampler=parts["sampler"],
        others=named,
        run_dir=directory,
        total_steps=STEPS,
        storage_test="off",
    )
    keeper.resume()
    while not keeper.finished:
        keeper.step_done(loss=step(parts), tokens=24)
    keeper.finish(leave_process=False)
    Path(directory, f"expected-{rank}.json").write_text(json.dumps(digests(parts), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
