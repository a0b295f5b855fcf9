"""What a save costs rank 0 of many ranks: `python -m tests.bench_save_scale` prints a table.

One process is rank 0.  Its planner, files, reports, `.metadata`, manifest and commit are the real ones.  Of the other
ranks there is what they send and what they leave on the disk: plans, made beforehand by the code that makes them, and
reports and files of the right size.  So what gloo and the network add is in none of the figures, and the bytes of the
tensors are few.  Processor time and wall time stand beside each other: the machine may have other work.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from stepkeeper_trainer.coordinate import groups
from stepkeeper_trainer.coordinate.agreement import Agreement, Call, Proposal
from stepkeeper_trainer.environment import read_environment
from stepkeeper_trainer.formats.manifest import CHUNK_BYTES, FileEntry
from stepkeeper_trainer.formats.steps import list_steps, newest_verified
from stepkeeper_trainer.formats.verify import Cache, look_again, look_at
from stepkeeper_trainer.link import Link
from stepkeeper_trainer.save.commit import Commits, Completer
from stepkeeper_trainer.save.division import Held
from stepkeeper_trainer.save.persist import Persister
from stepkeeper_trainer.save.planner import Planner, Share, share_of
from stepkeeper_trainer.save.replicas import digest, hash_tensor
from stepkeeper_trainer.save.report import Item, RankReport, encode_items, report_name
from stepkeeper_trainer.save.save import Phase, Save, Summary
from stepkeeper_trainer.save.serialise import ALIGNMENT, frame
from stepkeeper_trainer.save.staging import Staging

LIMIT_S = 3600.0
NO_SAVE_ID = "f" * 32  # in its place, until a save is known
SHARDS = 16  # of a replica, with `hsdp`
SHAPES = ((8192, 4), (8192,), (1024,), (3072, 8), (2048, 4), (1024, 4), (4096, 4), (2048,))
Figures = dict[str, float]


@dataclass(frozen=True)
class Layout:
    """How the state lies on the ranks; the tensors of one shape lie alike, as the layers of a model do."""

    kind: str
    ranks: int
    tensors: int
    saves: int  # the first one, and later ones

    def names(self) -> list[str]:
        """Return the names of the tensors: parameters, and their moments."""
        prefixes = ("model.layers", "optimizer.state.model.exp_avg.layers", "optimizer.state.model.exp_avg_sq.layers")
        return [f"{prefixes[n % 3]}.{n // 24}.block.{n // 3 % 8}.projection.weight" for n in range(self.tensors)]

    def kinds(self, rank: int) -> list[torch.Tensor]:
        """Return one tensor of each shape as a rank holds it."""
        shapes = SHAPES[: self.tensors]
        if self.kind == "replicated":
            return [torch.zeros(shape) for shape in shapes]
        world, placements = torch.arange(self.ranks), [Shard(0)]
        if self.kind == "hsdp":
            world, placements = world.view(-1, SHARDS), [Replicate(), Shard(0)]
        mesh = DeviceMesh("cpu", world, _init_backend=False, _rank=rank)
        parts = world.shape[-1]
        place = rank % parts
        found = []
        for shape in shapes:
            rows = -(-shape[0] // parts)
            own = torch.zeros((max(0, min(rows, shape[0] - place * rows)), *shape[1:]))
            stride = torch.empty(shape).stride()
            found.append(
                DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
            )
        return found

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the state of a rank."""
        kinds = self.kinds(rank)
        return {name: kinds[n % len(kinds)] for n, name in enumerate(self.names())}


class Clock:
    """Of one phase: what the simulation takes for itself is left out."""

    def __init__(self) -> None:
        self._left_out = [0.0, 0.0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done within."""
        at = self._now()
        yield
        self._left_out = [out + now - then for out, now, then in zip(self._left_out, self._now(), at, strict=True)]

    @contextmanager
    def measured(self, figures: Figures, name: str) -> Iterator[None]:
        """Note processor and wall seconds, and the peak of memory."""
        self._left_out = [0.0, 0.0]
        Path("/proc/self/clear_refs").write_text("5")
        at = self._now()
        yield
        cpu, wall = (now - then - out for now, then, out in zip(self._now(), at, self._left_out, strict=True))
        figures |= {f"{name}, CPU s": cpu, f"{name}, wall s": wall, f"{name}, peak MiB": _status("VmHWM:")}

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Crowd:
    """Stands in for gloo in one of rank 0's groups: brings what the others send, and takes what it sends them."""

    def __init__(self, clock: Clock, sent: list[Path]) -> None:
        """Take what each other rank of the group sends of the plans."""
        self._clock, self._sent = clock, sent
        self.taken: list[bytes] = []  # what each rank was sent last

    def rank(self) -> int:
        """Return rank 0's place."""
        return 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Fill in the sizes of what the others send; flags are rank 0's own."""
        if options.reduceOp == dist.ReduceOp.SUM:
            tensors[0][1:] = torch.tensor([path.stat().st_size for path in self._sent])
        return Done(tensors)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _options: Any) -> Any:
        """Bring the plans."""
        with self._clock.paused():
            outputs[0][0].copy_(inputs[0])
            for path, tensor in zip(self._sent, outputs[0][1:], strict=True):
                data = path.read_bytes()
                ctypes.memmove(tensor.data_ptr(), data, len(data))
        return Done(outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], _options: Any) -> Any:
        """Take the shares; rank 0 gets its own."""
        outputs[0].copy_(inputs[0][0])
        with self._clock.paused():
            self.taken = [tensor.numpy().tobytes() for tensor in inputs[0]]
        return Done(outputs)

    def reduce(self, tensors: list[torch.Tensor], _options: Any) -> Any:
        """Say of flags what rank 0 says."""
        return Done(tensors)

    broadcast = reduce


def group_of(layout: Layout, clock: Clock, directory: Path) -> groups.Group:
    """Return rank 0's group, in which the others have sent their plans."""
    plans = [pickle.dumps(message(layout, rank)) for rank in range(layout.ranks)]
    levels = []
    for block in groups.blocks(0, layout.ranks, groups.FAN_OUT):
        sent = []
        for rank in block[1:]:
            sent.append(directory / f"plans-{block.step}-{rank}")
            behind = plans[rank : rank + block.step]
            sent[-1].write_bytes(behind[0] if block.step == 1 else pickle.dumps(behind))
        gloo: Any = Crowd(clock, sent)
        levels.append(groups.Level(gloo, block, layout.ranks, "crowd"))
    return groups.Group("crowd", 0, layout.ranks, levels)


def answers_of(group: groups.Group) -> list[bytes]:
    """Return what each rank was sent last, in the order of the ranks."""
    found: list[bytes] = []
    for level in group.levels:
        taken = cast("Any", level.gloo).taken
        found += [part for data in (taken[1:] if found else taken) for part in level.split(data)]
    return found


class Done(dist.Work):
    """What is complete."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, _timeout: object = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> Future[Any]:
        """Return the result."""
        return self._future


def plan_of(layout: Layout, rank: int) -> SavePlan:
    """Return the plan of a rank: torch's, of one tensor of each shape, for all names."""
    kinds = layout.kinds(rank)
    plan = create_default_local_save_plan({str(n): tensor for n, tensor in enumerate(kinds)}, rank == 0)
    of_kind = {int(item.index.fqn): item for item in plan.items}
    items = []
    for n, name in enumerate(layout.names()):
        item = of_kind[n % len(kinds)]
        items.append(replace(item, index=MetadataIndex(name, item.index.offset)))
    return SavePlan(items)


def report_of(layout: Layout, rank: int, share: Share) -> RankReport:
    """Return what another rank reports of a save, but for the name of the save."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in layout.kinds(rank)]
    frames = [frame(tensor.dtype, tuple(tensor.shape)) for tensor in own]
    number = {name: n % len(own) for n, name in enumerate(layout.names())}
    hashes = [hash_tensor(tensor) for tensor in own]
    name = f"__{rank}_0.distcp"
    items, at = [], 0
    for index in share.items:
        around = frames[number[index.fqn]]
        length = len(around.head) + around.data_bytes + len(around.tail)
        items.append(Item.of(index, name, at, length))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return RankReport(
        rank=rank,
        save_id=NO_SAVE_ID,
        items=encode_items(tuple(items)),
        files={name: FileEntry(bytes=at, xxh3_128="0" * 32, chunks=("0" * 32,) * -(-at // CHUNK_BYTES))},
        replicas=digest(share.replicas, lambda fqn: hashes[number[fqn]]),
    )


@dataclass(frozen=True)
class Others:
    """What the ranks beside rank 0 leave in a save in flight: reports, and files that have the size and no bytes."""

    directory: Path
    files: dict[str, int]

    @staticmethod
    def of(layout: Layout, directory: Path, answers: list[bytes]) -> Others:
        """Have each rank learn its share."""
        files = {}
        for rank in range(1, layout.ranks):
            part = pickle.loads(answers[rank])  # noqa: S301  # our own bytes
            report = report_of(layout, rank, share_of(part, plan_of(layout, rank)))
            (directory / report_name(rank)).write_bytes(msgspec.json.encode(report))
            files |= {name: entry.bytes for name, entry in report.files.items()}
        return Others(directory, files)

    def write(self, save: Save) -> None:
        """Write their part of a save."""
        for rank, (name, size) in enumerate(self.files.items(), 1):
            os.close(os.open(save.directory / name, os.O_CREAT | os.O_WRONLY))
            os.truncate(save.directory / name, size)
            data = (self.directory / report_name(rank)).read_bytes()
            (save.directory / report_name(rank)).write_bytes(data.replace(NO_SAVE_ID.encode(), save.save_id.encode()))
        os.sync()


def play(layout: Layout, directory: Path) -> Figures:
    """Plan, save four times, and look at the step; return seconds and MiB."""
    figures: Figures = {}
    clock = Clock()
    group = group_of(layout, clock, directory)
    figures["one rank's message, KiB"] = len(pickle.dumps(message(layout, layout.ranks - 1))) / 1024
    tensors = layout.state(0)
    with clock.measured(figures, "one rank's own plan"):
        Held.of(create_default_local_save_plan(dict(tensors), is_coordinator=True), tensors, {}, {})
    run = directory / "run"
    (run / "checkpoints").mkdir(parents=True)
    commits = Commits(run, replace(read_environment({}), epoch=None))
    staging = Staging()
    planner = Planner(rank=0, group=group, private={})
    completer = Completer(
        commits=commits,
        world_size=layout.ranks,
        link=Link(None, "0.0"),
        parent=None,
        before_commit=lambda _limit_at, _unwanted: None,
        on_committed=lambda _save: None,
        uploader=None,
    )
    persister = Persister(
        rank=0, staging=staging, planner=planner, completer=completer, uploader=None, snapshots=None, dcp_values=False
    )
    figures["before, MiB"] = _status("VmRSS:")
    with clock.measured(figures, "plans and division"):
        persister.prepare(tensors, LIMIT_S)
    answers = answers_of(group)
    figures["one rank's answer, KiB"] = len(answers[-1]) / 1024
    others = Others.of(layout, directory, answers)
    later: list[Figures] = []
    for step in range(1, 1 + layout.saves):
        save_id = f"{step:032x}"
        save = Save(
            sequence=step,
            save_id=save_id,
            summary=Summary(step=step, tokens=step, loss=1.0, parts={}),
            emergency=False,
            requested_at=time.time(),
            limit_at=time.time() + LIMIT_S,
            directory=commits.in_flight(step, save_id),
        )
        save.directory.mkdir()
        commits.claim(save.directory)
        others.write(save)
        assert staging.copy_if_it_fits(tensors)
        save.advance(Phase.WRITING)
        one: Figures = {}
        with clock.measured(one, "save"):
            persister.persist(save, tensors, changed=False, given_up=lambda _missing: None)
        if step == 1:
            figures |= {f"first {name}": value for name, value in one.items()}
        else:
            later.append(one)
    figures |= {f"later {name}": statistics.median(each[name] for each in later) for name in later[0]}
    assert completer.committed is not None
    final = completer.committed[0]
    figures[".metadata, MiB"] = (final / ".metadata").stat().st_size / 2**20
    figures["MANIFEST.json, MiB"] = (final / "MANIFEST.json").stat().st_size / 2**20
    return figures | look(clock, commits.checkpoints, final)


def look(clock: Clock, checkpoints: Path, step: Path) -> Figures:
    """Look at a step directory as a launch and as `checkpoints ls` do."""
    figures: Figures = {}
    cache = Cache(checkpoints)
    with clock.measured(figures, "listing the steps"):
        list_steps(checkpoints)
    with clock.measured(figures, "a look, with .metadata"):
        seen = look_at(step)
    assert not seen.problems, seen.problems[:3]
    assert seen.manifest is not None
    cache.remember(seen.manifest.manifest_xxh3_128, seen.facts(), read_at=time.time() + 60)
    with clock.measured(figures, "a look, known"):
        look_again(step, cache)
    with clock.measured(figures, "choosing, known"):
        chosen = newest_verified(checkpoints)
    assert chosen.chosen is not None
    assert chosen.chosen.path == step
    return figures


def message(layout: Layout, rank: int) -> Held:
    """Return what a rank sends of its plan."""
    return Held.of(plan_of(layout, rank), layout.state(rank), {}, {})


STEPS = 200
STEP_S = 0.02  # longer than the other ranks need to answer


def agree(rank: int, ranks: int, directory: Path, fan_out: int) -> Figures:
    """Be one of several real ranks that agree at each step; return what that costs one rank and step."""
    groups.FAN_OUT = fan_out
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    before = _sockets()
    agreement = Agreement(groups.new_group(LIMIT_S), within_s=LIMIT_S)
    sockets = _sockets() - before
    own: list[float] = []
    used = time.process_time()
    for _ in range(STEPS):
        time.sleep(STEP_S)
        at = time.thread_time()
        agreement.read(Proposal)
        agreement.issue(Proposal())
        own.append(time.thread_time() - at)
    used = time.process_time() - used
    agreement.read(Proposal)
    waits: list[float] = []
    for _ in range(STEPS):
        at = time.perf_counter()
        agreement.settle(Call.STEP, [0])
        waits.append(time.perf_counter() - at)
    return {
        "main thread, CPU us a step": 1e6 * statistics.median(own),
        "all threads, CPU us a step": 1e6 * used / STEPS,
        "until all have answered, us": 1e6 * min(waits),
        "sockets of the group": sockets,
    }


def _sockets() -> int:
    links = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sum(link.startswith("socket:") for link in links)


def agree_all(ranks: int, fan_out: int) -> Figures:
    """Fork the ranks, and return what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as name:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                figures = agree(rank, ranks, Path(name), fan_out)
                if rank == 0:
                    Path(name, "figures").write_text(json.dumps(figures))
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes
        found: Figures = json.loads(Path(name, "figures").read_text())
    return found


def print_table(head: str, columns: list[str], found: list[Figures]) -> None:
    """Print one row a figure."""
    print(f"\n| {head} | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name in found[0]:
        print(f"| {name} | " + " | ".join(f"{each[name]:.3g}" for each in found) + " |", flush=True)


def main() -> int:
    """Measure each layout in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument(
        "--agreement",
        default="2,4,8,16,64/64,64",
        help="numbers of real ranks that agree at each step; 64/8: in groups of 8 in place of the library's",
    )
    parser.add_argument("--layouts", default="fsdp,hsdp,replicated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        with tempfile.TemporaryDirectory() as directory:
            layout = Layout(chosen.one, int(chosen.ranks), chosen.tensors, chosen.saves)
            print(json.dumps(play(layout, Path(directory))), flush=True)
        os._exit(0)
    if chosen.agreement:
        cases = [word.partition("/")[::2] for word in chosen.agreement.split(",")]
        played = [(int(ranks), int(fan_out or groups.FAN_OUT)) for ranks, fan_out in cases]
        columns = [f"{ranks:,} ranks" + (f", groups of {size}" if ranks > size else "") for ranks, size in played]
        print_table("agreement", columns, [agree_all(*each) for each in played])
    counts = [int(word) for word in chosen.ranks.split(",") if word]
    for kind in chosen.layouts.split(",") if counts else ():
        found: list[Figures] = []
        for count in counts:
            options = ["--one", kind, "--ranks", str(count), "--tensors", str(chosen.tensors)]
            options += ["--saves", str(chosen.saves)]
            command = [sys.executable, "-m", "tests.bench_save_scale", *options]
            said = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S).stdout
            found.append(json.loads(said.splitlines()[-1]))
        print_table(f"{kind}, {chosen.tensors:,} tensors", [f"{count:,} ranks" for count in counts], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
