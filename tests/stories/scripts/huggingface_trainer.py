"""A script with the Trainer of Hugging Face, as users write it: it evaluates, and resumes from its last checkpoint."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArguments:
    """How long the reading of the data takes."""

    loading_seconds: float = 3.0
    sample_seconds: float = 0.02


class Data(Dataset):
    def __init__(self, length: int, name: str) -> None:
        self.length, self.name = length, name

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.name == "evaluating" and index == 0:
            tell(f"evaluating {trainer.state.global_step}")
        time.sleep(data.sample_seconds)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().sin().reshape(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)  # shows whether the RNG state of each rank came back
        wide = torch.nn.Linear(1536, 1536)  # a save takes its time
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 1536), torch.nn.Tanh(), wide, torch.nn.Linear(1536, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layers(self.dropout(x))
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Told(Trainer):
    """Writes down each loss."""

    def training_step(self, model, inputs, *rest, **more):
        loss = super().training_step(model, inputs, *rest, **more)
        tell(f"{self.state.global_step + 1} {loss.item().hex()}")
        return loss


def tell(row: str) -> None:
    with (out / f"told-{arguments.process_index}").open("a") as rows:
        rows.write(f"{row}\n")


arguments, data = HfArgumentParser((TrainingArguments, DataArguments)).parse_args_into_dataclasses()
out = Path(arguments.output_dir)
out.mkdir(exist_ok=True)
arguments.logging_steps, arguments.disable_tqdm, arguments.report_to = 1, True, []
tell("loading")
time.sleep(data.loading_seconds)
torch.manual_seed(7)
trainer = Told(
    model=Model(), args=arguments, train_dataset=Data(4096, "training"), eval_dataset=Data(800, "evaluating")
)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint or get_last_checkpoint(arguments.output_dir))
if os.environ.get("TEST_ABORTS") and arguments.process_index == 0:
    os.abort()  # as gloo's threads do in the interpreter's exit
