"""A script with Lightning's Trainer that saves by itself, or by our library."""

import lightning
import saving
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from stepkeeper_trainer.engines.lightning import StepkeeperCheckpoints


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = saving.Model()

    def training_step(self, batch):
        (x,) = batch
        return torch.nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Told(lightning.Callback):  # called before those that save
    def on_train_batch_start(self, trainer, *_):
        stamps.begins_behind(trainer.global_step)

    def on_train_batch_end(self, trainer, *_):
        stamps.ended(trainer.global_step)


options = saving.options()
torch.set_num_threads(1)
stamps = saving.Stamps(options)
if options.way == "ours":
    saves = StepkeeperCheckpoints(run_dir=options.out, retention="all", every=options.every, storage_test="off")
else:
    saves = ModelCheckpoint(dirpath=options.out, every_n_train_steps=options.every, save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_steps=options.steps,
    limit_val_batches=0,
    callbacks=[Told(), saves],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(saving.ROWS, 16)), batch_size=8))
stamps.write()
