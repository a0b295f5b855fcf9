"""A run whose directory lies on shared storage with caches on every node; `test_shared_storage` plays it.

Runs below `unshare --mount`, and prints what it has seen as JSON.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stepkeeper.core import events as on
from tests.lab import LabOptions
from tests.lab.shared import SharedLab, Storage
from tests.lab.site import supervisor_python
from tests.stories import acts
from tests.training import Training, assert_complete

BASES = Path("/var/tmp")  # not the temporary directory: labs leave what is mounted there
CACHED_S = 3  # as NFS does for files that have just changed
PATIENT_S = 240.0


@dataclass
class Elsewhere(Training):
    """A run whose directory lies on the shared storage."""

    @property
    def run_dir(self) -> Path:
        assert isinstance(self.lab, SharedLab)
        return self.lab.storage.place / self.user / self.name


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="stepkeeper-story-", dir=BASES))
    base.chmod(0o755)
    options = LabOptions(nodes=2, gpus=1, cpus=4, grace_time_s=20, kill_wait_s=10)
    try:
        with Storage(base, cached_s=CACHED_S) as storage, SharedLab(options, storage) as lab:
            json.dump(play(lab), sys.stdout)
    finally:
        shutil.rmtree(base, ignore_errors=True)  # a server that was killed may still hold a file


def play(lab: SharedLab) -> dict[str, object]:
    """Kill a rank, preempt, ask, and have the doctor look; the losses are those of a run on a local disk."""
    reference = Training(lab, name="reference", step_seconds=0.0).submit()
    reference.wait_end(PATIENT_S)
    training = Elsewhere(lab, name="elsewhere", step_seconds=0.5)  # what happens is seen here up to 3 s later
    place = training.run_dir.parent
    place.mkdir(mode=0o700)
    account = training.work.stat()
    os.chown(place, account.st_uid, account.st_gid)

    training.submit()
    training.wait_step(13, PATIENT_S)
    acts.kill_ranks(training)
    training.wait_event(on.LaunchBegan, PATIENT_S, count=2)
    training.wait_step(training.step() + 2, PATIENT_S)
    urgent = lab.preempt(training.job_id)
    lab.wait_job(urgent, "RUNNING", timeout_s=PATIENT_S)
    lab.release(urgent)
    training.wait_end(PATIENT_S)
    assert_complete(training, reference)

    answer = place / "answer.json"
    look = f"exec {supervisor_python()} -m stepkeeper doctor --run-dir {place} --all --json"
    job = lab.submit(f"#!/bin/sh\n{look} >{answer}\n", sbatch_args=["-N2", "--mem=500"], user=training.user)
    lab.until(lambda: lab.job(job).state not in ("PENDING", "RUNNING", "COMPLETING"), "the doctor", PATIENT_S)
    of_storage = [each for each in json.loads(answer.read_text())["findings"] if each["subject"].startswith("storage")]
    newest = lab.run(training.stepkeeper, "checkpoints", "latest", training.run_dir, user=training.user).stdout
    return {
        "attempts": len(training.events(on.AttemptStarted)),
        "launches": len(training.launches()),
        "newest": Path(newest.strip()).name,
        "levels": [each["level"] for each in of_storage],
        "found": [each["found"] for each in of_storage],
        "story": training.story(),
    }


if __name__ == "__main__":
    main()
