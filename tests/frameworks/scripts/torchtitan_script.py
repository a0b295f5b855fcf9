"""A script with torchtitan's CheckpointManager, and stand-ins for the parts of its Trainer that need a GPU."""

import shared
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    def state_dict(self) -> dict:
        return get_optimizer_state_dict(model, optimizer, options=FLAT)

    def load_state_dict(self, state: dict) -> None:
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)

    def init_cache_state_dict(self) -> None:
        pass


class TrainState:
    step = 0

    def state_dict(self) -> dict:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict) -> None:
        self.step = int(state["step"])


class Loader(TrainState):
    pass


options = shared.options()
shared.begin()
model = shared.Model()
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
train_state = TrainState()
manager = CheckpointManager(
    CheckpointManager.Config(
        enable=True,
        interval=options.every,
        last_save_model_only=options.variant == "model-only",
        keep_latest_k=2 if options.variant == "keeping" else 0,
    ),
    dataloader=Loader(),
    model_parts=[model],
    optimizers=Optimizers(),
    lr_schedulers=scheduler,
    states={"train_state": train_state},
    sd_adapter=None,
    base_folder=options.out,
)
if options.resume:
    assert manager.load(step=int(options.resume.rsplit("-", 1)[1]))
for step in range(train_state.step + 1, options.steps + 1):
    loss = shared.loss_of(model, step)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    shared.log(options.losses, step, loss.item())
    train_state.step = step
    manager.save(step, last_step=step == options.steps)
manager.close()
dist.destroy_process_group()
