"""A script with the Trainer of Hugging Face."""

import os
import time
from pathlib import Path

import shared
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Data(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(shared.FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().sin().reshape(1)}


class Slow(Data):
    """An evaluation that takes its time; a file shows that it has begun."""

    def __len__(self) -> int:
        return 256 if options.variant == "dying" else 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        Path(f"{options.losses}.evaluating").touch()
        if options.variant == "dying" and index >= len(self) - 16:
            os._exit(3)  # as the end of a notice would end it
        time.sleep(0.02)
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
within = None
if options.variant == "deepspeed":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile that for minutes
    within = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
shared.seed()
evaluating = options.variant in ("evaluating", "dying")
trainer = Told(
    model=shared.compiling(Model(), options) if options.variant == "compiling" else Model(),
    args=TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        save_steps=options.every,
        logging_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        seed=7,
        learning_rate=0.01,
        deepspeed=within,
        eval_strategy="steps" if evaluating else "no",
        eval_steps=options.every,
    ),
    train_dataset=Data(),
    eval_dataset=Slow() if evaluating else None,
)
trainer.train(resume_from_checkpoint=options.resume or None)
if options.variant == "failing":  # in what a script does behind its training
    raise SystemExit(3)
