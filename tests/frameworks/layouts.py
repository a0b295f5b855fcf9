"""Checkpoints built by the documented layout of each framework, with real `torch.save` and DCP, in one process."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    exempt: Mapping[str, str] = field(default_factory=dict)  # files that a resume does not need, and why it does not
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


def lightning_deepspeed(root: Path, step: int) -> Path:
    path = root / f"step={step}.ckpt"
    _engine(path / "checkpoint", step, stage=2)
    write(path / "latest", "checkpoint")
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


def _engine(
    path: Path,
    step: int,
    *,
    stage: int,
    world: int = 2,
    model_parallel: int = 1,
    more: Mapping[int, Mapping[str, object]] | None = None,
) -> Path:
    common = {
        "module": {"a": tensor()},
        "dp_world_size": world,
        "mp_world_size": model_parallel,
        "global_steps": step,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "param_shapes": [OrderedDict(a=torch.Size([64]))],
    }
    for place in range(model_parallel):
        state = {**common, **(more or {}).get(place, {})}
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


def deepspeed_pipeline(*, stage: int, tensor_parallel: int = 1) -> Callable[[Path, int], Path]:
    """Return what 0.19.8 writes of two stages: a tied layer, a linear one, a function, dropout, and a linear one."""

    def build(root: Path, step: int) -> Path:
        stages = {
            place: {
                "module": None,
                "buffer_names": ["1.b"] if place == 0 else [],
                "optimizer": None if stage else {"param_groups": [{"params": [0, 1, 2, 3]}]},
                "param_shapes": [OrderedDict({name: torch.Size([64]) for name in ("tied_modules.emb.weight", own)})]
                if stage
                else None,
                "frozen_param_shapes": None,
                "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": tensor_parallel},
            }
            for place, own in enumerate(("1.l.weight", "4.weight") * tensor_parallel)
        }
        path = _engine(
            root / f"global_step{step}", step, stage=stage, world=1, model_parallel=2 * tensor_parallel, more=stages
        )
        for layer in (0, 1, 3, 4):
            for place in range(tensor_parallel):
                middle = f"-model_{place:02d}" if tensor_parallel > 1 else ""
                save(path / f"layer_{layer:02d}{middle}-model_states.pt", {"a": tensor()} if layer != 3 else {})
        return path

    return build


def deepspeed_experts(*, stage: int) -> Callable[[Path, int], Path]:
    """Return what 0.19.8 writes of two layers of 4 and 2 experts, on two expert parallel ranks."""

    def build(root: Path, step: int) -> Path:
        optimizer = {"param_groups": [{"name": "p", "params": [0]}, {"name": "ep_size_2", "moe": True, "params": [1]}]}
        more = {0: {"num_experts": [4, 2], "ds_autoep_layers": None, "optimizer": None if stage else optimizer}}
        path = _engine(root / f"global_step{step}", step, stage=stage, more=more)
        for layer, count in enumerate((4, 2)):
            for expert in range(count):
                save(path / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt", {"a": tensor()})
        for rank in range(0 if stage else 2):
            save(path / f"expp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer": optimizer})
        return path

    return build


def deepspeed_universal(root: Path, step: int) -> Path:
    path = root / f"global_step{step}_universal"
    write(root / "latest_universal", path.name)
    parameters = ("layer.a", "layer.b")
    shapes = OrderedDict({name: torch.Size([64]) for name in parameters})
    save(path / "mp_rank_00_model_states.pt", {"global_steps": step, "param_shapes": [shapes]})
    save(path / "zero/optimizer_state.pt", {"lr": 0.1})
    for parameter in parameters:
        for name in ("fp32.pt", "exp_avg.pt"):
            save(path / "zero" / parameter / name, tensor())
    return path


def _torch_dist(path: Path, step: int) -> Path:
    save_dcp(path, {"model.a": tensor(), "optimizer.state.a": tensor()})
    arguments = argparse.Namespace(train_iters=STEPS[-1], world_size=2)
    save(path / "common.pt", {"iteration": step, "args": arguments})
    write(path / "metadata.json", json.dumps(_METADATA))
    return path


_METADATA = {  # as all releases write it
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def megatron_common_in_dcp(root: Path, step: int) -> Path:
    """Build what Megatron-LM writes since 2026: no `common.pt`."""
    path = root / f"iter_{step:07d}"
    save_dcp(path, {"model.a": tensor(), "optimizer.state.a": tensor(), "common_state/shard_0_1": {"x": tensor()}})
    write(path / "metadata.json", json.dumps(_METADATA))
    write(root / "latest_checkpointed_iteration.txt", str(step))
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


def nemo_dcp(root: Path, step: int) -> Path:
    path = root / f"llama--val_loss=1.5-step={step}-consumed_samples=800.0"
    save_dcp(path / "weights", {"model.a": tensor(), "optimizer.state.a": tensor()})
    write(path / "context/model.yaml", "x: 1\n")
    return path


def automodel(root: Path, step: int) -> Path:
    path = root / f"epoch_0_step_{step}"
    save_dcp(path / "model", {"a": tensor()})
    return _automodel_rest(path)


def automodel_global_ranks(root: Path, step: int) -> Path:
    path = root / f"epoch_0_step_{step}"
    save_dcp(path / "model", {"a": tensor()})
    return _automodel_rest(path, ranks="global")


def _automodel_rest(path: Path, *, ranks: str = "dp") -> Path:
    save_dcp(path / "optim", {"a": tensor()})
    write(path / "config.yaml", "x: 1\n")
    for rank in range(2):
        save(path / f"rng/rng_{ranks}_rank_{rank}.pt", {"cpu": tensor()})
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


_ARGUMENTS = {"training_args.bin": "the Trainer of the new launch has arguments of its own, and does not read it"}
_CONFIG = {"config.yaml": "the recipe of the new launch has a configuration of its own, and does not load it"}
LAYOUTS = {
    "huggingface": Layout("huggingface", huggingface, _ARGUMENTS, "checkpoint-200"),
    "huggingface-fsdp": Layout("huggingface", huggingface_fsdp, _ARGUMENTS, "checkpoint-200"),
    "huggingface-deepspeed": Layout(
        "huggingface",
        huggingface_deepspeed,
        {"model.safetensors": "DeepSpeed loads the weights from its own states"},
        "checkpoint-200",
    ),
    "accelerate": Layout("accelerate", accelerate, {}, "checkpoint_200"),
    "lightning": Layout("lightning", lightning, {}, "step=200.ckpt"),
    "lightning-sharded": Layout("lightning", lightning_sharded, {}, "step=200.ckpt"),
    "lightning-deepspeed": Layout("lightning", lightning_deepspeed, {}, "step=200.ckpt"),
    "torchtitan": Layout("torchtitan", torchtitan, {}, "--checkpoint.load_step=200"),
    "dcp": Layout("dcp", plain_dcp),
    "deepspeed-0": Layout("deepspeed", deepspeed(0)),
    "deepspeed-1": Layout("deepspeed", deepspeed(1, model_parallel=2)),
    "deepspeed-3": Layout("deepspeed", deepspeed(3)),
    "deepspeed-pipeline": Layout("deepspeed", deepspeed_pipeline(stage=1)),
    "deepspeed-pipeline-0": Layout("deepspeed", deepspeed_pipeline(stage=0)),
    "deepspeed-pipeline-tensor": Layout("deepspeed", deepspeed_pipeline(stage=1, tensor_parallel=2)),
    "deepspeed-experts": Layout("deepspeed", deepspeed_experts(stage=2)),
    "deepspeed-experts-0": Layout("deepspeed", deepspeed_experts(stage=0)),
    "deepspeed-universal": Layout("deepspeed", deepspeed_universal),
    "megatron": Layout("megatron", megatron, {}, "--ckpt-step 200"),
    "megatron-common-in-dcp": Layout("megatron", megatron_common_in_dcp, {}, "--ckpt-step 200"),
    "megatron-integrity": Layout(
        "megatron",
        megatron_integrity,
        {"integrity.json": "Megatron reads it with --verify-integrity only, and verifies nothing without it"},
        "--ckpt-step 200",
    ),
    "megatron-legacy": Layout("megatron", megatron_legacy, {}, "--ckpt-step 200"),
    "megatron-bridge": Layout("megatron-bridge", megatron_bridge, {}, "checkpoint.ckpt_step=200"),
    "nemo": Layout("nemo", nemo),
    "nemo-dcp": Layout("nemo", nemo_dcp),
    "automodel": Layout("automodel", automodel, _CONFIG, "epoch_0_step_200"),
    "automodel-global-ranks": Layout("automodel", automodel_global_ranks, _CONFIG, "epoch_0_step_200"),
    "automodel-safetensors": Layout("automodel", automodel_safetensors, _CONFIG, "epoch_0_step_200"),
    "torch-checkpointing": Layout("torch-checkpointing", torch_checkpointing),
}


def build(name: str, root: Path) -> dict[int, Path]:
    root.mkdir(parents=True, exist_ok=True)
    return {step: LAYOUTS[name].build(root, step) for step in STEPS}
