"""The stories that operators tell, as transcripts: read the files in `scenarios/`, they are the test.

After a change of the rules, `STEPKEEPER_REWRITE=1 pytest tests/core/test_scenarios.py` writes what `decide`
does now; the diff is what to review.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper.simulate.scenario import play

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_ends_as_it_is_told(path: Path):
    """Each file is a promise to operators."""
    text = path.read_text()

    played = play(text)

    if os.environ.get("STEPKEEPER_REWRITE"):
        path.write_text(played)
    else:
        assert played == text


def test_there_is_a_story_for_each_promise():
    assert len(SCENARIOS) > 30
