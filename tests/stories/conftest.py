import pytest

from tests.lab import Lab
from tests.training import Training


@pytest.fixture(scope="session")
def lab(lab_factory):
    """One lab for the stories that leave it whole."""
    return lab_factory(grace_time_s=20, kill_wait_s=10, slurmd_timeout_s=8)


@pytest.fixture(scope="session")
def reference(lab: Lab):
    """The uninterrupted run that every other one must equal."""
    training = Training(lab, name="reference", step_seconds=0.0).submit()
    training.wait_end()
    assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert len(training.losses()) == training.steps
    return training
