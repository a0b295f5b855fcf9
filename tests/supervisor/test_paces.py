"""From the ranks' words on what they work to one event for all nodes."""

from __future__ import annotations

import pytest

from stepkeeper.core import events as on
from stepkeeper.supervisor.sources.bus import _EVENTS as RANK_EVENTS
from stepkeeper.supervisor.sources.bus import LEFT_OUT, SLOWEST_REPORTED, Paces
from stepkeeper.watcher import messages as bus
from stepkeeper.watcher.ranks import EVERY_S, WORDS_MAX, NodePace
from stepkeeper_trainer.formats.messages import Progress


def say(
    pace: NodePace, rank: int, step: int, own: float | None, *, launch: str = "0.1", loads: float | None = None
) -> None:
    pace.take(
        Progress(
            launch=launch, rank=rank, step=step, tokens=0, step_seconds=1.0, own_seconds=own, loading_seconds=loads
        )
    )


def test_a_node_speaks_of_its_slowest_rank_now_and_then() -> None:
    pace = NodePace("a")
    for step, own in enumerate((0.4, 0.5, 9.0, 0.5), 1):  # one step of a rank says nothing
        say(pace, 0, step, own)
    say(pace, 1, 4, 0.6)
    say(pace, 2, 4, 0.7, loads=0.2)

    (word,) = pace.words(1000.0)
    say(pace, 0, 5, 0.5)

    assert word == bus.Paced(
        node="a", launch="0.1", step=4, step_seconds=1.0, own_seconds=0.7, rank=2, loading_seconds=0.2
    )
    assert len(bus.encode(word)) <= bus.LINE_BYTES_MAX
    assert list(pace.words(1000.0 + EVERY_S / 2)) == []
    assert [each.step for each in pace.words(1000.0 + EVERY_S)] == [5]
    assert list(pace.words(1000.0 + 2 * EVERY_S)) == []  # nobody has said anything since


def test_what_a_rank_does_not_measure_and_what_an_older_launch_says_is_left_out() -> None:
    pace = NodePace("a")
    say(pace, 0, 1, None)
    assert list(pace.words(1000.0)) == []

    say(pace, 0, 1, 5.0, launch="0.0")
    say(pace, 0, 2, 0.5)

    assert [(word.launch, word.own_seconds) for word in pace.words(1000.0)] == [("0.1", 0.5)]


def test_words_of_quick_steps_do_not_pile_up() -> None:
    pace = NodePace("a")
    for step in range(10 * WORDS_MAX):
        say(pace, 0, step, 0.5)

    assert len(pace._own[0]) == WORDS_MAX


def test_what_rank_0_logs_between_its_steps_does_not_make_its_node_slow() -> None:
    pace = NodePace("a")
    say(pace, 0, 4, 1.5, loads=1.0)
    say(pace, 1, 4, 0.7, loads=0.1)
    (word,) = pace.words(1000.0)
    say(pace, 0, 5, 1.5, loads=1.0)
    (alone,) = pace.words(1000.0 + EVERY_S)

    assert (word.rank, word.own_seconds) == (1, 0.7)
    assert (alone.rank, alone.own_seconds) == (0, 1.5), "nobody tells what it would be"


def word(node: str, own: float, *, step: int = 5, rank: int | None = None, loads: float = 0.0) -> bus.Paced:
    return bus.Paced(
        node=node, launch="0.1", step=step, step_seconds=1.0, own_seconds=own, rank=rank, loading_seconds=loads
    )


def test_a_round_names_the_slowest_ranks_and_what_loading_usually_takes() -> None:
    paces = Paces()
    for number in range(SLOWEST_REPORTED + 2):
        paces.receive(word(f"n{number}", 0.5 + number, rank=number, loads=0.1 * number), 1, 10.0)

    event = paces.receive(word("n0", 0.5), 1, 25.0)

    assert event is not None
    assert event.loading == 0.2
    assert event.slowest[0] == (f"n{SLOWEST_REPORTED + 1}", SLOWEST_REPORTED + 1, 0.5)
    assert len(event.slowest) == SLOWEST_REPORTED


def test_a_round_is_over_when_a_node_speaks_again() -> None:
    paces = Paces()
    assert paces.receive(word("b", 0.5), 1, 10.0) is None
    assert paces.receive(word("a", 0.9, step=6), 1, 11.0) is None

    event = paces.receive(word("b", 0.5), 1, 25.0)

    assert event == on.NodesPaced(at=25.0, launch=1, step=6, step_seconds=1.0, own=(("a", 0.9), ("b", 0.5)))
    assert paces.receive(word("b", 0.5), 1, 40.0) == on.NodesPaced(
        at=40.0, launch=1, step=5, step_seconds=1.0, own=(("b", 0.5),)
    )  # a has not spoken since


@pytest.mark.parametrize(("word", "event"), RANK_EVENTS.items())
def test_every_field_of_a_ranks_word_has_its_place_in_the_event_or_is_left_out(word: type, event: type) -> None:
    """What the watchers gather of a rank's own time is no part of its event."""
    assert set(word.__struct_fields__) - LEFT_OUT <= set(event.__struct_fields__)


def test_a_new_launch_begins_a_new_round() -> None:
    paces = Paces()
    paces.receive(word("a", 0.9), 1, 10.0)

    assert paces.receive(word("a", 0.5), 2, 11.0) is None
