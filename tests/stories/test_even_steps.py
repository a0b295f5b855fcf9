"""A hang in a run of even steps is acted on before the time that silence has elsewhere."""

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from tests.lab import Lab
from tests.stories.test_failures import failing
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm
# elsewhere the least is two minutes; here a hundred steps would be longer than the test has
SOON = ("--set", "policy.hang_steady_s=8", "--set", "policy.hang_steps=1.5")


@pytest.mark.campaign
def test_ranks_that_do_nothing_are_not_waited_for_where_steps_were_even(lab: Lab, reference: Training) -> None:
    training = failing(lab, "hang", step=38, step_seconds=1.0, run_args=SOON)
    training.wait_end()

    (seen,) = [record.event for record in training.events(on.StacksCollected)]
    assert seen.idle, training.story()
    (said,) = [record.event for record in training.events(on.Judged)]
    assert (said.cause, said.rank) == (Cause.HANG, 1), training.story()
    assert_complete(training, reference)
