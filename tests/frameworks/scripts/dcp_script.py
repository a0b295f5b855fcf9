"""A script with FSDP2, or FSDP1, and plain torch.distributed.checkpoint, which may save beside the next steps."""

import os

import shared
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

options = shared.options()
shared.begin()
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
model = shared.Model()
if options.variant == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state() -> dict:
    weights, moments = get_state_dict(model, optimizer, options=how)
    return {"model": weights, "optim": moments, "step": torch.tensor(done)}


# FSDP1: parameter groups as lists are on rank 0 alone
how = StateDictOptions(flatten_optimizer_state_dict=options.variant == "fsdp1")
saves = dist.new_group(backend="gloo")  # of their own: they run beside the steps
saving = None
done = 0
if options.resume:
    found = state()
    dcp.load(found, checkpoint_id=options.resume)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=how)
    done = int(found["step"])
for step in range(done + 1, options.steps + 1):
    loss = shared.loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shared.log(options.losses, step, loss.item())
    done = step
    if step % options.every == 0:
        path = os.path.join(options.out, f"step_{step}")
        if options.variant != "async":
            dcp.save(state(), checkpoint_id=path)
            continue
        if saving is not None:
            saving.result()
        saving = dcp.async_save(state(), checkpoint_id=path, process_group=saves)
if saving is not None:
    saving.result()
dist.destroy_process_group()
