"""`make bench-checkpoint`: what saves cost, against torch's own and against the limits of the machine.

Every way to save runs in processes of its own, in turn, and is compared with a warm memory copy of the same
tensors and with `dd` and fsync of as many bytes in that very process: quote the ratios, not the seconds.

    python -m tests.bench_checkpoint [--mib 1024] [--tensors 100 20000] [--ranks 1 2] [--repeats 3]

A further part (loading, verification) is a function in `PARTS` that returns the lines of its section.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.trainer.ranks import free_port

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks-checkpoint.md"
WAYS = ("stepkeeper", "dcp.async_save, thread", "dcp.async_save, process", "dcp.save", "torch.save")
WARM_STEPS, CALM_STEPS, SAVES = 4, 12, 3
LIMIT_S = 1200.0
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints against torch's own and the machine's limits.")
    parser.add_argument("--mib", type=int, default=1024, help="of state, on each rank")
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 20_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--directory", type=Path, help="on the storage to measure (default: a temporary one)")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(save_once(options.worker, options)), flush=True)
        os._exit(0)  # what torch has left running does not count
    lines = ["# Checkpoints", "", HEAD.format(mib=options.mib, repeats=options.repeats, cores=os.cpu_count()), ""]
    for part in options.parts:
        lines += PARTS[part](options)
    options.page.write_text("\n".join(lines).rstrip() + "\n")


HEAD = """Medians of {repeats} runs on {cores} cores, {mib} MiB of state on each rank (a model and its AdamW). Machines
are noisy and shared: every figure is a ratio to a limit that the same process measured. Written by
`make bench-checkpoint`."""

SAVE_HEAD = """The state is the same on all ranks, so that each writes its share. *Blocked*: the call that saves, as a
multiple of one warm memory copy of the same list of tensors. *Slowed*: what steps took longer than their median from
the request until the step was durable, by the same measure. *Durable*: bytes per second until then, as a share of `dd`
with fsync. *Memory*: the peak above training alone, as a multiple of the state (child processes included)."""
COLUMNS = ("first blocked", "blocked", "slowed", "durable", "memory")


def save_part(options: argparse.Namespace) -> list[str]:
    """Return the section on saving."""
    lines = ["## Saving", "", SAVE_HEAD, ""]
    for ranks in options.ranks:
        for tensors in options.tensors:
            found: dict[str, list[Figures]] = {way: [] for way in options.ways}
            failed: dict[str, str] = {}
            for _ in range(options.repeats):
                for way in options.ways:
                    try:
                        found[way].append(launch(way, ranks, tensors, options))
                    except RuntimeError as error:
                        failed[way] = str(error)
            lines += [f"### {ranks} rank{'s' * (ranks > 1)}, {tensors} tensors", ""]
            lines += ["| | " + " | ".join(COLUMNS) + " | steps blocked s / slowed s / durable s |"]
            lines += ["|---" * (len(COLUMNS) + 2) + "|"]
            for way, figures in found.items():
                if not figures:
                    lines.append(f"| {way} | fails: {failed[way]} |" + " |" * len(COLUMNS))
                    continue
                middle = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
                cells = [f"{middle[name]:.2f}x" for name in COLUMNS]
                seconds = " / ".join(f"{middle[name]:.2f}" for name in ("blocked_s", "slowed_s", "durable_s"))
                lines.append(f"| {way} | {' | '.join(cells)} | {seconds} |")
            lines.append("")
            print("\n".join(lines[-len(found) - 4 :]), flush=True)
    return lines


PARTS: dict[str, Callable[[argparse.Namespace], list[str]]] = {"save": save_part}


def launch(way: str, ranks: int, tensors: int, options: argparse.Namespace) -> Figures:
    """Measure one way to save; return the figures of the slowest rank."""
    port = free_port()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-checkpoint-") as directory:
        command = [sys.executable, "-m", "tests.bench_checkpoint", f"--worker={way}", f"--mib={options.mib}"]
        command += [f"--tensors={tensors}", f"--directory={directory}"]
        processes, pipe = [], subprocess.PIPE
        for rank in range(ranks):
            own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])}
            if ranks > 1:
                own |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=pipe, stderr=pipe, text=True))
        found: list[Figures] = []
        try:
            for process in processes:
                said, errors = process.communicate(timeout=LIMIT_S)
                if process.returncode:
                    known = [line for line in errors.splitlines() if re.search(r"Error\b.*:", line)]
                    raise RuntimeError((known or errors.splitlines() or ["?"])[-1].strip())
                found.append(json.loads(said.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
    worst = {name: max(one[name] for one in found) for name in found[0]}
    return worst | {"durable": min(one["durable"] for one in found)}


# --- in a rank ---------------------------------------------------------------------------------------------


class Work:
    """A training whose every step works on all of the state, and on the interpreter too."""

    def __init__(self, mib: int, tensors: int, directory: Path, *, first_keeper: bool) -> None:
        import torch  # noqa: PLC0415

        from stepkeeper_trainer import Keeper, start_distributed  # noqa: PLC0415
        from stepkeeper_trainer.attach import new_group  # noqa: PLC0415

        self.place = start_distributed()
        torch.manual_seed(0)
        parameters = max(1, tensors // 4)  # AdamW has two moments and a count for each
        size = mib * 2**20 // (parameters * 3 * 4)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for _ in range(parameters)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=True)
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.keeper = Keeper(model=self.model, optimizer=self.optimizer, run_dir=directory / "run")
        self.keeper.resume()
        self.group = new_group(LIMIT_S)
        self.keeper._prepared = not first_keeper  # only Stepkeeper's own way gets its memory
        self.square = torch.rand(256, 256)

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {name: tensor.detach() for name, tensor in self.keeper._state.collect().items()}

    def all_agree(self, one: bool) -> bool:  # noqa: FBT001
        """Say whether it is so on all ranks: they take as many steps as each other."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        if self.place.world_size == 1:
            return one
        flag = torch.tensor([int(one)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag)

    def step(self) -> None:
        self.optimizer.step()
        for _ in range(10):
            self.square = (self.square @ self.square).softmax(0)
        sum(n * n for n in range(20_000))  # the interpreter's part of a step
        self.keeper.step_done(loss=1.0)


def save_once(way: str, options: argparse.Namespace) -> Figures:
    """Train and save in one way; return what it cost, the first save apart from the later ones."""
    directory: Path = options.directory
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # torch's process mode opens a file for each tensor
    if way.endswith("process") and "RANK" not in os.environ:  # torch's process mode wants a group, if of one
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    work = Work(options.mib, options.tensors[0], directory, first_keeper=way == "stepkeeper")
    for _ in range(WARM_STEPS):
        work.step()
    before = _rss(os.getpid())
    if way == "stepkeeper":
        time.sleep(1.0)  # the memory for saves is made beside the first step
        before -= work.keeper._saver._staging.arena.bytes  # type: ignore[union-attr]
    step_s = statistics.median(_timed(work.step) for _ in range(CALM_STEPS))
    saves = [_one_save(_begin(way, work, directory / f"{n}"), work, step_s) for n in range(1 + SAVES)]
    memory = _peak(os.getpid()) - before + sum(_peak(pid) for pid in _children())
    copy_s, write_s, size = limits(work, directory)
    blocked, slowed, durable = (statistics.median(column) for column in zip(*saves[1:], strict=True))
    share = size / max(1, work.place.world_size) if way != "torch.save" else size
    return {
        "first blocked": saves[0][0] / copy_s,
        "blocked": blocked / copy_s,
        "slowed": slowed / copy_s,
        "durable": write_s * (share / size) / durable,
        "memory": memory / size,
        "blocked_s": blocked,
        "slowed_s": slowed,
        "durable_s": durable,
    }


def _one_save(begin: Callable[[], Callable[[], bool]], work: Work, step_s: float) -> tuple[float, float, float]:
    """Return how long a save blocked, how much it slowed training, and when it was durable."""
    started_at = time.perf_counter()
    done = begin()
    blocked_s = time.perf_counter() - started_at
    slowed_s = blocked_s
    while not work.all_agree(done()):
        slowed_s += _timed(work.step) - step_s
    durable_s = time.perf_counter() - started_at
    return blocked_s, max(0.0, slowed_s), durable_s


def _begin(way: str, work: Work, path: Path) -> Callable[[], Callable[[], bool]]:
    """Return what begins a save; that returns what tells whether it is durable."""
    import torch  # noqa: PLC0415
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: PLC0415

    alone = work.place.world_size == 1
    keeper = work.keeper

    def stepkeeper() -> Callable[[], bool]:
        keeper.save()
        saver = keeper._saver
        assert saver is not None
        assert saver.last is not None
        last = saver.last

        def done() -> bool:
            assert last.error is None, last.error
            return last.settled.is_set()

        return done

    def asynchronous() -> Callable[[], bool]:
        if not hasattr(work, "stager"):  # one for all saves, as its documentation asks for
            work.stager = DefaultStager(StagingOptions(False, False, False, False))  # type: ignore[attr-defined]  # noqa: FBT003
        kind = AsyncCheckpointerType.PROCESS if way.endswith("process") else AsyncCheckpointerType.THREAD
        future = dcp.async_save(
            work.state(),
            checkpoint_id=path,
            async_checkpointer_type=kind,
            async_stager=work.stager,  # type: ignore[attr-defined]
            no_dist=alone and kind is AsyncCheckpointerType.THREAD,
        )

        def done() -> bool:
            if future.done():  # type: ignore[union-attr]
                future.result()  # type: ignore[union-attr]
                return True
            return False

        return done

    def at_once() -> Callable[[], bool]:
        if way == "dcp.save":
            dcp.save(work.state(), checkpoint_id=path, no_dist=alone)
        else:
            path.mkdir(exist_ok=True)
            with (path / f"{work.place.rank}.pt").open("wb") as file:
                torch.save(work.state(), file)
                file.flush()
                os.fsync(file.fileno())
        return lambda: True

    return {"stepkeeper": stepkeeper, "dcp.save": at_once, "torch.save": at_once}.get(way, asynchronous)


def limits(work: Work, directory: Path) -> tuple[float, float, int]:
    """Return the seconds of a warm copy and of `dd` with fsync, and the bytes of the state."""
    import ctypes  # noqa: PLC0415

    import torch  # noqa: PLC0415

    state = [tensor for tensor in work.state().values() if tensor.numel()]
    size = sum(tensor.nbytes for tensor in state)
    copies = [torch.empty_like(tensor) for tensor in state]
    triples = [(a.data_ptr(), b.data_ptr(), b.nbytes) for a, b in zip(copies, state, strict=True)]

    def copy() -> None:
        for triple in triples:
            ctypes.memmove(*triple)

    copy()
    copy_s = statistics.median(_timed(copy) for _ in range(5))
    mib = max(1, size >> 20)
    command = ["dd", "if=/dev/zero", f"of={directory}/dd.{work.place.rank}", "bs=1M", f"count={mib}", "conv=fsync"]
    write_s = statistics.median(
        _timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3)
    )
    return copy_s, write_s * size / (mib << 20), size


def _timed(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def _rss(pid: int) -> int:
    return _status(pid, "VmRSS:")


def _peak(pid: int) -> int:
    return _status(pid, "VmHWM:")


def _status(pid: int, field: str) -> int:
    with suppress(FileNotFoundError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found]


if __name__ == "__main__":
    main()
