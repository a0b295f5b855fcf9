"""Which sensors see nothing."""

from __future__ import annotations

from stepkeeper.node_agent.evaluate import SensorHealth
from stepkeeper.node_agent.readings import Evidence, GpuHealth, NvmlState, NvmlStatus

T = 1_790_000_000.0


def ended(at: float) -> NvmlStatus:
    return NvmlStatus(at=T + at, state=NvmlState.ENDED, detail="signal 11")


def test_a_death_now_and_then_blinds_nobody() -> None:
    sight = SensorHealth()

    assert not any(sight.take(ended(700.0 * number)) for number in range(10))


def test_an_nvml_process_that_dies_in_a_loop_is_told_once_and_its_recovery_too() -> None:
    """It may read every GPU before it dies: that is no recovery."""
    sight = SensorHealth()
    said = []
    for at in range(0, 600, 60):
        said.append(sight.take(ended(at)))
        said.append(sight.take(NvmlStatus(at=T + at + 50, state=NvmlState.READY)))
        said.append(sight.take(GpuHealth(at=T + at + 51, pci="0000:3b:00.0")))

    assert [each for each in said if each] == ["NVML"]
    assert "signal 11" in sight.blind["NVML"]
    assert sight.take(GpuHealth(at=T + 1000, pci="0000:3b:00.0")) == "NVML"
    assert not sight.blind


def test_a_kernel_log_that_cannot_be_read_is_told_until_it_can() -> None:
    sight = SensorHealth()

    def told(readable: float) -> str:
        values = {"readable": readable}
        return sight.take(Evidence(at=T, what="sensor", where="/dev/kmsg", text="cannot read it", values=values))

    assert [told(0.0), told(0.0)] == ["kernel log", ""]
    assert sight.blind == {"kernel log": "cannot read it"}
    assert [told(1.0), told(1.0)] == ["kernel log", ""]
