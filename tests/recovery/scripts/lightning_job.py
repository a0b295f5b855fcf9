"""The training as a LightningModule, on SLURMEnvironment with its auto-requeue."""

import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import loop
import marks
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, IterableDataset

OWN = marks.DIRECTORY / "lightning"


class Positions(IterableDataset[int]):
    """One item a step; which samples are in it follows from the step."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Module(lightning.LightningModule):
    """One `training_step` is one optimizer step over the global batch."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = options
        self.model, self.corpus, self.order = loop.prepare(options)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return what `train_lm` uses."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.own.lr, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: loop.schedule(step, self.own))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, *_: Any) -> None:
        """Train this rank's micro-batches."""
        options, done = self.own, self.global_step
        self.order.epoch, self.order.consumed = divmod(done * options.batch, self.order.dataset_len)
        optimizer: Any = self.optimizers()
        own = range(self.global_rank, options.batch // options.micro_batch, self.trainer.world_size)
        for micro_batch in own:
            self.model.dropout.key(options.seed, done, micro_batch)
            samples = self.order.micro_batch(micro_batch, options.micro_batch)
            self.manual_backward(self.model(*self.corpus.batch(samples, loop.CPU)) / len(own))
        self.clip_gradients(optimizer, gradient_clip_val=options.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()


class Telling(Callback):
    """Tells the benchmark of each step, and slows it down as asked."""

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self.started_at = time.monotonic()

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Say which process this is."""
        marks.began(trainer.global_rank)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Tell of the step."""
        marks.stepped(trainer.global_rank, trainer.global_step)
        time.sleep(max(0.0, self.least_s - (time.monotonic() - self.started_at)))
        self.started_at = time.monotonic()


def main() -> None:
    """Train, or go on where the file of the signal, else the last checkpoint, ends."""
    options = loop.parse_options()
    saving = ModelCheckpoint(
        dirpath=OWN / "checkpoints", every_n_train_steps=options.checkpoint_every_steps, save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[saving, Telling(options.step_seconds_min)],
        default_root_dir=OWN,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    of_signal = list(Path(OWN).glob("hpc_ckpt_*.ckpt"))
    trainer.fit(Module(options), DataLoader(Positions(), batch_size=None), ckpt_path=None if of_signal else "last")


if __name__ == "__main__":
    main()
