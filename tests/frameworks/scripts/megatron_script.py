"""A script with Megatron-core's dist_checkpointing; two lines are for a machine without a GPU."""

import os
import sys

import shared
import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_, **__: None
torch.cuda.current_device = lambda: "cpu"


def main() -> None:
    from megatron.core import dist_checkpointing  # noqa: PLC0415 - after those lines
    from megatron.core.dist_checkpointing import ShardedTensor  # noqa: PLC0415

    options = shared.options()
    shared.begin()
    model = torch.nn.parallel.DistributedDataParallel(shared.Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def sharded() -> dict:
        def one(name: str, value: torch.Tensor) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(name, value, replica_id=dist.get_rank())

        weights = {f"model.{name}": one(f"model.{name}", value.data) for name, value in model.module.named_parameters()}
        moments = {}
        for name, value in model.module.named_parameters():
            state = optimizer.state[value]
            state.setdefault("momentum_buffer", torch.zeros_like(value))
            key = f"optimizer.state.momentum.{name}"
            moments[key] = one(key, state["momentum_buffer"])
        return {**weights, **moments}

    done = 0
    if options.resume:
        state = dist_checkpointing.load(sharded(), options.resume)
        done = state["iteration"]
        for name, value in model.module.named_parameters():
            value.data.copy_(state[f"model.{name}"])
            optimizer.state[value]["momentum_buffer"].copy_(state[f"optimizer.state.momentum.{name}"])
    for step in range(done + 1, options.steps + 1):
        loss = shared.loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shared.log(options.losses, step, loss.item())
        if step % options.every == 0:
            path = os.path.join(options.out, f"iter_{step:07d}")
            if dist.get_rank() == 0:
                os.makedirs(path, exist_ok=True)
            dist.barrier()
            dist_checkpointing.save({**sharded(), "iteration": step}, path)
            if dist.get_rank() == 0:
                tracker = os.path.join(options.out, "latest_checkpointed_iteration.txt")
                with open(tracker, "w", encoding="utf-8") as file:
                    file.write(str(step))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
