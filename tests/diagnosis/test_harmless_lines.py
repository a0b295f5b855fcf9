"""A line that says nothing of the failure changes no verdict; one much like it, of a real failure, still decides."""

from __future__ import annotations

import pytest

from stepkeeper.diagnosis.classify import LIKELY
from tests.diagnosis.corpus import verdict

HARMLESS = (
    "INFO storage: 503 GET https://x/b/c: Service Unavailable, retrying",
    "wandb: Network error (ConnectTimeout), entering retry loop.",
    "INFO tracker: upload got HTTP status 503; retrying",
    "INFO AWS_IO_THREADS=4",
    "2026-01-01 INFO using google.cloud.storage.transport.Transport",
    "could not connect to the server, continuing offline",
    "metadata service: no termination notice received",
    "Preemptible VM, no preemption notice received",
    "Note: parameters are different across pipeline stages (expected)",
    "config: cuda_error_contained=retry",
    "grpc: Unable to reach peer (error 802), using fallback",
    "cache miss (error 803)",
    "slurmstepd: error: munge decode failed, retried",
    "INFO upload got HTTP status 503, backing off 2 s",
    "INFO upload got HTTP status 503, retried",
    "INFO status code: 503 (attempt 1/5)",
    "{'AWS_IO_THREADS': '4'}",
    "DEBUG:aiohttp.client.TimeoutError handled",
    "could not connect to the server, falling back to the local cache",
    "failed to connect to server, using cached weights",
    "spot watcher: no instance termination notice received",
    "spot watcher: no preemption is imminent",
    "metadata service: preemption notice received: none",
    "gradients are different across replicas: this is expected",
    "CUDA_ERROR_CONTAINED=retry",
    "telemetry system not yet initialized",
    "tracker: Error 803: no such table",
    "slurmstepd: error: Munge decode failed, will try again",
    "[n1:1] PMIX ERROR: NOT-FOUND in file dstore_base.c at line 1567",
    "rm: cannot remove '/usr/local/cuda/compat/lib': Read-only file system",
    "Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(': Connection refused')': /api/v1/runs",
    "max locked memory           (kbytes, -l) 64",
    "slurmstepd: error: pyxis:     3474707 Segmentation fault      (core dumped) | pwck -R /run > /dev/null 2>&1",
    "WARNING Grad scale is small: 0.0078125",
    "slurmstepd: error: task/cgroup: unable to add task[pid=21077] to memory cg '(null)'",
    "slurmstepd: error: xcgroup_instantiate: unable to create cgroup '/sys/fs/cgroup/a' : No space left on device",
    "srun: Job 12 step creation still disabled, retrying (Requested nodes are busy)",
    "srun: error: spank: x11.so: Plugin file not found",
    "loader: thread 7: recv: Resource temporarily unavailable, retrying",
    "It looks like the cache init failed, using the default",
    "prefetch: iteration timed out, retrying",
    "autoscaler: worker 3: no node has crashed",
    "router: Server error '503 Service Unavailable' for url 'http://n1:3938/generate', retrying",
    "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
)
RAISED = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 61, in main
    x = f()
ValueError: shapes do not match
"""
ENDS = {"an exception": RAISED, "a kill": "srun: error: n2: task 3: Killed\n", "nothing": "bye\n"}
STEPS = "".join(f"step {step} loss: 2.1\n" for step in range(29))


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_changes_no_verdict(line: str, end: str) -> None:
    alone, judged = verdict(f"start\n{end}"), verdict(f"start\n{line}\n{end}")

    assert (judged.cause, judged.rule, judged.confidence) == (alone.cause, alone.rule, alone.confidence)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_input_file_that_cannot_be_opened_is_an_error_of_the_program(end: str) -> None:
    judged = verdict(f"start\nRuntimeError: File /data/vocab.json cannot be opened\n{end}")

    assert judged.cause.value == "exception"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("google.api_core.exceptions.ServiceUnavailable: 503 Unavailable. Please retry your request.", "network"),
        ("HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://x. Retry after 55 seconds.", "network"),
        ("ERROR upload got HTTP status 503 (attempt 5/5)", "network"),
        ("awscrt.exceptions.AwsCrtError: AWS_IO_SOCKET_TIMEOUT: socket operation timed out.", "network"),
        ("could not connect to the server", "network"),
        ("aiohttp.client_exceptions.ServerTimeoutError: this was not handled", "network"),
        ("Compute Engine metadata service: instance preemption notice received", "node_lost"),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "node_fault",
        ),
        ("RuntimeError: CUDA error: system not yet initialized", "node_fault"),
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: unknown", "version_mismatch"),
        ("NCCL WARN Cuda failure 'CUDA_ERROR_CONTAINED'", "node_fault"),
        ("Parameters are different across ranks, but expected to be equal", "exception"),
        ("RuntimeError: File /ckpt/iter_1/model_optim_rng.pt cannot be opened.", "storage"),
        ("slurmstepd: error: Munge decode failed: Expired credential", "node_fault"),
        ("[n1:1] PMIX ERROR: NOT-FOUND in file client/pmix_client.c at line 12", "configuration"),
        (
            "ValueError: Free memory on device (12.31/79.11 GiB) is less than desired GPU memory utilization (0.9)",
            "gpu_memory",
        ),
        ("ImportError: cannot import name 'A' from partially initialized module 'mine.model' (circular)", "exception"),
        ("ImportError: cannot import name 'A' from 'transformers.utils' (/env/utils.py)", "version_mismatch"),
        ("InductorError: RuntimeError: Cannot find a working triton installation.", "version_mismatch"),
        ("torch._dynamo.exc.Unsupported: Data-dependent branching", "exception"),
        (
            "ValueError: Expected parameter loc to satisfy the constraint Real(), but found invalid values:",
            "numerical",
        ),
        (
            "google.api_core.exceptions.RetryError: Timeout of 120.0s exceeded, last exception: 503 GET https://x/b",
            "network",
        ),
        ("srun: fatal: Could not establish a configuration source", "network"),
        ("salloc: error: Job submit/allocate failed: Job violates accounting/QOS policy", "configuration"),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", "configuration"),
        ("ptxas fatal   : Unsupported .version 8.4; current version is '8.2'", "version_mismatch"),
        ("httpx.HTTPStatusError: Server error '503 Service Unavailable' for url 'http://n1/generate'", "network"),
        ("worker exit type: SYSTEM_ERROR Worker exit detail: Owner's node has crashed.", "node_lost"),
        ("OSError: [Errno 37] No locks available: '/home/u/hub/.locks/x.lock'", "storage"),
    ],
)
def test_a_line_of_a_real_failure_still_decides(line: str, cause: str) -> None:
    judged = verdict(f"start\n{line}\n")

    assert (judged.cause.value, judged.confidence >= LIKELY) == (cause, True)


def test_a_memory_limit_that_was_reached_at_some_point_explains_no_exception() -> None:
    said = "slurmstepd: error: Exceeded step memory limit at some point.\n"

    assert verdict(f"{RAISED}{said}").cause.value == "exception"
    assert (verdict(said).cause.value, verdict(said).confidence < LIKELY) == ("host_memory", True)


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Task launch for StepId=12.3 failed on node n1: Job credential expired",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.3. Some of the step tasks have been OOM Killed.",
    ],
)
def test_an_error_that_training_outlived_is_not_why_it_ended(line: str) -> None:
    assert verdict(f"{line}\n{STEPS}{RAISED}").cause is verdict(RAISED).cause


@pytest.mark.parametrize(
    ("said", "cause"),
    [("TIME LIMIT", "time_limit"), ("PREEMPTION", "preempted"), ("NODE FAILURE, SEE SLURMCTLD LOG", "node_lost")],
)
def test_what_ends_a_job_is_why_it_ended_though_ranks_write_on(said: str, cause: str) -> None:
    end = f"slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO {said} ***"

    assert verdict(f"{end}\n{STEPS}{ENDS['a kill']}").cause.value == cause
