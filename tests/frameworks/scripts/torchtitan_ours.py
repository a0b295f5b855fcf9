"""torchtitan's loop around its checkpoint manager, which is Stepkeeper's, and stand-ins for what needs a GPU."""

import shared
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from stepkeeper_trainer.engines.torchtitan import StepkeeperCheckpointManager


class Data(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(shared.FEATURES, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().reshape(1)


class Loader:
    """Counts what its rank has read, as torchtitan's data sets do."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        rows = range(self.read * 8 + shared.rank(), len(Data()), 2)
        for batch in DataLoader(torch.utils.data.Subset(Data(), rows), batch_size=4):
            self.read += 1
            yield batch

    def state_dict(self) -> dict:
        return {"read": self.read}

    def load_state_dict(self, state: dict) -> None:
        self.read = state["read"]


class Model(shared.Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.1))


class TrainState:
    step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


class Optimizers:
    """As torchtitan's container: one optimizer a part of the model."""

    def __init__(self) -> None:
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]


options = shared.options()
shared.tell()
shared.begin()
model = Model()
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
container, loader, train_state = Optimizers(), Loader(), TrainState()
[optimizer] = container.optimizers
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
config = StepkeeperCheckpointManager.Config(
    enable=True, interval=options.every, keep_latest_k=0, folder=".", total_steps=options.steps
)
checkpointer = config.build(
    dataloader=loader,
    model_parts=[model],
    optimizers=container,
    lr_schedulers=scheduler,
    states={"train_state": train_state},
    sd_adapter=None,
    base_folder=options.out,
)
checkpointer.load(step=-1)
batches = iter(loader)
while train_state.step < options.steps:
    train_state.step += 1
    x, y = next(batches)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    shared.log(options.losses, train_state.step, loss.item())
    checkpointer.save(train_state.step, last_step=train_state.step == options.steps)
checkpointer.close()
dist.destroy_process_group()
