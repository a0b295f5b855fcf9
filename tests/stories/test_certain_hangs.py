"""A rank that is sure to do nothing ends the launch in seconds: in two looks, and no patience is spent on it."""

from __future__ import annotations

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.training import Training

pytestmark = pytest.mark.slurm
STEP = 38  # enough steps before it to know that they are even


def pieces(training: Training) -> str:
    """Return where the seconds of the first hang went, from the last step that was told."""
    records = training.records()
    killed = next(at for at, record in enumerate(records) if any(isinstance(e, do.KillRanks) for e in record.effects))
    done = max(at for at in range(killed) if isinstance(records[at].event, on.Progressed))
    begun = records[done].event.at
    step = records[done].event.step
    words = []
    for record in records[done + 1 :]:
        if isinstance(record.event, on.Progressed) and record.event.step > step:
            words.append(f"{record.event.at - begun:.1f} new step")
            break
        kinds = [type(effect).__name__ for effect in record.effects]
        if isinstance(record.event, (on.StacksCollected, on.LaunchEnded, on.RankHello)) or {
            "CollectStacks", "KillRanks", "StartLaunch"
        } & set(kinds):  # fmt: skip
            words.append(f"{record.event.at - begun:.1f} {type(record.event).__name__} {' '.join(kinds)}")
    return "\n".join(words)


@pytest.mark.campaign
@pytest.mark.parametrize("step_seconds", [0.2, 2.0])
@pytest.mark.parametrize("how", ["asleep", "stopped", "locked", "hang", "computes"])
def test_measure(lab: Lab, how: str, step_seconds: float) -> None:
    training = failing(lab, how, step=STEP, step_seconds=step_seconds)
    training.wait_end(400)
    print("PIECES", how, step_seconds)
    print(pieces(training))
