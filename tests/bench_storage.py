"""What a save asks of shared storage: `python -m tests.bench_storage` prints tables of counts.

Real gloo ranks save a small state, with the real library, as many nodes as their environment says.  strace counts what
each rank asks of the run directory, from one save to the next.  Counts do not depend on the file system, and nothing
here is a time.  From runs with several numbers of ranks and nodes follow three figures for each kind of call: `a` once
a save, `b` for each rank, `c` for each node; and with them what many ranks would ask.

Then the sockets of a rank, and what supervisor and watcher ask of the run directory while nothing happens.

`--before DIR` counts another `trainer/` directory too, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WITHIN_S = 240.0
CALLS = (
    "open,openat,openat2,creat,stat,lstat,newfstatat,statx,fstat,access,faccessat,faccessat2,readlink,readlinkat,"
    "statfs,fstatfs,getdents64,mkdir,mkdirat,rmdir,rename,renameat,renameat2,unlink,unlinkat,link,linkat,symlink,"
    "symlinkat,chmod,fchmod,fchmodat,chown,fchown,fchownat,utimensat,truncate,ftruncate,fallocate,fsync,fdatasync,"
    "write,pwrite64,writev,getxattr,lgetxattr,fgetxattr,listxattr"
)
MARK = "/bench-storage-mark"
SETTLE_S = 0.8  # what follows a save: the look at older steps, their removal
LOOKS_AFTER_S = 0.05  # instead of 2 s, so that each save has a look of its own, as saves minutes apart have
FIRST_SAVES, SAVES = 3, 4  # those that are not counted, and those that are
IDLE_STEP_S = 0.5
KEPT = 2  # steps: older ones are removed, as in a long run
LAYOUTS = ((2, 1), (4, 2), (8, 1), (8, 4), (16, 4))  # ranks and nodes

KINDS = (
    "files made",
    "files opened",  # that are there
    "look-ups",  # stat, access, opening without reading
    "fsync of a file",
    "fsync of a directory",
    "listings",
    "renames",
    "removals",
    "directories made",
    "modes and sizes set",
    "file system asked",  # statfs
    "writes",
)
OLDER = "older steps: "  # before the name of a kind: steps are verified, remembered and removed
_OLDER = re.compile(r"/checkpoints/(?:step_|\.verified|\.trash-step_)")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FD = re.compile(r"(?:^|[ (,=])(?:\d+|AT_FDCWD)<([^<>]*)>")


@dataclass(frozen=True)
class Layout:
    """How ranks lie on nodes, and where their files go first."""

    ranks: int
    nodes: int
    tiered: bool = False

    def node(self, rank: int) -> int:
        """Return the node of a rank: neighbours share one."""
        return rank * self.nodes // self.ranks

    def role(self, rank: int) -> str:
        """Return what a rank is besides a rank."""
        if rank == 0:
            return "rank 0"
        return "first of its node" if self.node(rank) != self.node(rank - 1) else "another rank"


# --- one rank -----------------------------------------------------------------------------------------------------


def train(rank: int, layout: Layout, directory: Path) -> None:
    """Be a rank: save, with marks between the saves that strace sees."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from stepkeeper_trainer import CheckpointManager  # noqa: PLC0415
    from stepkeeper_trainer.formats import verify  # noqa: PLC0415
    from stepkeeper_trainer.store import retention  # noqa: PLC0415
    from stepkeeper_trainer.tiers.tier import Tiers  # noqa: PLC0415

    verify.SETTLED_S = LOOKS_AFTER_S
    retention.SETTLED_S = LOOKS_AFTER_S  # type: ignore[attr-defined]
    os.environ |= {"SLURMD_NODENAME": f"n{layout.node(rank)}"}
    before = sockets()
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", layout.ranks), rank=rank,
                            world_size=layout.ranks)  # fmt: skip
    dist.barrier()
    torchs = sockets() - before
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    if layout.ranks > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    dist.barrier()
    before = sockets()
    tiers = Tiers(local=f"{directory}/disk{layout.node(rank)}") if layout.tiered else None
    manager = CheckpointManager(
        {"model": model, "optimizer": optimizer}, every=None, run_dir=directory / "run", tiers=tiers,
        retention=f"newest {KEPT}", attach_hooks=True,
    )  # fmt: skip
    manager.resume()
    step = 0
    for number in range(FIRST_SAVES + SAVES):
        for _ in range(2):
            model(torch.rand(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            manager.step_done(loss=1.0)
        manager.save()
        assert manager.wait_saved(WITHIN_S)
        dist.barrier()
        time.sleep(SETTLE_S)
        dist.barrier()
        with contextlib.suppress(OSError):
            os.stat(f"{MARK}-{number}")
        dist.barrier()
    dist.barrier()
    Path(directory, f"figures-{rank}").write_text(
        json.dumps({"torch's own": torchs, "the library's": sockets() - before})
    )
    dist.barrier()


def sockets() -> int:
    """Return how many sockets this process has."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
    return found


class Traced:
    """strace on a process that runs, and on what it makes from now on."""

    def __init__(self, pid: int, log: Path) -> None:
        """Attach; returns once it has."""
        command = ["strace", "-f", "-y", "-s", "200", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(log)]
        self._process = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if "attached" not in said:
            raise RuntimeError(f"strace: {said.strip()}")
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def wait(self) -> None:
        """Wait until what it traces has ended."""
        self._process.wait(WITHIN_S)

    def detach(self) -> None:
        """Let go of what it traces."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(WITHIN_S)


def play(layout: Layout, directory: Path) -> dict[str, Any]:
    """Fork the ranks under strace; return the counts of each, and its sockets."""
    from tests.trainer.forked import warm_up  # noqa: PLC0415

    warm_up()
    children, tracers = [], []
    for rank in range(layout.ranks):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(writer)
            code = 1
            if not os.read(reader, 1):
                os._exit(code)  # strace could not attach, and nobody waits
            try:
                with open(directory / f"output-{rank}", "w") as output:
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                train(rank, layout, directory)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        os.close(reader)
        tracers.append(Traced(child, directory / f"log-{rank}"))
        os.write(writer, b"x")
        os.close(writer)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for tracer in tracers:
        tracer.wait()
    if any(codes):
        worst = next(rank for rank, code in enumerate(codes) if code)
        raise RuntimeError(f"ranks ended with {codes}: {(directory / f'output-{worst}').read_text()[-2000:]}")
    ranks = []
    for rank in range(layout.ranks):
        lines = (directory / f"log-{rank}").read_text(errors="replace").splitlines()
        ranks.append({
            "role": layout.role(rank),
            "counts": {kind: count / SAVES for kind, count in count_saves(lines, str(directory / "run")).items()},
            "sockets": json.loads((directory / f"figures-{rank}").read_text()),
        })  # fmt: skip
    return {"ranks": ranks}


# --- what the log says ---------------------------------------------------------------------------------------------


def count_saves(lines: Iterable[str], below: str) -> Counter[str]:
    """Count what a log has between the mark of the last save that does not count, and that of the last one."""
    chosen, counts = [], False
    for line in lines:
        if MARK in line:
            number = int(line.split(f"{MARK}-")[1].split('"')[0])
            counts = FIRST_SAVES - 1 <= number < FIRST_SAVES + SAVES - 1
        elif counts:
            chosen.append(line)
    return count(chosen, below)


def count(lines: Iterable[str], below: str) -> Counter[str]:
    """Count the calls of a log that are about a directory, by kind; a call that failed asked as much."""
    found: Counter[str] = Counter()
    begun: dict[str, str] = {}
    directories: set[str] = set()
    for line in lines:
        thread, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        if rest.startswith("<... "):
            if thread not in begun:
                continue  # it began before the first mark
            rest = f"{begun.pop(thread)} {rest.partition(' resumed>')[2]}"
        match = re.match(r"(\w+)\((.*)$", rest)
        if match is None:
            continue
        name, rest = match.groups()
        path = _path(name, rest)
        if path is not None and (path == below or path.startswith(f"{below}/")):
            kind = _kind(name, rest, path, directories)
            if kind is not None:
                found[f"{OLDER}{kind}" if _OLDER.match(path[len(below) :]) else kind] += 1
    return found


def _path(name: str, rest: str) -> str | None:
    """Return what a call is about: of two names the first."""
    if name.startswith("open") and (opened := re.search(r" = \d+<([^<>]*)>$", rest)):
        return opened[1]
    base = _FD.search(f"({rest.partition(' = ')[0]}")
    named = _PATH.search(rest.partition(" = ")[0])
    by_name = name not in BY_DESCRIPTOR and named is not None
    if by_name and named is not None and named[1].startswith("/"):
        return named[1]
    if base is None:
        return None
    place = base[1].removesuffix(" (deleted)")
    return f"{place}/{named[1]}" if by_name and named is not None and named[1] else place


BY_DESCRIPTOR = frozenset(
    {"fstat", "fstatfs", "getdents64", "fchmod", "fchown", "ftruncate", "fallocate", "fsync", "fdatasync", "write",
     "pwrite64", "writev", "fgetxattr"}
)  # fmt: skip


KIND_OF = {
    **dict.fromkeys(("rename", "renameat", "renameat2"), "renames"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "removals"),
    **dict.fromkeys(("mkdir", "mkdirat"), "directories made"),
    **dict.fromkeys(("statfs", "fstatfs"), "file system asked"),
    **dict.fromkeys(("write", "pwrite64", "writev"), "writes"),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "utimensat"), "modes and sizes set"),
    **dict.fromkeys(("truncate", "ftruncate", "fallocate"), "modes and sizes set"),
}


def _kind(name: str, rest: str, path: str, directories: set[str]) -> str | None:
    """Return the kind of a call; None for one that costs shared storage nothing, or is part of another."""
    if name in ("open", "openat", "openat2", "creat"):
        return _opening(rest, path, directories)
    if name == "fstat" or "AT_EMPTY_PATH" in rest:
        return None  # of an open file: the client knows
    if name == "getdents64":
        return "listings" if rest.rpartition(" = ")[2].startswith("0") else None
    if name in ("fsync", "fdatasync"):
        return "fsync of a directory" if path in directories else "fsync of a file"
    return KIND_OF.get(name, "look-ups")


def _opening(rest: str, path: str, directories: set[str]) -> str | None:
    if "O_PATH" in rest:
        return "look-ups"
    if "O_DIRECTORY" in rest:
        directories.add(path)
        return None  # counted as a listing or an fsync
    made = "O_TMPFILE" in rest or ("O_CREAT" in rest and "O_APPEND" not in rest)  # what grows is there already
    return "files made" if made else "files opened"


# --- the model ------------------------------------------------------------------------------------------------------


def fit(layouts: list[Layout], totals: list[float]) -> tuple[float, float, float]:
    """Return `a`, `b`, `c` of `a + b * ranks + c * nodes`, least squares."""
    import torch  # noqa: PLC0415

    rows = torch.tensor([[1.0, each.ranks, each.nodes] for each in layouts], dtype=torch.float64)
    found = torch.linalg.lstsq(rows, torch.tensor(totals, dtype=torch.float64).unsqueeze(1)).solution
    a, b, c = (float(value) for value in found.flatten())
    return a, b, c


def run_all(layouts: list[Layout], trainer: Path) -> list[dict[str, Any]]:
    """Play each layout in a process of its own, with the library of a `trainer/` directory."""
    found = []
    for layout in layouts:
        with tempfile.TemporaryDirectory(prefix="bench-storage-") as directory:
            one = [str(layout.ranks), str(layout.nodes), str(int(layout.tiered)), directory]
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench_storage", "--one", *one],
                cwd=ROOT, check=False, timeout=2 * WITHIN_S, stdout=subprocess.PIPE, text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_"))}
                | {"PYTHONPATH": f"{trainer}:{ROOT}", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{layout}: ended with {done.returncode}: {done.stdout[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def total(played: dict[str, Any], kind: str) -> float:
    """Return how often all ranks together did something, a save."""
    return float(sum(rank["counts"].get(kind, 0.0) for rank in played["ranks"]))


def print_model(
    title: str, layouts: list[Layout], before: list[dict[str, Any]] | None, now: list[dict[str, Any]], many: Layout
) -> None:
    """Print what all ranks together do a save: the figures, and what follows for many ranks."""
    print(f"\n{title}: a save of all ranks together\n")
    versions = [("before", before), ("now", now)] if before is not None else [("", now)]
    heads = [f"{name + ': ' if name else ''}{word}" for name, _ in versions
             for word in ("once", "a rank", "a node", f"{many.ranks:,} ranks on {many.nodes:,} nodes")]  # fmt: skip
    print("| call | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(heads)) + "|")
    sums = [0.0] * len(versions)
    for kind in (*KINDS, *(f"{OLDER}{kind}" for kind in KINDS)):
        cells = []
        for number, (_, played) in enumerate(versions):
            assert played is not None
            a, b, c = fit(layouts, [total(each, kind) for each in played])
            found = max(0.0, a + b * many.ranks + c * many.nodes)
            sums[number] += found if not kind.endswith("writes") else 0.0
            cells += [f"{a + 0.0:.1f}", f"{b:.2f}", f"{c:.2f}", f"{found:,.0f}"]
        if any(total(each, kind) for _, played in versions for each in played or ()):
            print(f"| {kind} | " + " | ".join(re.sub(r"^-(0\.0+)$", r"\1", cell) for cell in cells) + " |", flush=True)
    print("| all but writes " + "".join(f"| | | | {each:,.0f} " for each in sums) + "|", flush=True)


def print_roles(layout: Layout, played: dict[str, Any]) -> None:
    """Print what one rank of each kind does."""
    roles = ("rank 0", "first of its node", "another rank")
    print(f"\n{layout.ranks} ranks on {layout.nodes} nodes: one rank, a save\n")
    print("| call | " + " | ".join(roles) + " |")
    print("|---" * (1 + len(roles)) + "|")
    for kind in (*KINDS, *(f"{OLDER}{kind}" for kind in KINDS)):
        cells = []
        for role in roles:
            own = [each["counts"].get(kind, 0.0) for each in played["ranks"] if each["role"] == role]
            cells.append(f"{sum(own) / len(own):.1f}" if own else "")
        if any(cell not in ("", "0.0") for cell in cells):
            print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


def print_sockets(layouts: list[Layout], now: list[dict[str, Any]]) -> None:
    """Print the sockets of the rank that has most."""
    most = {}
    for layout, played in zip(layouts, now, strict=True):
        most[layout.ranks] = {
            name: max(each["sockets"][name] for each in played["ranks"]) for name in played["ranks"][0]["sockets"]
        }
    print("\n| sockets of a rank | " + " | ".join(f"{ranks} ranks" for ranks in most) + " |")
    print("|---" * (1 + len(most)) + "|")
    for name in ("torch's own", "the library's"):
        print(f"| {name} | " + " | ".join(str(each[name]) for each in most.values()) + " |")


# --- while nothing happens -----------------------------------------------------------------------------------------


def watch_idle(seconds: float) -> None:
    """Print what supervisor, watchers and ranks of a real run ask of its directory a minute, between saves."""
    from tests.lab import Lab, LabOptions, processes  # noqa: PLC0415
    from tests.stories import acts  # noqa: PLC0415
    from tests.training import Training  # noqa: PLC0415

    with Lab(LabOptions()) as lab, tempfile.TemporaryDirectory(prefix="bench-storage-") as name:
        training = Training(
            lab, name="storage", nodes=2, steps=100_000, every=100_000, step_seconds=IDLE_STEP_S
        ).submit()
        training.wait_step(5)
        job = lab.job(training.job_id)
        batch = {pid for pids in lab.task_pids(training.job_id).values() for pid in pids}
        found = {"supervisor": batch}
        for word, words in (("watchers", "stepkeeper.watcher.main"), ("ranks and their wrappers", "train_lm")):
            pids = {
                pid for node in job.nodes for pid in processes.by_environment("SLURMD_NODENAME", node)
                if words in acts.command_of(pid) and processes.name(pid) not in ("srun", "slurmstepd")
            } - batch  # fmt: skip
            found[f"{word} ({len(pids)})"] = pids
        counts: dict[str, Counter[str]] = {}
        for number, (who, pids) in enumerate(found.items()):
            logs = [Path(name, f"{number}-{pid}") for pid in pids]
            tracers = [Traced(pid, log) for pid, log in zip(pids, logs, strict=True)]
            time.sleep(seconds)
            for tracer in tracers:
                tracer.detach()
            counts[who] = Counter()
            for log in logs:
                counts[who] += count(log.read_text(errors="replace").splitlines(), str(training.run_dir))
        lab.cancel(training.job_id)
        training.wait_end()
    print(f"\nBetween saves, on 2 nodes, steps of {IDLE_STEP_S} s: a minute, all together\n")
    print("| call | " + " | ".join(counts) + " |")
    print("|---" * (1 + len(counts)) + "|")
    for kind in KINDS:
        print(f"| {kind} | " + " | ".join(f"{each[kind] * 60 / seconds:.0f}" for each in counts.values()) + " |")


def _layout(word: str, *, tiered: bool = False) -> Layout:
    ranks, nodes = (int(number) for number in word.split("/"))
    return Layout(ranks, nodes, tiered)


def main() -> int:
    """Play the layouts, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(f"{ranks}/{nodes}" for ranks, nodes in LAYOUTS),
                        help="RANKS/NODES,...")  # fmt: skip
    parser.add_argument("--many", default="1000/125", help="RANKS/NODES to which the model is applied")
    parser.add_argument("--before", type=Path, help="another trainer/ directory, to compare with")
    parser.add_argument("--idle", type=float, default=0.0, metavar="S",
                        help="watch each part of a run on a lab for so many seconds too (root, Slurm)")  # fmt: skip
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        ranks, nodes, tiered = (int(word) for word in chosen.one[:3])
        print(json.dumps(play(Layout(ranks, nodes, bool(tiered)), Path(chosen.one[3]))), flush=True)
        os._exit(0)
    if shutil.which("strace") is None:
        print(
            "strace is not installed, and nothing else here counts system calls: nothing was measured", file=sys.stderr
        )
        return 1
    many = _layout(chosen.many)
    for title, tiered in (("Shared storage only", False), ("Node disks first", True)) if chosen.layouts else ():
        layouts = [_layout(word, tiered=tiered) for word in chosen.layouts.split(",")]
        before = run_all(layouts, chosen.before.resolve()) if chosen.before else None
        now = run_all(layouts, ROOT / "trainer")
        print_model(title, layouts, before, now, many)
        print_roles(layouts[-1], now[-1])
        if not tiered:
            print_sockets(layouts, now)
    if chosen.idle:
        watch_idle(chosen.idle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
