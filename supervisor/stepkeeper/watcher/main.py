"""The watcher's loop: stdin (supervisor), a datagram socket (ranks), signals, and a slow clock."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import sys
import time
from typing import TYPE_CHECKING

from stepkeeper import __version__
from stepkeeper.core.liveness import SUSPECT_AFTER_S, Life, Peer
from stepkeeper.loop_tools import Stalls
from stepkeeper.slurm.launch import node_name
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.channel import Channel
from stepkeeper.watcher.failover import Failover, Found
from stepkeeper.watcher.messages import Assignment, read
from stepkeeper.watcher.processes import RankSteps, kill_older_watchers, kill_ranks, rank_processes
from stepkeeper.watcher.ranks import NodePace, RankSocket, free_port, ranks_here
from stepkeeper.watcher.sensors import Fitness, NodeSensors
from stepkeeper.watcher.stacks import StackTaker
from stepkeeper.wrapper import own_address
from stepkeeper_trainer.formats.messages import Hello, Progress, SaveRequest, TaskStarted, shorten

if TYPE_CHECKING:
    from stepkeeper.watcher.rescue import Result

ALIVE_EVERY_S = 2.0
SWITCHES_CHARACTERS_MAX = 200  # of what Slurm has above a node: a line of the bus is short
PROGRESS_EVERY_S = 1.0
ACKNOWLEDGE_WITHIN_S = 2.0  # after SIGTERM, for a message of the supervisor
BUS_BACK_WITHIN_S = 10.0  # when only srun died, a new bus takes over from us by then
RESCUE_STAGGER_S = 0.5  # the second watcher gives the first this long, and so on
RESCUERS = 4  # nodes that try early; a thousand must not ask Slurm at once
RESCUERS_LATE_S = 10.0
RESCUE_AGAIN_S = 2.0
RESCUE_AGAIN_MAX_S = 60.0
KILL_AGAIN_EVERY_S = 0.05
STEP_LOOKS_MAX = 60  # one with each `Alive`: what a launch without the library and our wrapper may take to begin
SAVE_AGAIN_EVERY_S = 1.0
SAVE_AGAIN_FOR_S = 60.0  # a request that is not for good: the ranks have got it by then
PROBE_EVERY_S = SUSPECT_AFTER_S / 2  # of a supervisor that sends nothing, while nothing else is known of it


class Watcher:
    """State of one watcher.  `run` returns its exit code."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.node = node_name()
        self.selector = selectors.DefaultSelector()
        self.output = Channel(1, self.node)
        self.output_full = False
        self.input = b""
        kill_older_watchers(assignment, self.node)
        self.ranks = RankSocket(assignment.socket_name(self.node))
        self.launch: int | None = None
        self.cleared: int | None = None  # the launch that the node was cleared for: all its ranks have reported to us
        self.signaled: int | None = None  # the launch whose ranks got the stop signal from us
        self.steps = RankSteps()
        self.steps_looks = STEP_LOOKS_MAX  # left, for Slurm steps of ranks that say nothing themselves
        self.wrapped: set[int] = set()
        self.started: dict[int, tuple[str, int]] = {}  # rank -> launch, pid, as its wrapper says
        self.greeted: dict[int, tuple[str, int, int | None]] = {}  # rank -> launch, pid, step of its newest hello
        self.memory: dict[str, int | None] = {}  # where ranks hold snapshots here -> descriptor by which we do so too
        self.pidfds: dict[int, tuple[int, str, int]] = {}  # pid -> (descriptor, launch, rank)
        self.progress_at = 0.0
        self.progress: tuple[Progress, float] | None = None  # the newest of rank 0, and when it came
        self.pace = NodePace(self.node)
        self.senses = NodeSensors(assignment, self.node, self.steps)
        self.stacks = StackTaker(assignment, self.node)
        self.clearing: bus.Clear | None = None
        self.fitness: Fitness | None = None  # of the node, as of the newest `Clear`
        self.saving: SaveRequest | None = None
        self.save_again_at = 0.0
        self.save_until = 0.0
        self.supervisor = Peer(time.monotonic())
        self.failover = Failover(assignment, self.node)
        self.signaled_by_slurm = False  # since the newest message of the supervisor
        self.probe_at = 0.0  # the next probe of a supervisor that sends nothing
        self.probes = 0  # since its newest message
        self.requests = 0  # that we made in its place
        self.said = ""  # of the newest probe
        self.asked_to_save = False  # the ranks, in its place, since its newest message
        self.lost = False  # and to stop
        self.quit = False
        self.for_good = False  # with that: the run leaves the node
        self.alive_at = 0.0

    def run(self) -> int:
        """Serve until the order to quit, or until the rescue is done."""
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        self.selector.register(0, selectors.EVENT_READ, self._on_input)
        self.selector.register(self.ranks, selectors.EVENT_READ, self._on_rank)
        self.selector.register(self.senses, selectors.EVENT_READ, self._on_senses)
        self.selector.register(self.stacks, selectors.EVENT_READ, self._on_stacks)
        self.selector.register(self.failover, selectors.EVENT_READ, self._on_failover)
        self.selector.register(reader, selectors.EVENT_READ, lambda: self._on_signal(reader))
        switches = bus.switches_above(os.environ.get("SLURM_TOPOLOGY_ADDR", ""), self.node)[:SWITCHES_CHARACTERS_MAX]
        self.say(bus.Ready(node=self.node, pid=os.getpid(), version=__version__, reads=True, switches=switches))
        if self.assignment.bus <= 1:  # the first watchers of an attempt come before a launch
            self.senses.look_ahead()
        self.senses.start()
        stalls = Stalls(time.monotonic())
        while not self.quit:
            wait_s = self._wait_s()
            stalls.waits(wait_s)
            ready = self.selector.select(wait_s)
            self._forgive(stalls.look(time.monotonic()))
            for key, _ in ready:
                key.data()
            now = time.monotonic()
            self._forgive(stalls.look(now))
            self._on_clock(now)
        self._flush()
        self.ranks.close()
        self.senses.close()
        if self.for_good:
            self._give_back_memory()
        self.say(bus.Left(node=self.node))
        self._flush()
        return 0

    def _hold_memory(self, where: str) -> None:
        """Keep the snapshots that a rank told of, if it has any, from being taken for left over while no rank runs."""
        if not where:
            return
        from stepkeeper_trainer.tiers.memory import hold_told  # noqa: PLC0415 - few runs hold any
        from stepkeeper_trainer.tiers.tier import TierError  # noqa: PLC0415

        try:
            self.memory[where] = hold_told(where, self.memory.get(where))
        except (OSError, TierError) as error:
            if where not in self.memory:  # ranks repeat what they say
                self._complain(f"snapshots are not held: {error}")
            self.memory.setdefault(where, None)

    def _give_back_memory(self) -> None:
        """Remove the snapshots that the ranks of this run hold here: the run has ended, or leaves the node.

        Where another process holds them still, they are of a launch after ours, or its end is near: they are its own.
        """
        if not self.memory:
            return
        from stepkeeper_trainer.tiers.memory import discard_told  # noqa: PLC0415 - few runs hold any

        while self.memory:
            where, held = self.memory.popitem()
            try:
                if held is not None and not discard_told(where, held):
                    self._complain(f"snapshots are left to the processes that hold them: {where}")
            except OSError as error:
                self._complain(f"snapshots are left: {error}")

    def _complain(self, text: str) -> None:
        with contextlib.suppress(OSError):  # srun may be gone: nobody reads it
            sys.stderr.write(f"stepkeeper watcher {self.node}: {text}\n")
            sys.stderr.flush()

    def say(self, message: bus.FromWatcher) -> None:
        """Queue one line for the supervisor.  Never waits."""
        self.output.put(message)
        self._wait_for_room()

    def _flush(self) -> None:
        self.output.flush()
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        if bool(len(self.output)) != self.output_full:
            self.output_full = bool(len(self.output))
            if self.output_full:
                self.selector.register(1, selectors.EVENT_WRITE, self._flush)
            else:
                self.selector.unregister(1)

    # --- what comes in ----------------------------------------------------------------------------

    def _on_input(self) -> None:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(0)
            self.supervisor = self.supervisor.hinted(time.monotonic() + BUS_BACK_WITHIN_S)
            return
        *lines, self.input = (self.input + data).split(b"\n")
        for line in lines:
            message = bus.decode_to_watcher(line)
            if message is not None:
                self._obey(message)

    def _obey(self, message: bus.ToWatcher) -> None:  # noqa: C901, PLR0912 - one case a message
        match message:
            case bus.Lease():
                self._on_supervisor_alive()
                self.launch = message.launch
            case bus.Save():
                self.saving = SaveRequest(
                    launch=f"{self.assignment.attempt}.{message.launch}",
                    request_id=message.request_id,
                    stop=message.stop,
                    deadline_at=message.deadline_at,
                    why=message.why,
                )
                self.save_again_at = 0.0
                self.save_until = time.monotonic() + SAVE_AGAIN_FOR_S
                if message.signal:
                    self._signal_ranks(message.launch, message.signal, library_seen=message.library_seen)
            case bus.Kill():
                self._kill()
                self.senses.look_ahead()
            case bus.Clear():
                self.clearing = message
                self.cleared = message.launch
                self.fitness = None
                self.senses.check(message)
                self.saving = None
                self.wrapped.clear()
                self.ranks.forget()
            case bus.Check():
                if message.node == self.node:
                    self.senses.check(message)
            case bus.Look():
                if message.node == self.node:
                    self.senses.look(message.why)
            case bus.Read():
                if message.node == self.node:
                    self.senses.read(message)
            case bus.ReadNoMore():
                self.senses.read_no_more(message.number)
            case bus.Stacks():
                self._take_stacks(message)
            case bus.Leave():
                if message.node == self.node:
                    self._give_back_memory()
            case bus.Quit():
                self.quit, self.for_good = True, message.for_good

    def _take_stacks(self, wanted: bus.Stacks) -> None:
        of_launch = f".{wanted.launch}"
        started = {rank: pid for rank, (launch, pid) in self.started.items() if launch.endswith(of_launch)}
        greeted = {rank: pid for rank, (launch, pid, _) in self.greeted.items() if launch.endswith(of_launch)}
        self.stacks.take(wanted, ranks_here(started, greeted))

    def _on_stacks(self) -> None:
        for word in self.stacks.words():
            self.say(word)

    def _on_senses(self) -> None:
        for word in self.senses.take():
            if not isinstance(word, Fitness):
                self.say(word)
            elif word.launch is None:
                self.say(bus.Checked(node=self.node, number=word.number, unfit=shorten(word.unfit)))
            elif self.clearing is not None and (word.launch, word.number) == (
                self.clearing.launch,
                self.clearing.number,
            ):
                self.fitness = word

    def _on_rank(self) -> None:
        received = self.ranks.receive()
        if received is None:
            return
        message, pid = received
        if isinstance(message, Progress):
            self.pace.take(message)
            if message.rank == 0:
                self.progress = message, time.monotonic()
            return
        if isinstance(message, TaskStarted | Hello):
            self.steps.learn(pid)
        if isinstance(message, TaskStarted):
            self.wrapped.add(message.rank)
            self.started[message.rank] = (message.launch, message.pid)
        if isinstance(message, Hello) and message.rank not in self.wrapped:
            self._follow(pid, message.launch, message.rank)
        if isinstance(message, Hello):
            self._hold_memory(message.memory)
            known = self.greeted.get(message.rank)
            resumed = message.resumed_step if message.rank == 0 else None  # all go on from the same step: one says it
            self.greeted[message.rank] = (message.launch, pid, resumed)
            if message.unable:
                del self.greeted[message.rank]  # it gets the stop signal
            elif known == self.greeted[message.rank]:
                return  # said again in case that we are new: the supervisor knows
        self._say_progress()  # what was said before must arrive before
        self.say(bus.Rank(node=self.node, message=message))

    def _follow(self, pid: int, launch: str, rank: int) -> None:
        """Notice the death of a rank that has no wrapper of ours."""
        if pid in self.pidfds:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # gone already, or in another pid namespace: srun's end shows it
        self.pidfds[pid] = (descriptor, launch, rank)
        self.selector.register(descriptor, selectors.EVENT_READ, lambda: self._on_rank_gone(pid))

    def _on_rank_gone(self, pid: int) -> None:
        descriptor, launch, rank = self.pidfds.pop(pid)
        self.selector.unregister(descriptor)
        os.close(descriptor)
        self._say_progress()
        self.say(bus.Lost(node=self.node, launch=launch, rank=rank))

    def _on_signal(self, reader: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in set(os.read(reader, 64)):
                self.say(bus.Signaled(node=self.node, signal=signal.Signals(number).name.removeprefix("SIG")))
        self.signaled_by_slurm = True
        self.failover.cancel()
        self.supervisor = self.supervisor.hinted(time.monotonic() + ACKNOWLEDGE_WITHIN_S)

    def _forgive(self, away_s: float) -> None:
        """We did not run for so long (the job was suspended): nobody was silent meanwhile."""
        if not away_s:
            return
        self.supervisor = self.supervisor.paused(away_s, time.monotonic())
        self.save_until += away_s
        self.probe_at += away_s
        self.say(bus.Note(node=self.node, text=f"suspended for {away_s:.0f} s"))

    # --- the clock --------------------------------------------------------------------------------

    def _wait_s(self) -> float:
        now = time.monotonic()
        until = [self.alive_at, self._next_probe_at()]
        if self.progress is not None:
            until.append(self.progress_at)
        if self.clearing is not None:
            until.append(now + KILL_AGAIN_EVERY_S)
        if self.saving is not None:
            until.append(self.save_again_at)
        return max(0.0, min(until) - now)

    def _on_clock(self, now: float) -> None:
        if now >= self.alive_at:
            self.alive_at = now + ALIVE_EVERY_S
            self.say(bus.Alive(node=self.node))
            self._learn_steps()
            for word in self.pace.words(now):
                self.say(word)
        if now >= self.progress_at:
            self._say_progress()
        if self.clearing is not None:
            self._clear()
        if self.saving is not None and not self.saving.stop and now >= self.save_until:
            self.saving = None
        if self.saving is not None and now >= self.save_again_at:
            self.save_again_at = now + SAVE_AGAIN_EVERY_S
            self.ranks.send(self.saving.launch, self.saving)
        if now >= self._next_probe_at():
            self._probe_supervisor(now)

    def _learn_steps(self) -> None:
        """Look for ranks that say nothing, a few times after a launch: later their environment may be overwritten."""
        if self.steps or not self.steps_looks or self.clearing is not None:
            return
        self.steps_looks -= 1
        own = self.assignment
        for pid in rank_processes(own.run_id, self.node, attempt_max=own.attempt):
            self.steps.learn(pid)

    def _say_progress(self) -> None:
        if self.progress is not None:
            message, came_at = self.progress
            # later only where this process was stopped, as the ranks were
            late_s = round(min(time.monotonic() - came_at, PROGRESS_EVERY_S), 3)
            self.say(bus.Rank(node=self.node, message=message, late_s=late_s))
            self.progress = None
            self.progress_at = time.monotonic() + PROGRESS_EVERY_S

    def _kill(self) -> None:
        self.saving = None
        kill_ranks(self.assignment.run_id, self.node, attempt_max=self.assignment.attempt, steps=self.steps)

    def _signal_ranks(self, launch: int, name: str, *, library_seen: bool) -> None:
        """Send the stop signal, once a launch, to the ranks that have no trainer library.

        Args:
            launch: of the ranks.
            name: of the signal.
            library_seen: some ranks have the library: a watcher without reports of all since their start signals none.
        """
        from stepkeeper.watcher import stop_signal  # noqa: PLC0415 - most watchers never need it

        if self.signaled == launch or (library_seen and self.cleared != launch):
            return
        self.signaled = launch
        of_launch = f"{self.assignment.attempt}.{launch}"
        theirs = {pid for known, pid, _ in self.greeted.values() if known == of_launch}
        attempt, run_id = self.assignment.attempt, self.assignment.run_id
        sent = stop_signal.send_stop_signal(
            run_id, self.node, name, attempt_max=attempt, with_library=theirs, steps=self.steps
        )
        if sent:
            self.say(bus.StopSignalSent(node=self.node, launch=launch, text=shorten(stop_signal.in_words(name, sent))))

    def _clear(self) -> None:
        """End what is left; confirm once nothing is and the node has been looked at.  Called again until then."""
        if self.clearing is None:
            return
        self._kill()
        own = self.assignment
        left = rank_processes(own.run_id, self.node, attempt_max=own.attempt, steps=self.steps)
        if self.fitness is None or next(left, None) is not None:
            return
        self.steps.forget()
        self.steps_looks = STEP_LOOKS_MAX
        address = own_address(os.environ, self.node)
        unfit = shorten(self.fitness.unfit)
        launch = self.clearing.launch
        self.say(
            bus.Cleared(
                node=self.node,
                launch=launch,
                number=self.clearing.number,
                address=address,
                port=free_port(),
                unfit=unfit,
                shared=self.fitness.shared,
            )
        )
        self.clearing = None

    # --- when the supervisor sends nothing ----------------------------------------------------------

    def _on_supervisor_alive(self) -> None:
        """It lives: whatever was suspected is over, and a probe that is under way changes nothing."""
        self.supervisor = self.supervisor.received(time.monotonic())
        self.failover.cancel()
        self.signaled_by_slurm = self.asked_to_save = self.lost = False
        self.probes, self.probe_at = 0, 0.0

    def _next_probe_at(self) -> float:
        """Return when to probe the supervisor: the first nodes of the job do so before the others."""
        index = self.assignment.nodes.index(self.node) if self.node in self.assignment.nodes else 0
        late_s = index * RESCUE_STAGGER_S
        if index >= RESCUERS:
            late_s = RESCUERS_LATE_S + index / len(self.assignment.nodes) * RESCUE_AGAIN_MAX_S
        return max(self.supervisor.suspect_at + late_s, self.probe_at)

    def _probe_supervisor(self, now: float) -> None:
        """Begin a probe on a thread, and plan the next one."""
        gone = self.supervisor.life(now) is Life.GONE
        begun = self.failover.probe(gone=gone, signaled=self.signaled_by_slurm, again=self.probes > 0)
        self.probes += begun
        pause_s = PROBE_EVERY_S
        if gone or self.signaled_by_slurm:
            pause_s = min(RESCUE_AGAIN_S * 1.5**self.probes, RESCUE_AGAIN_MAX_S)
        self.probe_at = now + pause_s * random.uniform(0.7, 1.3)  # noqa: S311 - so that nodes do not ask in step

    def _on_failover(self) -> None:
        for found in self.failover.take():
            match found:
                case Found.SIGN:
                    self._on_supervisor_alive()
                case Found.LOST:
                    self._save_in_its_place(stop=True)
                case Found.UNKNOWN:
                    self._save_in_its_place(stop=False)
                case _:
                    self._on_result(found)

    def _save_in_its_place(self, *, stop: bool) -> None:
        """Ask the ranks for a save, once until the supervisor is back; they go on where nothing is certain yet."""
        if self.launch is None or self.lost or (self.asked_to_save and not stop):
            return
        self.requests += 1
        self.lost, self.asked_to_save = stop, True
        request = SaveRequest(
            launch=f"{self.assignment.attempt}.{self.launch}",
            request_id=-self.requests,
            stop=stop,
            deadline_at=time.time() + 0.6 * self.assignment.kill_wait_s if stop else None,
            why="the supervisor is lost" if stop else "neither the supervisor nor Slurm answers",
        )
        self.ranks.send(request.launch, request)

    def _on_result(self, result: Result) -> None:
        if result.why != self.said:
            self.said = result.why
            self.say(bus.Note(node=self.node, text=shorten(f"failover: {result.why}")))
            self._complain(f"failover: {result.why}")
        if result.left:
            self._kill()
        elif result.done and self.launch is not None:  # Slurm is about to end the ranks
            self._signal_ranks(self.launch, self.assignment.stop_signal, library_seen=True)
        self.quit = self.for_good = result.done  # the job is requeued, or the run is over


def main() -> int:
    """Run the watcher of this node."""
    return Watcher(read(os.environ)).run()


if __name__ == "__main__":
    sys.exit(main())
