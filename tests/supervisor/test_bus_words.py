"""Every message of a rank becomes an event with all that it says."""

from __future__ import annotations

import msgspec
import pytest

from stepkeeper.supervisor.sources.bus import EVENTS
from stepkeeper_trainer.formats import messages as words

ENVELOPE = {"at", "launch", "node"}  # of the bus
NOT_FOR_THE_RULES = {  # gathered by the watchers, or for the log
    words.Hello: {"world_size", "pid", "version", "memory"},
    words.Progress: {"rank", "own_seconds", "loading_seconds"},
}
NOT_OF_A_RANK = {words.Progress: {"printed", "late_s"}}  # what an event of this kind says where it comes from elsewhere


def fields(kind: type[msgspec.Struct]) -> dict[str, tuple[object, object]]:
    """Return the type and the default of each field, by name."""
    return {field.name: (field.type, field.default) for field in msgspec.structs.fields(kind)}


def test_every_message_has_an_event() -> None:
    assert {*EVENTS, words.TaskStarted} == set(words.FromRank.__args__)


@pytest.mark.parametrize("word", EVENTS, ids=lambda word: word.__name__)
def test_an_event_declares_what_its_message_declares(word: type[words.FromRank]) -> None:
    """A field that only one of them has would be lost, and one of another type would end the bus."""
    said, kept = fields(word), fields(EVENTS[word])

    assert said.keys() - kept.keys() - ENVELOPE == NOT_FOR_THE_RULES.get(word, set())
    assert kept.keys() - said.keys() - ENVELOPE == NOT_OF_A_RANK.get(word, set())
    shared = said.keys() & kept.keys() - ENVELOPE
    assert {name: said[name] for name in shared} == {name: kept[name] for name in shared}
