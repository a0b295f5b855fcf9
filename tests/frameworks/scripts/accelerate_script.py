"""A script with Accelerate, as its examples have it."""

import os
import time
from pathlib import Path

import shared
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(shared.FEATURES, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().reshape(1)


class Slow(Data):
    """An evaluation that takes its time; a file shows that it has begun."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        Path(f"{options.losses}.evaluating").touch()
        time.sleep(0.02)
        return super().__getitem__(index)


options = shared.options()
shared.seed()
accumulated = 2 if options.variant == "accumulating" else 1
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
model = shared.Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(Data(), batch_size=4, generator=torch.Generator())
validation = DataLoader(Slow(), batch_size=4, generator=torch.Generator())
model, optimizer, scheduler, loader, validation = accelerator.prepare(model, optimizer, scheduler, loader, validation)
done = 0
if options.resume.startswith("step_"):  # it knows the step, and leaves the directory to Accelerate
    accelerator.load_state()
    done = int(options.resume.rsplit("_", 1)[1])
elif options.resume:
    accelerator.load_state(options.resume)
    done = int(options.resume.rsplit("_", 1)[1])
step, skip = done, done * accumulated % len(loader)
while step < options.steps:
    for x, y in accelerator.skip_first_batches(loader, skip) if skip else loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss = loss + 0.001 * torch.rand(1)[0]  # shows whether the RNG state came back
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        shared.log(options.losses, step, loss.item())
        if step % options.every == 0:
            path = os.path.join(options.out, f"checkpoint_{step}")
            accelerator.save_state(path)
            if options.variant == "further" and accelerator.is_main_process:
                Path(path, "epochs.txt").write_text("1")
        if options.variant == "evaluating" and step == options.every + 10:
            with torch.no_grad():
                for inputs, _ in validation:
                    model(inputs)
        if step == options.steps:
            break
    skip = 0
accelerator.end_training()
