"""What our Slurm steps inherit: the identity of the job, never another srun's geometry."""

from __future__ import annotations

import pytest

from stepkeeper.slurm.launch import as_submitted, kept, scrub_geometry, without_python


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_TASKS_PER_NODE",
        "SLURM_CPUS_PER_TASK",
        "SLURM_MEM_PER_NODE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_HOSTFILE",
        "SLURM_DISTRIBUTION",
        "SLURM_UNBUFFEREDIO",
        "SLURM_KILL_BAD_EXIT",
        "SLURM_EXACT",
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SRUN_CPUS_PER_TASK",
    ],
)
def test_what_srun_reads_as_an_option_is_left_out(name):
    """After a shrink a plain srun silently started 16 tasks on three four-GPU nodes."""
    assert scrub_geometry({name: "3", "HOME": "/h"}) == {"HOME": "/h"}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_CONF",
        "SLURM_JOB_NODELIST",
        "SLURM_RESTART_COUNT",
        "CUDA_HOME",
        "PYTHONPATH",
    ],
)
def test_who_the_job_is_stays(name):
    assert scrub_geometry({name: "7"}) == {name: "7"}


def test_our_own_processes_load_nobody_elses_modules():
    mine = {
        "PATH": "/bin",
        "PYTHONPATH": "/u",
        "PYTHONHOME": "/u",
        "PYTHONSTARTUP": "/u/x.py",
        "PYTHONINSPECT": "1",
    }

    assert without_python(mine) == {"PATH": "/bin"}


def test_a_watcher_knows_how_its_job_was_submitted_though_srun_says_otherwise_of_its_step():
    job = {"PYTHONPATH": "/u", "SLURM_HINT": "nomultithread", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
    step = {"SLURM_CPUS_PER_TASK": "1", "SLURM_DISTRIBUTION": "block", "STEPKEEPER_WATCHER": "{}"}
    watcher = {**without_python(scrub_geometry(job)), **kept(job), **step}

    assert as_submitted(watcher) == {**job, "STEPKEEPER_WATCHER": "{}"}
    assert as_submitted(job) == job
