"""Every word of a rank becomes an event with all that it says."""

import pytest

from stepkeeper.supervisor.sources.bus import _EVENTS, LEFT_OUT


@pytest.mark.parametrize("word", _EVENTS, ids=lambda word: word.__name__)
def test_an_event_holds_every_field_of_its_word(word):
    """A field that only one of them had would end the bus with the first such word."""
    said = set(word.__struct_fields__) - LEFT_OUT

    assert said <= set(_EVENTS[word].__struct_fields__)
