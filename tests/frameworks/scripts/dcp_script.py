"""A script with FSDP2 and plain torch.distributed.checkpoint."""

import os

import shared
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

options = shared.options()
shared.begin()
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
model = shared.Model()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state() -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "step": torch.tensor(done)}


done = 0
if options.resume:
    found = state()
    dcp.load(found, checkpoint_id=options.resume)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    done = int(found["step"])
for step in range(done + 1, options.steps + 1):
    loss = shared.loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shared.log(options.losses, step, loss.item())
    done = step
    if step % options.every == 0:
        dcp.save(state(), checkpoint_id=os.path.join(options.out, f"step_{step}"))
dist.destroy_process_group()
