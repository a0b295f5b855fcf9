"""The bus: one Slurm step of watchers, spoken to through its srun's stdin and stdout."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.liveness import SUSPECT_AFTER_S, Life, Peer
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.supervisor.sources.slurmd import follow
from stepkeeper.supervisor.srun import Srun
from stepkeeper.watcher import messages as lines
from stepkeeper_trainer.formats import messages as words

# The watchers' words on what their ranks work for a step, put together: one event for all nodes.

SLOWEST_REPORTED = 4  # nodes


class Paces:
    """Collects a round of words; it is over when a node speaks again."""

    def __init__(self) -> None:
        self._launch = -1
        self._paces: dict[str, lines.Paced] = {}

    def receive(self, word: lines.Paced, launch: int, at: float) -> on.NodesPaced | None:
        """Take in a message; return the round that is over with it.

        Args:
            word: of a watcher.
            launch: of the attempt, that it concerns.
            at: Unix seconds.
        """
        event = None
        if launch != self._launch:
            self._launch, self._paces = launch, {}
        elif word.node in self._paces:
            said = self._paces.values()
            slowest = sorted((each for each in said if each.rank is not None), key=lambda each: -each.own_seconds)
            event = on.NodesPaced(
                at=at,
                launch=launch,
                step=max(each.step for each in said),
                step_seconds=statistics.median(each.step_seconds for each in said),
                own=tuple(sorted((each.node, each.own_seconds) for each in said)),
                loading=statistics.median_low(each.loading_seconds for each in said),
                slowest=tuple((each.node, each.rank or 0, each.loading_seconds) for each in slowest[:SLOWEST_REPORTED]),
            )
            self._paces = {}
        self._paces[word.node] = word
        return event


ERROR_CHARACTERS_MAX = 300
KILLED = ((1.0, signal.SIGKILL),)
LEAVE_WITHIN_S = 2.0  # assumed to be enough for all watchers but those of lost nodes
LATE_AFTER_S = 2.5  # a watcher sends something every 2 s; until its node is told, it is silent for 3 s more (`slurmd`)
# A rank's message -> the event that it becomes, with each field that both have: `test_bus_words` compares them.
EVENTS: dict[type[words.FromRank], Any] = {
    words.TaskExited: on.RankExited,
    words.Hello: on.RankHello,
    words.Progress: on.Progressed,
    words.Replayed: on.Replayed,
    words.Corrupted: on.Corrupted,
    words.SaveStarted: on.SaveBegan,
    words.Committed: on.CheckpointCommitted,
    words.SaveFailed: on.SaveFailed,
    words.Finished: on.TrainingFinished,
    words.Stopped: on.TrainingStopped,
}


def _event(kind: Any, message: msgspec.Struct, **known: object) -> on.Event:
    """Return the event of a message: what it knows besides counts more than what the message says."""
    said = {name: getattr(message, name) for name in message.__struct_fields__} | known
    event: on.Event = kind(**{name: said[name] for name in kind.__struct_fields__ if name in said})
    return event


class Bus:
    """One generation of watchers.  Emits their words as events."""

    def __init__(
        self,
        number: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        inbox: Inbox,
        attempt: int,
        note: Callable[[str, str], None],
        on_shard: Callable[[lines.ShardRead], None],
        on_stack: Callable[[lines.OfStacks], None] = lambda _: None,
        on_stop_signal: Callable[[lines.StopSignalSent], None] = lambda _: None,
        after_s: float = 0.0,
        size: int = 0,
    ) -> None:
        """Start srun, `after_s` seconds from now; `BusEnded` comes when it could not be started.

        Args:
            number: of this bus; the higher one takes over.
            argv: of srun.
            environment: of srun and the watchers.
            inbox: where events go.
            attempt: messages of other attempts are not taken for this one's.
            note: called with a node and what its watcher has for the log, on a thread of the bus.
            on_shard: called with what a watcher says of its shard of a step directory, on a thread of the bus.
            on_stack: called with what a watcher says of its ranks' stacks, on a thread of the bus.
            on_stop_signal: called when ranks of a node got the stop signal, on a thread of the bus.
            after_s: a bus that failed is not tried again at once.
            size: nodes of it; 0: not known.
        """
        self.number = number
        self._inbox = inbox
        self._attempt = attempt
        self._note = note
        self._on_share = on_shard
        self._on_stack = on_stack
        self._on_stop_signal = on_stop_signal
        self._expected: tuple[int, int] = (-1, 0)  # launch and how many tasks it has
        # launch, and what each rank's wrapper said when it was started
        self._started: tuple[int, dict[int, words.TaskStarted]] = (-1, {})
        self._cleared: dict[str, lines.Cleared] = {}
        self._clear_number = 0
        self._check_number = 0
        self._to_clear: do.ClearNodes | None = None
        self._left: set[str] = set()  # nodes whose watcher ends
        self._heard_of_end = threading.Event()
        self._peers: dict[str, Peer] = {}  # by node; its watcher, by the monotonic clock
        # nodes whose watcher was late at the last look, and when it had spoken
        self._late: dict[str, float] = {}
        self._slurmds: dict[str, tuple[str, int]] = {}  # addresses of those that were asked for
        self._size = size
        self._ready: set[str] = set()  # nodes whose watcher has answered
        self._reads: set[str] = set()  # nodes whose watcher can read shards of step directories
        self._paces = Paces()
        self._error = ""
        self._srun = Srun(inbox, Part.BUS, f"bus-{number}", on_word=self._on_word, on_line=self._on_line)
        self._closed = threading.Event()
        inbox.run(Part.BUS, lambda: self._run(list(argv), dict(environment), after_s), name=f"bus-{number}")

    def say(self, message: lines.ToWatcher) -> None:
        """Queue one line for every watcher; never waits."""
        self._srun.say(lines.encode(message, on_cut=lambda cut: self._note("", cut)))

    def expect(self, launch: int, tasks: int) -> None:
        """Expect a launch; `LaunchBegan` comes when so many tasks have started."""
        self._expected = (launch, tasks)

    def clear(self, wanted: do.ClearNodes) -> None:
        """Have the nodes cleared and looked at; `NodesCleared` comes when all of them confirmed."""
        self._clear_number += 1  # first: an answer to the question before is none to this one
        self._cleared, self._to_clear = {}, wanted
        self.say(lines.Clear(launch=wanted.launch, number=self._clear_number, at=time.time()))

    def check(self, wanted: do.CheckNodes) -> None:
        """Have nodes looked at that take no part; `NodesChecked` comes from each."""
        self._check_number += 1
        for node in wanted.nodes:
            self.say(lines.Check(node=node, number=self._check_number, at=time.time()))

    def readers(self) -> set[str]:
        """Return the nodes whose watcher answers and can read shards of step directories."""
        return self._reads & set(self._peers.copy())

    def report_uncleared(self, launch: int) -> None:
        """Emit `NodesNotCleared`: who has not confirmed."""
        wanted = self._to_clear
        nodes = wanted.nodes if wanted is not None and wanted.launch == launch else ()
        missing = tuple(node for node in nodes if node not in self._cleared)
        self._inbox.put(on.NodesNotCleared(at=self._now(), launch=launch, nodes=missing))

    def look_at_late(self) -> None:
        """Emit `Suspected` for nodes whose watcher is late, and look at them.  Called by the loop.

        `SlurmdGone` comes where nothing of Slurm runs.
        """
        now = time.monotonic()
        last = {node: peer.last_message_at for node, peer in self._peers.copy().items()}
        late = {node: at for node, at in last.items() if now - at >= LATE_AFTER_S}
        new = [node for node, at in late.items() if self._late.get(node) != at]
        self._late = late
        other = next((node for node in sorted(last) if node not in late), None)
        if new and other is not None:
            self._inbox.put(on.Suspected(at=self._now(), nodes=tuple(sorted(late))))
            self._inbox.run(Part.SLURMD, lambda: self._follow(new, other), name=f"bus-{self.number}-slurmd")

    def _follow(self, late: list[str], other: str) -> None:
        """Ask where slurmd of the nodes is, and look at it until they speak, or another bus replaces this one."""
        last = {node: peer.last_message_at for node, peer in self._peers.copy().items() if node in late}

        def spoke(node: str) -> bool:
            peer = self._peers.get(node)
            return peer is not None and peer.last_message_at != last.get(node)

        def report(node: str) -> None:
            silent_s = round(time.monotonic() - last[node], 1)
            self._inbox.put(on.SlurmdGone(at=self._now(), node=node, bus=self.number, silent_s=silent_s))

        try:
            if unknown := [node for node in (*last, other) if node not in self._slurmds]:
                self._slurmds |= SlurmCommands().slurmds(unknown)  # once for each node: they do not move
            follow(last, other, self._slurmds, spoke=spoke, wait=self._closed.wait, report=report)
        except SlurmError as error:  # nothing is known then, and silence alone counts
            self._note(other, f"slurmd of {', '.join(last)} was not looked at: {error}")

    def check_silence(self) -> None:
        """Emit `WatcherLost` for watchers that are suspect: a new bus costs nothing.  Called by the loop."""
        now = time.monotonic()
        for node, watcher in list(self._peers.items()):
            if watcher.life(now) is not Life.ALIVE:
                if self._peers.pop(node, None) is None:
                    continue  # srun has reported it meanwhile
                why = f"silent for {SUSPECT_AFTER_S:g} s"
                self._inbox.put(on.WatcherLost(at=self._now(), node=node, bus=self.number, why=why))

    def forgive(self, seconds: float) -> None:
        """Take no watcher for silent because of a time in which we could not receive.  Called by the loop."""
        now = time.monotonic()
        for node, watcher in list(self._peers.items()):
            self._peers[node] = watcher.paused(seconds, now)

    def close(self, *, lost: Collection[str] = ()) -> None:
        """Ask the watchers to leave, since the run leaves the nodes, and end the input.

        With a lost node srun would not end: it waits for the end of that watcher, which nobody reports.
        """
        self._close(for_good=True)
        if lost:
            self._inbox.run(Part.KILL, lambda: self._end_without(lost), name=f"bus-{self.number}-kill")

    def abandon(self) -> None:
        """End srun of a bus that another one replaces; its watchers are ended by their successors."""
        self._close(for_good=False)
        self._inbox.run(Part.KILL, lambda: self._srun.end(KILLED), name=f"bus-{self.number}-kill")

    def _close(self, *, for_good: bool) -> None:
        self._closed.set()
        self.say(lines.Quit(for_good=for_good))
        self._srun.say(None)

    # --- threads ----------------------------------------------------------------------------------

    def _end_without(self, lost: Collection[str]) -> None:
        """End srun once all watchers but those of lost nodes have left, or had the time to."""
        until = time.monotonic() + LEAVE_WITHIN_S
        while not set(self._peers.copy()) - set(lost) <= self._left and time.monotonic() < until:
            self._heard_of_end.wait(until - time.monotonic())
            self._heard_of_end.clear()
        self._srun.end(((0.0, signal.SIGKILL),))

    def _run(self, argv: list[str], environment: dict[str, str], after_s: float) -> None:
        """Start srun, read what it says until it ends, and report the end."""
        code, error = 0, ""
        if not self._closed.wait(after_s):
            try:
                wait = self._srun.run(argv, environment)
            except OSError as failure:
                code, error = 127, f"srun: {failure.strerror}"
            else:
                code = wait()
                error = self._error if code else ""
        self._inbox.put(on.BusEnded(at=self._now(), bus=self.number, code=code, error=error))

    def _on_line(self, line: bytes) -> None:
        message = lines.decode_from_watcher(line)
        if message is not None:
            self._emit(message)

    def _on_word(self, text: str) -> None:
        self._error = text[:ERROR_CHARACTERS_MAX]
        self._notice_death(text)

    def _notice_death(self, text: str) -> None:
        """Take srun's word for a dead watcher: `srun: error: NODE: task 1: Killed`."""
        parts = text.split(": ")
        if len(parts) >= 4 and parts[:2] == ["srun", "error"] and parts[3].startswith("task"):  # noqa: PLR2004
            node = parts[2]
            if parts[-1].startswith("Killed") and len(self._ready) < self._size:
                return  # Slurm ends a step on all nodes that it cannot start on one: this says nothing of the others
            if self._peers.pop(node, None) is not None:
                why = ": ".join(parts[3:])
                self._inbox.put(on.WatcherLost(at=self._now(), node=node, bus=self.number, why=why))

    # --- words become events ----------------------------------------------------------------------

    def _now(self) -> float:
        return self._inbox.clock.now()

    def _emit(self, message: lines.FromWatcher) -> None:  # noqa: C901, PLR0912 - one case a message
        if message.node in self._peers or isinstance(message, lines.Ready):
            self._peers[message.node] = Peer(time.monotonic())
        at = self._now()
        match message:
            case lines.Ready():
                self._ready.add(message.node)
                if message.reads:
                    self._reads.add(message.node)
                self._inbox.put(on.WatcherReady(at=at, node=message.node, bus=self.number, switches=message.switches))
            case lines.Signaled():
                self._inbox.put(on.NodeSignaled(at=at, node=message.node, signal=message.signal))
            case lines.Cleared():
                self._on_cleared(message)
            case lines.Checked():
                if message.number == self._check_number:
                    self._on_checked(message)
            case lines.Rank():
                event = self._rank_event(message, at)
                if event is not None:
                    self._inbox.put(event)
            case lines.Paced():
                launch = self._launch(message.launch)
                if launch is not None:
                    self._inbox.guard(Part.PACE, self._on_paced)(message, launch, at)
            case lines.Lost():
                launch = self._launch(message.launch)
                if launch is not None:
                    self._inbox.put(on.RankExited(at=at, launch=launch, rank=message.rank, node=message.node))
            case lines.Faulted():
                self._inbox.put(_event(on.NodeFaulted, message, at=at))
            case lines.ShardRead():
                self._on_share(message)
            case lines.DoesNothing() | lines.Stood() | lines.StoodBelow() | lines.Entered() | lines.StacksTaken():
                self._on_stack(message)
            case lines.StopSignalSent():
                self._on_stop_signal(message)
            case lines.Note():
                self._note(message.node, message.text)
            case lines.Left():
                self._left.add(message.node)
                self._heard_of_end.set()
            case lines.Alive():
                pass  # its arrival is what counts

    def _on_cleared(self, message: lines.Cleared) -> None:
        wanted, cleared = self._to_clear, self._cleared
        current = message.number in (0, self._clear_number)  # 0: a watcher of a version that sends none
        if wanted is None or message.launch != wanted.launch or not current:
            return
        cleared[message.node] = message
        if not all(node in cleared for node in wanted.nodes):
            return
        self._to_clear = None
        first = cleared[wanted.first]
        said = [cleared[node] for node in wanted.nodes]
        self._inbox.put(
            on.NodesCleared(
                at=self._now(),
                launch=wanted.launch,
                address=first.address,
                port=first.port,
                unfit=tuple(on.Unfit(node=w.node, why=w.unfit, shared=w.shared) for w in said if w.unfit),
                nodes=wanted.nodes,
            )
        )

    def _on_paced(self, message: lines.Paced, launch: int, at: float) -> None:
        paced = self._paces.receive(message, launch, at)
        if paced is not None:
            self._inbox.put(paced)

    def _on_checked(self, message: lines.Checked) -> None:
        unfit = (on.Unfit(node=message.node, why=message.unfit),) if message.unfit else ()
        self._inbox.put(on.NodesChecked(at=self._now(), nodes=(message.node,), unfit=unfit))

    def _on_task_started(self, launch: int, word: words.TaskStarted, at: float) -> on.LaunchBegan | None:
        if self._started[0] != launch:
            self._started = (launch, {})
        started = self._started[1]
        started[word.rank] = word
        if (launch, len(started)) != self._expected:
            return None
        warm = sum(each.warm for each in started.values())
        return on.LaunchBegan(
            at=at, launch=launch, warm=warm, cold=next((each.cold for each in started.values() if each.cold), "")
        )

    def _launch(self, word: str) -> int | None:
        """Return the launch of `ATTEMPT.LAUNCH`, if it is of our attempt."""
        attempt, _, launch = word.partition(".")
        if not launch.isdigit() or attempt != str(self._attempt):
            return None
        return int(launch)

    def _rank_event(self, said: lines.Rank, at: float) -> on.Event | None:
        word = said.message
        launch = self._launch(word.launch)
        if launch is None:
            return None
        if isinstance(word, words.TaskStarted):
            return self._on_task_started(launch, word, at)
        return _event(EVENTS[type(word)], word, at=at, launch=launch, node=said.node, late_s=said.late_s)
