"""A script with Lightning's Trainer, as its users write it; what is tried happens by TEST_* variables alone."""

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

DIES_AT, STEP_S = int(os.environ.get("TEST_DIES_AT", "0")), float(os.environ.get("TEST_STEP_S", "0"))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, _batch):
        # by the step, not by the batch: Lightning begins the epoch's data anew on a resume with a plain DataLoader
        step = self.global_step + 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + self.global_rank))
        loss = torch.nn.functional.mse_loss(self.layers(x), x.sum(1, keepdim=True).sin())
        time.sleep(STEP_S)
        with (out / f"losses-{self.global_rank}").open("a") as rows:
            rows.write(f"{step} {loss.item().hex()}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, _checkpoint) -> None:
        if self.global_step == DIES_AT and self.global_rank == 0 and not (out / "died").exists():
            (out / "died").touch()
            (out / "step=12.ckpt").write_bytes(b"PK\x03\x04 half of it, as a full /tmp leaves it")
            os.kill(os.getpid(), 9)


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int)
parser.add_argument("--ckpt")
options = parser.parse_args()
out = Path(options.out)
lightning.seed_everything(7)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_steps=options.steps,
    callbacks=[ModelCheckpoint(dirpath=options.out, every_n_train_steps=6, save_top_k=-1, filename="{step}")],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.zeros(512, 1)), batch_size=4), ckpt_path=options.ckpt)
