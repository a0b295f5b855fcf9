"""Scenes of `any_state` with what most scripts have: schedules, averages, loaders, meshes, frozen weights."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.trainer.any_state import Scene, _fit, _mlp
from tests.trainer.unusual_scenes import Box, Data

COMMON: dict[str, Callable[[int, int], Scene]] = {}
"""A resume goes on to the last bit."""
RANKS = {"hsdp_and_tensor_parallel": 4, "experts_of_a_mesh_and_of_each_rank": 4}


def common(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    COMMON[make.__name__] = make
    return make


@common
def schedules_and_a_scaler(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model, data = _mlp(1), Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm, cosine = lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    other = torch.optim.SGD(_mlp(2).parameters(), lr=0.1, momentum=0.9)
    cycle, plateau = lr_scheduler.OneCycleLR(other, 0.2, 8), lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(data.draw()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        other.step()
        schedule.step()
        cycle.step()
        plateau.step(1.0)
        return float(loss.detach())

    state = {"model": model, "optimizer": optimizer, "other": other, "scaler": scaler, "data": data}
    return Scene(state=state | {"schedule": schedule, "cycle": cycle, "plateau": plateau}, step=step)


@common
def averages_of_torch(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    fit = _fit(model, optimizer)

    def step() -> float:
        loss = fit()
        ema.update_parameters(model)
        swa.update_parameters(model)
        if "swalr" in state:
            schedule.step()
        return loss

    state = {"model": model, "optimizer": optimizer, "ema": ema, "swa": swa}
    holds_function = any(map(callable, schedule.state_dict().values()))  # as torch 2.6's does: refused by name
    if not holds_function:
        state["swalr"] = schedule
    return Scene(state=state, step=step, more=lambda: schedule.last_epoch if "swalr" in state else None)


@common
def a_stateful_loader_of_each_rank(rank: int, world_size: int) -> Scene:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415

    class Own(StatefulDataLoader):  # type: ignore[type-arg]  # subclasses were taken for shared once
        pass

    model = _mlp(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.arange(48.0).reshape(48, 1).expand(48, 6) / 48
    shuffled = torch.Generator().manual_seed(rank)
    loader = Own(list(rows[rank::world_size]), batch_size=2, shuffle=True, generator=shuffled)
    read: list[Iterator[torch.Tensor]] = []
    seen = Box([])

    def step() -> float:
        if not read:
            read.append(iter(loader))
        batch = next(read[0])
        seen.value = batch[:, 0].tolist()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return float(loss.detach())

    # what the loader says of itself is of its process: what it reads is what counts
    state = {"model": model, "optimizer": optimizer, "loader": loader, "seen": seen}
    return Scene(state=state, step=step, counts_anew=frozenset({"loader"}))


@common
def muon_and_sparse_adam(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(8, 6, sparse=True), _mlp(2)
            nn.init.constant_(self.embed.weight, 0.5)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.mix(self.embed(words))
            return found

    model, words = Words(), torch.Generator().manual_seed(3)
    matrices = [each for each in model.mix.parameters() if each.ndim == 2]
    muon: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
    optimizers = {
        "muon": muon(matrices, lr=0.01),
        "sparse": torch.optim.SparseAdam([model.embed.weight], lr=0.01),
        "rest": torch.optim.AdamW([each for each in model.mix.parameters() if each.ndim < 2], lr=0.01),
    }

    def step() -> float:
        model.zero_grad()
        loss = model(torch.randint(8, (5,), generator=words)).square().mean()
        loss.backward()
        for each in optimizers.values():
            each.step()
        return float(loss.detach())

    return Scene(state={"model": model, **optimizers, "words": _OfGenerator(words)}, step=step)


class _OfGenerator:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def _parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _fit_alike(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> Callable[[], float]:
    """A step on data that all ranks read alike."""

    def step() -> float:
        optimizer.zero_grad()
        loss = model(data.draw()).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


@common
def tensor_parallel_alone(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model, data = _parallel(_mlp(1), init_device_mesh("cpu", (world_size,))), Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return Scene(state={"model": model, "optimizer": optimizer, "data": data}, step=_fit_alike(model, optimizer, data))


@common
def hsdp_and_tensor_parallel(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, world_size // 4, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model, data = _parallel(_mlp(1), mesh["tensor"]), Data()
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return Scene(state={"model": model, "optimizer": optimizer, "data": data}, step=_fit_alike(model, optimizer, data))


@common
def experts_of_a_mesh_and_of_each_rank(rank: int, world_size: int) -> Scene:
    """A trunk by FSDP2, experts that are a DTensor, and experts that each rank has for itself."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "expert"))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.own = _mlp(1), _mlp(2)
            whole = torch.arange(32.0).reshape(4, 4, 2)
            self.experts = nn.Parameter(distribute_tensor(whole, mesh["expert"], [Shard(0)]))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.trunk(rows)
            return found

    model, data = Experts(), Data()
    fully_shard(model.trunk, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(data.draw()).square().mean()
        loss.backward()
        gradient = model.experts.to_local().detach() * 0.1 + rank % 2
        model.experts.grad = DTensor.from_local(gradient, mesh["expert"], [Shard(0)])
        for parameter in model.own.parameters():
            parameter.grad = parameter.detach() * (1 + rank)
        optimizer.step()
        return float(loss.detach())

    return Scene(state={"model": model, "optimizer": optimizer, "data": data}, step=step)


@common
def a_pipeline_of_torch(rank: int, world_size: int) -> Scene:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415

    whole, data = _mlp(1), Data()
    part = nn.Sequential(*(list(whole.children())[:1] if rank == 0 else list(whole.children())[1:]))
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda found, wanted: (found - wanted).square().mean())
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        rows = data.draw()[:4]
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=torch.zeros(4, 3), losses=[])
        optimizer.step()
        return 0.0

    return Scene(state={"model": part, "optimizer": optimizer, "data": data}, step=step)


class _Versioned(nn.Module):
    """It converts a state of before its version 2, as torch's own BatchNorm does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix = nn.Parameter(torch.ones(6)), _mlp(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mix(rows * self.scale)
        return found

    def _load_from_state_dict(self, state: Any, prefix: str, noted: Any, *rest: Any) -> None:  # type: ignore[override]
        if (noted.get("version") or 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] * 2
        super()._load_from_state_dict(state, prefix, noted, *rest)


@common
def a_module_with_a_version(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model = nn.parallel.DistributedDataParallel(_Versioned())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


@common
def frozen_weights_that_no_state_has(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """As adapters do it: a hook leaves out what the script loads by itself at each start."""
    model = _mlp(1)
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index, union-attr]

    def leave_out(_module: Any, state: dict[str, Any], _prefix: str, _noted: Any) -> None:
        for name in [each for each in state if each.startswith("0.")]:
            del state[name]

    model.register_state_dict_post_hook(leave_out)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)  # type: ignore[index, union-attr]
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@common
def weights_that_training_unfreezes(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """A resumed script is past the step that does it: the resume has to."""
    model, done = _mlp(1), Box(0)
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index, union-attr]
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)  # type: ignore[index, union-attr]
    fit = _fit(model, optimizer)

    def step() -> float:
        done.value += 1
        if done.value == 2:
            model[0].requires_grad_(requires_grad=True)  # type: ignore[index, union-attr]
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})  # type: ignore[index, union-attr]
        return fit()

    def trained() -> list[bool]:
        return [each.requires_grad for each in model.parameters()]

    return Scene(state={"model": model, "optimizer": optimizer, "done": done}, step=step, more=trained)


class _Named(torch.optim.SGD):
    """Each group has to say something."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        assert "role" in group, "a group says its role"
        super().add_param_group(group)


@common
def a_group_with_options_that_training_adds(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model, done = _mlp(1), Box(0)
    optimizer = _Named([{"params": list(model[2].parameters()), "role": "head"}], lr=0.1, momentum=0.9)  # type: ignore[index, union-attr]
    fit = _fit(model, optimizer)

    def step() -> float:
        done.value += 1
        if done.value == 2:
            optimizer.add_param_group({"params": list(model[0].parameters()), "role": "body"})  # type: ignore[index, union-attr]
        return fit()

    return Scene(state={"model": model, "optimizer": optimizer, "done": done}, step=step)


@common
def weights_that_are_frozen_in_turn_under_ddp(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """As adversaries are trained: one is frozen at the end of each step, and not where the script begins."""
    maker, judge = (nn.parallel.DistributedDataParallel(nn.Linear(6, size)) for size in (6, 1))
    makers, judges = torch.optim.AdamW(maker.parameters()), torch.optim.AdamW(judge.parameters())

    def step() -> float:
        judge.requires_grad_(requires_grad=True)
        judges.zero_grad()
        (judge(torch.randn(3, 6)).mean() - judge(maker(torch.randn(3, 6)).detach()).mean()).backward()
        judges.step()
        judge.requires_grad_(requires_grad=False)
        makers.zero_grad()
        loss = judge(maker(torch.randn(3, 6))).mean()
        loss.backward()
        makers.step()
        return float(loss.detach())

    return Scene(state={"maker": maker, "judge": judge, "makers": makers, "judges": judges}, step=step)


class _Split(nn.Module):
    """Its state has other names than its parameters, and a loading of its own without options."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.both(rows))
        return found

    def state_dict(self, *given: Any, **options: Any) -> Any:
        state = super().state_dict(*given, **options)
        state["one"], state["other"] = (half.detach().clone() for half in state.pop("both.weight").chunk(2))
        return state

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        state = dict(state)
        state["both.weight"] = torch.cat([state.pop("one"), state.pop("other")])
        return super().load_state_dict(state)


class _Assigning(nn.Linear):
    """torch writes into the notes that it is given with a state; those of other modules must not have it."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        return super().load_state_dict(state, strict, assign=True)


class _Adapter(nn.Module):
    """A frozen layer with an extra state, which a hook leaves out, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = _Extra(6, 3).requires_grad_(requires_grad=False), nn.Linear(6, 3)
        self.register_state_dict_post_hook(self._leave_out)

    @staticmethod
    def _leave_out(module: Any, state: dict[str, Any], prefix: str, noted: dict[str, Any]) -> None:
        noted["made_by"] = type(module)  # what a hook notes may be anything
        for name in [each for each in state if each.startswith(f"{prefix}base.")]:
            del state[name]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(rows) + self.low(rows)
        return found


class _Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Any) -> None: ...


@common
def modules_that_load_in_their_own_way(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    torch.manual_seed(3)
    models = {"assigning": _Assigning(), "split": _Split(), "adapter": _Adapter()}
    optimizers = {f"{name}_optimizer": torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    fits = [_fit(model, each) for model, each in zip(models.values(), optimizers.values(), strict=True)]
    return Scene(state=models | optimizers, step=lambda: sum(fit() for fit in fits))


class Options(enum.Flag):
    A, B, C = 1, 2, 4


@common
def values_of_more_kinds(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Sets, queues, numbers of NumPy and of the complex plane, flags."""
    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = _fit(model, optimizer)
    box = Box(
        {
            "seen": {"a", ("b", 1)},
            "fixed": frozenset({1, 2.5}),
            "last": deque([0.1], maxlen=2),
            "counts": defaultdict(int, {"a": 1}),
            "options": Options.A | Options.B,
            "root": 1 + 2j,
            "bytes": bytearray(b"\x00\xff"),
            "rate": np.float32(0.1),
            "half": np.float16(0.1),
            "wave": np.complex64(1 + 2j),
            "flag": np.bool_(True),  # noqa: FBT003
            "big": np.uint64(2**64 - 1),
        }
    )

    def step() -> float:
        value = box.value
        value["seen"].add(len(value["seen"]) + rank)
        value["last"].append(float(value["rate"]))
        value["counts"]["b"] += 1
        value["options"] ^= Options.C
        value["rate"] *= np.float32(1.1)  # rounds in another way than Python's number
        value["wave"] *= value["wave"]
        return fit()

    def types() -> list[Any]:
        value = box.value
        return [*map(type, value.values()), sorted(map(str, value["seen"])), value["last"].maxlen, value["counts"]["c"]]

    state = {"model": model, "optimizer": optimizer, "box": box}
    return Scene(state=state, step=step, more=types, counts_anew=frozenset({"box"}))


class _OtherKeys(torch.optim.SGD):
    """Its states have keys that are numbers, and such with dots in them."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state[0] = state.get(0, torch.zeros_like(parameter)) + parameter.detach()
                state["slow.mean"] = state.get("slow.mean", torch.zeros(2)) + 1
        return loss


@common
def states_under_other_keys(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model = _mlp(1)
    optimizer = _OtherKeys(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state_dict = optimizer.state_dict  # type: ignore[method-assign]  # as wrappers of optimizers set it
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))
