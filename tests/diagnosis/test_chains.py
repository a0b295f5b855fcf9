"""Of what one log says about one failure, the word that tells most: chains, launchers, NCCL's last error, Slurm."""

from __future__ import annotations

import pytest

from stepkeeper.core.causes import Cause
from tests.diagnosis.corpus import verdict

BEGIN = "Traceback (most recent call last):\n"
TERMINATED = (
    f'{BEGIN}  File "/w/train.py", line 9, in main\n    for batch in loader:\n'
    "RuntimeError: DataLoader worker (pid 81) is killed by signal: Terminated. \n\n"
    "The above exception was the direct cause of the following exception:\n\n"
    f'{BEGIN}  File "/w/train.py", line 9, in main\nRuntimeError: DataLoader worker (pid(s) 81) exited unexpectedly\n'
)
ELASTIC = (
    "W1122 10:00:00 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 12 closing signal SIGTERM\n"
)
FAILED = "E1122 10:00:01 torch/distributed/elastic/multiprocessing/api.py:900] failed (exitcode: {}) local_rank: 0\n"


def raised(text: str, place: str = "/w/train.py", line: int = 5) -> str:
    return f'{BEGIN}  File "{place}", line {line}, in main\n    step()\n{text}\n'


def test_loaders_that_a_launcher_ended_do_not_hide_the_exception_behind_it() -> None:
    log = raised("ValueError: bad") + ELASTIC + TERMINATED + FAILED.format(1)

    assert verdict(log).location == "ValueError at /w/train.py:5 in main"
    assert verdict(TERMINATED + log).location == "ValueError at /w/train.py:5 in main"
    assert verdict(TERMINATED).confidence < 0.6, "a loader that was told to end says little"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (1, Cause.EXCEPTION),
        (255, Cause.EXCEPTION),
        (-9, Cause.HOST_MEMORY),
        (-11, Cause.SEGFAULT),
        (-6, Cause.SEGFAULT),
        (-15, Cause.CANCELLED),
    ],
)
def test_the_rank_that_failed_counts_more_than_those_that_torchrun_ended(code: int, cause: Cause) -> None:
    assert verdict(ELASTIC * 3 + FAILED.format(code)).cause is cause


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("Cuda failure 2 'out of memory'", Cause.GPU_MEMORY),
        ("Cuda failure 999 'unknown error'", Cause.NODE_FAULT),
        ("Error: failed to extend /dev/shm/nccl-Xy to 9637892 bytes", Cause.HOST_MEMORY),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000", Cause.CONFIGURATION),
        ("Proxy Call to rank 7 failed (Connect)", Cause.NETWORK),
        ("socketStartConnect: Connect to 10.0.0.7<43> failed : Software caused connection abort", Cause.NETWORK),
        ("nvmlInit_v2() failed: Driver/library version mismatch", Cause.NODE_FAULT),
    ],
)
@pytest.mark.parametrize("kind", ["ncclInternalError: Internal check failed.", "ncclUnhandledCudaError: Call failed."])
def test_nccls_last_error_decides(kind: str, last: str, cause: Cause) -> None:
    error = (
        f"torch.distributed.DistBackendError: NCCL error in: a.cpp:1, NCCL version 2.20.5\n{kind}\nLast error:\n{last}"
    )

    for log in (raised(error), "\n".join(f"[rank3]: {line}" for line in raised(error).splitlines())):
        assert verdict(log).cause is cause, log


def test_a_specific_exception_beats_a_generic_one_on_either_side_of_a_chain() -> None:
    generic, specific = raised("ValueError: x", line=1), raised("OSError: Can't load tokenizer for 'm'", line=2)
    for how in ("During handling of the above exception, another exception occurred:",
                "The above exception was the direct cause of the following exception:"):  # fmt: skip
        assert verdict(f"{generic}\n{how}\n\n{specific}").cause is Cause.CONFIGURATION
        assert verdict(f"{specific}\n{how}\n\n{generic}").cause is Cause.CONFIGURATION


def test_a_program_that_leaves_after_an_error_does_not_hide_it() -> None:
    how = "\nDuring handling of the above exception, another exception occurred:\n\n"

    assert verdict(raised("ValueError: x") + how + raised("SystemExit: 1", line=9)).location.startswith("ValueError")


def test_the_exception_of_a_loaders_worker_is_located_where_it_came_from() -> None:
    log = (
        f'{BEGIN}  File "/w/train.py", line 81, in go\n    for b in loader:\n'
        "ValueError: Caught ValueError in DataLoader worker process 0.\n"
        f'Original {BEGIN}  File "/w/data.py", line 3, in __getitem__\nValueError: sample 7 is torn\n'
    )

    judged = verdict(log)

    assert judged.location == "ValueError at /w/data.py:3 in __getitem__"
    assert "sample 7" in judged.evidence[0].text


def test_an_exception_of_another_process_of_ray_is_located_there() -> None:
    log = (
        f'{BEGIN}  File "/w/main.py", line 12, in main\n    ray.get(task)\n'
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.step() (pid=249, ip=10.0.0.78)\n"
        '  File "/w/worker.py", line 33, in step\n    loss.backward()\n'
        "torch.OutOfMemoryError: CUDA out of memory.\n"
    )

    assert verdict(log).location == "OutOfMemoryError at /w/worker.py:33 in step"


def test_a_traceback_in_a_box_is_read() -> None:
    log = (
        "╭──────────── Traceback (most recent call last) ────────────╮\n"
        "│ /w/train.py:81 in go                                      │\n"
        "│ ❱  81 │   raise ValueError(name)                          │\n"
        "╰───────────────────────────────────────────────────────────╯\n"
        "ValueError: x\n"
    )

    assert verdict(log).location == "ValueError at /w/train.py:81 in go"


def test_semaphores_that_do_not_fit_into_shared_memory_are_no_full_disk() -> None:
    error = "OSError: [Errno 28] No space left on device"

    assert verdict(raised(error, "/usr/lib/python3.11/multiprocessing/synchronize.py")).cause is Cause.HOST_MEMORY
    assert verdict(raised(error)).cause is Cause.STORAGE


@pytest.mark.parametrize(
    ("log", "cause", "node"),
    [
        (
            "srun: error: Task launch for StepId=20.0 failed on node gpu-33: Socket timed out on send/recv operation",
            Cause.NETWORK,
            "gpu-33",
        ),
        (
            (
                "srun: error: Task launch for 14.0 failed on node gpu-33: Job credential expired\n"
                "srun: error: Application launch failed: Job credential expired\n"
                "srun: error: Timed out waiting for job step to complete"
            ),
            Cause.NODE_FAULT,
            "gpu-33",
        ),
        (
            "slurmstepd: error: execve(): /var/spool/slurmd/job7/slurm_script: No such file or directory",
            Cause.NODE_FAULT,
            "",
        ),
        ("slurmstepd: error: execve(): /w/train: No such file or directory", Cause.CONFIGURATION, ""),
        (
            (
                "slurmstepd: error: pyxis: container start failed with error code: 1\n"
                "slurmstepd: error: pyxis:     enroot-switchroot: failed to execute: /bin/bash: No such file\n"
                "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
                "srun: error: gpu-33: task 1: Exited with exit code 1"
            ),
            Cause.CONFIGURATION,
            "",
        ),
        (
            "slurmstepd: error: pyxis:     [ERROR] Could not process JSON input: Connection timed out",
            Cause.NETWORK,
            "",
        ),
        ("srun: error: gpu-33: task 3: Out Of Memory", Cause.HOST_MEMORY, "gpu-33"),
    ],
)
def test_a_launch_that_slurm_could_not_carry_out_names_its_cause_and_node(log: str, cause: Cause, node: str) -> None:
    judged = verdict(log)

    assert (judged.cause, judged.node) == (cause, node)


def test_what_slurm_says_at_the_end_does_not_hide_the_programs_own_error() -> None:
    log = raised("ValueError: bad") + "srun: error: Timed out waiting for job step to complete\n"

    assert verdict(log).cause is Cause.EXCEPTION


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec.", Cause.NETWORK),
        ("wandb.sdk.lib.service.service_process.ServiceStartTimeoutError: wandb-core did not start", Cause.NETWORK),
        ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=...)", Cause.CONFIGURATION),
        (
            "botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation",
            Cause.CONFIGURATION,
        ),
    ],
)
def test_services_beside_the_training_have_rules(text: str, cause: Cause) -> None:
    assert verdict(raised(text)).cause is cause


def test_a_tracker_whose_process_is_gone_is_told_from_a_peer() -> None:
    log = raised("BrokenPipeError: [Errno 32] Broken pipe", "/env/lib/python3.11/site-packages/wandb/sdk/interface.py")

    assert verdict(log).rule == "tracker-gone"


def test_a_warning_gives_way_to_whatever_failed() -> None:
    warning = "[W1122 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to [::1]:29500\n"
    fallback = "[W1122 10:00:00.1 ProcessGroupGloo.cpp:524] Warning: Unable to resolve hostname to a (local) address. "
    fallback += "Using the loopback address as fallback.\n"

    assert verdict(warning + raised("ValueError: bad")).cause is Cause.EXCEPTION
    assert verdict(fallback + ELASTIC + FAILED.format(-9)).cause is Cause.HOST_MEMORY
    assert verdict(fallback + "step 1 loss 2.5\n").cause is Cause.UNKNOWN
