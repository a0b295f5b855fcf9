"""Which GPUs of a node are a job's: told by Slurm and the driver, from a /proc of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepkeeper.slurm.client import SlurmError
from stepkeeper.watcher.own_sensors import OwnGpus

PCIS = ("0000:07:00.0", "0000:0f:00.0", "0000:47:00.0", "0000:4e:00.0")
SWITCH = "0000:c4:00.0"


def uuid(minor: int) -> str:
    return f"GPU-0000000{minor}-ba5d-6944-dfbe-a55ebcfa0000"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Four GPUs as the driver lists them; the last two have their numbers the other way round."""
    for pci, minor in zip(PCIS, (0, 1, 3, 2), strict=True):
        directory = tmp_path / "driver/nvidia/gpus" / pci
        directory.mkdir(parents=True)
        (directory / "information").write_text(
            f"Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 259\nGPU UUID: \t {uuid(minor)}\n"
            f"Bus Type: \t PCIe\nBus Location: \t {pci}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    return tmp_path


def held(proc: Path, environment: dict[str, str], *, counted: bool = True) -> OwnGpus:
    return OwnGpus(environment, counted=lambda: counted, proc=proc)


def concerned(gpus: OwnGpus) -> set[str]:
    return {pci for pci in PCIS if gpus.concern(pci, "", ()).counts}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_STEP_GPUS": "0,2", "SLURM_GPUS_ON_NODE": "2"}, {PCIS[0], PCIS[3]}),
        ({"SLURM_STEP_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0"}, {PCIS[3]}),  # the job's own numbers begin with 0
        ({"SLURM_STEP_GPUS": "0,1,2,3"}, set(PCIS)),
        ({"CUDA_VISIBLE_DEVICES": uuid(1)}, {PCIS[1]}),
        ({"SLURM_STEP_GPUS": "9", "CUDA_VISIBLE_DEVICES": f"MIG-{uuid(3)}/1/0,MIG-{uuid(3)}/2/0"}, {PCIS[2]}),
        ({"SLURM_JOB_NAME": "no-gpus"}, set()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, set()),
    ],
)
def test_only_faults_of_the_jobs_gpus_count(proc: Path, environment: dict[str, str], expected: set[str]) -> None:
    gpus = held(proc, environment)

    assert concerned(gpus) == expected
    assert gpus.addresses in (None, tuple(sorted(expected)))
    assert gpus.concern("", "", ()).counts == bool(expected)  # what concerns the whole node, such as a stuck NVML
    assert gpus.concern(SWITCH, "", ()).counts == bool(expected)


def test_a_gpu_that_has_only_its_uuid_left_is_known(proc: Path) -> None:
    gpus = held(proc, {"SLURM_STEP_GPUS": "0"})

    assert gpus.concern("", uuid(0), ()).counts
    assert not gpus.concern("", uuid(1), ()).counts


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, "Slurm has not set"),
        ({"SLURM_STEP_GPUS": "7"}, "the driver does not say where GPU 7 sits"),
        ({"SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "MIG-5b1c0b5e-0000-5000-8000-000000000000"}, "slices"),
    ],
)
def test_where_it_cannot_be_told_every_fault_counts_and_says_so(
    proc: Path, environment: dict[str, str], why: str
) -> None:
    gpus = held(proc, environment)

    assert concerned(gpus) == set(PCIS)
    assert why in gpus.concern(PCIS[0], "", ()).why
    assert gpus.addresses is None


def test_a_node_whose_gpus_slurm_does_not_count_is_the_jobs(proc: Path) -> None:
    gpus = held(proc, {}, counted=False)

    assert concerned(gpus) == set(PCIS)
    assert "does not count" in gpus.concern(PCIS[0], "", ()).why


def test_a_slurm_that_does_not_answer_proves_nothing(proc: Path) -> None:
    def asked() -> bool:
        raise SlurmError("scontrol show node: no answer in 10 s")

    found = OwnGpus({}, counted=asked, proc=proc).concern(PCIS[0], "", ())

    assert found.counts
    assert "no answer in 10 s" in found.why


def test_a_process_that_uses_a_gpu_all_the_same_is_seen(proc: Path) -> None:
    """A site that does not confine devices: the job was given none, and takes them."""
    descriptors = proc / "4242" / "fd"
    descriptors.mkdir(parents=True)
    os.symlink("/dev/nvidiactl", descriptors / "3")
    gpus = held(proc, {})
    assert not gpus.concern(PCIS[0], "", (4242, 4243)).counts

    os.symlink("/dev/nvidia0", descriptors / "4")
    assert gpus.concern(PCIS[0], "", (4242,)).counts


def test_a_node_without_the_driver_has_no_gpus_to_tell(tmp_path: Path) -> None:
    assert held(tmp_path, {"SLURM_STEP_GPUS": "0"}).concern(PCIS[0], "", ()).counts
