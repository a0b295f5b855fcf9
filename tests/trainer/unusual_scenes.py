"""Scenes of `any_state` with modules, optimizers and values that keep their state in unusual ways."""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from tests.trainer.any_state import Scene, _fit, _mlp

EXACT: dict[str, Callable[[int, int], Scene]] = {}
"""A resume goes on to the last bit."""
REFUSED: dict[str, Callable[[int, int], Scene]] = {}
"""Refused by name before a step is committed."""
NOT_RESUMED: dict[str, Callable[[int, int], Scene]] = {}
"""Refused by name at the resume."""
RANKS = {"a_model_on_some_ranks": 4}
APPEND_EVERY_S = 0.1


def exact(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    EXACT[make.__name__] = make
    return make


def refused(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    REFUSED[make.__name__] = make
    return make


def not_resumed(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    NOT_RESUMED[make.__name__] = make
    return make


class Box:
    """A part of the state that is a value, which `load_state_dict` takes as it comes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Data:
    """Batches of a generator of its own: the same on all ranks."""

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> torch.Tensor:
        return torch.randn(5, 6, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def _train(state: dict[str, Any], model: Any, optimizer: Any, more: Callable[[], Any] = lambda: None) -> Scene:
    data = Data()

    def step() -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = model(data.draw()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return Scene(state={**state, "data": data}, step=step, more=more)


# --- optimizers ------------------------------------------------------------------------------------------


class _Shared(torch.optim.SGD):
    """States under a key that is no parameter, text, and one tensor that all parameters count with."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        parameters = self.param_groups[0]["params"]
        self.state["all"]["rate"] = self.state["all"].get("rate", 0.01) * 0.9
        count = self.state[parameters[0]].setdefault("count", torch.zeros(1))
        count += 1
        for parameter in parameters:
            self.state[parameter]["count"] = self.state[parameter].get("count", count)
            self.state[parameter]["phase"] = "warm" if count < 2 else "cold"
        self.param_groups[0]["lr"] = self.state["all"]["rate"]
        return loss


class _Slow(torch.optim.SGD):
    """A `state_dict` with more in it, as optimizers with slow or master weights have one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = [each.clone() for each in state_dict["slow"]]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = super().step(closure)
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)
        return loss


class _Around(torch.optim.SGD):
    """An optimizer around another one, with a `state_dict` of another layout."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups[0]["params"], lr=0.0)

    def state_dict(self) -> Any:
        return {"inner": self.base.state_dict(), "kind": "around"}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["inner"])

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@exact
def a_buffer_to_which_each_rank_appends(rank: int, _: int) -> Scene:
    """Each save has values under names that no save before had, and ranks hold different ones."""
    model = _mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer: deque[Any] = deque(maxlen=1000)
    box = Box(buffer)
    fit = _train({"model": model, "optimizer": optimizer, "box": box}, model, optimizer)

    def step() -> float:
        time.sleep(APPEND_EVERY_S)  # longer than a save of it takes
        box.value.append((np.full(3, len(box.value) + rank), np.zeros(2), 0.5 * rank))
        return fit.step()

    return Scene(state=fit.state, step=step)


@exact
def optimizers_of_all_kinds(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    models = {
        name: _mlp(number) for number, name in enumerate(("shared", "slow", "around", "hooked", "local", "named"))
    }
    averager = PeriodicModelAverager(period=3, warmup_steps=1)
    slow, around = (
        _Slow(models["slow"].parameters()),
        _Around(torch.optim.AdamW(models["around"].parameters(), lr=0.01)),
    )
    hooked = torch.optim.AdamW(models["hooked"].parameters(), lr=0.01)
    seen = {"steps": 0}

    def load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen["steps"] = state["steps"]
        return state

    hooked.register_state_dict_post_hook(lambda _, state: {**state, "steps": seen["steps"]})
    hooked.register_load_state_dict_pre_hook(load)
    optimizers = {
        "shared": _Shared(models["shared"].parameters(), lr=0.01),
        "slow": slow,
        "around": around,
        "hooked": hooked,
        "local": PostLocalSGDOptimizer(torch.optim.SGD(models["local"].parameters(), lr=0.01), averager),
        "named": torch.optim.AdamW(models["named"].named_parameters(), lr=torch.tensor(0.01), foreach=False),
    }
    fits = [_fit(models[name], each) for name, each in optimizers.items() if name != "local"]

    def step() -> float:
        optimizers["local"].zero_grad()
        models["local"](torch.randn(5, 6)).square().mean().backward()
        optimizers["local"].step()
        seen["steps"] += 1
        return sum(fit() for fit in fits)

    state = models | {f"{name}_optimizer": each for name, each in optimizers.items()}
    return Scene(state=state, step=step, more=lambda: [slow.slow, around.base, seen, averager.step])


@exact
def all_optimizers_of_torch(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    names = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
    models = {name: _mlp(number) for number, name in enumerate(names)}
    optimizers = {name: getattr(torch.optim, name)(each.parameters(), lr=0.01) for name, each in models.items()}
    fits = [_fit(models[name], each) for name, each in optimizers.items()]
    state = models | {f"{name}_optimizer": each for name, each in optimizers.items()}
    return Scene(state=state, step=lambda: sum(fit() for fit in fits))


@exact
def states_that_begin_late(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Gradients of one weight begin at another step on each rank, and so does an option."""
    model, data, done = _mlp(1), Data(rank), Box(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> float:
        done.value += 1
        optimizer.zero_grad()
        loss = model(data.draw()).square().mean()
        loss.backward()
        if done.value < 2 + 2 * rank:
            model[2].weight.grad = None  # type: ignore[index, union-attr]
        else:
            optimizer.param_groups[0]["late"] = {"rank": rank, "at": [done.value, (1, 2.5)]}
        optimizer.step()
        return float(loss.detach())

    return Scene(state={"model": model, "optimizer": optimizer, "data": data, "done": done}, step=step)


def _divided(momentum: Callable[[torch.Tensor], torch.Tensor]) -> type[torch.optim.Optimizer]:
    class Divided(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            assert closure is None
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                kept = state.setdefault("momentum", momentum(parameter))
                assert isinstance(kept, DTensor)
                grad = parameter.grad if isinstance(parameter, DTensor) else parameter.grad.clone()
                if isinstance(grad, DTensor):
                    grad = grad.full_tensor()
                kept.mul_(0.9).add_(distribute_tensor(grad, kept.device_mesh, kept.placements))
                step = kept.full_tensor()
                if isinstance(parameter, DTensor):
                    step = distribute_tensor(step, parameter.device_mesh, parameter.placements)
                parameter.sub_(step, alpha=0.01)

    return Divided


@exact
def moments_that_are_sharded_otherwise(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Parameters are replicated, their momentum is sharded on the same mesh."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = distribute_module(_mlp(1), mesh)
    kind = _divided(lambda each: distribute_tensor(torch.zeros(each.shape), mesh, [Shard(0)]))
    optimizer = kind(model.parameters())
    data = Data()

    def step() -> float:
        optimizer.zero_grad()
        loss = model(distribute_tensor(data.draw(), mesh, [Replicate()])).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.full_tensor())

    return Scene(state={"model": model, "optimizer": optimizer, "data": data}, step=step)


@refused
def moments_on_a_mesh_of_no_parameter(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    mesh = init_device_mesh("cpu", (world_size,))
    model = _mlp(1)
    kind = _divided(lambda each: distribute_tensor(torch.zeros(each.shape), mesh, [Shard(0)]))
    optimizer = kind(model.parameters())
    return _train({"model": model, "optimizer": optimizer}, model, optimizer)


@not_resumed
def a_group_of_no_module_that_training_adds(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model, done, own = _mlp(1), Box(0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit = _fit(model, optimizer)

    def step() -> float:
        done.value += 1
        if done.value == 2:
            optimizer.add_param_group({"params": [own]})
        return fit()

    return Scene(state={"model": model, "optimizer": optimizer, "done": done}, step=step)


@not_resumed
def a_group_that_training_removes(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model, done = _mlp(1), Box(0)
    optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])])  # type: ignore[index, union-attr]
    fit = _fit(model, optimizer)

    def step() -> float:
        done.value += 1
        if done.value == 2:
            del optimizer.param_groups[0]
        return fit()

    return Scene(state={"model": model, "optimizer": optimizer, "done": done}, step=step)


@refused
def a_momentum_that_is_sparse(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Nothing but the first step makes it."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()
        return 0.1

    return Scene(state={"model": model, "optimizer": optimizer}, step=step)


def _box(name: str, reason: str, make: Callable[[], Any]) -> None:
    def scene(rank: int, world_size: int) -> Scene:  # noqa: ARG001
        model = _mlp(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "box": Box(make())}
        return Scene(state=state, step=_fit(model, optimizer))

    REFUSED[name] = scene
    VALUES[name] = reason


def _jagged() -> torch.Tensor:
    found: torch.Tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return found


class _Scaled(torch.Tensor):
    scale: float


def _scaled() -> torch.Tensor:
    found = torch.ones(3).as_subclass(_Scaled)
    found.scale = 2.0
    return found


VALUES: dict[str, str] = {}
"""Values that are refused, and how."""
_box("a_long_double", r"box\.value is a longdouble", lambda: np.longdouble(1) / 3)
_box("a_record_of_numpy", r"box\.value is a void", lambda: np.zeros(1, dtype=[("a", "i4")])[0])
_box("a_date_of_numpy", r"box\.value is a datetime64", lambda: np.datetime64("2024-01-01"))
_box("a_nested_tensor", r"box\.value is a nested Tensor", lambda: torch.nested.nested_tensor([torch.ones(2)]))
_box("a_jagged_tensor", r"box\.value is a nested NestedTensor", _jagged)
_box("a_tensor_of_bits", r"box\.value is a Tensor, .* of torch\.bits8", lambda: torch.empty(2, dtype=torch.bits8))
_box("a_tensor_of_a_class", r"box\.value is a _Scaled, a subclass of torch\.Tensor", _scaled)


# --- modules ---------------------------------------------------------------------------------------------


class _Unusual(nn.Module):
    """Buffers that training makes, of other shapes and types than in the beginning, and extra states that grow."""

    none: torch.Tensor | None
    grows: torch.Tensor
    wider: torch.Tensor
    turned: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = _mlp(1), rank
        self.register_buffer("none", None)
        self.register_buffer("grows", torch.zeros(0))
        self.register_buffer("wider", torch.zeros(3))
        self.register_buffer("turned", torch.zeros(3, dtype=torch.complex64).conj())
        self.observer = torch.ao.quantization.PerChannelMinMaxObserver(ch_axis=1)  # it shapes its buffers itself
        self.extra: Any = None
        self.late: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        total = x.detach().sum(0)
        self.none = total if self.none is None else self.none + total
        self.grows = torch.cat([self.grows, total[:1]])
        self.wider = self.wider.double() + 1 / 3
        self.turned = (self.turned.conj().clone() + complex(1, 2)).conj()
        self.observer(x.detach())  # type: ignore[no-untyped-call]
        before = torch.zeros(0) if self.extra is None else self.extra
        self.extra = torch.cat([before, total[: 1 + self.rank]])
        self.late = {"count": (self.late or {"count": 0})["count"] + 1, "row": total}
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return found | ({"late": {"nested": self.late}} if self.late else {})

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.late = state_dict.get("late", {}).get("nested")
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "late"}, *args, **kwargs)


@exact
def a_module_that_training_changes(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model = _Unusual(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fit = _fit(model, optimizer)
    return Scene(state={"model": model, "optimizer": optimizer}, step=fit, more=lambda: model.late)


@exact
def models_that_share_weights(rank: int, world_size: int) -> Scene:
    """Two models with one trunk and an optimizer each, tied weights, frozen ones, and one model that is compiled."""
    torch.manual_seed(1)
    trunk, tied = nn.Linear(6, 6), nn.Linear(6, 6)
    actor = nn.Sequential(trunk, nn.Tanh(), tied, nn.Linear(6, 3))
    critic = torch.compile(nn.Sequential(trunk, nn.Linear(6, 1)), backend="eager")
    tied.weight = trunk.weight
    torch.manual_seed(1000 + rank + world_size)
    actor[3].bias.requires_grad_(requires_grad=False)
    one = torch.optim.AdamW(actor.parameters(), lr=0.01)
    other = torch.optim.AdamW([*critic.parameters()], lr=0.02)  # type: ignore[attr-defined]
    fits = [_fit(actor, one), _fit(critic, other)]
    state = {"other": other, "actor": actor, "critic": critic, "one": one}
    return Scene(state=state, step=lambda: sum(fit() for fit in fits))


@exact
def a_model_on_some_ranks(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Of four ranks two hold the shards; the others have the same model, and nothing of it."""
    mesh = DeviceMesh("cpu", [0, 1])
    model = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)]))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        if rank < 2:
            model["weight"].grad = model["weight"].detach() * 0.1
            optimizer.step()
        return 0.0

    return Scene(state={"model": model, "optimizer": optimizer}, step=step)


@not_resumed
def a_buffer_that_nobody_has_declared(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fit = _fit(model, optimizer)

    def step() -> float:
        model.register_buffer("late", torch.ones(2))
        return fit()

    return Scene(state={"model": model, "optimizer": optimizer}, step=step)


def _with(name: str, change: Callable[[nn.Module], Any]) -> None:
    def make(rank: int, world_size: int) -> Scene:  # noqa: ARG001
        model = _mlp(1)
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))

    REFUSED[name] = make


def _codes() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8)


_with("a_quantized_buffer", lambda model: model.register_buffer("codes", _codes()))
_with("a_sparse_buffer", lambda model: model.register_buffer("sparse", torch.eye(4).to_sparse_csr()))
_with("a_buffer_without_memory", lambda model: model.register_buffer("meta", torch.zeros(4, device="meta")))
_with("an_expanded_buffer", lambda model: model.register_buffer("expanded", torch.ones(1).expand(4)))
_with("a_parameter_without_a_shape", lambda model: model.add_module("lazy", nn.LazyLinear(4)))


# --- values ----------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARM = "warm"
    COLD = "cold"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@exact
def values_of_all_kinds(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Kinds of dicts, members of enumerations, and tensors that are one under several names."""
    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    one = torch.zeros(3)
    box = Box(
        {
            "counter": Counter({2: 1}),
            "ordered": OrderedDict(a=torch.zeros(1), b=2),
            "phase": Phase.WARM,
            "level": Level.LOW,
            "one": one,
            "again": [one],
        }
    )
    fit = _fit(model, optimizer)

    def step() -> float:
        value = box.value
        value["counter"].update([5, rank])
        value["ordered"].move_to_end("a")
        value["phase"] = {Phase.WARM: Phase.COLD, Phase.COLD: Phase.WARM}[value["phase"]]
        value["level"] = Level(3 - value["level"].value)
        value["one"] += 1
        loss = fit()
        schedule.step()
        return loss

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "box": box}
    return Scene(
        state=state, step=step, more=lambda: [type(schedule.milestones).__name__, *map(type, box.value.values())]
    )


@exact
def an_average_that_begins_late(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Shards of an average that a new process does not have yet."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    model = _mlp(1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = Box({})
    made = _train({"model": model, "optimizer": optimizer, "average": average}, model, optimizer)
    fit, done = made.step, made.state["data"]

    def step() -> float:
        loss = fit()
        old = defaultdict(float, average.value)
        average.value = {name: 0.9 * old[name] + 0.1 * each.detach() for name, each in model.named_parameters()}
        return loss

    made.step = step
    assert done is not None
    return made


@refused
def a_value_that_is_a_part_of_a_sum(rank: int, world_size: int) -> Scene:
    mesh = init_device_mesh("cpu", (world_size,))
    part = DTensor.from_local(torch.ones(3) * rank, mesh, [Partial()], run_check=False)
    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train({"model": model, "optimizer": optimizer, "box": Box(part)}, model, optimizer)


@refused
def a_schedule_that_holds_a_function(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    class Warm:
        def __init__(self) -> None:
            self.curve = lambda count: 1 / (1 + count)

        def __call__(self, count: int) -> float:
            return float(self.curve(count))

    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Warm())
    return _train({"model": model, "optimizer": optimizer, "schedule": schedule}, model, optimizer)


# --- parts -----------------------------------------------------------------------------------------------


@exact
def parts_of_some_ranks(rank: int, world_size: int) -> Scene:
    """Each rank calls its stage by another name, and the last rank has a part more."""
    model, buffer = _mlp(rank), Box(torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit = _fit(model, optimizer, all_ranks=False)

    def step() -> float:
        buffer.value = buffer.value + 1
        dist.barrier()
        return fit()

    state = {f"stage{rank}": model, "optimizer": optimizer}
    return Scene(state=state | ({"buffer": buffer} if rank == world_size - 1 else {}), step=step)
