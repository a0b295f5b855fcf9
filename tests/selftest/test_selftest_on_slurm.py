"""The self-test on a cluster that it has never seen: other partitions, no GPUs, an ordinary user."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from tests.lab import Lab
from tests.lab.site import site_python

USER = "news"
STRANGE = ("PartitionName=maths Nodes=ALL MaxTime=00:30:00 DefaultTime=00:01:00 State=UP",)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_it_passes_on_a_cluster_that_it_has_never_seen(lab_factory: Callable[..., Lab]) -> None:
    lab = lab_factory(nodes=4, gpus=0, slurm_conf=STRANGE)
    python = site_python(USER)
    done = lab.run(
        *(python.parent / "stepkeeper", "selftest", "-p", "maths", "-N", "2", "--json"),
        *("--sbatch=--cpus-per-task=1", "--sbatch=--mem=2000"),
        user=USER,
        cwd=lab.workdir(USER),
        check=False,
        timeout_s=500.0,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    answer = json.loads(done.stdout)
    assert answer["passed"]
    assert answer["equal"] == answer["steps"] == 120
    assert [each["requeued"] for each in answer["interruptions"]] == [False, True]
    assert not list(lab.workdir(USER).glob("stepkeeper-selftest-*")), "it cleans up"
    assert not lab.run("squeue", "--noheader", "--user", USER).stdout


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_it_follows_the_job_that_is_submitted_again_where_none_may_be_requeued(lab_factory: Callable[..., Lab]) -> None:
    """As under a site's submit plugin that takes the right to requeue away; no job of it is left behind."""
    lab = lab_factory(nodes=4, gpus=0, slurm_conf=STRANGE)
    python = site_python(USER)
    found = threading.Event()

    def forbid() -> bool:
        named = lab.run("squeue", "--noheader", "--name=stepkeeper-selftest-tested", "--format=%A").stdout.split()
        for job in named[:1]:
            lab.run("scontrol", "update", f"JobId={job}", "Requeue=0")
            found.set()
        return found.is_set()

    admin = threading.Thread(target=lambda: lab.until(forbid, "the job", 400.0), daemon=True)
    admin.start()
    done = lab.run(
        *(python.parent / "stepkeeper", "selftest", "-p", "maths", "-N", "1", "--json"),
        *("--sbatch=--cpus-per-task=1", "--sbatch=--mem=2000"),
        user=USER,
        cwd=lab.workdir(USER),
        check=False,
        timeout_s=500.0,
    )
    admin.join(20)
    assert found.is_set()
    assert done.returncode == 0, (done.stdout, done.stderr)
    answer = json.loads(done.stdout)
    assert answer["passed"]
    assert answer["jobs"]["tested"] > answer["jobs"]["reference"] + 1, "another job went on"
    assert not lab.run("squeue", "--noheader", "--user", USER).stdout
