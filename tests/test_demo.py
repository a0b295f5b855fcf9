from __future__ import annotations

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from tests import demo
from tests.reading.build import record


def test_the_story_says_each_thing_once() -> None:
    def decided(why: str, phase: Phase, attempt: int = 0) -> demo.Record:
        return record(on.Tick(at=1.0), why=why, phase=phase, attempt=attempt)

    records = [
        decided("the attempt starts", Phase.STARTING),
        decided("", Phase.TRAINING),
        decided("preempted", Phase.SAVING),
        decided("step 23 is verified", Phase.SAVING),
        decided("preempted", Phase.REQUEUEING),
        decided("the job holds its nodes", Phase.REQUEUEING),
        decided("preempted", Phase.REQUEUEING),
        decided("the attempt starts", Phase.STARTING, attempt=1),
        decided("the training is finished", Phase.CLOSING, attempt=1),
        decided("the training is finished", Phase.DONE, attempt=1),
    ]

    assert [(each.attempt, each.phase, each.why) for each in demo.told(records)] == [
        (0, Phase.STARTING, "the attempt starts"),
        (0, Phase.SAVING, "preempted"),
        (0, Phase.SAVING, "step 23 is verified"),
        (0, Phase.REQUEUEING, "preempted"),
        (0, Phase.REQUEUEING, "the job holds its nodes"),
        (1, Phase.STARTING, "the attempt starts"),
        (1, Phase.DONE, "the training is finished"),
    ]
