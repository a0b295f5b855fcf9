"""A script with the Trainer of Hugging Face, as its users write it; what is tried happens by TEST_* variables alone."""

import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments

DIES_AT, STEP_S = int(os.environ.get("TEST_DIES_AT", "0")), float(os.environ.get("TEST_STEP_S", "0"))


class Data(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().sin().reshape(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)  # shows whether the RNG state of each rank came back
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(self.dropout(x))
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Told(Trainer):
    """Prints each loss, and dies in a save once."""

    def training_step(self, model, inputs, *rest, **more):
        loss = super().training_step(model, inputs, *rest, **more)
        time.sleep(STEP_S)
        with (out / f"losses-{self.args.process_index}").open("a") as rows:
            rows.write(f"{self.state.global_step + 1} {loss.item().hex()}\n")
        return loss

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == DIES_AT and self.args.process_index == 0 and not (out / "died").exists():
            (out / "died").touch()
            os.kill(os.getpid(), 9)
        super()._save_optimizer_and_scheduler(output_dir)


(arguments,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
out = Path(arguments.output_dir)
arguments.logging_steps, arguments.disable_tqdm, arguments.report_to = 1, True, []
arguments.save_total_limit = 3
torch.manual_seed(7)
trainer = Told(model=Model(), args=arguments, train_dataset=Data())
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
if os.environ.get("TEST_ABORTS") and arguments.process_index == 0:
    os.abort()  # as gloo's threads do in the interpreter's exit
