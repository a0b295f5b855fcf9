"""What srun says of dead watchers: of their nodes it tells only where the whole bus had begun."""

from __future__ import annotations

import os
import signal

import pytest

from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
from stepkeeper.supervisor.sources import bus as sources
from stepkeeper.supervisor.sources.bus import Bus
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper.watcher import messages as lines

ANSWER_S = 60.0
# says who is ready, hears a word, and dies of what srun says then
SRUN = 'printf "%s" "$WORDS"; read word; echo "$DEATH" >&2; exit 1'


def play(death: str, *, size: int) -> list[on.Event]:
    """Return the events of a bus on which watchers of a and b answer, after which srun reports a death and ends."""
    words = b"".join(lines.encode(lines.Ready(node=node, pid=1, version="1")) for node in ("a", "b"))
    inbox = Inbox(Clock())
    bus = Bus(
        1,
        ["sh", "-c", SRUN],
        {"WORDS": words.decode(), "DEATH": death},
        inbox=inbox,
        attempt=0,
        note=lambda *_: None,
        on_shard=lambda _share: None,
        size=size,
    )
    events = [inbox.get(ANSWER_S), inbox.get(ANSWER_S)]
    assert all(isinstance(each, on.WatcherReady) for each in events)
    bus.say(lines.ReadNoMore(number=1))
    found: list[on.Event] = []
    while not found or not isinstance(found[-1], on.BusEnded):
        event = inbox.get(ANSWER_S)
        assert event is not None, found
        found.append(event)
    return found


@pytest.mark.parametrize(
    ("death", "size", "lost"),
    [
        pytest.param("srun: error: b: task 1: Killed", 2, ["b"], id="killed on a whole bus"),
        pytest.param("srun: error: b: task 1: Killed", 3, [], id="killed by Slurm, which could not start the third"),
        pytest.param("srun: error: b: task 1: Exited with exit code 1", 3, ["b"], id="failed by itself"),
    ],
)
def test_a_watcher_that_slurm_ends_with_its_bus_is_not_lost(death: str, size: int, lost: list[str]) -> None:
    events = play(death, size=size)
    assert [each.node for each in events if isinstance(each, on.WatcherLost)] == lost
    assert isinstance(events[-1], on.BusEnded)


def test_the_srun_of_a_bus_that_another_one_replaces_is_ended_though_it_does_not_hear() -> None:
    inbox = Inbox(Clock())
    bus = Bus(
        1,
        ["sh", "-c", "printf '%s' \"$READY\"; trap '' TERM; while :; do sleep 0.1; done"],
        {"READY": lines.encode(lines.Ready(node="a", pid=1, version="1")).decode(), "PATH": os.environ["PATH"]},
        inbox=inbox,
        attempt=0,
        note=lambda *_: None,
        on_shard=lambda _shard: None,
    )

    assert isinstance(inbox.get(ANSWER_S), on.WatcherReady)
    bus.abandon()
    ended = inbox.get(ANSWER_S)

    assert isinstance(ended, on.BusEnded)
    assert ended.code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("lost", "last_word", "within_s", "code"),
    [
        pytest.param((), "", ANSWER_S, 0, id="all watchers leave: their step ends by itself"),
        pytest.param(("b",), "left", ANSWER_S, -signal.SIGKILL, id="srun waits for the watcher of a lost node"),
        pytest.param(("b",), "", 0.1, -signal.SIGKILL, id="the other one does not leave in time either"),
    ],
)
def test_a_bus_with_a_lost_node_is_ended_once_the_others_have_left(
    lost: tuple[str, ...], last_word: str, within_s: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LEAVE_WITHIN_S", within_s)
    ready = [lines.encode(lines.Ready(node=node, pid=1, version="1")).decode() for node in ("a", "b")]
    inbox = Inbox(Clock())
    bus = Bus(
        1,
        ["sh", "-c", 'printf "%s" "$READY"; while read word; do :; done; printf "%s" "$LEFT"; exec sleep "$LEAVES_S"'],
        {
            "READY": "".join(ready),
            "LEFT": lines.encode(lines.Left(node="a")).decode() if last_word else "",
            "LEAVES_S": str(2 * ANSWER_S) if lost else "0.5",
            "PATH": os.environ["PATH"],
        },
        inbox=inbox,
        attempt=0,
        note=lambda *_: None,
        on_shard=lambda _shard: None,
    )
    for _ in range(2):
        assert isinstance(inbox.get(ANSWER_S), on.WatcherReady)

    bus.close(lost=lost)

    ended = inbox.get(ANSWER_S)
    assert isinstance(ended, on.BusEnded)
    assert ended.code == code
