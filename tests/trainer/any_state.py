"""Trainings whose ranks hold other things than a plain data-parallel one: `python -m tests.trainer.any_state < plays`.

A play names a scene, a run directory, the number of ranks, and how many steps to do.  Ranks are forked from one process
that has torch already.  Each prints a fingerprint of all that it has, after each step and right after its resume.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.trainer import warm

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Play:
    scene: str
    run_dir: str
    world_size: int = 2
    steps: int
    resume: bool = False
    every: int = 1
    whole: bool = False  # fingerprints are of whole tensors, so that other shardings have the same


@dataclass(frozen=True, kw_only=True)
class Played:
    run_dir: str
    codes: list[int]
    prints: list[dict[str, str]]  # of each rank: fingerprint by step
    said: str


@dataclass(kw_only=True)
class Scene:
    """What a script has: parts for CheckpointManager, one step, and more that it has besides."""

    state: dict[str, Any]
    step: Callable[[], float]
    more: Callable[[], Any] = field(default=lambda: None)
    counts_anew: frozenset[str] = frozenset()  # parts whose own state says the same in other numbers after a resume


SCENES: dict[str, Callable[[int, int], Scene]] = {}


def scene(make: Callable[[int, int], Scene]) -> Callable[[int, int], Scene]:
    SCENES[make.__name__] = make
    return make


def play(plays: list[Play]) -> list[Played]:
    """Play one after the other, in a process of their own."""
    path = os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_", "RANK", "WORLD"))}
    done = warm.run(
        [sys.executable, "-m", "tests.trainer.any_state"],
        text="\n".join(json.dumps(asdict(each)) for each in plays),
        cwd=ROOT, timeout=60 + 2 * LIMIT_S * len(plays),
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Played(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"run_dir"')]


def main() -> None:
    import torch  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: PLC0415

    import stepkeeper_trainer  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    for line in sys.stdin.read().splitlines():
        print(json.dumps(asdict(_play(Play(**json.loads(line))))), flush=True)


def _play(each: Play) -> Played:
    with tempfile.TemporaryDirectory() as scratch:
        pids = []
        for rank in range(each.world_size):
            pid = os.fork()
            if pid == 0:
                _be_rank(each, rank, Path(scratch))
            pids.append(pid)
        codes = [_wait(pid) for pid in pids]
        prints, said = [], []
        for rank in range(each.world_size):
            found = Path(scratch, f"prints-{rank}")
            rows = [line.split() for line in found.read_text().splitlines()] if found.exists() else []
            prints.append(dict(rows))
            said += [f"[{rank}] {line}" for line in Path(scratch, f"log-{rank}").read_text().splitlines()]
        return Played(run_dir=each.run_dir, codes=codes, prints=prints, said="\n".join(said))


def _wait(pid: int) -> int:
    limit_at = time.monotonic() + LIMIT_S
    while time.monotonic() < limit_at:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


def _be_rank(each: Play, rank: int, scratch: Path) -> None:
    log = os.open(scratch / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr, force=True)
    code = 1
    try:
        code = _train(each, rank, scratch)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # noqa: BLE001  # it is printed, and the code says it
        code = getattr(error, "exit_code", 1)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _train(each: Play, rank: int, scratch: Path) -> int:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from stepkeeper_trainer import CheckpointManager  # noqa: PLC0415

    store = dist.FileStore(str(scratch / "store"), each.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=each.world_size)
    torch.manual_seed(1000 + rank)
    made = _find(each.scene)(rank, each.world_size)
    manager = CheckpointManager(
        made.state,
        every=each.every,
        run_dir=each.run_dir,
        total_steps=each.steps,
        storage_test="off",
        resume_from="latest" if each.resume else None,
        save_within_s=100,
    )
    manager.resume()
    with (scratch / f"prints-{rank}").open("w") as prints:
        if each.resume:
            prints.write(f"{manager.step} {fingerprint(made, whole=each.whole)}\n")
        while not manager.finished:
            loss = made.step()
            prints.write(f"{manager.step + 1} {fingerprint(made, whole=each.whole)}\n")
            manager.step_done(loss=loss, tokens=1)
    return manager.finish()


def _find(name: str) -> Callable[[int, int], Scene]:
    if name in SCENES:
        return SCENES[name]
    from tests.trainer.common_scenes import COMMON  # noqa: PLC0415
    from tests.trainer.package_scenes import PACKAGE_SCENES  # noqa: PLC0415
    from tests.trainer.unusual_scenes import EXACT, NOT_RESUMED, REFUSED  # noqa: PLC0415

    return (COMMON | PACKAGE_SCENES | EXACT | NOT_RESUMED | REFUSED)[name]


def fingerprint(made: Scene, *, whole: bool = False) -> str:
    """Return a hash of everything that a script has: each bit, type and place of it counts.

    With `whole` only what has a meaning on any number of ranks counts.
    """
    import torch  # noqa: PLC0415

    digest = hashlib.blake2b(digest_size=8)
    state = {name: part for name, part in made.state.items() if name not in made.counts_anew}
    for value in leaves(state, whole=True) if whole else leaves([state, made.more(), torch.get_rng_state()]):
        digest.update(value)
    for part in made.state.values():
        if isinstance(part, torch.nn.Module):
            digest.update(repr([each.requires_grad for each in part.parameters()]).encode())
    return digest.hexdigest()


def leaves(value: Any, *, whole: bool = False) -> Iterator[bytes]:  # noqa: C901, PLR0912  # one branch a type
    """Yield every bit, type and place of what a script has."""
    import torch  # noqa: PLC0415
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(value, DTensor) and whole:
        yield from leaves(value.full_tensor(), whole=True)
    elif isinstance(value, DTensor):
        yield str(value._spec.placements).encode()
        yield from leaves(value.to_local())
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        yield f"{type(value).__name__} {context}".encode()
        yield from leaves([getattr(value, name) for name in names])
    elif isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        yield from leaves(value.to_dense(), whole=whole)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.device}".encode()
        yield value.detach().resolve_conj().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, torch.nn.Module):
        yield from leaves({**dict(value.named_parameters()), **dict(value.named_buffers())}, whole=whole)
        yield from leaves(getattr(value, "extra", None))
    elif isinstance(value, ZeroRedundancyOptimizer):
        yield from leaves(value.optim, whole=whole)
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from leaves({key: item for key, item in group.items() if key != "params"}, whole=whole)
            for parameter in group["params"]:
                yield from leaves([parameter, dict(value.state.get(parameter, {}))], whole=whole)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from leaves(value[key], whole=whole)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item, whole=whole)
    elif hasattr(value, "state_dict"):
        yield from leaves(value.state_dict(), whole=whole)
    else:
        yield repr(value).encode()


# --- what scripts have ---------------------------------------------------------------------------------


def _mlp(seed: int, inner: int = 12) -> torch.nn.Module:
    """The same on all ranks that give the same seed."""
    import torch  # noqa: PLC0415

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, inner), torch.nn.Tanh(), torch.nn.Linear(inner, 3))
    torch.set_rng_state(state)
    return model


def _fit(model: Any, *optimizers: Any, all_ranks: bool = True) -> Callable[[], float]:
    """One step on data of this rank's own; gradients are those of all ranks together, where they share the model."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    def step() -> float:
        def closure() -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            found = model(data).square().mean()
            found.backward()
            for parameter in model.parameters() if all_ranks else ():
                if parameter.grad is not None and not isinstance(parameter, DTensor):
                    dist.all_reduce(parameter.grad)
            return found

        data = torch.randn(5, 6)
        loss = 0.0
        for optimizer in optimizers:
            loss = float(optimizer.step(closure))
        return loss

    return step


@scene
def plain(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415

    model = _mlp(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def converted(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """A module whose state dict holds copies of another shape and name, with hooks that turn them back."""
    import torch  # noqa: PLC0415

    model = _mlp(1)

    def turn(module: Any, state: dict[str, Any], prefix: str, _meta: Any) -> None:  # noqa: ARG001
        state[f"{prefix}turned"] = state.pop(f"{prefix}weight").t().contiguous()

    def turn_back(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
        state[f"{prefix}weight"] = state.pop(f"{prefix}turned").t()

    model[0]._register_state_dict_hook(turn)
    model[0].register_load_state_dict_pre_hook(turn_back)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def extra_state(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Extra states: a tensor in one module, JSON in another, and one of each rank."""
    import torch  # noqa: PLC0415

    class Recipe(torch.nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.extra, torch.Tensor):
                self.extra = self.extra + x.abs().max().detach()
            else:
                self.extra = {**self.extra, "seen": self.extra["seen"] + 1 + rank}
            return x

    model = torch.nn.Sequential(_mlp(1), Recipe(torch.zeros(4)), Recipe({"seen": 0, "raw": b"\0\1", "of": (1, 2)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def zero1(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    model = _mlp(1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def momentum_on_one_rank(rank: int, world_size: int) -> Scene:
    """As distributed Muon has it: one rank keeps the momentum of a parameter, and gives all the new value."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    class Owned(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            for number, parameter in enumerate(self.param_groups[0]["params"]):
                owner = number % world_size
                if rank == owner:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum, alpha=0.01)
                dist.broadcast(parameter.data, owner)
            return loss

    model = _mlp(1)
    optimizer = Owned(model.parameters())
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def pipeline(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Each rank has a stage, with the names of the whole model."""
    import torch  # noqa: PLC0415

    model = torch.nn.Sequential()
    model.add_module(f"stage{rank}", _mlp(rank, 8 + rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (rank + 1))
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


@scene
def stages_of_one_name(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Each rank has a stage of its own size, and all call it the same."""
    import torch  # noqa: PLC0415

    model = _mlp(rank, 8 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


@scene
def local_experts(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """A trunk that all ranks share, and experts of each rank under one name; two pairs of ranks hold one alike."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = _mlp(1)
            self.expert = _mlp(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trunk(x) + self.expert(x) * (1 + rank % 2)

    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank % 2)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6, generator=data)).square().mean()
        loss.backward()
        for parameter in model.trunk.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return float(loss.detach())

    state = {"model": model, "optimizer": optimizer, "data": _Generator(data)}
    return Scene(state=state, step=step)


class _Generator:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


@scene
def a_child_called_module(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """A child with the name of a wrapper's, and another child that has the name of one in it."""
    import torch  # noqa: PLC0415

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.ModuleDict({"head": torch.nn.Linear(6, 3)})
            self.head = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module["head"](x) - self.head(x)

    torch.manual_seed(1)
    model = Net()
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def gan(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Two models with an optimizer each, and a parameter of no module."""
    import torch  # noqa: PLC0415

    one, other = _mlp(1), _mlp(2)
    scale = torch.nn.Parameter(torch.ones(3))
    first = torch.optim.AdamW([{"params": one.parameters()}, {"params": [scale], "lr": 0.1}], lr=0.01)
    second = torch.optim.Adam(other.parameters(), lr=0.02)

    def step() -> float:
        data = torch.randn(5, 6, generator=torch.Generator().manual_seed(int(scale.sum() * 1000)))
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss = (one(data) * scale - other(data)).square().mean()
        loss.backward()
        first.step()
        second.step()
        return float(loss.detach())

    state = {"model": one, "one": first, "other": second, "critic": other}
    return Scene(state=state, step=step, more=lambda: scale)


@scene
def loader_of_each_rank(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """A position in the data that nothing marks as one of each rank: equal in the beginning, not later."""
    import torch  # noqa: PLC0415

    class Position:
        def __init__(self) -> None:
            self.at, self.rows = 0, torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "rows": self.rows}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, self.rows = state["at"], state["rows"]

    model = _mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    position = Position()
    fit = _fit(model, optimizer)

    def step() -> float:
        position.at += 1 + (rank if position.at > 1 else 0)
        position.rows = position.rows + rank
        return fit()

    return Scene(state={"model": model, "optimizer": optimizer, "loader": position}, step=step)


def _reader(kind: type) -> Callable[[int, int], Scene]:
    """Train beside a reader of a kind; each step reads once."""

    def make(rank: int, world_size: int) -> Scene:
        import torch  # noqa: PLC0415

        model = _mlp(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        reader = kind(rank, world_size)
        fit = _fit(model, optimizer)

        def step() -> float:
            reader.read()
            return fit()

        return Scene(state={"model": model, "optimizer": optimizer, "reader": reader}, step=step)

    return make


class _Counting:
    """Counts what this rank has read: equal on all ranks, and another place in the data on more of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.count = rank, world_size, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.read()

    def read(self) -> int:
        self.count += 1
        return (self.count - 1) * self.world_size + self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def reshard(self) -> _Counting:
        """As a streaming data set of Hugging Face has it: it has nothing to do with ranks."""
        raise AssertionError("not called")


class _CountingForAll(_Counting):
    """Counts what the whole job has read."""

    per_rank = False

    def read(self) -> int:
        self.count += 1
        return self.count


class _Shards(_Counting):
    """Has shards of its own with a place in each; any number of ranks can share them anew."""

    def __init__(self, rank: int, world_size: int) -> None:
        import torch  # noqa: PLC0415

        super().__init__(rank, world_size)
        self.places = torch.zeros(12 // world_size, dtype=torch.int64)
        self.shards = list(range(rank, 12, world_size))
        self.mean = torch.zeros(3)

    def read(self) -> int:
        at = self.count % len(self.shards)
        self.places[at] += 1 + self.shards[at]
        self.mean = self.mean + 1
        return super().read()

    def state_dict(self) -> dict[str, Any]:
        return {"places": self.places, "shards": self.shards, "mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places, self.shards, self.mean, self.count = (
            state["places"],
            state["shards"],
            state["mean"],
            state["count"],
        )
        print(f"reader has {dict(zip(self.shards, self.places.tolist(), strict=True))} {self.mean.tolist()}")

    def reshard(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:  # type: ignore[override]
        import torch  # noqa: PLC0415

        known = {shard: place for s in states for shard, place in zip(s["shards"], s["places"].tolist(), strict=True)}
        mine = sorted(known)[rank::world_size]
        return states[0] | {"shards": mine, "places": torch.tensor([known[shard] for shard in mine])}


class _ShardsOfOne(_Shards):
    """Cannot be shared anew by its last rank."""

    def reshard(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        if rank == world_size - 1:
            raise RuntimeError("no shard is left")
        return super().reshard(states, rank, world_size)


def _on_mesh(degree: int) -> Callable[[int, int], Scene]:
    """Ranks that read the same data are neighbours; each data-parallel rank reads at a pace of its own."""

    def make(rank: int, world_size: int) -> Scene:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        from stepkeeper_trainer import MeshLoader  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (degree, world_size // degree), mesh_dim_names=("dp", "tp"))
        made = _reader(_Counting)(rank, world_size)
        reader = made.state["reader"]
        loader = MeshLoader(reader, mesh["dp"])
        fit = made.step

        def step() -> float:
            reader.count += loader.rank
            return fit()

        return dataclasses.replace(made, state={**made.state, "reader": _Printed(loader)}, step=step)

    return make


class _Printed:
    """Prints what it loads."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.state_dict, self.reshard = loader, loader.state_dict, loader.reshard

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        print(f"data rank {self.loader.rank} goes on at {self.loader.loader.count}")


SCENES |= {
    "two_data_ranks": _on_mesh(2),
    "one_data_rank": _on_mesh(1),
    "reader_that_counts": _reader(_Counting),
    "reader_that_counts_for_all": _reader(_CountingForAll),
    "reader_that_reshards": _reader(_Shards),
    "reader_that_reshards_badly": _reader(_ShardsOfOne),
}


@scene
def experts_that_are_compared_slowly(rank: int, world_size: int) -> Scene:
    """Several steps end while the ranks find out which of them hold different values."""
    from stepkeeper_trainer.save.planner import Planner  # noqa: PLC0415

    plan = Planner._plan_together

    def plan_slowly(self: Any, tensors: Any, contents: Any) -> Any:
        time.sleep(1.0 if contents else 0.0)
        return plan(self, tensors, contents)

    Planner._plan_together = plan_slowly  # type: ignore[method-assign]
    made = local_experts(rank, world_size)
    step = made.step

    def step_slowly() -> float:
        time.sleep(0.3)
        return step()

    return dataclasses.replace(made, step=step_slowly)


@scene
def lbfgs(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415

    model = _mlp(1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    data = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    return Scene(state={"model": model, "optimizer": optimizer}, step=lambda: float(optimizer.step(closure)))  # type: ignore[no-untyped-call]


@scene
def moments_of_another_type(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """Parameters in bfloat16, moments in float32: torch's own loading would round them."""
    import torch  # noqa: PLC0415

    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                moment = state.setdefault("moment", torch.zeros(parameter.shape))
                state["count"] = state.get("count", torch.tensor(0, dtype=torch.int64)) + 1
                moment.mul_(0.9).add_(parameter.grad.float())
                parameter.sub_((0.01 * moment).to(parameter.dtype))
            return loss

    model = _mlp(1).to(torch.bfloat16)
    optimizer = Wide(model.parameters())

    def step() -> float:
        data = torch.randn(5, 6, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    return Scene(state={"model": model, "optimizer": optimizer}, step=step)


def _quantized() -> Any:
    """A state of 8 bits with a scale, as quantizing optimizers have: a subclass that consists of two tensors."""
    import torch  # noqa: PLC0415
    from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: PLC0415

    class Eight(torch.Tensor):
        @staticmethod
        def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Eight:  # noqa: FBT001, PYI034
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

        def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:  # noqa: FBT001
            self.codes, self.scale, self.signed = codes, scale, signed

        def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
            return ["codes", "scale"], [self.signed, torch.float32]

        @classmethod
        def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any = None, stride: Any = None) -> Eight:
            return cls(inner["codes"], inner["scale"], context[0])

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            name = function._schema.name
            if name in ("aten::detach", "aten::_to_copy", "aten::clone", "aten::alias"):
                made = cls(args[0].codes.clone(), args[0].scale.clone(), args[0].signed)
                return (
                    return_and_correct_aliasing(function, args, kwargs or {}, made) if name == "aten::detach" else made
                )
            raise NotImplementedError(name)

    return Eight


EIGHT: Any = None


@scene
def quantized_moments(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415

    global EIGHT  # noqa: PLW0603  # the class is found among those that the script has made
    EIGHT = EIGHT or _quantized()

    class Small(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                old = state.get("moment")
                moment = parameter.grad + (old.codes.float() * old.scale * 0.9 if old is not None else 0)
                scale = moment.abs().max() / 127
                state["moment"] = EIGHT((moment / scale).round().to(torch.int8), scale, True)  # noqa: FBT003
                parameter.sub_(0.01 * moment)
            return loss

    model = _mlp(1)
    optimizer = Small(model.parameters())
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer))


@scene
def buffers_of_each_rank(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    """DDP keeps parameters equal; statistics of a batch norm are each rank's own."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    inner = torch.nn.Sequential(_mlp(1), torch.nn.BatchNorm1d(3))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


@scene
def a_replica_that_drifts(rank: int, world_size: int) -> Scene:
    """A device that computes wrongly under DDP: the last rank has other bytes from its third step on."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    model = DistributedDataParallel(_mlp(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit = _fit(model, optimizer, all_ranks=False)

    def step() -> float:
        loss = fit()
        if rank == world_size - 1 and int(optimizer.state[next(model.parameters())]["step"]) == 3:
            with torch.no_grad():
                model.module[0].weight[0, 0] += 1
        return loss

    return Scene(state={"model": model, "optimizer": optimizer}, step=step)


def _sharded(rank: int, world_size: int, how: str) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: PLC0415

    model = _mlp(1)
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif how == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards")))
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(7)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Scene(state={"model": model, "optimizer": optimizer, "data": _Generator(data)}, step=step)


@scene
def fsdp2(rank: int, world_size: int) -> Scene:
    return _sharded(rank, world_size, "fsdp")


@scene
def hsdp(rank: int, world_size: int) -> Scene:
    return _sharded(rank, world_size, "hsdp")


@scene
def tensor_parallel(rank: int, world_size: int) -> Scene:
    return _sharded(rank, world_size, "tp")


@scene
def stages_that_are_sharded(rank: int, world_size: int) -> Scene:
    """Two stages of one name, each sharded among its half of the ranks."""
    import torch  # noqa: PLC0415
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    half = world_size // 2
    stage = rank // half
    meshes = [DeviceMesh("cpu", list(range(start, start + half))) for start in (0, half)]
    model = _mlp(stage)
    fully_shard(model, mesh=meshes[stage])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(7)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Scene(state={"model": model, "optimizer": optimizer, "data": _Generator(data)}, step=step)


@scene
def a_replica_of_shards_that_drifts(rank: int, world_size: int) -> Scene:
    """A device that computes wrongly under HSDP: the last rank's shard has other bytes from its third step on."""
    import torch  # noqa: PLC0415

    plain = _sharded(rank, world_size, "hsdp")
    weight = next(plain.state["model"].parameters())

    def step() -> float:
        loss = plain.step()
        if rank == world_size - 1 and int(plain.state["optimizer"].state[weight]["step"]) == 3:
            with torch.no_grad():
                weight.to_local()[0, 0] += 1
        return loss

    return Scene(state=plain.state, step=step)


def _in_halves(rank: int, world_size: int) -> tuple[Any, Any]:
    """Return the model of a rank's half by DistributedDataParallel, with a group of its own, and the optimizer."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    half = world_size // 2
    groups = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    model = DistributedDataParallel(_mlp(rank // half), process_group=groups[rank // half])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@scene
def stages_of_data_parallel_ranks(rank: int, world_size: int) -> Scene:
    """Two stages of one name, each by DistributedDataParallel on its half of the ranks."""
    model, optimizer = _in_halves(rank, world_size)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


@scene
def an_actor_that_drifts(rank: int, world_size: int) -> Scene:
    """Two models by DistributedDataParallel, each on its half of the ranks; the second rank of one has other bytes."""
    import torch  # noqa: PLC0415

    half = world_size // 2
    model, optimizer = _in_halves(rank, world_size)
    fit = _fit(model, optimizer, all_ranks=False)
    name = "actor" if rank < half else "critic"

    def step() -> float:
        loss = fit()
        if rank == half - 1 and int(optimizer.state[next(model.parameters())]["step"]) == 3:
            with torch.no_grad():
                model.module[0].weight[0, 0] += 1
        return loss

    return Scene(state={name: model, f"{name}_optimizer": optimizer}, step=step)


@scene
def fsdp1(rank: int, world_size: int) -> Scene:  # noqa: ARG001
    import torch  # noqa: PLC0415
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    model = FullyShardedDataParallel(_mlp(1), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Scene(state={"model": model, "optimizer": optimizer}, step=_fit(model, optimizer, all_ranks=False))


if __name__ == "__main__":
    main()
