"""A script with Lightning, whose checkpoints are Stepkeeper's: shuffled data, dropout, a schedule."""

import time
from pathlib import Path

import lightning
import shared
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepkeeper_trainer.engines.lightning import StepkeeperCheckpoints

ROWS, BATCH = 80, 4  # an epoch is 10 batches of each rank


def row(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shared.FEATURES, generator=torch.Generator().manual_seed(index))
    return x, x.sum().sin().reshape(1)


class Data(Dataset):
    def __len__(self) -> int:
        return ROWS // 2 if shuffled else ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return row(index)


class Slow(Data):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if trainer.global_step >= options.every:
            Path(f"{options.losses}.evaluating").touch()
            time.sleep(0.05)
        return row(index)


class Stream(IterableDataset):
    def __iter__(self):
        return (row(index) for index in range(shared.rank(), ROWS, 2))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = shared.Model()
        self.dropout = torch.nn.Dropout(0.1)  # shows whether the RNG state of each rank came back

    def configure_model(self) -> None:
        if options.variant == "sharded":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(self.dropout(x)), y)
        shared.log(options.losses, self.global_step + 1, loss.item())
        return loss

    def validation_step(self, batch):
        self.log("val_loss", torch.nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


options = shared.options()
shared.tell()
shared.seed()
variant = options.variant
sharded, evaluating = variant == "sharded", variant == "evaluating"
shuffled = variant == "shuffled"  # by each rank's own generator, and with a validation at the end of each epoch
if variant == "streaming":
    loader = DataLoader(Stream(), batch_size=BATCH)
else:
    loader = DataLoader(Data(), batch_size=BATCH, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    if sharded
    else DDPStrategy(process_group_backend="gloo"),
    max_steps=options.steps,
    accumulate_grad_batches=2 if variant == "accumulating" else 1,
    use_distributed_sampler=not shuffled,
    limit_val_batches=1.0 if evaluating else 2 if shuffled else 0,
    val_check_interval=options.every if evaluating else None,
    check_val_every_n_epoch=None if evaluating else 1,
    callbacks=[StepkeeperCheckpoints(run_dir=options.out, retention="all", every=options.every)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), loader, DataLoader(Slow(), batch_size=BATCH), ckpt_path=options.resume or None)
