"""A script with torch_checkpointing."""

import os

import shared
import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def main() -> None:
    options = shared.options()
    shared.begin()
    model = torch.nn.parallel.DistributedDataParallel(shared.Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(), "optimizer": ItemSpec(), "step": ItemSpec()},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    done = 0
    if options.resume:
        found = manager.load(options.resume)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = int(found["step"])
    for step in range(done + 1, options.steps + 1):
        loss = shared.loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shared.log(options.losses, step, loss.item())
        if step % options.every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            manager.save(os.path.join(options.out, f"step_{step}"), state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
