"""A script with the Trainer of Hugging Face that saves by itself, or by our library."""

import saving
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from stepkeeper_trainer.engines.huggingface import save_with_stepkeeper


class Data(Dataset):
    def __len__(self) -> int:
        return saving.ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().reshape(1)}


class Model(saving.Model):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Told(TrainerCallback):
    def on_step_begin(self, _args, state, *_, **__):
        stamps.begins_behind(state.global_step)

    def on_step_end(self, _args, state, *_, **__):
        stamps.ended(state.global_step)


options = saving.options()
torch.set_num_threads(1)
stamps = saving.Stamps(options)
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        save_steps=options.every,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Data(),
    callbacks=[Told()],
)
if options.way == "ours":
    save_with_stepkeeper(trainer, run_dir=options.out, retention="all", storage_test="off")
trainer.train()
stamps.write()
