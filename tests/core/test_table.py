"""`docs/state-machine.md` is made from the code and cannot rot."""

from __future__ import annotations

from pathlib import Path

from stepkeeper.core import events as on
from stepkeeper.core import table
from stepkeeper.core.state import Phase

FILE = Path(__file__).parents[2] / "docs" / "state-machine.md"


def test_the_committed_table_is_what_decide_does_now():
    made = "\n".join(table.lines())

    assert FILE.read_text() == made, "run: python -m stepkeeper.core.table > docs/state-machine.md"


def test_the_table_shows_every_phase_and_every_event():
    text = FILE.read_text()

    for phase in Phase:
        assert f"| {phase.value}" in text
    for kind in on.Event.__args__:
        assert kind.__name__ in text or kind is on.AttemptStarted
