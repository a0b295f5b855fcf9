"""The job's time limit, where no signal announces it."""

import pytest

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from tests.lab import Lab
from tests.stories.test_first_hour import asked
from tests.training import Training, assert_complete

pytestmark = pytest.mark.slurm


@pytest.mark.campaign
def test_a_chain_of_time_limited_jobs_needs_neither_a_signal_nor_a_hand(lab: Lab, reference: Training) -> None:
    """A minute a job: each leaves in time with its steps saved, and the next one goes on."""
    # the steps alone take longer than the limit: no machine is through before
    training = Training(
        lab, name="limited", step_seconds=1.6, every=1000, sbatch_args=("--time=1", "--signal=B:USR2@1")
    ).submit()
    training.wait_end(480)

    assert len(training.events(on.AttemptStarted)) >= 2, training.story()
    first = [record for record in training.records() if record.attempt == 0]
    reasons = [reason for record in first for reason in record.reasons]
    notices = [each.notice for each in reasons if isinstance(each, because.SlurmSaid)]
    assert Notice.TIME_LIMIT in notices, training.story()
    if not any(isinstance(record.event, on.SignalReceived) for record in first):  # Slurm may send it a minute early
        assert because.Plain(because.Fact.TIME_LIMIT_NEAR) in reasons, training.story()
    assert any(isinstance(record.event, on.CheckpointCommitted) and record.event.emergency for record in first)
    why = asked(training, "explain", str(training.run_dir), "--attempt", "0")
    assert "time_limit" in why, why
    assert_complete(training, reference)
