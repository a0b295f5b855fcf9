"""An `srun` for `tests.bench_control_plane`: one process that speaks for the watchers and ranks of many nodes.

What it says is what real watchers say, byte for byte (`watcher.messages`), as often as they say it.  It stands for
srun and everything behind it, so what those cost themselves is in no figure of the benchmark.

As the srun of a training step it only waits until its ranks have ended.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from stepkeeper.slurm.client import expand
from stepkeeper.slurm.launch import WATCHER_VARIABLE
from stepkeeper.watcher import main as watcher
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher import ranks as paces
from stepkeeper_trainer.formats import messages as words

SOCKET = "CROWD_SOCKET"
NOTES = "CROWD_NOTES"  # what the crowd saw, and when: one JSON object a line
RANKS_PER_NODE = 8
STEP_S = 1.0
SAVE_S = 0.2


class Crowd:
    """The watchers of one bus, and the ranks of the launch that runs."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.attempt = bus.read(os.environ).attempt
        self.launch = 0
        self.step = 0
        self.training: socket.socket | None = None
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.input = b""
        self.out: list[bytes] = []
        self.quit = False
        self.notes = open(os.environ[NOTES], "a", buffering=1)  # noqa: SIM115 - for as long as the process lives

    def run(self) -> None:
        """Speak until the order to quit, or until the supervisor is gone."""
        address = os.environ[SOCKET]
        if os.path.exists(address):
            os.unlink(address)  # of the bus before, which is over
        self.listener.bind(address)
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.read)
        self.note("ready begins")
        for pid, node in enumerate(self.nodes, 1):
            self.say(bus.Ready(node=node, pid=pid, version="1", reads=False, switches="s0"))
        self.flush()
        self.note("ready said")
        for index, node in enumerate(self.nodes):
            part = index / len(self.nodes)
            self.every(watcher.ALIVE_EVERY_S, part, lambda node=node: self.say(bus.Alive(node=node)))
            self.every(paces.EVERY_S, part, lambda node=node: self.say_pace(node))
        self.every(STEP_S, 0.0, self.take_step)
        while not self.quit:
            now = time.monotonic()
            for key, _ in self.selector.select(max(0.0, self.due[0][0] - now)):
                key.data()
            now = time.monotonic()
            while self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            self.flush()

    def every(self, seconds: float, part: float, call: Callable[[], None]) -> None:
        """Do something every so many seconds; `part` of them passes before the first time."""

        def again() -> None:
            call()
            self.later(seconds, again)

        self.later(seconds * part, again)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Do something once."""
        heapq.heappush(self.due, (time.monotonic() + seconds, next(self.number), call))

    def say(self, message: bus.FromWatcher) -> None:
        """Queue a line of a watcher."""
        self.out.append(bus.encode(message))

    def flush(self) -> None:
        """Write what is queued; waits while the supervisor does not read."""
        data = memoryview(b"".join(self.out))
        self.out.clear()
        while data:
            data = data[os.write(1, data[:65536]) :]

    def note(self, what: str) -> None:
        """Keep an instant for the benchmark."""
        self.notes.write(json.dumps({"at": time.monotonic(), "what": what}) + "\n")

    def read(self) -> None:
        """Take the supervisor's lines; each is for all nodes."""
        data = os.read(0, 65536)
        self.quit = not data
        *lines, self.input = (self.input + data).split(b"\n")
        for line in lines:
            message = bus.decode_to_watcher(line)
            if isinstance(message, bus.Clear):
                self.note("clear asked")
                for node in self.nodes:
                    self.say(
                        bus.Cleared(node=node, launch=message.launch, number=message.number, address=node, port=29500)
                    )
                self.flush()
                self.note("clear said")
            elif isinstance(message, bus.Lease) and message.launch is not None:
                self.launch = message.launch
            elif isinstance(message, bus.Save):
                self.note("save asked")
                self.later(SAVE_S, lambda stop=message.stop: self.save(stop=stop))
            elif isinstance(message, bus.Kill):
                self.note("kill asked")
                self.end(signal.SIGKILL)
            elif isinstance(message, bus.Quit):
                self.quit = True

    def accept(self) -> None:
        """A launch begins: each wrapper, and then the trainer library in each rank, reports."""
        self.training, _ = self.listener.accept()
        self.selector.register(self.training, selectors.EVENT_READ, self.read_training)
        self.note("launch begins")
        for rank, node, local in self.ranks():
            task = words.TaskStarted(launch=self.of(), rank=rank, local_rank=local, pid=rank + 1)
            self.say(bus.Rank(node=node, message=task))
        for rank, node, _ in self.ranks():
            hello = words.Hello(
                launch=self.of(), rank=rank, world_size=len(self.nodes) * RANKS_PER_NODE, pid=rank + 1, version="1",
                resumed_step=self.step,
            )  # fmt: skip
            self.say(bus.Rank(node=node, message=hello))
        self.flush()
        self.note("launch said")

    def read_training(self) -> None:
        """A person of the benchmark may have a rank fail; an end means that srun was killed."""
        assert self.training is not None
        data = self.training.recv(64)
        if not data:
            self.selector.unregister(self.training)
            self.training = None

    def ranks(self) -> list[tuple[int, str, int]]:
        """Return rank, node and number on the node of each."""
        each = itertools.product(self.nodes, range(RANKS_PER_NODE))
        return [(rank, node, local) for rank, (node, local) in enumerate(each)]

    def of(self) -> str:
        """Return how the ranks name their launch."""
        return f"{self.attempt}.{self.launch}"

    def take_step(self) -> None:
        """Rank 0 reports one; where the benchmark wants it, a rank fails."""
        if self.training is None:
            return
        self.step += 1
        progress = words.Progress(
            launch=self.of(), rank=0, step=self.step, tokens=self.step * 1000, loss=1.0, step_seconds=STEP_S,
            own_seconds=STEP_S / 2,
        )  # fmt: skip
        self.say(bus.Rank(node=self.nodes[0], message=progress))
        failing = os.environ[NOTES] + ".fail"
        if os.path.exists(failing):
            os.unlink(failing)
            self.note("rank fails")
            gone = words.TaskExited(launch=self.of(), rank=1, signal=int(signal.SIGSEGV), at=time.time())
            self.say(bus.Rank(node=self.nodes[0], message=gone))

    def say_pace(self, node: str) -> None:
        """Every watcher reports what its slowest rank works for a step."""
        if self.training is not None:
            pace = bus.Paced(node=node, launch=self.of(), step=self.step, step_seconds=STEP_S, own_seconds=0.5, rank=0)
            self.say(pace)

    def save(self, *, stop: bool) -> None:
        """All ranks save the newest step, and leave."""
        if self.training is None:
            return
        first, save_id = self.nodes[0], f"{self.step:032x}"
        said: list[words.FromRank] = [
            words.SaveStarted(launch=self.of(), step=self.step, save_id=save_id, emergency=True),
            words.Committed(
                launch=self.of(), step=self.step, save_id=save_id, directory=f"step_{self.step:08d}", bytes=1,
                seconds=SAVE_S, emergency=True,
            ),
        ]  # fmt: skip
        if stop:
            said.append(words.Stopped(launch=self.of(), step=self.step, save_id=save_id))
        for message in said:
            self.say(bus.Rank(node=first, message=message))
        if stop:
            for rank, node, _ in self.ranks():
                gone = words.TaskExited(launch=self.of(), rank=rank, code=0, at=time.time())
                self.say(bus.Rank(node=node, message=gone))
            self.flush()
            self.note("ranks left")
            self.end(0)

    def end(self, code: int) -> None:
        """End the srun of the training step."""
        if self.training is not None:
            self.training.sendall(bytes([code]))


def train() -> int:
    """Be the srun of a training step: wait for its end."""
    with socket.socket(socket.AF_UNIX) as crowd:
        crowd.connect(os.environ[SOCKET])
        end = crowd.recv(1) or b"\x01"
    return 137 if end[0] == signal.SIGKILL else end[0]


def main() -> int:
    """Be the watchers where this is their step, else a training step."""
    if WATCHER_VARIABLE not in os.environ:
        return train()
    listed = next(word for word in sys.argv if word.startswith("--nodelist="))
    Crowd(expand(listed.partition("=")[2])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
