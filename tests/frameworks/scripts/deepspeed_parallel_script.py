"""A script with DeepSpeed that saves a pipeline or a model with experts, as `--variant` says (`pipeline-0`, ...).

It trains nothing: what a checkpoint consists of is the same.
"""

import deepspeed
import shared
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn


class Experts(nn.Module):
    """Two layers of 4 and 2 experts, on two expert parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2, k=1)
        self.second = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2, k=1)


def with_buffer() -> nn.Module:
    """Return a layer that has more than parameters."""
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", torch.zeros(1))
    return layer


options = shared.options()
shared.seed()
kind, _, stage = options.variant.partition("-")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile that for minutes, at its first start
deepspeed.init_distributed(dist_backend="gloo")
if kind == "pipeline":
    tied = TiedLayerSpec("embedding", nn.Linear, 4, 4, forward_fn=lambda layer, x: layer(x))
    layers = [
        TiedLayerSpec("embedding", nn.Linear, 4, 4),
        with_buffer(),
        torch.tanh,
        nn.Dropout(0.1),
        LayerSpec(nn.Linear, 4, 4),
        tied,
    ]
    model: nn.Module = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    parameters = [{"params": list(model.parameters())}]
else:
    model = Experts()
    together = {"params": list(model.parameters()), "name": "all"}
    parameters = split_params_into_different_moe_groups_for_optimizer(together)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=parameters,
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "bf16": {"enabled": stage != "0"},
    },
)
for step in (2, 4, 6):
    engine.global_steps = step
    engine.save_checkpoint(options.out)
torch.distributed.destroy_process_group()
