"""Starting torch.distributed from whatever launched this process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from stepkeeper_trainer.environment import Place, find_place

START_WITHIN_S = 300.0


def start_distributed() -> Place:
    """Join the other ranks (torchrun's variables, else Slurm's) and say which rank this is.

    A process alone stays alone: no process group is made.  CPU ranks use gloo; GPU ranks NCCL, with gloo
    beside it for what lives on the CPU.

    Raises:
        UsageError: the variables contradict each other.
        torch.distributed.DistError: the other ranks were not met within `START_WITHIN_S`.
    """
    place = find_place()
    if place is None or (place.world_size == 1):
        if torch.cuda.is_available() and place is not None:
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        return place or Place()
    if torch.cuda.is_available():
        # Slurm may show each task one GPU only, or all of the node's.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{place.master_address}:{place.master_port}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=START_WITHIN_S),
    )
    return place
