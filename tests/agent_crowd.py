"""Many node agents in one process, against a real slurmctld: a part of `tests.bench_agents`.

Real are the agents' state and `decide`, `Acts` with a thread for each call, the schedule of the setup's look, the
expediter, and each RPC.  An agent asks by `NodeCommands`, which starts a process for each question; or by `Library`,
which sends the same RPCs from this process: ten thousand nodes have ten thousand processors for their processes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import heapq
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from stepkeeper.loop_tools import Clock
from stepkeeper.node_agent import setup
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.core import events as on
from stepkeeper.node_agent.core.decide import decide
from stepkeeper.node_agent.core.events import AskNodes, CheckNode, Resume, SetDrain
from stepkeeper.node_agent.core.plan import due_at
from stepkeeper.node_agent.core.state import Mode, Policy, State
from stepkeeper.node_agent.evaluate import Fitness
from stepkeeper.node_agent.expedite_requeue import RequeueExpediter, RequeueRequest
from stepkeeper.node_agent.runtime import Acts, Inbox, Item
from stepkeeper.slurm.client import NodeFacts, OwnedJob, SlurmError, expand
from stepkeeper.slurm.nodes import CALL_WITHIN_S, NodeCommands, parse_nodes, parse_owned_job
from tests.node_agent.agent.story import fault

SCENES = ("boot", "switch", "expedite")
FAULTS_WITHIN_S = 2.0
STACK_BYTES = 256 * 1024
SHOW_ALL = 1
LIBRARY = next(Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"), None)


class _Message(ctypes.Structure):
    """`node_info_msg_t`, and so `partition_info_msg_t`."""

    _fields_ = (("last_update", ctypes.c_long), ("count", ctypes.c_uint32), ("array", ctypes.c_void_p))


class _Jobs(ctypes.Structure):
    """`job_info_msg_t`."""

    _fields_ = (
        ("last_backfill", ctypes.c_long),
        ("last_update", ctypes.c_long),
        ("count", ctypes.c_uint32),
        ("array", ctypes.c_void_p),
    )


class Library:
    """What `NodeCommands` asks, by Slurm's own library.  Drains and returns are few, and stay processes.

    A list of all nodes is received whole, and dropped: what it says is known from `drained`, where all processes of
    the crowd note their drains.  On a real cluster each node reads its list with its own processor.
    """

    def __init__(self, commands: NodeCommands, names: tuple[str, ...], drained: Path) -> None:
        assert LIBRARY is not None
        os.environ |= dict(commands.environment) | {"SLURM_TIME_FORMAT": "%s"}
        self._slurm = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)  # for its plugins
        self._slurm.slurm_init(None)
        for name in ("slurm_sprint_node_table", "slurm_sprint_job_info"):
            getattr(self._slurm, name).restype = ctypes.c_void_p
        self._slurm.slurm_strerror.restype = ctypes.c_char_p
        self._commands = commands
        self._nodes = {name: NodeFacts(name=name, states=frozenset(("IDLE",)), partitions=("crowd",)) for name in names}
        self._drained = drained
        self._listed: tuple[int, tuple[NodeFacts, ...]] = (-1, ())

    def node(self, name: str) -> NodeFacts:
        self._load("partition", _Message, "slurm_load_partitions", ctypes.c_long(0))  # so does sinfo
        text = self._load("node", _Message, "slurm_load_node_single", name.encode(), shown="slurm_sprint_node_table")
        return parse_nodes(text)[0]

    def peers(self, _name: str) -> tuple[NodeFacts, ...]:
        self._load("partition", _Message, "slurm_load_partitions", ctypes.c_long(0))
        self._load("node", _Message, "slurm_load_node", ctypes.c_long(0))
        version = self._drained.stat().st_mtime_ns
        if version != self._listed[0]:
            noted = {path.name: json.loads(path.read_text()) for path in self._drained.iterdir() if path.suffix == ""}
            held = {name: NodeFacts(name=name, states=frozenset(("IDLE", "DRAIN")), partitions=("crowd",), **facts)
                    for name, facts in noted.items()}  # fmt: skip
            self._listed = (version, tuple((self._nodes | held).values()))
        return self._listed[1]

    def cluster_size(self) -> int:
        self._load("partition", _Message, "slurm_load_partitions", ctypes.c_long(0))
        return len(self._nodes)

    def owned_job(self, job_id: int) -> OwnedJob:
        text = self._load("job", _Jobs, "slurm_load_job", ctypes.c_uint32(job_id), shown="slurm_sprint_job_info")
        return parse_owned_job(text, job_id)

    def drain(self, name: str, reason: str) -> None:
        self._commands.drain(name, reason)
        new = self._drained / f"{name}.new"
        new.write_text(json.dumps({"reason": reason, "reason_at": int(time.time())}))
        new.rename(self._drained / name)

    def resume(self, name: str) -> None:
        self._commands.resume(name)
        (self._drained / name).unlink()

    def _load(self, kind: str, message: type[Any], function: str, word: Any, *, shown: str = "") -> str:
        """Send one RPC; return its first record as `scontrol -o` shows it, where a function of that is given."""
        found = ctypes.POINTER(message)()
        began = time.monotonic()
        call = getattr(self._slurm, function)
        place = ctypes.byref(found)
        # only the questions about all take what is known already first
        words = (word, place) if function in ("slurm_load_node", "slurm_load_partitions") else (place, word)
        if call(*words, ctypes.c_uint16(SHOW_ALL)):
            error = self._slurm.slurm_strerror(self._slurm.slurm_get_errno()).decode()
            raise SlurmError(f"{function}: {error}", unreachable=True)
        text = ""
        if shown and found.contents.count:
            held = ctypes.c_void_p(getattr(self._slurm, shown)(ctypes.c_void_p(found.contents.array), 1))
            text = ctypes.string_at(held.value).decode() if held.value else ""
            self._slurm.slurm_xfree(ctypes.byref(held))
        getattr(self._slurm, f"slurm_free_{kind}_info_msg")(found)
        if time.monotonic() - began > CALL_WITHIN_S:
            raise SlurmError(f"{function}: no answer in {CALL_WITHIN_S:g} s", unreachable=True)
        return text


class Noted:
    """Any of the two, which notes each question: when, what, how long, and what was wrong."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.notes: list[tuple[float, str, float, str]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ask = getattr(self._client, name)

        def noted(*words: Any) -> Any:
            began, error = time.monotonic(), ""
            try:
                return ask(*words)
            except SlurmError as failure:
                error = str(failure)
                raise
            finally:
                self.notes.append((began, name, time.monotonic() - began, error))

        return noted


class _Words(Inbox):
    """One agent's inbox: what comes is for the crowd's one loop."""

    def __init__(self, crowd: Crowd, agent: int) -> None:
        super().__init__(crowd.clock)
        self._crowd, self._agent = crowd, agent

    def put(self, item: Item) -> None:
        self._crowd.came.put((self._agent, item))

    def fail(self, error: BaseException) -> None:
        self._crowd.came.put((self._agent, error))


class Crowd:
    """Agents whose real acts share one loop."""

    def __init__(self, names: tuple[str, ...], client: Any, size: int) -> None:
        """`size`: of the cluster, as Slurm said when the agents started."""
        self.clock = Clock()
        self.came: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.policy = Policy(mode=Mode.ACT)
        self.states = [State(node=name, boot_id="b") for name in names]
        self._acts = [
            Acts(
                name,
                client,
                _Words(self, number),
                check=lambda: Fitness(unfit="a GPU is lost"),
                reset=lambda _: "no GPU is reset",
                noted=lambda: "",
                mistaken=lambda _: "",
            )
            for number, name in enumerate(names)
        ]
        for acts in self._acts:
            acts._size = size
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something done at an instant of the crowd's clock."""
        heapq.heappush(self._due, (when, next(self._order), what))

    def play(self, until: float) -> None:
        """Let everything happen until then."""
        while (now := self.clock.now()) < until:
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            wait_s = min(until, self._due[0][0] if self._due else until) - self.clock.now()
            try:
                agent, item = self.came.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            self.feed(agent, item)

    def feed(self, agent: int, event: on.Event) -> None:
        """Take one event of an agent."""
        decision = decide(self.states[agent], event, self.policy)
        self.states[agent] = decision.state
        for effect in decision.effects:
            if isinstance(effect, AskNodes | SetDrain | Resume | CheckNode):
                self._acts[agent].perform(effect)
        if (due := due_at(decision.state)) is not None:
            self.at(due, functools.partial(self._tick, agent))

    def _tick(self, agent: int) -> None:
        due, now = due_at(self.states[agent]), self.clock.now()
        if due is not None and due <= now:  # else it was put off meanwhile
            self.feed(agent, on.Tick(at=now))


def switch_fails(crowd: Crowd, begin: float, _client: Any, _jobs: list[int]) -> None:
    """Let a GPU of every node fail within two seconds."""
    dice = random.Random(os.getpid())  # noqa: S311 - a simulation
    for agent in range(len(crowd.states)):
        at = begin + FAULTS_WITHIN_S * dice.random()
        crowd.at(at, lambda agent=agent, at=at: crowd.feed(agent, on.FaultSeen(at=at, fault=fault(79, at))))


def all_boot(crowd: Crowd, begin: float, client: Any, _jobs: list[int]) -> None:
    """Have every agent look at its setup and learn the size of the cluster, as it does when it starts."""

    def look(node: str) -> None:
        client.node(node)
        client.cluster_size()

    for state in crowd.states:
        ask = threading.Thread(target=look, args=(state.node,), daemon=True)
        crowd.at(begin + setup.first_look_after_s(NodeConfig(node_name=state.node)), ask.start)


def all_requeued(crowd: Crowd, begin: float, client: Any, jobs: list[int]) -> None:
    """Have an agent for each job wait until it may make it eligible; the jobs stay as they are."""
    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
    dice = random.Random(os.getpid())  # noqa: S311 - a simulation
    for job in jobs:
        expediter = RequeueExpediter(client, log)
        expediter.start()
        request = RequeueRequest(job_id=job, uid=None, restart_count=1, exclude=None)
        crowd.at(begin + FAULTS_WITHIN_S * dice.random(), functools.partial(expediter.add, request))


def main() -> int:
    """Say `ready`, read when to begin (of the monotonic clock), play one part of a crowd, and write what it asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--how", choices=("commands", "library"), required=True)
    parser.add_argument("--nodes", required=True, help="all nodes of the cluster")
    parser.add_argument("--part", required=True, help="FIRST:LAST, of these")
    parser.add_argument("--jobs", default="", help="FIRST:LAST:COUNT, numbers of jobs")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--conf", required=True)
    parser.add_argument("--drained", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    chosen = parser.parse_args()
    threading.stack_size(STACK_BYTES)
    names = expand(chosen.nodes)
    first, last = map(int, chosen.part.split(":"))
    commands = NodeCommands({"SLURM_CONF": chosen.conf})
    client = Noted(commands if chosen.how == "commands" else Library(commands, names, chosen.drained))
    crowd = Crowd(names[first:last], client, len(names))
    jobs: list[int] = []
    if chosen.jobs:
        low, high, count = map(int, chosen.jobs.split(":"))
        jobs = list(itertools.islice(itertools.cycle(range(low, high)), count))
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    begin += crowd.clock.now() - time.monotonic()
    {"boot": all_boot, "switch": switch_fails, "expedite": all_requeued}[chosen.scene](crowd, begin, client, jobs)
    crowd.play(begin + chosen.seconds)
    outcomes = [each.outcome.value for state in crowd.states for each in state.incidents]
    chosen.notes.write_text(json.dumps({"asked": client.notes, "outcomes": outcomes}))
    os._exit(0)  # calls may be under way


if __name__ == "__main__":
    sys.exit(main())
