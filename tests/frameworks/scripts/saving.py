"""What the scripts of `bench_engines` share: a model whose state takes time to save, and when each step ended."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, ROWS = 1536, 8, 4096  # 18.9 million parameters: with AdamW's two averages 216 MiB
_LOOK_S = 0.002


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--losses", required=True)  # all scripts here are given these two
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--way", choices=["own", "ours"], required=True)
    return parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.layers = nn.Sequential(nn.Linear(16, WIDTH), *wide, nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Stamps:
    """When each step ended, when its checkpoint was durable, and how long that held training up here."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.ends: dict[int, float] = {}
        self.durable: dict[int, float] = {}
        self.synced_s: dict[int, float] = {}  # not counted as the framework's: it leaves the disk to the system
        if chosen.way == "ours":
            threading.Thread(target=self._watch, daemon=True).start()

    def ended(self, step: int) -> None:
        """An optimizer step is complete; what saves comes behind this."""
        self.ends[step] = time.monotonic()

    def begins_behind(self, step: int) -> None:
        """The step behind that one begins: where the framework has saved, have the disk hold it."""
        if self.chosen.way == "ours" or step in self.durable or step % self.chosen.every or step not in self.ends:
            return
        before = time.monotonic()
        for path in self.chosen.out.rglob("*"):
            if path.is_file() or path.is_dir():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        self.durable[step] = time.monotonic()
        self.synced_s[step] = self.durable[step] - before

    def _watch(self) -> None:
        """Our commit is the rename to the step's name, behind all fsyncs."""
        while True:
            for path in (self.chosen.out / "checkpoints").glob("step_*"):
                step = int(path.name.removeprefix("step_"))
                self.durable.setdefault(step, time.monotonic())
            time.sleep(_LOOK_S)

    def write(self) -> None:
        if os.environ["RANK"] == "0":
            found = {"ends": self.ends, "durable": self.durable, "synced_s": self.synced_s}
            Path(self.chosen.losses).write_text(json.dumps(found))
