"""What srun says of dead watchers: of their nodes it tells only where the whole bus had begun."""

from __future__ import annotations

import pytest

from stepkeeper.core import events as on
from stepkeeper.loop_tools import Clock
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
