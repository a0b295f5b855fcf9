"""What the watcher learns of its node: the agent's incidents, or its own where there is no agent, and the checks.

Everything here may block, so each works on a thread of its own; what it has to say comes through a queue into the
watcher's loop, which sees a readable pipe.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepkeeper import __version__
from stepkeeper.node_agent import protocol
from stepkeeper.node_agent.protocol import AgentClient, AgentError, AgentGoneError, connect
from stepkeeper.slurm.nodes import NodeCommands
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.messages import Assignment
from stepkeeper.watcher.own_sensors import OwnGpus
from stepkeeper.watcher.processes import RankSteps, rank_processes
from stepkeeper_trainer.formats.messages import shorten

if TYPE_CHECKING:
    from stepkeeper.watcher.checks import NodeChecks
    from stepkeeper.watcher.verify import ShardReader

AGENT_AGAIN_S = 30.0  # an agent that is absent is looked for again
RESTARTS_WITHIN_S = 20.0  # one that has left may be restarting: it is looked for soon, and nothing takes its place yet
AGENT_SOON_S = 0.5
LOOKS_MAX = 8


class Fitness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a launch may start on this node: empty if so, else why not."""

    launch: int | None  # None: of a node that takes no part
    number: int  # of the request
    unfit: str
    shared: bool = False  # the cause may be common to all nodes


Word = bus.FromWatcher | Fitness


class NodeSensors:
    """Threads that watch the node.  `fileno` is readable when `take` has something."""

    def __init__(self, assignment: Assignment, node: str, steps: RankSteps | None = None) -> None:
        self._assignment = assignment
        self._steps = steps
        self._node = node
        self._words: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._looks: queue.Queue[str] = queue.Queue(LOOKS_MAX)
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # of the thread that listens to the agent
        self._closed = threading.Event()
        self._stop_own: Callable[[], None] | None = None
        self._share_reader: ShardReader | None = None
        self._checks: NodeChecks | None = None
        self._noted = ""
        self._gpus = OwnGpus(os.environ, counted=self._counts_gpus)

    def fileno(self) -> int:
        """For select."""
        return self._reader

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._attend, name="agent", daemon=True).start()

    def close(self) -> None:
        """Stop watching; what a thread still waits for ends with the process."""
        self._closed.set()
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._waker, b"\0")
        if self._stop_own is not None:
            self._stop_own()

    def take(self) -> list[Word]:
        """Return what there is to say."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        words = []
        while not self._words.empty():
            words.append(self._words.get())
        return words

    def check(self, wanted: bus.Clear | bus.Check) -> None:
        """Look whether a launch may start here; `Fitness` comes."""
        work = (self._checking(), wanted, time.time())
        threading.Thread(target=self._check, args=work, name="checks", daemon=True).start()

    def look_ahead(self) -> None:
        """A launch comes soon: look already whether it may start here."""
        self._checking().begin()

    def _checking(self) -> NodeChecks:
        if self._checks is None:
            # imported now: a watcher that checks nothing stays small
            from stepkeeper.watcher.checks import NodeChecks  # noqa: PLC0415

            self._checks = NodeChecks(self._assignment, gpus=self._gpus.addresses)
        return self._checks

    def look(self, why: str) -> None:
        """Have the agent look; without one the next checks do."""
        with contextlib.suppress(queue.Full, BlockingIOError):  # it looks already
            self._looks.put_nowait(why)
            os.write(self._waker, b"\0")

    def read(self, wanted: bus.Read) -> None:
        """Read a shard of a step directory; `ShardRead` comes, again and again."""
        if self._share_reader is None:
            # imported now: a watcher that reads nothing stays small
            from stepkeeper.watcher.verify import ShardReader  # noqa: PLC0415

            checkpoints = Path(self._assignment.run_directory) / "checkpoints"
            self._share_reader = ShardReader(checkpoints, self._node, self._put)
        self._share_reader.read(wanted)

    def read_no_more(self, number: int) -> None:
        """Stop reading for a verification and for those before it."""
        if self._share_reader is not None:
            self._share_reader.drop(number)

    def _put(self, word: Word) -> None:
        self._words.put(word)
        with contextlib.suppress(BlockingIOError):  # full: the loop wakes anyway
            os.write(self._writer, b"\0")

    # --- the checks -------------------------------------------------------------------------------

    def _check(self, checking: NodeChecks, wanted: bus.Clear | bus.Check, heard_at: float) -> None:
        launch = wanted.launch if isinstance(wanted, bus.Clear) else None
        if wanted.at is None:  # a supervisor of a version that asks for none
            self._put(Fitness(launch=launch, number=wanted.number, unfit=""))
            return
        try:
            report = checking.report(wanted, heard_at)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not keep a launch from starting
            self._put(bus.Note(node=self._node, text=shorten(f"the checks themselves failed: {error!r}")))
            self._put(Fitness(launch=launch, number=wanted.number, unfit=""))
            return
        for warning in report.warnings:
            self._put(bus.Note(node=self._node, text=shorten(f"checks: {warning}")))
        of_gpus = report.gpu_problems
        ours = bool(of_gpus) and (not self._gpus.holds_none or self._is_ours("checks", "", ""))
        unfit = "; ".join(each for each in report.problems if ours or each not in of_gpus)
        self._put(Fitness(launch=launch, number=wanted.number, unfit=unfit, shared=not ours))

    # --- the agent --------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Listen to the node's agent; sense for ourselves while there is none."""
        left_at: float | None = None
        while not self._closed.is_set():
            try:
                client = connect(os.environ, self._node)
                if client is not None:
                    with client:
                        self._listen(client)
                elif not _is_recent(left_at):
                    self._sense()
            except AgentGoneError as error:
                left_at = time.monotonic()
                self._note(f"node agent: {error}")
            except AgentError as error:
                self._note(f"node agent: {error}")
            except Exception as error:  # noqa: BLE001 - reported, and tried again: without this thread no fault arrives
                self._note(f"hardware faults of this node are not received: {error!r}")
            self._closed.wait(AGENT_SOON_S if _is_recent(left_at) else AGENT_AGAIN_S)

    def _note(self, text: str) -> None:
        """Say something for the log, once until something else is to be said."""
        if text != self._noted:
            self._noted = text
            self._put(bus.Note(node=self._node, text=shorten(text)))

    def _listen(self, client: AgentClient) -> None:
        client.join(self._assignment.job_id, self._assignment.restart_count, version=__version__)
        self._rest()
        while not self._closed.is_set():
            for message in client.receive():
                self._on_message(message)
            select.select([client.fileno(), self._wake], [], [])
            with contextlib.suppress(BlockingIOError, queue.Empty):
                os.read(self._wake, 64)
                client.send(protocol.Look(job_id=self._assignment.job_id, why=self._looks.get_nowait()))

    def _on_message(self, message: protocol.FromAgent) -> None:
        match message:
            case protocol.Seen() if message.action.drains and not self._is_ours(message.name, message.pci, message.gpu):
                pass  # said
            case protocol.Seen():
                gpu = " ".join(part for part in (message.pci, message.gpu) if part)
                self._put(
                    bus.Faulted(
                        node=self._node,
                        incident=message.incident,
                        name=shorten(message.name),
                        action=(message.observed or message.action).value,
                        leave=message.action.drains,
                        why=shorten(message.why),
                        gpu=shorten(gpu),
                        drained=message.drained,
                    )
                )
            case protocol.Refused():
                self._put(bus.Note(node=self._node, text=shorten(f"node agent: {message.what}: {message.why}")))
            case _:
                pass  # answers to what was asked

    def _is_ours(self, name: str, pci: str, uuid: str) -> bool:
        """Return whether the job leaves the node for a fault; report where it does not, or where that is not known."""
        found = self._gpus.concern(pci, uuid, self._processes())
        gpu = " ".join(part for part in (pci, uuid) if part)
        if not found.counts:
            self._note(f"{name} on {gpu or 'this node'} concerns other jobs, and this one continues: {found.why}")
        elif found.why:
            self._note(f"{name} on {gpu or 'this node'} counts for this job: {found.why}")
        return found.counts

    def _processes(self) -> Iterator[int]:
        own = self._assignment
        return rank_processes(own.run_id, self._node, attempt_max=own.attempt, steps=self._steps)

    def _counts_gpus(self) -> bool:
        """Ask Slurm, once there is a fault, whether it knows of GPUs on this node."""
        return "gpu" in NodeCommands({}).node(self._node).gres

    # --- without an agent -------------------------------------------------------------------------

    def _sense(self) -> None:
        """Watch NVML and the kernel log ourselves, as far as an ordinary user may."""
        if self._stop_own is None:
            if self._checks is not None:
                self._checks.wait()  # a launch waits for those, and both start processes that ask the driver
            if self._closed.is_set():
                return
            from stepkeeper.watcher.own_sensors import OwnSensors  # noqa: PLC0415 - not where there is an agent

            own = OwnSensors(self._node, self._put, since=self._assignment.started_at, is_ours=self._is_ours)
            self._stop_own = own.close

    def _rest(self) -> None:
        if self._stop_own is not None:
            self._stop_own()
            self._stop_own = None


def _is_recent(left_at: float | None) -> bool:
    """Tell whether the agent has left so lately that it may be restarting."""
    return left_at is not None and time.monotonic() - left_at < RESTARTS_WITHIN_S
