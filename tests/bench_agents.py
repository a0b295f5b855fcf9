"""What node agents ask of one slurmctld: `python -m tests.bench_agents` (root, Slurm) prints tables.

slurmctld is real, and knows 1,000 or 10,000 nodes that have no slurmd.  The agents' decisions, schedules, waits and
RPCs are real (`tests.agent_crowd`).  They, munged and slurmctld share this machine's processors, so times are upper
bounds.  All is in a network namespace of its own: the loopback's counters are the bytes told.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from stepkeeper.slurm.nodes import NodeCommands
from tests.lab import Lab, LabOptions

PROCESSES = 4
JOB_NODES = 8
JOBS_MAX = 200  # that slurmctld has; more expediters ask about the same ones
BEGIN_S = 3.0  # once each process of a crowd is ready
LOOK_S = 0.5
NAMESPACE = "STEPKEEPER_BENCH_NAMESPACE"
_RPC = re.compile(r"^\t?\s*(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.MULTILINE)
_KEPT = re.compile(r"REQUEST_(STATS_INFO|PING|NODE_REGISTRATION|PERSIST|.*COMPLETE)")


class BigLab(Lab):
    """A lab with many nodes more, on whose port nobody listens."""

    def __init__(self, more: int) -> None:
        super().__init__(LabOptions(nodes=1, gpus=0))
        self.more = more

    def _set_place(self, directory: Path, lab_id: str, port: int, mountpoint: Path | None) -> None:
        super()._set_place(directory, lab_id, port, mountpoint)
        self.crowd = f"{lab_id}c[1-{self.more}]"
        lines = (
            "SlurmdTimeout=0",  # no node is given up
            (
                f"NodeName={self.crowd} NodeHostname={self.place.hostname} NodeAddr=127.0.0.1 Port=9"
                " CPUs=128 RealMemory=1000000 State=UNKNOWN"
            ),
            f"PartitionName=crowd Nodes={self.crowd} MaxTime=INFINITE State=UP",
        )
        object.__setattr__(self.options, "slurm_conf", lines)

    def up(self) -> Self:
        """Start all, and have Slurm take the nodes for idle: it returns no node that it has not seen yet."""
        super().up()
        self.make_idle()
        return self

    def make_idle(self) -> None:
        """Return all nodes to service, whatever they are."""
        for state in ("DOWN", "RESUME"):
            self.run("scontrol", "update", f"NodeName={self.crowd}", f"State={state}", "Reason=bench")

    def _all_up(self) -> bool:
        """Tell whether slurmctld answers and the one real node is there."""
        found = self.run("sinfo", "-h", "-N", "-n", self.node_names[0], "-o", "%T", check=False).stdout.split()
        return bool(found) and set(found) == {"idle"}


class Meter:
    """What slurmctld uses, and how long a foreign squeue waits, while something happens."""

    def __init__(self, lab: BigLab) -> None:
        self._lab = lab
        self._slurmctld = lab._daemon_pid("slurmctld")
        self._munged = lab._daemon_pid("munged")
        self._over = threading.Event()
        self.series: list[tuple[float, float, float, int]] = []  # when, slurmctld's and munged's seconds, bytes
        self.squeues: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self._lab.run("sdiag", "--reset")
        self._threads = [threading.Thread(target=each) for each in (self._look, self._queue)]
        self.note()
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()
        self.note()
        self.rpcs = rpcs(self._lab)

    def note(self) -> None:
        """Note what was used until now."""
        self.series.append((time.monotonic(), _used_s(self._slurmctld), _used_s(self._munged), told()))

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.note()

    def _queue(self) -> None:
        while not self._over.wait(LOOK_S):
            began = time.monotonic()
            self._lab.run("squeue", check=False, timeout_s=100)
            self.squeues.append((began, time.monotonic() - began))

    def used(self, since: float, until: float) -> tuple[float, float, float]:
        """Return seconds of slurmctld and of munged, and MB, between two instants."""
        inside = [each for each in self.series if since - LOOK_S <= each[0] <= until + LOOK_S]
        first, last = inside[0], inside[-1]
        return last[1] - first[1], last[2] - first[2], (last[3] - first[3]) / 1e6

    def waits(self, since: float, until: float) -> list[float]:
        """Return how long each squeue took that began between two instants."""
        return [took for began, took in self.squeues if since <= began < until]


def _used_s(pid: int | None) -> float:
    """Return the processor time of a process and of its threads, ended ones too, to the nanosecond."""
    assert pid is not None
    return time.clock_gettime(ctypes.c_int32((~pid << 3) | 2).value)


def told() -> int:
    """Return the bytes that went over this namespace's loopback."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def rpcs(lab: BigLab) -> dict[str, tuple[int, float]]:
    """Return how often slurmctld was asked what, and the seconds that it took, but for what we do to look."""
    found = _RPC.findall(lab.run("sdiag").stdout)
    return {name: (int(count), int(total) / 1e6) for name, count, total in found if not _KEPT.match(name)}


def price(lab: BigLab, ask: Callable[[], object], times: int) -> dict[str, str]:
    """Return what one question costs, asked by its real command, one after the other."""
    ask()
    lab.run("sdiag", "--reset")
    pid, munged = lab._daemon_pid("slurmctld"), lab._daemon_pid("munged")
    ours = _ours_s()
    before = _used_s(pid), _used_s(munged), told(), time.monotonic()
    for _ in range(times):
        ask()
    after = _used_s(pid), _used_s(munged), told(), time.monotonic()
    used, munge, size, took = ((late - early) / times for early, late in zip(before, after, strict=True))
    asked = rpcs(lab)
    kinds = ", ".join(f"{count / times:.3g} {name.removeprefix('REQUEST_')}" for name, (count, _) in asked.items())
    return {
        "RPCs": kinds,
        "slurmctld, ms": f"{1000 * used:.3g}",
        "munged, ms": f"{1000 * munge:.3g}",
        "told, KB": f"{size / 1000:,.3g}",
        "on the node, ms of a core": f"{1000 * (_ours_s() - ours) / times:.3g}",
        "answered in, ms": f"{1000 * took:.3g}",
    }


def _ours_s() -> float:
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in found)


def prices(lab: BigLab, job: int) -> dict[str, dict[str, str]]:
    """Return what each question of an agent costs."""
    client = NodeCommands({"SLURM_CONF": str(lab.place.conf)})
    own = f"{lab.place.lab_id}c1"
    return {
        "its own node": price(lab, lambda: client.node(own), 100),
        "all nodes": price(lab, lambda: client.peers(own), 10),
        "the partitions": price(lab, client.cluster_size, 100),
        "a job": price(lab, lambda: client.owned_job(job), 100),
        "a drain, and its return": price(lab, lambda: (client.drain(own, "stepkeeper: bench"), client.resume(own)), 20),
    }


def play(
    lab: BigLab,
    scene: str,
    agents: int,
    *,
    seconds: float,
    how: str = "library",
    jobs: tuple[int, int] = (0, 0),
    away_s: float = 0.0,
) -> dict[str, str]:
    """Play one scene, and return its figures; `away_s`: slurmctld is stopped for so long at its begin."""
    directory = lab.directory / f"{scene}-{agents}-{how}-{time.monotonic():.0f}"
    drained = directory / "drained"
    drained.mkdir(parents=True)
    bounds = [round(agents * part / PROCESSES) for part in range(PROCESSES + 1)]
    crowd = []
    for part, (first, last) in enumerate(itertools.pairwise(bounds)):
        words = ["--scene", scene, "--how", how, "--nodes", lab.crowd, "--part", f"{first}:{last}"]
        words += ["--seconds", str(seconds), "--conf", str(lab.place.conf)]
        words += ["--drained", str(drained), "--notes", str(directory / f"notes-{part}")]
        if scene == "expedite":
            words += ["--jobs", f"{jobs[0]}:{jobs[1]}:{(last - first) // JOB_NODES}"]
        crowd.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.agent_crowd", *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(directory / f"log-{part}").open("w"), text=True,
            )
        )  # fmt: skip
    for part, process in enumerate(crowd):
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError((directory / f"log-{part}").read_text()[-3000:])
    begin = time.monotonic() + BEGIN_S
    for process in crowd:
        assert process.stdin is not None
        process.stdin.write(f"{begin}\n")
        process.stdin.close()
    if away_s:
        lab.stop_slurmctld()
        time.sleep(max(0.0, begin + away_s - time.monotonic()))
        lab.start_slurmctld()
    with Meter(lab) as meter:
        for part, process in enumerate(crowd):
            if process.wait(timeout=seconds + 120):
                raise RuntimeError((directory / f"log-{part}").read_text()[-3000:])
    notes: list[dict[str, Any]] = [json.loads((directory / f"notes-{part}").read_text()) for part in range(PROCESSES)]
    lab.make_idle()
    return figures(meter, notes, begin + away_s, begin + seconds)


def figures(meter: Meter, notes: list[dict[str, Any]], begin: float, end: float) -> dict[str, str]:
    """Return what one scene has cost."""
    asked = sorted(each for note in notes for each in note["asked"] if each[0] + each[2] >= begin)
    first: dict[str, float] = {}
    kinds = Counter(kind for _, kind, _, _ in asked)
    seconds = Counter(int(at - begin) for at, _, _, _ in asked)
    lists = Counter(int(at - begin) for at, kind, _, _ in asked if kind == "peers")
    own = [(at, took) for at, kind, took, error in asked if kind in ("node", "owned_job") and not error]
    for at, took in own:
        first["last"] = max(first.get("last", 0.0), at + took - begin)
    takes = sorted(took for _, took in own) or [0.0]
    squeue = meter.waits(begin, end) or [0.0]
    outcomes = Counter(each for note in notes for each in note["outcomes"])
    rows = {
        "asked": ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()),
        "failed": f"{sum(bool(error) for *_, error in asked):,}",
        "RPCs": ", ".join(
            f"{count:,} {name.removeprefix('REQUEST_')} ({total:.3g} s)"
            for name, (count, total) in sorted(meter.rpcs.items(), key=lambda each: -each[1][0])
        ),
        "most questions in a second": f"{max(seconds.values(), default=0):,}",
        "most lists in a second": f"{max(lists.values(), default=0):,}",
        "own question: p50, max, s": f"{statistics.median(takes):.3g}, {takes[-1]:.3g}",
        "last answered after, s": f"{first.get('last', 0.0):.3g}",
        "squeue: p50, max, s": f"{statistics.median(squeue):.3g}, {max(squeue):.3g} of {len(squeue)}",
        "outcomes": ", ".join(f"{count:,} {name}" for name, count in outcomes.most_common()),
    }
    for until in (10.0, 60.0, end - begin):
        used, munge, size = meter.used(begin, min(end, begin + until))
        rows[f"first {until:.0f} s: slurmctld s, munged s, MB"] = f"{used:.3g}, {munge:.3g}, {size:,.4g}"
    return rows


def quiet(lab: BigLab) -> dict[str, str]:
    """Return what slurmctld uses by itself, and how long a squeue takes then."""
    with Meter(lab) as meter:
        time.sleep(10.0)
    at = time.monotonic()
    used, munge, size = meter.used(at - 11, at)
    squeue = meter.waits(0, at)
    return {
        "slurmctld s, munged s, MB in 10 s": f"{used:.3g}, {munge:.3g}, {size:.3g}",
        "squeue: p50, max, s": f"{statistics.median(squeue):.3g}, {max(squeue):.3g}",
    }


def submit(lab: BigLab, count: int) -> tuple[int, int]:
    """Put jobs into the queue that do not start; return the first number and the one behind the last."""
    words = ("sbatch", "--parsable", "-p", "crowd", f"-N{JOB_NODES}", "--begin=now+1day", "--wrap=true")
    numbers = [int(lab.run(*words).stdout) for _ in range(count)]
    return numbers[0], numbers[-1] + 1


def show(title: str, columns: dict[str, dict[str, str]]) -> None:
    """Print a table: a row for each figure, a column for each case."""
    print(f"\n### {title}\n\n| | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        print(f"| {name} | " + " | ".join(column.get(name, "") for column in columns.values()) + " |", flush=True)


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="1000,10000", help="of the clusters")
    parser.add_argument("--commands", default="100,1000", help="agents that start real commands, on the first cluster")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each switch failure")
    parser.add_argument("--scenes", default="prices,boot,switch,away,expedite")
    chosen = parser.parse_args()
    if NAMESPACE not in os.environ:
        # enough ports for ten thousand calls a minute; without an address beside 127.0.0.1 no name is resolved
        ports = 'sysctl -qw net.ipv4.ip_local_port_range="32768 65535" net.ipv4.tcp_tw_reuse=1'
        ready = f"ip link set lo up && ip address add 192.0.2.1/32 dev lo && {ports}"
        line = f'{ready}; exec "$@"'
        os.environ[NAMESPACE] = "1"
        words = [sys.executable, "-m", "tests.bench_agents", *sys.argv[1:]]
        return subprocess.run(["unshare", "--net", "sh", "-c", line, "sh", *words], check=False).returncode
    scenes = chosen.scenes.split(",")
    for place, count in enumerate(map(int, chosen.nodes.split(","))):
        with BigLab(count) as lab:
            jobs = submit(lab, min(JOBS_MAX, count // JOB_NODES))
            print(f"\n## {count:,} nodes, {jobs[1] - jobs[0]} jobs\n")
            show("nobody asks", {"": quiet(lab)})
            if "prices" in scenes:
                show("one question", prices(lab, jobs[0]))
            if "boot" in scenes:
                show("all boot", {f"{count:,} agents": play(lab, "boot", count, seconds=75.0)})
            if "switch" in scenes:
                columns = {f"{count:,} agents": play(lab, "switch", count, seconds=chosen.seconds)}
                for few in map(int, filter(None, chosen.commands.split(",") if not place else ())):
                    name = f"{few:,}, real commands"
                    columns[name] = play(lab, "switch", few, seconds=chosen.seconds, how="commands")
                show("a switch fails", columns)
            if "away" in scenes:
                columns = {"after 30 s": play(lab, "switch", count, seconds=30.0 + chosen.seconds, away_s=30.0)}
                show("a switch fails, and slurmctld is away", columns)
            if "expedite" in scenes:
                name = f"{count // JOB_NODES:,} jobs"
                show("all jobs are requeued", {name: play(lab, "expedite", count, seconds=60.0, jobs=jobs)})
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
