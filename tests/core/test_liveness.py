"""Alive, suspect, gone: what holds for every history of partitions, pauses and hints.

A clock that is set cannot reach it: seconds are monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stepkeeper import standby
from stepkeeper.core.liveness import EVERY_S, GONE_AFTER_S, SUSPECT_AFTER_S, Life, Peer
from stepkeeper.core.policy import Policy
from stepkeeper.loop_tools import LATE_S, Stalls

LOOK_EVERY_S = 2.0
LOOKS = 3 * LOOK_EVERY_S  # how late a verdict may come: the look itself, one that was cut short, and rounding


@dataclass
class Watching:
    """A loop as those of supervisor and watcher: it looks every two seconds, and knows its own pauses by `Stalls`."""

    now: float = 1000.0  # of its clock
    ran_s: float = 0.0  # time in which it ran since the newest word, as an outsider knows it
    stalls: Stalls = field(init=False)
    peer: Peer = field(init=False)

    def __post_init__(self) -> None:
        self.stalls, self.peer = Stalls(self.now), Peer(self.now)

    def run(self, seconds: float, *, words: bool) -> None:
        """Run for a while; the peer speaks as it should, or nothing of it arrives."""
        end = self.now + seconds
        while self.now < end:
            self.stalls.waits(LOOK_EVERY_S)
            self.now += LOOK_EVERY_S
            self.ran_s += LOOK_EVERY_S
            self.look()
            if words:
                self.message()

    def message(self) -> None:
        self.peer, self.ran_s = self.peer.received(self.now), 0.0
        assert self.life is Life.ALIVE, "one word ends every suspicion"

    def stop(self, seconds: float) -> None:
        """We are stopped; the clock goes on."""
        self.stalls.waits(LOOK_EVERY_S)
        self.now += seconds
        if seconds - LOOK_EVERY_S <= LATE_S:
            self.ran_s += seconds  # too short to be told from a busy machine
        self.look()

    def look(self) -> None:
        away_s = self.stalls.look(self.now)
        if away_s:
            self.peer = self.peer.paused(away_s, self.now)

    @property
    def life(self) -> Life:
        return self.peer.life(self.now)


SECONDS = st.integers(0, 100).map(float)
HAPPENINGS = st.one_of(
    st.tuples(st.sampled_from(["together", "partition", "stop", "hint"]), SECONDS),
    st.tuples(st.just("stop"), st.integers(100, 100_000).map(float)),
)


def play(history: list[tuple[str, float]]) -> Watching:
    watching = Watching()
    for what, seconds in history:
        match what:
            case "together":
                watching.run(seconds, words=True)
            case "partition":
                watching.run(seconds, words=False)
            case "stop":
                watching.stop(seconds)
            case "hint":
                watching.peer = watching.peer.hinted(watching.now + seconds)
        if watching.life is Life.GONE:
            assert watching.ran_s >= GONE_AFTER_S - LOOKS, "gone, though it had no time to be heard"
    return watching


@given(st.lists(HAPPENINGS, max_size=12))
def test_slow_is_not_gone(history: list[tuple[str, float]]) -> None:
    """A peer is gone only after a minute of silence in which we ran, whatever pauses and hints do."""
    play(history)


@given(st.lists(HAPPENINGS, max_size=12))
def test_gone_is_never_missed(history: list[tuple[str, float]]) -> None:
    """Whatever came before: a peer that is silent from now on is gone after a minute of our own time."""
    watching = play(history)
    watching.run(GONE_AFTER_S + LOOKS, words=False)

    assert watching.life is Life.GONE


@given(st.lists(HAPPENINGS, max_size=12))
def test_one_word_clears_everything(history: list[tuple[str, float]]) -> None:
    """Also after a false alarm: the next loss is noticed like the first."""
    watching = play(history)
    watching.message()
    watching.run(SUSPECT_AFTER_S - LOOKS, words=False)
    assert watching.life is Life.ALIVE
    watching.run(LOOKS + LOOK_EVERY_S, words=False)
    assert watching.life is Life.SUSPECT


@given(st.lists(st.tuples(st.just("hint"), SECONDS), max_size=5), st.integers(0, 59).map(float))
def test_hints_make_nobody_gone(hints: list[tuple[str, float]], silent_s: float) -> None:
    watching = play(hints)

    assert watching.peer.life(watching.now + silent_s) is not Life.GONE


def test_a_hint_makes_suspect_from_its_instant_on() -> None:
    peer = Peer(0.0).hinted(2.0).hinted(9.0)

    assert [peer.life(at) for at in (1.9, 2.0)] == [Life.ALIVE, Life.SUSPECT]
    assert peer.suspect_at == 2.0
    assert peer.received(3.0) == Peer(3.0)


def test_a_watcher_acts_later_than_its_supervisor_gives_up_its_node() -> None:
    """Else a node that is cut off alone would requeue the job of a supervisor that is about to go on without it."""
    assert SUSPECT_AFTER_S + EVERY_S + Policy().watcher_back_within_s < GONE_AFTER_S
    assert 2 * EVERY_S < SUSPECT_AFTER_S
    assert standby.LEASE_S == GONE_AFTER_S, "of a program that imports nothing of ours"
