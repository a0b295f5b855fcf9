"""A script with Lightning's Trainer, as its users write it: it validates, and resumes from its last checkpoint."""

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        wide = torch.nn.Linear(1536, 1536)  # a save takes its time
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 1536), torch.nn.Tanh(), wide, torch.nn.Linear(1536, 1))

    def training_step(self, _batch):
        # by the step, not by the batch: Lightning begins the epoch's data anew on a resume with a plain DataLoader
        step = self.global_step + 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + self.global_rank))
        loss = torch.nn.functional.mse_loss(self.layers(x), x.sum(1, keepdim=True).sin())
        time.sleep(options.step_seconds)
        tell(f"{step} {loss.item().hex()}")
        return loss

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            tell(f"evaluating {self.global_step}")

    def validation_step(self, _batch) -> None:
        time.sleep(options.step_seconds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def tell(row: str) -> None:
    with (out / f"told-{os.environ.get('SLURM_PROCID', '0')}").open("a") as rows:
        rows.write(f"{row}\n")


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--max_steps", type=int)
parser.add_argument("--save_steps", type=int)
parser.add_argument("--eval_steps", type=int)
parser.add_argument("--loading_seconds", type=float, default=3.0)
parser.add_argument("--step_seconds", type=float, default=0.15)
parser.add_argument("--ckpt_path")
options = parser.parse_args()
out = Path(options.out)
out.mkdir(exist_ok=True)
tell("loading")
time.sleep(options.loading_seconds)
lightning.seed_everything(7)
saves = ModelCheckpoint(
    dirpath=options.out, every_n_train_steps=options.save_steps, save_top_k=-1, filename="{step}", save_last=True
)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_steps=options.max_steps,
    val_check_interval=options.eval_steps,
    check_val_every_n_epoch=None,
    default_root_dir=options.out,
    callbacks=[saves],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = DataLoader(TensorDataset(torch.zeros(2048, 1)), batch_size=4)
validation = DataLoader(TensorDataset(torch.zeros(480, 1)), batch_size=4)
trainer.fit(Module(), data, validation, ckpt_path=options.ckpt_path or "last")
