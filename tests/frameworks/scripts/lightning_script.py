"""A script with Lightning: `ddp` writes single files, `sharded` directories."""

import os
import time
from pathlib import Path

import lightning
import shared
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Slow(TensorDataset):
    """A validation that takes its time; a file shows that it has begun."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if trainer.global_step:  # not in the check before training
            Path(f"{options.losses}.evaluating").touch()
        if options.variant == "dying" and index >= len(self) - 16:
            os._exit(3)  # as the end of a notice would end it
        time.sleep(0.02)
        return super().__getitem__(index)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = shared.Model()

    def configure_model(self) -> None:
        if options.variant == "sharded":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        if options.variant == "compiling":
            shared.compiling(self.model, options)

    def training_step(self, _batch):
        # by the step, not by the batch: Lightning begins the epoch's data anew on a resume with a plain DataLoader
        loss = shared.loss_of(self.model, self.global_step + 1)
        shared.log(options.losses, self.global_step + 1, loss.item())
        return loss

    def validation_step(self, _batch):
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


options = shared.options()
shared.seed()
loader = DataLoader(TensorDataset(torch.zeros(256, 1)), batch_size=4)
sharded, evaluating = options.variant == "sharded", options.variant in ("evaluating", "dying")
validation = (
    DataLoader(Slow(torch.zeros(256 if options.variant == "dying" else 64, 1)), batch_size=4) if evaluating else None
)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    if sharded
    else DDPStrategy(process_group_backend="gloo"),
    max_steps=options.steps,
    val_check_interval=options.every if evaluating else None,
    check_val_every_n_epoch=None if evaluating else 1,
    callbacks=[ModelCheckpoint(options.out, every_n_train_steps=options.every, save_top_k=-1, filename="{step}")],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), loader, validation, ckpt_path=options.resume or None)
