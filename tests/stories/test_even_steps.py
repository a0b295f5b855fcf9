"""A hang in a run of even steps is acted on before the time that silence has elsewhere; this one is in native code."""

from __future__ import annotations

import shutil

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.watcher import py_spy
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
LATE = ("--hang-least-s=1000",)  # a hundred even steps are less: what ends this launch is that nobody does anything


def with_py_spy(lab: Lab) -> dict[str, str]:
    """Return the environment of a job on whose nodes py-spy is installed, where it is here."""
    spy = py_spy.find()
    if spy is None:
        return {}
    place = lab.workdir("games") / "bin"
    place.mkdir(exist_ok=True)
    shutil.copyfile(spy, place / py_spy.NAME)
    for path in (place, place / py_spy.NAME):
        path.chmod(0o755)
    return {"PATH": f"{place}:{lab.path}"}


@pytest.mark.campaign
def test_ranks_that_do_nothing_are_not_waited_for_where_steps_were_even(lab: Lab, reference: Training) -> None:
    """Who looks is an ordinary user: native stacks are his to take, and the kernel tells him of system calls."""
    environment = with_py_spy(lab)
    training = failing(lab, "native", step=38, step_seconds=1.0, run_args=LATE, env=environment)
    training.wait_end()

    *_, seen = [record.event for record in training.events(on.StacksCollected)]  # looked at before: it moved still
    assert seen.idle, training.story()
    assert "rank 1 is in waiting_below_python (failing.py:" in seen.summary, seen.summary
    assert "), in pause" in seen.summary, seen.summary
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank) == (Cause.HANG, 1), training.story()
    (kept,) = training.run_dir.glob("logs/attempt-000/launch-000/stacks/rank-1.txt")
    stacks = kept.read_text()
    assert "What the kernel says of process" in stacks
    if environment:
        told = "no native stacks of rank" in training.output()  # a very busy machine
        assert told or "libffi" in stacks, "the frames of native code, which only py-spy tells"
    assert_complete(training, reference)
