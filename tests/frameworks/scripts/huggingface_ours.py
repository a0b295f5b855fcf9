"""A script with the Trainer of Hugging Face, whose checkpoints are Stepkeeper's: shuffled data, dropout, a schedule."""

import sys
import time
from pathlib import Path

import shared
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from stepkeeper_trainer.engines.huggingface import save_with_stepkeeper

ROWS, BATCH = 80, 4


class Data(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(shared.FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().sin().reshape(1)}


class Slow(Data):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if trainer.state.global_step >= options.every:
            Path(f"{options.losses}.evaluating").touch()
            time.sleep(0.05 if options.variant == "evaluating" else 0)
        return super().__getitem__(index)


class Model(shared.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)  # shows whether the RNG state of each rank came back

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(self.dropout(x))
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Told(Trainer):
    def training_step(self, model, inputs, *rest, **more):
        loss = super().training_step(model, inputs, *rest, **more)
        shared.log(options.losses, self.state.global_step + 1, loss.item())
        return loss


options = shared.options()
shared.tell()
shared.seed()
evaluating = options.variant == "evaluating"
accumulating = options.variant == "accumulating"
trainer = Told(
    model=Model(),
    args=TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        save_steps=options.every,
        logging_steps=3,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2 if accumulating else 1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        seed=7,
        learning_rate=0.01,
        warmup_steps=3,
        eval_strategy="steps" if evaluating else "no",
        eval_steps=options.every,
        load_best_model_at_end=options.variant == "refused",
        save_strategy="no" if options.variant == "refused" else "steps",
    ),
    train_dataset=Data(),
    eval_dataset=Slow(),
)
save_with_stepkeeper(trainer, run_dir=options.out, retention="all")
trainer.train(resume_from_checkpoint=options.resume or None)
shared.note(options.losses, log=trainer.state.log_history[-2:-1] and trainer.state.log_history[-2].get("loss"))
if options.variant == "failing":  # in what a script does behind its training
    sys.exit(3)
