"""Checkpoints built by the documented layout of each framework, with real `torch.save` and DCP, in one process."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from stepkeeper_trainer.formats import safetensors

STEPS = (100, 200)


@dataclass(frozen=True)
class Layout:
    """A framework's directory with two steps."""

    framework: str
    build: Callable[[Path, int], Path]  # one step below a root; returns its path
    optional: tuple[str, ...] = ()  # files whose loss does not make a checkpoint incomplete
    argument: str = ""  # part of the resume arguments of step 200


def tensor(size: int = 64) -> torch.Tensor:
    return torch.arange(1, size + 1, dtype=torch.float32)


def save(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def save_dcp(path: Path, state: dict[str, object]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def save_weights(path: Path, names: tuple[str, ...] = ("a", "b")) -> None:
    header = safetensors.pack_header([(name, "float32", (64,)) for name in names], {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + bytes(256) * len(names))


def huggingface(root: Path, step: int) -> Path:
    path = root / f"checkpoint-{step}"
    save_weights(path / "model-00001-of-00002.safetensors", ("a",))
    save_weights(path / "model-00002-of-00002.safetensors", ("b",))
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write(path / "model.safetensors.index.json", json.dumps({"weight_map": index}))
    return _trainer(path, step)


def _trainer(path: Path, step: int) -> Path:
    if not (path / "optimizer_0").exists():
        save(path / "optimizer.pt", {"state": tensor()})
    save(path / "scheduler.pt", {"last_epoch": step})
    for rank in range(2):
        save(path / f"rng_state_{rank}.pth", {"cpu": tensor()})
    save(path / "training_args.bin", argparse.Namespace(lr=0.1))
    write(path / "trainer_state.json", json.dumps({"global_step": step, "max_steps": STEPS[-1]}))
    return path


def huggingface_fsdp(root: Path, step: int) -> Path:
    path = root / f"checkpoint-{step}"
    save_dcp(path / "pytorch_model_fsdp_0", {"model": {"a": tensor()}})
    save_dcp(path / "optimizer_0", {"state": {"a": tensor()}})
    return _trainer(path, step)


def huggingface_deepspeed(root: Path, step: int) -> Path:
    path = root / f"checkpoint-{step}"
    _engine(path / f"global_step{step}", step, stage=2)
    write(path / "latest", f"global_step{step}")
    save_weights(path / "model.safetensors")
    save(path / "scheduler.pt", {"last_epoch": step})
    for rank in range(2):
        save(path / f"rng_state_{rank}.pth", {"cpu": tensor()})
    write(path / "trainer_state.json", json.dumps({"global_step": step, "max_steps": STEPS[-1]}))
    return path


def accelerate(root: Path, step: int) -> Path:
    path = root / f"checkpoint_{step}"
    save_weights(path / "model.safetensors")
    save(path / "optimizer.bin", {"state": tensor()})
    save(path / "scheduler.bin", {"last_epoch": step})
    for rank in range(2):
        save(path / f"random_states_{rank}.pkl", {"step": step, "cpu": tensor()})
    return path


def _lightning_state(step: int) -> dict[str, object]:
    return {"state_dict": {"a": tensor()}, "optimizer_states": [{}], "loops": {}, "global_step": step, "epoch": 0}


def lightning(root: Path, step: int) -> Path:
    path = root / "lightning_logs/version_0/checkpoints" / f"epoch=0-step={step}.ckpt"
    save(path, _lightning_state(step))
    return path


def lightning_sharded(root: Path, step: int) -> Path:
    path = root / f"step={step}.ckpt"
    save_dcp(path, {"state_dict": {"a": tensor()}, "optimizer_0": {"a": tensor()}})
    save(path / "meta.pt", {"global_step": step, "loops": {}})
    return path


def torchtitan(root: Path, step: int) -> Path:
    path = root / "checkpoint" / f"step-{step}"
    state = {"a": tensor(), "optimizer": {"a": tensor()}, "train_state": {"step": torch.tensor(step)}}
    save_dcp(path, {**state, "lr_scheduler": {"x": tensor()}, "dataloader": {"x": tensor()}})
    return path


def plain_dcp(root: Path, step: int) -> Path:
    path = root / f"my-run-{step}"
    save_dcp(path, {"model": {"a": tensor()}, "optim": {"a": tensor()}})
    return path


def _engine(path: Path, step: int, *, stage: int, world: int = 2, model_parallel: int = 1) -> Path:
    state = {
        "module": {"a": tensor()},
        "dp_world_size": world,
        "mp_world_size": model_parallel,
        "global_steps": step,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "param_shapes": [OrderedDict(a=torch.Size([64]))],
    }
    for place in range(model_parallel):
        if stage == 3:
            for rank in range(world):
                save(path / f"zero_pp_rank_{rank}_mp_rank_{place:02d}_model_states.pt", state)
        else:
            save(path / f"mp_rank_{place:02d}_model_states.pt", state)
        for rank in range(world if stage else 0):
            save(path / f"bf16_zero_pp_rank_{rank}_mp_rank_{place:02d}_optim_states.pt", {"state": tensor()})
    return path


def deepspeed(stage: int, *, model_parallel: int = 1) -> Callable[[Path, int], Path]:
    def build(root: Path, step: int) -> Path:
        write(root / "latest", f"global_step{step}")
        return _engine(root / f"global_step{step}", step, stage=stage, model_parallel=model_parallel)

    return build


def deepspeed_pipeline(root: Path, step: int) -> Path:
    path = _engine(root / f"global_step{step}", step, stage=1, model_parallel=2)
    for layer in (0, 3):
        for place in range(2):
            save(path / f"layer_{layer:02d}-model_{place:02d}-model_states.pt", {"a": tensor()})
    return path


def deepspeed_experts(root: Path, step: int) -> Path:
    path = _engine(root / f"global_step{step}", step, stage=1)
    for expert in range(3):
        save(path / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt", {"a": tensor()})
    return path


def deepspeed_universal(root: Path, step: int) -> Path:
    path = root / f"global_step{step}_universal"
    write(root / "latest_universal", path.name)
    state = {"global_steps": step, "param_shapes": [OrderedDict({"layer.a": torch.Size([64])})]}
    save(path / "mp_rank_00_model_states.pt", state)
    save(path / "zero/optimizer_state.pt", {"lr": 0.1})
    for name in ("fp32.pt", "exp_avg.pt"):
        save(path / "zero/layer.a" / name, tensor())
    return path


def _torch_dist(path: Path, step: int) -> Path:
    save_dcp(path, {"model.a": tensor(), "optimizer.state.a": tensor()})
    arguments = argparse.Namespace(train_iters=STEPS[-1], world_size=2)
    save(path / "common.pt", {"iteration": step, "args": arguments})
    write(path / "metadata.json", json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return path


def megatron(root: Path, step: int) -> Path:
    write(root / "latest_checkpointed_iteration.txt", str(step))
    return _torch_dist(root / f"iter_{step:07d}", step)


def megatron_integrity(root: Path, step: int) -> Path:
    path = megatron(root, step)
    digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(path.iterdir())}
    write(path / "integrity.json", json.dumps({"algorithm": "sha256", "files": digests}))
    return path


def megatron_legacy(root: Path, step: int) -> Path:
    path = root / f"iter_{step:07d}"
    arguments = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_distributed_optimizer=True
    )
    for place in range(2):
        for stage in range(2):
            state = {"iteration": step, "args": arguments, "model": {"a": tensor()}, "optimizer": {"x": 1}}
            save(path / f"mp_rank_{place:02d}_{stage:03d}/model_optim_rng.pt", state)
            save(path / f"mp_rank_{place:02d}_{stage:03d}/distrib_optim.pt", {"a": tensor()})
    return path


def megatron_bridge(root: Path, step: int) -> Path:
    path = _torch_dist(root / f"iter_{step:07d}", step)
    save(path / "train_state.pt", {"step": torch.tensor(step)})
    write(path / "run_config.yaml", "x: 1\n")
    shutil.copyfile(path / "train_state.pt", root / "latest_train_state.pt")
    write(root / "latest_checkpointed_iteration.txt", str(step))
    return path


def nemo(root: Path, step: int) -> Path:
    path = root / f"llama--val_loss=1.5-step={step}-consumed_samples=800.0"
    _torch_dist(path / "weights", step)
    write(path / "context/model.yaml", "x: 1\n")
    return path


def automodel(root: Path, step: int) -> Path:
    path = root / f"epoch_0_step_{step}"
    save_dcp(path / "model", {"a": tensor()})
    return _automodel_rest(path)


def _automodel_rest(path: Path) -> Path:
    save_dcp(path / "optim", {"a": tensor()})
    for rank in range(2):
        save(path / f"rng/rng_dp_rank_{rank}.pt", {"cpu": tensor()})
        save(path / f"dataloader/dataloader_dp_rank_{rank}.pt", {"x": 1})
    save(path / "step_scheduler.pt", {"step": 1})
    return path


def automodel_safetensors(root: Path, step: int) -> Path:
    path = root / f"epoch_0_step_{step}"
    for shard in (1, 2):
        save_weights(path / f"model/shard-{shard:05d}-model-00001-of-00001.safetensors")
    return _automodel_rest(path)


def torch_checkpointing(root: Path, step: int) -> Path:
    path = root / f"run_{step}"
    for rank in range(2):
        save(path / f"model_{rank}.pt", {"a": tensor()})
        save(path / f"optimizer_{rank}.pt", {"a": tensor()})
    return path


LAYOUTS = {
    "huggingface": Layout("huggingface", huggingface, ("training_args.bin",), "checkpoint-200"),
    "huggingface-fsdp": Layout("huggingface", huggingface_fsdp, ("training_args.bin",), "checkpoint-200"),
    "huggingface-deepspeed": Layout(
        "huggingface", huggingface_deepspeed, ("latest", "model.safetensors", "scheduler.pt"), "checkpoint-200"
    ),
    "accelerate": Layout(
        "accelerate", accelerate, ("scheduler.bin", "random_states_1.pkl"), "checkpoint_200"
    ),  # the last rank's: only --world-size tells that there was one
    "lightning": Layout("lightning", lightning, (), "step=200.ckpt"),
    "lightning-sharded": Layout("lightning", lightning_sharded, (), "step=200.ckpt"),
    "torchtitan": Layout("torchtitan", torchtitan, (), "--checkpoint.load_step=200"),
    "dcp": Layout("dcp", plain_dcp),
    "deepspeed-0": Layout("deepspeed", deepspeed(0)),
    "deepspeed-1": Layout("deepspeed", deepspeed(1, model_parallel=2)),
    "deepspeed-3": Layout("deepspeed", deepspeed(3)),
    "deepspeed-pipeline": Layout("deepspeed", deepspeed_pipeline),
    "deepspeed-experts": Layout(
        "deepspeed", deepspeed_experts, ("layer_0_expert_2_mp_rank_00_model_states.pt",)
    ),  # nothing says how many experts there were
    "deepspeed-universal": Layout("deepspeed", deepspeed_universal, ("zero/layer.a/exp_avg.pt",)),
    "megatron": Layout("megatron", megatron, ("common.pt",), "--ckpt-step 200"),
    "megatron-integrity": Layout("megatron", megatron_integrity, ("integrity.json",), "--ckpt-step 200"),
    "megatron-legacy": Layout("megatron", megatron_legacy, (), "--ckpt-step 200"),
    "megatron-bridge": Layout("megatron-bridge", megatron_bridge, ("common.pt",), "checkpoint.ckpt_step=200"),
    "nemo": Layout("nemo", nemo, ("weights/common.pt",)),
    "automodel": Layout("automodel", automodel, ("step_scheduler.pt",), "epoch_0_step_200"),
    "automodel-safetensors": Layout(
        "automodel",
        automodel_safetensors,
        ("step_scheduler.pt", "model/shard-00002-model-00001-of-00001.safetensors"),
        "epoch_0_step_200",
    ),
    "torch-checkpointing": Layout("torch-checkpointing", torch_checkpointing),
}


def build(name: str, root: Path) -> dict[int, Path]:
    root.mkdir(parents=True, exist_ok=True)
    return {step: LAYOUTS[name].build(root, step) for step in STEPS}
