"""`docs/state-machine.md` plays every event in a typical state of every phase."""

from __future__ import annotations

import typing

from stepkeeper.core import events
from stepkeeper.core.state import Phase
from tests.pages import state_machine


def test_the_state_machine_shows_every_phase_and_every_event() -> None:
    page = state_machine.page()
    diagram, table = page.split("## Events")
    for phase in Phase:
        assert f"{phase.value} --> " in diagram
        assert f"--> {phase.value}" in diagram
        assert f"| {phase.value}" in table
    for kind in typing.get_args(events.Event):
        assert f"| {kind.__name__}" in table or kind is events.AttemptStarted
