"""A loop with DeepSpeed's ZeRO, as its examples have it: it evaluates, and resumes from what `latest` names."""

import argparse
import os
import time

import deepspeed
import torch


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's 16 samples: all are the same on any number of ranks."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True).sin()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return x[rank::ranks], y[rank::ranks]


def tell(row: str) -> None:
    with open(f"{args.save_dir}/told-{os.environ.get('RANK', '0')}", "a", encoding="utf-8") as rows:
        rows.write(f"{row}\n")


parser = argparse.ArgumentParser()
parser.add_argument("--save_dir", default="out")
parser.add_argument("--train_iters", type=int)
parser.add_argument("--save_interval", type=int)
parser.add_argument("--eval_interval", type=int)
parser.add_argument("--loading_seconds", type=float, default=3.0)
parser.add_argument("--step_seconds", type=float, default=0.15)
parser.add_argument("--stage", type=int, default=2)
args = parser.parse_args()
os.makedirs(args.save_dir, exist_ok=True)
tell("loading")
time.sleep(args.loading_seconds)
torch.manual_seed(7)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile that for minutes, at its first start
deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Sequential(
    torch.nn.Linear(16, 1536),
    torch.nn.Tanh(),
    torch.nn.Linear(1536, 1536),  # a save takes its time
    torch.nn.Linear(1536, 1),
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 16 // torch.distributed.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
engine.load_checkpoint(args.save_dir)
while engine.global_steps < args.train_iters:
    x, y = batch(engine.global_steps + 1)
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    time.sleep(args.step_seconds)
    mean = loss.detach().clone() / torch.distributed.get_world_size()
    torch.distributed.all_reduce(mean)
    tell(f"{engine.global_steps} {mean.item().hex()}")
    if engine.global_steps % args.save_interval == 0:
        engine.save_checkpoint(args.save_dir)
    if engine.global_steps % args.eval_interval == 0:
        tell(f"evaluating {engine.global_steps}")
        engine.eval()
        with torch.no_grad():
            for number in range(24):
                time.sleep(args.step_seconds)
                engine(batch(10_000 + number)[0])
        engine.train()
torch.distributed.destroy_process_group()
