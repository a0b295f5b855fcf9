"""A script with Accelerate."""

import os

import shared
import torch
from accelerate import Accelerator

options = shared.options()
shared.seed()
accelerator = Accelerator(cpu=True)
model = shared.Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
done = 0
if options.resume:
    accelerator.load_state(options.resume)
    done = int(options.resume.rsplit("_", 1)[1])
for step in range(done + 1, options.steps + 1):
    loss = shared.loss_of(model, step) + 0.001 * torch.rand(1)[0]  # shows whether the RNG state came back
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    shared.log(options.losses, step, loss.item())
    if step % options.every == 0:
        accelerator.save_state(os.path.join(options.out, f"checkpoint_{step}"))
accelerator.end_training()
