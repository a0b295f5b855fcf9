"""What the node agent costs, and how fast it is: `python -m tests.bench_agent` (root, Slurm) prints a table.

Times are taken from the agent's own log, whose clock is that of the process that writes into the kernel log.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from stepkeeper.cli.dev import record, write
from tests.lab import Lab, LabOptions, processes
from tests.lab.agents import Agents
from tests.lab.site import supervisor_python

KMSG = Path("/dev/kmsg")
TICKS = os.sysconf("SC_CLK_TCK")
LINES_PER_S = 1000


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="faults that are timed")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long idle and busy are watched")
    parser.add_argument("--here", action="store_true", help="this interpreter, not a clean one")
    chosen = parser.parse_args()
    python = Path(sys.executable) if chosen.here else supervisor_python()
    rows: list[tuple[str, str, str]] = []
    with Lab(LabOptions(nodes=1, gpus=2)) as lab, Agents(lab, nvml=True, python=python) as agents:
        (node,) = lab.node_names
        agents.configure(node, test={"limits": {"health_every_s": 10.0}}, breaker={"drains_per_hour": 1000})
        agents.start(node)
        agents.wait_event(node, "nvml")
        time.sleep(3.0)
        rows += idle(lab, agents, node, chosen.seconds)
        rows += busy(agents, node, chosen.seconds)
        agents.stop(node)
        rows += drains(lab, agents, node, chosen.rounds)
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}\n")
    print("| what | target | measured |\n|---|---|---|")
    for what, target, measured in rows:
        print(f"| {what} | {target} | {measured} |")
    return 0


def idle(lab: Lab, agents: Agents, node: str, seconds: float) -> list[tuple[str, str, str]]:
    """Return memory, processor time and Slurm calls of an agent with nothing to do."""
    pid = agents.pid(node)
    child = sorted(processes.descendants(pid))
    calls = _calls(lab)
    used = _share([pid], seconds)
    made = _calls(lab) - calls
    rows = [
        ("agent, resident", "35 MB", f"{_resident(pid):.1f} MB"),
        ("agent idle, of one core", "0.2 %", f"{used:.2f} %"),
        ("Slurm calls an hour, idle", "0", f"{made * 3600 / seconds:.0f}"),
    ]
    if child:
        rows.append(("its NVML process, resident", "-", f"{sum(map(_resident, child)):.1f} MB"))
        rows.append(("its NVML process idle, of one core", "-", f"{_share(child, seconds):.2f} %"))
    return rows


def busy(agents: Agents, node: str, seconds: float) -> list[tuple[str, str, str]]:
    """Return what a kernel log of many lines costs."""
    pid = agents.pid(node)
    writer = subprocess.Popen([sys.executable, "-m", "tests.bench_agent_writer", str(LINES_PER_S), str(seconds + 4)])
    try:
        time.sleep(2.0)
        used = _share([pid], seconds)
    finally:
        writer.terminate()
        writer.wait(10)
    return [
        (f"agent at {LINES_PER_S} log lines a second, of one core", "-", f"{used:.1f} %"),
        ("agent after that, resident", "35 MB", f"{_resident(pid):.1f} MB"),
    ]


def drains(lab: Lab, agents: Agents, node: str, rounds: int) -> list[tuple[str, str, str]]:
    """Return how long a certain fault takes from the kernel log to Slurm."""
    times = []
    for _ in range(rounds):
        agents.boot(node)
        agents.start(node)
        before = len(_drained(agents, node))
        time.sleep(0.5)
        began = time.time()
        write(KMSG, record(79, agents.pci(node)))
        lab.until(lambda before=before: len(_drained(agents, node)) > before, "the drain", 20)
        times.append(1000 * (_drained(agents, node)[-1] - began))
        lab.until(lambda: "DRAIN" in lab.nodes()[node].state, "the drain", 5)
        agents.stop(node)
        lab.undrain(node)
        _forget(agents, node)
    times.sort()
    high = times[min(len(times) - 1, int(0.95 * len(times)))]
    said = f"median {statistics.median(times):.0f} ms, 95 % {high:.0f} ms"
    return [
        ("XID 79 in the kernel log to node drained", "100 ms", said),
        ("one scontrol", "-", f"{_one_call(lab):.0f} ms"),
    ]


def _drained(agents: Agents, node: str) -> list[float]:
    found = [each for each in agents.events(node, "decision") if each["why"].startswith("the node is drained")]
    return [datetime.fromisoformat(each["timestamp"]).timestamp() for each in found]


def _forget(agents: Agents, node: str) -> None:
    """Begin the next round with an empty ledger: nothing escalates."""
    (agents.directory / node / "state" / "incidents.jsonl").unlink()


def _one_call(lab: Lab) -> float:
    def once() -> None:
        lab.run("scontrol", "-a", "-o", "show", "nodes")

    return 1000 * statistics.median(_timed(once) for _ in range(10))


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def _share(pids: list[int], seconds: float) -> float:
    """Return processor time in percent of one core."""
    before = sum(map(_ticks, pids))
    time.sleep(seconds)
    return 100 * (sum(map(_ticks, pids)) - before) / TICKS / seconds


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _calls(lab: Lab) -> int:
    text = lab.run("sdiag").stdout
    found = [line.split("count:")[1].split()[0] for line in text.splitlines() if "REQUEST_NODE_INFO" in line]
    return sum(map(int, found))


if __name__ == "__main__":
    sys.exit(main())
