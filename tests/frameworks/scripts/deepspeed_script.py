"""A script with DeepSpeed; the variant is the ZeRO stage."""

import deepspeed
import shared
import torch

options = shared.options()
shared.seed()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile that for minutes, at its first start
deepspeed.init_distributed(dist_backend="gloo")
model = shared.Model()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": int(options.variant)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    },
)
done = 0
if options.resume:
    directory, _, tag = options.resume.rpartition("/")
    path, _ = engine.load_checkpoint(directory, tag=tag or None)  # without a tag: what `latest` names
    assert path is not None
    done = engine.global_steps
for step in range(done + 1, options.steps + 1):
    loss = shared.loss_of(engine, step)
    engine.backward(loss)
    engine.step()
    shared.log(options.losses, step, loss.item())
    if step % options.every == 0:
        engine.save_checkpoint(options.out)
torch.distributed.destroy_process_group()
