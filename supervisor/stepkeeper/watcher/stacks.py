"""What ranks do that stand still: their stacks, Python's and native ones, and what the kernel says of them.

Python's come first, quickly: by py-spy where it is installed, else the trainer library has Python's faulthandler write
them on a signal.  They stay in the launch's logs, each taken twice: a rank whose stack has changed is not stuck.  Then
py-spy takes the native frames, with a time limit of its own: what goes wrong there is told, and costs nothing else.
At last the ranks are asked where they are in their collectives (`flight_recorder`), and NCCL is (`nccl_ras`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from stepkeeper.watcher import kernel, py_spy
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.flight_recorder import WITHIN_S, FlightRecorderRequest, ask
from stepkeeper.watcher.frames import (
    Below,
    Doing,
    Frame,
    below,
    describe,
    in_own_code,
    of_faulthandler,
    of_py_spy,
    says_it_all,
)
from stepkeeper.watcher.messages import Assignment
from stepkeeper.watcher.nccl_ras import WITHIN_S as RAS_WITHIN_S
from stepkeeper.watcher.nccl_ras import RasWitness
from stepkeeper.watcher.tracing import CALLS_MAX, calls_made
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.messages import shorten

APART_S = 3.0  # between the two
SLEEPS_LEAST = 3  # in that time: the first is the one that it was in, so two whole rounds of a loop are seen
DUMP_WITHIN_S = 5.0
NATIVE_WITHIN_S = 6.0  # for all ranks of the node
STUCK_FOR_S = 1.5  # ranks that cannot handle a signal are not waited for longer
SETTLED_S = 0.3  # a file that has not grown for so long is written
BRIEF_S = 2.0  # for what the flight recorders say, where seconds count
READ_BYTES_MAX = 256 * 1024
WRITTEN_WITHIN_S = 2.0
RANKS_SHOWN_MAX = 4

Word = bus.OfStacks | bus.Note


class _Files:
    """Writes into the ranks' files on a thread of its own: the storage of the run may be what the ranks wait for."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="stack files", daemon=True)
        self._thread.start()

    def append(self, path: Path, text: str) -> None:
        if text:
            self._wanted.put((path, text))

    def close(self, within_s: float) -> None:
        """Wait for what is written, but no longer than `within_s` seconds."""
        self._wanted.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            path, text = wanted
            # what cannot be written is in the words still
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(text)


class StackTaker:
    """Takes stacks on a thread; its words are for the watcher's loop, which selects on it."""

    def __init__(
        self,
        assignment: Assignment,
        node: str,
        *,
        find_spy: Callable[[], str | None] = py_spy.find,
        native_within_s: float = NATIVE_WITHIN_S,
        apart_s: float = APART_S,
    ) -> None:
        """Nothing runs until stacks are wanted; `find_spy` returns py-spy's path, if it is there then."""
        self._assignment = assignment
        self._node = node
        self._find_spy = find_spy
        self._native_within_s = native_within_s
        self._apart_s = apart_s
        self._words: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._next: tuple[bus.Stacks, dict[int, int]] | None = None
        self._busy = False
        self._files: _Files

    def fileno(self) -> int:
        """For select."""
        return self._ready

    def words(self) -> list[Word]:
        """Return what there is to say."""
        os.eventfd_read(self._ready)
        words = []
        while not self._words.empty():
            words.append(self._words.get())
        return words

    def take(self, wanted: bus.Stacks, pids: Mapping[int, int]) -> None:
        """Begin; where one request is under way the newest of those that come meanwhile follows it."""
        with self._lock:
            self._next = (wanted, dict(pids))
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._serve, name="stacks", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                following, self._next = self._next, None
                if following is None:
                    self._busy = False
                    return
            try:
                self._take(*following)
            except BaseException:
                with self._lock:
                    self._busy = False
                raise

    def _say(self, word: Word) -> None:
        self._words.put(word)
        os.eventfd_write(self._ready, 1)

    def _take(self, wanted: bus.Stacks, pids: dict[int, int]) -> None:
        self._files = _Files()
        try:
            ras = RasWitness(pids, within_s=BRIEF_S if wanted.brief else RAS_WITHIN_S)
            spy = self._find_spy()
            first = self._sample(spy, wanted.launch, pids)
            lived = {rank: kernel.of_life(pid) for rank, pid in pids.items()}
            waited = {rank: kernel.wait_of(pid) for rank, pid in pids.items()}
            families = {rank: kernel.of_family(pid) for rank, pid in pids.items()} if wanted.brief else {}
            families_at = time.monotonic()
            dozing = {
                rank: pids[rank]
                for rank in families
                if in_own_code(first[rank]) and kernel.sleeps_less(waited[rank], self._apart_s)
            }
            still = [rank for rank in pids if kernel.sure_s(waited[rank], waited[rank]) >= self._apart_s]
            for rank in [*still, *dozing][:1]:  # one is enough to prepare the next launch
                self._say(bus.DoesNothing(node=self._node, number=wanted.number, rank=rank))
            calls = self._pause(dozing)
            ras.look_again()
            waits_on = {rank: kernel.wait_of(pid) for rank, pid in pids.items()}
            lives_on = {rank: kernel.of_life(pid) for rank, pid in pids.items()}
            took_s = time.monotonic() - families_at
            slept = {
                rank
                for rank, pid in dozing.items()
                if only_sleeps(calls[rank])
                and kernel.family_rests(families[rank], kernel.of_family(pid), took_s, traced=pid)
            }
            second = self._sample(spy, wanted.launch, pids)
            asleep = {rank for rank in slept if first[rank] == second[rank]}
            stands: dict[int, int] = {}  # pids of ranks that do
            plain: dict[int, tuple[Frame, ...]] = {}  # of them, those of which native frames may say more
            for rank, pid in sorted(pids.items()):
                frames = second[rank]
                stuck = lived[rank].in_device and lives_on[rank].in_device
                doing = put_together(frames, kernel.of_kernel(pid), stuck=stuck)
                moved = first[rank] != frames
                if not first[rank] or not frames:
                    moved = kernel.lives(lived[rank], lives_on[rank], self._apart_s)
                if not moved:
                    stands[rank] = pid
                if frames and not moved and not doing.halted and not says_it_all(doing.where):
                    plain[rank] = frames
                rests = kernel.rests(lived[rank], lives_on[rank], self._apart_s)
                stays = not moved and rests and lived[rank].switches == lives_on[rank].switches
                stood = bus.Stood(
                    node=self._node,
                    number=wanted.number,
                    rank=rank,
                    where=shorten(doing.where),
                    waits=doing.waits,
                    halted=doing.halted,
                    moved=moved,
                    idle=rests,
                    sure_s=kernel.sure_s(waited[rank], waits_on[rank]) if stays else 0.0,
                    sleeps=rank in asleep,
                )
                self._say(stood)
            if not wanted.brief:
                self._below(spy, wanted, stands, plain)
            within_s = BRIEF_S if wanted.brief else WITHIN_S
            # behind the stacks: faulthandler does one thing at a time, and drops a signal that comes meanwhile; and
            # whom py-spy holds answers no signal
            asked = FlightRecorderRequest(self._file(wanted.launch, 0).parent.parent, pids, within_s=within_s)
            for rank, places in sorted(asked.take().items()):
                for place in places:
                    self._say(bus.Entered(node=self._node, number=wanted.number, rank=rank, place=place))
            for behind in ras.take():
                said = bus.Entered(
                    node=self._node,
                    number=wanted.number,
                    rank=behind.first,
                    place=behind.place,
                    ranks=behind.ranks,
                )
                self._say(said)
            self._files.close(WRITTEN_WITHIN_S)
            self._say(bus.StacksTaken(node=self._node, number=wanted.number))
        finally:
            self._files.close(0.0)

    def _pause(self, pids: Mapping[int, int]) -> dict[int, tuple[str, ...] | None]:
        """Let the time between two looks pass; return which system calls these ranks make in it, None: not known."""
        until = time.monotonic() + self._apart_s
        calls: dict[int, tuple[str, ...] | None] = {}
        if pids:
            with ThreadPoolExecutor(max_workers=len(pids)) as threads:  # who traces a process has to be one thread
                seen = threads.map(calls_made, pids.values(), repeat(self._apart_s))
                calls = dict(zip(pids, seen, strict=True))
        time.sleep(max(0.0, until - time.monotonic()))
        return calls

    # --- Python -----------------------------------------------------------------------------------

    def _sample(self, spy: str | None, launch: int, pids: dict[int, int]) -> dict[int, tuple[Frame, ...]]:
        """Return the stack of each rank's main thread, the innermost frame first; empty where nobody can tell."""
        files = {rank: self._file(launch, rank) for rank in pids}
        until = time.monotonic() + DUMP_WITHIN_S
        found: dict[int, tuple[Frame, ...]] = {}
        spied: dict[int, py_spy.PySpyStacks] = {}
        if spy is not None:
            spied = py_spy.of_each(
                pids,
                lambda _, pid: py_spy.dump(spy, pid, native=False, within_s=until - time.monotonic()),
                until,
            )
            for rank, each in spied.items():
                self._files.append(files[rank], each.text)
                found[rank] = of_py_spy(each.text, pids[rank])
        begun = {rank: _size(path) for rank, path in files.items()}
        asked = {
            rank
            for rank, pid in pids.items()
            if not found.get(rank)
            and kernel.state_of(pid) != "T"  # it would answer when it goes on
            and ask(pid, collectives.STACKS_SIGNAL)
        }
        give_up_at = time.monotonic() + DUMP_WITHIN_S
        sizes = dict(begun)
        since = ran_at = time.monotonic()
        while asked and time.monotonic() < min(give_up_at, ran_at + STUCK_FOR_S):
            time.sleep(0.05)
            now = {rank: _size(files[rank]) for rank in asked}
            if any(now[rank] == begun[rank] and kernel.state_of(pids[rank]) in ("R", "S") for rank in asked):
                ran_at = time.monotonic()
            if now != {rank: sizes[rank] for rank in asked}:
                sizes, since = sizes | now, time.monotonic()
            elif all(now[rank] > begun[rank] for rank in asked) and time.monotonic() - since > SETTLED_S:
                break
        for rank in asked:  # a word of ours before would have been taken for theirs
            self._files.append(files[rank], "" if rank not in spied else f"{spied[rank].problem}\n")
            found[rank] = of_faulthandler(_read(files[rank], begun[rank]))
        return {rank: found.get(rank, ()) for rank in pids}

    # --- below it ---------------------------------------------------------------------------------

    def _below(
        self, spy: str | None, wanted: bus.Stacks, pids: dict[int, int], plain: Mapping[int, tuple[Frame, ...]]
    ) -> None:
        """Write what native code and the kernel do for each rank that stands, and say it where it says more.

        Args:
            spy: py-spy.
            wanted: the request.
            pids: of the ranks that stand.
            plain: Python's stacks of those of which native frames may say more.
        """
        calls = {rank: kernel.call_of(pid) for rank, pid in pids.items()}
        workers = {rank: kernel.worker_that_waits(pids[rank]) for rank in plain}
        for rank, pid in pids.items():
            self._files.append(self._file(wanted.launch, rank), kernel.account(pid))
        spied = self._spy_below(spy, wanted, {**{rank: pids[rank] for rank in plain}, **pids}) if spy else {}
        for rank, python in plain.items():
            text = spied[rank].text if rank in spied else ""
            frames = below(of_py_spy(text, pids[rank]), python) if text else Below()
            where = in_words(frames, calls[rank], workers[rank])
            if where:
                word = bus.StoodBelow(node=self._node, number=wanted.number, rank=rank, where=shorten(where))
                self._say(word)

    def _spy_below(self, spy: str, wanted: bus.Stacks, pids: dict[int, int]) -> dict[int, py_spy.PySpyStacks]:
        """Return what py-spy says of native code; why it says nothing is told."""
        until = time.monotonic() + self._native_within_s
        spied = py_spy.of_each(
            pids,
            lambda _, pid: py_spy.dump(spy, pid, native=True, within_s=until - time.monotonic()),
            until,
            py_spy.NATIVE_AT_ONCE,
        )
        problems: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(pids):
            found = spied.get(rank, py_spy.PySpyStacks(problem="there was no time left"))
            text = found.text or f"no native stack: {found.problem}\n"
            self._files.append(self._file(wanted.launch, rank), text)
            if found.problem:
                problems[found.problem].append(rank)
        for problem, ranks in problems.items():
            self._say(bus.Note(node=self._node, text=shorten(f"no native stacks of {_numbers(ranks)}: {problem}")))
        return spied

    def _file(self, launch: int, rank: int) -> Path:
        return collectives.stacks_file(Path(self._assignment.run_directory), self._assignment.attempt, launch, rank)


def only_sleeps(calls: tuple[str, ...] | None) -> bool:
    """Tell whether a rank slept again and again, and asked the kernel for nothing else, in all of the time.

    >>> only_sleeps(("clock_nanosleep",) * 3), only_sleeps(("clock_nanosleep",)), only_sleeps(None)
    (True, False, False)
    >>> only_sleeps(("clock_nanosleep", "newfstatat", "clock_nanosleep", "newfstatat"))
    False
    >>> only_sleeps(("clock_nanosleep",) * CALLS_MAX)  # it was let go early
    False
    """
    return calls is not None and SLEEPS_LEAST <= len(calls) < CALLS_MAX and set(calls) == {"clock_nanosleep"}


def put_together(frames: tuple[Frame, ...], seen: Doing, *, stuck: bool) -> Doing:
    """Say what a rank does by its stack, and by what the kernel says.

    Args:
        frames: of Python; empty where nobody can tell.
        seen: what the kernel says.
        stuck: it was in a device or file system before already: many a read is, for a moment.
    """
    if not frames:
        return seen
    doing = describe(frames)
    if not seen.halted or (seen.in_device and not stuck):
        return doing
    return Doing(f"{seen.where}, and {doing.where}", halted=True)


def in_words(frames: Below, call: kernel.Call, worker: str = "") -> str:
    """Say where a rank is below Python, and which process of its own waits; empty where nothing is known of either.

    >>> in_words(Below("pread64", "mdb_get (liblmdb.so.0)"), kernel.Call("pread64", "/data/train.mdb"))
    'in pread64 of /data/train.mdb under mdb_get (liblmdb.so.0)'
    """
    inner = str(call) if call.says_something else frames.call
    words = " under ".join(each for each in (inner, frames.function) if each)
    return ", ".join(each for each in (f"in {words}" if words else "", worker) if each)


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN_MAX]))
    more = f" and {len(ranks) - RANKS_SHOWN_MAX} others" if len(ranks) > RANKS_SHOWN_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
