"""A large step directory is read by the supervisor and the watchers together, whatever becomes of the watchers."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.actions import checkpoints as acts
from stepkeeper.supervisor.actions import shards as sharing
from stepkeeper.supervisor.actions.verify_pool import Limits, VerifyPool, Wanted
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines
from stepkeeper.watcher.verify import ShardReader
from stepkeeper_trainer.formats import verify as verifying
from stepkeeper_trainer.formats.manifest import read_manifest
from tests.trainer.test_verify import flip, make_big, total

OWN = "n0"
ANSWER_S = 90.0
SMALL = Limits(shared_mib_min=0.25)  # a step of some hundred KiB counts as large


@pytest.mark.parametrize(
    ("mib_per_s", "mib", "shards"),
    [
        (0.0, 1023, 1), (0.0, 1024, 4), (0.0, 10_240, 12),  # no limit: one node reads a GiB within seconds
        (100.0, 399, 1), (100.0, 400, 4), (100.0, 10_240, 12),  # what it may read in four seconds
        (1000.0, 1023, 1), (1000.0, 1024, 4),
    ],
)  # fmt: skip
def test_a_step_is_shared_where_one_node_would_read_for_long(mib_per_s: float, mib: int, shards: int):
    assert Limits(mib_per_s=mib_per_s).count_shards(mib * 2**20, readers=3) == shards


class Watchers:
    """A bus whose watchers read for real; every line passes through the encoding of the wire."""

    def __init__(self, checkpoints: Path, *nodes: str) -> None:
        self.alive = set(nodes)
        self.mute: set[str] = set()  # that hear, and never answer
        self.told: list[lines.ToWatcher] = []
        self.heard: Callable[[lines.ShardRead], None] | None = None
        self.on_ask: Callable[[lines.Read], None] = lambda _message: None
        self._readers = {node: ShardReader(checkpoints, node, self._say) for node in nodes}

    def use(self, node: str, checkpoints: Path) -> None:
        """See the run directory elsewhere: a mount that went wrong."""
        self._readers[node] = ShardReader(checkpoints, node, self._say)

    def readers(self) -> set[str]:
        return set(self.alive)

    def say(self, message: lines.ToWatcher) -> None:
        heard = lines.decode_to_watcher(lines.encode(message))
        assert heard == message
        self.told.append(heard)
        for node in self.alive - self.mute:
            if isinstance(heard, lines.ReadNoMore):
                self._readers[node].drop(heard.number)
            elif isinstance(heard, lines.Read) and heard.node == node:
                self._readers[node].read(heard)
        if isinstance(heard, lines.Read):
            self.on_ask(heard)

    def _say(self, message: lines.FromWatcher) -> None:
        heard = lines.decode_from_watcher(lines.encode(message))
        assert isinstance(heard, lines.ShardRead), heard
        assert self.heard is not None
        if heard.node in self.alive:
            self.heard(heard)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were made a moment ago may be remembered."""
    monkeypatch.setattr(verifying, "SETTLED_S", -60.0)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def watchers(tmp_path: Path) -> Watchers:
    return Watchers(tmp_path, "n1", "n2")


@pytest.fixture
def pool(watchers: Watchers, notes: list[str]) -> Iterator[VerifyPool]:
    pool = VerifyPool(OWN, 3, SMALL, lambda node, text: notes.append(f"{node}: {text}"))
    pool.use(watchers)
    watchers.heard = pool.receive
    yield pool
    pool.begin()  # ends what a failed test left under way


def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


def choose(checkpoints: Path, pool: VerifyPool) -> on.Event:
    inbox = Inbox(Clock())
    acts.choose(checkpoints, pool=pool, inbox=inbox)
    event = inbox.get(ANSWER_S)
    assert event is not None, "no answer"
    return event


def verify_back(
    step: Path, pool: VerifyPool, writers: acts.Writers | None = None, *, patient: bool = False
) -> on.CheckpointVerified:
    inbox = Inbox(Clock())
    effect = do.VerifyCheckpoint(directory=step.name, from_disk=True)
    acts.verify_back(step.parent, effect, writers=writers, patient=patient, pool=pool, inbox=inbox)
    event = inbox.get(ANSWER_S)
    assert isinstance(event, on.CheckpointVerified), event
    return event


def asked(watchers: Watchers) -> list[lines.Read]:
    return [message for message in watchers.told if isinstance(message, lines.Read)]


def test_all_nodes_read_each_byte_once_and_the_result_is_remembered(
    tmp_path: Path, watchers: Watchers, pool: VerifyPool
):
    step = make_big(tmp_path, chunks=40)
    threads = threading.active_count()

    first, second = choose(tmp_path, pool), choose(tmp_path, pool)

    assert isinstance(first, on.CheckpointChosen)
    assert (first.directory, first.step) == (str(step), 1)
    assert first.bytes_read == total(step)
    assert {"n1", "n2"} <= set(first.readers)
    assert isinstance(second, on.CheckpointChosen)
    assert (second.directory, second.bytes_read, second.readers) == (str(step), 0, ())
    assert isinstance(watchers.told[-1], lines.ReadNoMore)
    until(lambda: threading.active_count() <= threads, "threads are left")  # who answered may be about to end


def test_a_small_step_is_read_by_the_supervisor_alone(tmp_path: Path, watchers: Watchers, pool: VerifyPool):
    step = make_big(tmp_path, files=1, chunks=2)

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert (chosen.bytes_read, chosen.readers) == (total(step), (OWN,))
    assert not asked(watchers)


@pytest.mark.parametrize("offset", [10, 64 * 1024 * 39 + 5], ids=["first", "last"])
def test_a_damaged_step_is_passed_over_and_the_one_before_is_used(tmp_path: Path, pool: VerifyPool, offset: int):
    older, newer = make_big(tmp_path, 1, chunks=40), make_big(tmp_path, 2, chunks=40, seed=1)
    flip(newer / "__3_0.distcp", offset)

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert chosen.directory == str(older)
    (skipped,) = chosen.skipped
    assert {"n1", "n2"} <= set(chosen.readers)
    assert skipped.damaged
    assert skipped.directory == newer.name
    assert "__3_0.distcp: bytes of chunk" in skipped.problem


def test_a_lost_watcher_s_share_is_read_by_the_others(tmp_path: Path, watchers: Watchers, pool: VerifyPool):
    step = make_big(tmp_path, chunks=40)
    watchers.mute = {"n1"}

    def lose(message: lines.Read) -> None:
        if message.node == "n1":
            watchers.alive.discard("n1")

    watchers.on_ask = lose

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert (chosen.directory, chosen.bytes_read) == (str(step), total(step))
    assert [message for message in asked(watchers) if message.node == "n1"], "it had been asked"


def test_a_watcher_that_never_answers_costs_no_more_than_its_limit(
    tmp_path: Path, watchers: Watchers, pool: VerifyPool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sharing, "STALLED_S", 0.5)
    monkeypatch.setattr(sharing, "PATIENCE_MIN_S", 0.5)
    step = make_big(tmp_path, chunks=40)
    watchers.mute = {"n1", "n2"}

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert (chosen.directory, chosen.bytes_read) == (str(step), total(step))


def test_watchers_that_come_while_it_is_read_take_part(tmp_path: Path, watchers: Watchers, notes: list[str]):
    """The supervisor looks for the step before any watcher of the attempt answers."""
    make_big(tmp_path, chunks=40)
    slowly = Limits(shared_mib_min=0.25, mib_per_s=2.0)  # alone it would take seconds
    pool = VerifyPool(OWN, 3, slowly, lambda _node, text: notes.append(text))
    watchers.heard = pool.receive
    inbox = Inbox(Clock())
    before = set(threading.enumerate())
    acts.choose(tmp_path, pool=pool, inbox=inbox)
    until(lambda: "read-own-shard" in {each.name for each in set(threading.enumerate()) - before}, "nobody reads")

    pool.use(watchers)

    chosen = inbox.get(ANSWER_S)
    assert isinstance(chosen, on.CheckpointChosen)
    assert set(chosen.readers) == {OWN, "n1", "n2"}
    assert {message.mib_per_s for message in asked(watchers)} == {2.0}, "the limit holds on every node"


def test_a_node_with_a_bad_mount_does_not_condemn_a_good_step(
    tmp_path: Path, watchers: Watchers, pool: VerifyPool, notes: list[str]
):
    step = make_big(tmp_path, chunks=40)
    watchers.use("n1", tmp_path / "stale")

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert chosen.directory == str(step)
    assert not chosen.skipped
    assert [note for note in notes if note.startswith("n1: could not read a shard")]


def test_what_a_node_wrote_is_read_back_from_the_disk_by_another_one(
    tmp_path: Path, watchers: Watchers, pool: VerifyPool
):
    step = make_big(tmp_path, files=6, chunks=20)
    writers = acts.Writers((OWN, "n1", "n2"), ranks_per_node=2)
    avoid = writers.of_shards(read_manifest(step), 12)

    read = verify_back(step, pool, writers)

    assert read.ok
    assert read.bytes_read == total(step)
    given = asked(watchers)
    assert given
    assert all(message.from_disk for message in given)
    assert {message.of for message in given} == {12}
    assert not [message for message in given if message.node in avoid[message.index] and len(avoid[message.index]) == 1]


def test_what_was_read_back_is_not_read_again_at_the_next_start(tmp_path: Path, pool: VerifyPool):
    step = make_big(tmp_path, chunks=40)
    read_back = verify_back(step, pool)

    chosen = choose(tmp_path, pool)

    assert read_back.bytes_read == total(step)
    assert isinstance(chosen, on.CheckpointChosen)
    assert (chosen.directory, chosen.bytes_read) == (str(step), 0)


def test_what_was_saved_a_moment_ago_is_read_when_a_change_would_show(
    tmp_path: Path, pool: VerifyPool, monkeypatch: pytest.MonkeyPatch
):
    """Else the result could not be remembered, and the next start would read it all again."""
    monkeypatch.setattr(verifying, "SETTLED_S", 1.0)
    step = make_big(tmp_path, chunks=40)

    read_back = verify_back(step, pool, patient=True)
    known = choose(tmp_path, pool)

    assert read_back.ok
    assert isinstance(known, on.CheckpointChosen)
    assert (known.directory, known.bytes_read) == (str(step), 0)


def test_a_new_bus_is_asked_anew_for_what_the_one_before_had_begun(
    tmp_path: Path, watchers: Watchers, pool: VerifyPool, monkeypatch: pytest.MonkeyPatch
):
    """Its watchers stand on the same nodes, and know nothing of it."""
    monkeypatch.setattr(sharing, "STALLED_S", 600.0)
    step = make_big(tmp_path, chunks=40)
    successors = Watchers(tmp_path, "n1", "n2")
    successors.heard = pool.receive
    watchers.mute = {"n1", "n2"}
    watchers.on_ask = lambda _message: pool.use(successors)

    chosen = choose(tmp_path, pool)

    assert isinstance(chosen, on.CheckpointChosen)
    assert (chosen.directory, chosen.bytes_read) == (str(step), total(step))
    assert asked(watchers)
    assert asked(successors)


def test_a_damaged_step_is_found_when_it_is_read_back(tmp_path: Path, pool: VerifyPool):
    step = make_big(tmp_path, chunks=40)
    flip(step / "__2_0.distcp", 5)

    read = verify_back(step, pool)

    assert not read.ok
    assert "__2_0.distcp" in read.problem


def test_a_newer_verification_ends_the_one_before(tmp_path: Path, watchers: Watchers, notes: list[str]):
    """The emergency checkpoint counts, not the one that was being read back."""
    step = make_big(tmp_path, chunks=40)
    newest = make_big(tmp_path, 2, files=1, chunks=2, seed=1)
    pool = VerifyPool(OWN, 3, Limits(shared_mib_min=0.25, mib_per_s=0.5), lambda _node, text: notes.append(text))
    pool.use(watchers)
    watchers.heard = pool.receive
    inbox = Inbox(Clock())
    effect = do.VerifyCheckpoint(directory=step.name)
    acts.verify_back(tmp_path, effect, writers=None, patient=False, pool=pool, inbox=inbox)

    read = verify_back(newest, pool)

    assert (read.directory, read.ok) == (newest.name, True)
    assert inbox.get(0.5) is None, "nobody waits for the older one any more"


def test_an_unreadable_word_of_a_share_is_not_needed(pool: VerifyPool, tmp_path: Path):
    """Late words of an older verification change nothing."""
    step = make_big(tmp_path, chunks=40)
    pool.receive(lines.ShardRead(node="n1", number=-1, index=0, of=3, bytes_read=1, done=True, problem="old"))

    number = pool.begin()
    read = pool.read(Wanted(directory=step, of=3), number, None)

    assert read is not None
    assert read.verdict.ok


def test_a_step_that_was_removed_meanwhile_is_no_damaged_one(tmp_path: Path, pool: VerifyPool):
    step = make_big(tmp_path)
    gone = step.rename(tmp_path / ".trash")

    assert verify_back(tmp_path / step.name, pool).gone
    assert gone.is_dir()
