"""What a start from shared storage costs: `python -m tests.bench_shared [--repeats 2]` (root, Slurm, glusterfs-client).

A job on 16 nodes, each with a client of its own that has been mounted a moment ago, so that nothing of Python or
Stepkeeper is in any cache of any node; from the local disk, as `bench_start` has it, for comparison.  Writes
`docs/benchmarks-shared.md`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stepkeeper.core import events as on
from tests.lab import Lab, LabOptions
from tests.lab.shared import PROGRAM, SharedLab, Storage, install, missing
from tests.measuring import medians
from tests.training import REPOSITORY, Training

PAGE = REPOSITORY / "docs" / "benchmarks-shared.md"
BASES = Path("/var/tmp")  # not the temporary directory: labs leave what is mounted there
WITHIN_S = 300.0
DELAYS_US = (0, 500)
INSIDE = "--in-a-namespace-of-its-own"
BY_NAME = "open,openat,access,faccessat,faccessat2,stat,lstat,newfstatat,statx,readlink,readlinkat"
HEAD = """# Benchmarks: starting from shared storage

Written by `python -m tests.bench_shared`, and by nothing else: {cores} cores, load average {load} before it began,
{version}. The supervisor's whole environment (interpreter, its modules, packages) lies on shared storage. {nodes}
nodes of a lab cluster have a client each, which was mounted a moment before. The page cache of the server was
dropped, so no cache of any node has anything of the environment. Client and server are in user space here, and
{nodes} nodes share {cores} cores with the server. That is more work than on a real node. No network is between them,
so the way is shorter. So it is measured again with each request answered {delay_ms:g} ms later, as by a server
across a network.

The kernel of the machine that this was measured on has no NFS, so it was not NFS. What a start asks of storage is
the same. One watcher looks {looks} times for a file by its name, one after the other. {missed} of these files are
not there.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure starts from shared storage on a lab cluster.")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument(INSIDE, action="store_true", dest="inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    if not options.inside:  # so that no mount outlives this, however it ends
        words = [
            sys.executable,
            "-m",
            "tests.bench_shared",
            INSIDE,
            f"--repeats={options.repeats}",
            f"--nodes={options.nodes}",
        ]
        raise SystemExit(subprocess.run(["unshare", "--mount", *words], check=False).returncode)
    load = os.getloadavg()[0]
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="stepkeeper-shared-", dir=BASES) as base:
        Path(base).chmod(0o755)
        with Storage(Path(base)).filled() as place:
            command = install(place)
            looks, missed = lookups(command, place)
        for repeat in range(options.repeats):
            for name, value in local(options.nodes, f"local-{repeat}").items():
                found.setdefault(name, []).append(value)
            for delay_us in DELAYS_US:
                for name, value in shared(
                    options.nodes, Path(base), command, delay_us, f"shared-{repeat}-{delay_us}"
                ).items():
                    found.setdefault(name, []).append(value)
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    head = HEAD.format(
        cores=os.cpu_count(), load=f"{load:.1f}", version=version, nodes=options.nodes, delay_ms=max(DELAYS_US) / 1000,
        looks=looks, missed=missed,
    )  # fmt: skip
    PAGE.write_text(head + medians(found) + "\n")
    print(PAGE.read_text())


def lookups(command: Path, place: Path) -> tuple[int, int]:
    """Return how often a watcher looks for a file below a place by its name, until it could work; how often in vain."""
    python = command.parent / "python3"
    with tempfile.NamedTemporaryFile() as log:
        line = [
            "strace",
            "-f",
            "-e",
            f"trace={BY_NAME}",
            "-o",
            log.name,
            python,
            "-I",
            "-c",
            "import stepkeeper.watcher.main",
        ]
        subprocess.run(line, check=True, timeout=WITHIN_S, cwd="/", capture_output=True)
        calls = [line for line in Path(log.name).read_text().splitlines() if f'"{place}/' in line]
    return len(calls), sum(" = -1 ENOENT" in line for line in calls)


def local(nodes: int, name: str) -> dict[str, float]:
    with Lab(LabOptions(nodes=nodes, gpus=1, cpus=2)) as lab:
        training = Training(lab, name=name, nodes=nodes, command=("bash", "-c", "sleep 600"))
        assert training.stepkeeper.exists(), "the user's environment is made before the cache is dropped"
        return start(lab, training, "local disk")


def shared(nodes: int, base: Path, command: Path, delay_us: int, name: str) -> dict[str, float]:
    with (
        Storage(base, delay_us=delay_us) as storage,
        SharedLab(LabOptions(nodes=nodes, gpus=1, cpus=2), storage) as lab,
    ):
        env = {"STEPKEEPER": str(command)}
        training = Training(lab, name=name, nodes=nodes, command=("bash", "-c", "sleep 600"), env=env)
        how = f", each request {delay_us / 1000:g} ms later" if delay_us else ""
        return start(lab, training, f"shared storage{how}")


def start(lab: Lab, training: Training, where: str) -> dict[str, float]:
    """Submit a job that trains nothing, with nothing in any cache; return how long it takes until all answer."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    began = time.time()
    training.submit()
    training.until(
        lambda: len(training.events(on.WatcherReady)) >= training.nodes, f"{training.nodes} watchers", WITHIN_S
    )
    started = training.events(on.AttemptStarted)[0].event.at
    ready = [record.event.at for record in training.events(on.WatcherReady)]
    lab.cancel(training.job_id)
    training.wait_end()
    shutil.rmtree(training.run_dir)
    return {
        f"{where}: sbatch to the supervisor's first event, s": started - began,
        f"{where}: from there to the last of {training.nodes} watchers, s": max(ready) - started,
    }


if __name__ == "__main__":
    main()
