import fcntl
import shutil
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.training import Training


@pytest.fixture(scope="session")
def lab(lab_factory):
    """One lab for the stories that leave it whole: nodes that answer late on a busy machine are not DOWN."""
    return lab_factory(grace_time_s=20, kill_wait_s=10)


@pytest.fixture(scope="session")
def reference(lab: Lab, tmp_path_factory: pytest.TempPathFactory, worker_id: str):
    """The uninterrupted run that every other one must equal; of several workers one plays it for all."""
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    with (shared / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _reference(lab, shared / "reference.csv")


def _reference(lab: Lab, played: Path) -> Training:
    training = Training(lab, name="reference", step_seconds=0.0)
    if played.exists():
        training.run_dir.mkdir()
        shutil.copyfile(played, training.run_dir / "metrics.csv")
    else:
        training.submit().wait_end()
        assert lab.job(training.job_id).state == "COMPLETED", training.story()
    assert len(training.losses()) == training.steps
    if not played.exists():
        shutil.copyfile(training.run_dir / "metrics.csv", played)
    return training
