"""Real NVML on a real GPU: run where one is there, skipped elsewhere with the reason."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.node_agent import nvml
from stepkeeper.node_agent.readings import NvmlState, NvmlStatus, NvmlXid, Reading
from stepkeeper.node_agent.xid.catalogue import Action, Domain, load
from stepkeeper.node_agent.xid.judge import judge_xid_event

pytestmark = pytest.mark.gpu
PROGRAMS = {13, 31, 43, 45}  # what a program's own mistake is reported as
SEEN_S = 30.0


@pytest.fixture(scope="module")
def look() -> nvml.Once:
    found = nvml.once(within_s=60.0)
    if found.status.state is not NvmlState.READY:
        pytest.skip(f"no GPU here: NVML is {found.status.state.value}: {found.status.detail}")
    return found


@pytest.fixture
def readings(look: nvml.Once) -> Iterator[queue.SimpleQueue[Reading]]:
    """Everything that NVML says from now on."""
    assert look.status.gpus
    found: queue.SimpleQueue[Reading] = queue.SimpleQueue()
    process = nvml.NvmlProcess(found.put, health_every_s=5.0, on_failure=print)
    process.start()
    limit = time.monotonic() + SEEN_S
    while not isinstance(first := found.get(timeout=max(0.1, limit - time.monotonic())), NvmlStatus):
        assert time.monotonic() < limit
    assert first.state is NvmlState.READY
    yield found
    process.stop()


def test_every_gpu_has_a_name_an_address_and_a_health(look: nvml.Once) -> None:
    for gpu in look.status.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.pci.count(":") == 2
    assert {health.pci for health in look.health} == {gpu.pci for gpu in look.status.gpus}
    for health in look.health:
        assert not health.lost
        assert health.temperature_c is not None
        assert health.recovery_action in (0, None)  # None: a driver before R565


def test_a_programs_fault_is_seen_as_the_programs_and_drains_nothing(
    look: nvml.Once, readings: queue.SimpleQueue[Reading]
) -> None:
    kernel = Path(__file__).with_name("faulting_kernel.py")
    done = subprocess.run([sys.executable, kernel], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 2:
        pytest.skip(f"no CUDA driver beside NVML: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr

    event = next_xid(readings)

    fault = judge_xid_event(event, catalogue=load())
    assert event.code in PROGRAMS
    assert event.pci in {gpu.pci for gpu in look.status.gpus}
    assert not fault.action.drains
    assert fault.action in (Action.RESTART_JOB, Action.LOG)
    assert fault.domain in (Domain.APPLICATION, Domain.INFO)
    after = nvml.once(within_s=60.0)
    assert all(not health.lost and not health.recovery_action for health in after.health)


def next_xid(readings: queue.SimpleQueue[Reading]) -> NvmlXid:
    limit = time.monotonic() + SEEN_S
    while (left_s := limit - time.monotonic()) > 0:
        try:
            reading = readings.get(timeout=left_s)
        except queue.Empty:
            break
        if isinstance(reading, NvmlXid):
            return reading
    pytest.fail(f"no XID event in {SEEN_S:g} s")
