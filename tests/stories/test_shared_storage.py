"""A run directory on shared storage, where each node has a client with caches of its own, as with NFS."""

import json
import os

import pytest

from tests.lab import shared

pytestmark = [pytest.mark.slurm, pytest.mark.campaign]
STORY_S = 540.0
WANTED = "LAB_SHARED_STORAGE"


@pytest.mark.timeout(600)
def test_a_run_on_shared_storage_is_relaunched_preempted_and_complete(slurm: None) -> None:  # noqa: ARG001
    """Lease, journal, commits and step directories go over it; the doctor sees what each node sees, and how soon."""
    if os.environ.get(WANTED) != "1":
        pytest.skip(f"{WANTED}=1 plays it: it wants glusterfs-client, which nothing else needs")
    if why := shared.missing():
        pytest.fail(why)

    done = shared.in_namespace("tests.stories.on_shared_storage", timeout_s=STORY_S)

    assert done.returncode == 0, done.stderr[-6000:]
    seen = json.loads(done.stdout)
    assert (seen["attempts"], seen["launches"]) == (2, 3), seen["story"]
    assert seen["newest"] == "step_00000040", seen
    assert set(seen["levels"]) == {"ok"}, seen
    assert any("fuse" in each for each in seen["found"]), seen
    assert any("a replaced file is seen everywhere" in each for each in seen["found"]), seen
