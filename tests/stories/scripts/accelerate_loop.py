"""A loop with Accelerate, as its examples have it: it evaluates, and resumes from the newest of its checkpoints."""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(args.sample_seconds)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().reshape(1)


def tell(row: str) -> None:
    with open(f"{args.output_dir}/told-{os.environ.get('RANK', '0')}", "a", encoding="utf-8") as rows:
        rows.write(f"{row}\n")


def newest() -> str | None:
    """Return the checkpoint that was begun last."""
    found = sorted(Path(args.output_dir).glob("step_*"), key=os.path.getctime)
    return str(found[-1]) if found else None


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--max_train_steps", type=int)
parser.add_argument("--checkpointing_steps", type=int)
parser.add_argument("--eval_steps", type=int)
parser.add_argument("--loading_seconds", type=float, default=3.0)
parser.add_argument("--sample_seconds", type=float, default=0.02)
parser.add_argument("--resume_from_checkpoint", default=None)
args = parser.parse_args()
os.makedirs(args.output_dir, exist_ok=True)
tell("loading")
time.sleep(args.loading_seconds)
torch.manual_seed(7)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(
    torch.nn.Dropout(0.1),  # shows whether the RNG state of each rank came back
    torch.nn.Linear(16, 1536),
    torch.nn.Tanh(),
    torch.nn.Linear(1536, 1536),  # a save takes its time
    torch.nn.Linear(1536, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
# with generators of their own: an iterator would draw from the RNG of the dropout, and a resume makes one more
train_dataloader = DataLoader(Data(512), batch_size=8, generator=torch.Generator())
eval_dataloader = DataLoader(Data(800), batch_size=8, generator=torch.Generator())
model, optimizer, scheduler, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, scheduler, train_dataloader, eval_dataloader
)
completed_steps = 0
path = args.resume_from_checkpoint or newest()
if path:
    accelerator.load_state(path)
    completed_steps = int(os.path.basename(path).replace("step_", ""))
while completed_steps < args.max_train_steps:
    model.train()
    skipped = completed_steps % len(train_dataloader)
    for x, y in accelerator.skip_first_batches(train_dataloader, skipped) if skipped else train_dataloader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        completed_steps += 1
        tell(f"{completed_steps} {loss.item().hex()}")
        if completed_steps % args.checkpointing_steps == 0:
            accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
        if completed_steps % args.eval_steps == 0:
            tell(f"evaluating {completed_steps}")
            model.eval()
            with torch.no_grad():
                for inputs, _ in eval_dataloader:
                    model(inputs)
            model.train()
        if completed_steps >= args.max_train_steps:
            break
accelerator.end_training()
