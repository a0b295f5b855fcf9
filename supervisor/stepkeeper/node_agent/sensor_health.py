"""What the agent cannot see: an agent without its sensors looks like one whose node is well, so it says so.  Pure."""

from __future__ import annotations

from collections import deque

from stepkeeper.node_agent.sensors.kernel_log import READABLE
from stepkeeper.node_agent.sensors.readings import Evidence, GpuHealth, NvmlState, NvmlStatus, Reading

KERNEL_LOG = "kernel log"
NVML = "NVML"
DEATHS_MAX = 3
DEATHS_WITHIN_S = 600.0
"""So many deaths of the NVML process in so long are no accident."""
LASTED_S = 300.0
"""An NVML process that has lived this long sees again; the pauses between two deaths are shorter."""


class SensorHealth:
    """Remembers which sensors see nothing, and why."""

    def __init__(self) -> None:
        self.blind: dict[str, str] = {}
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX)

    def take(self, reading: Reading) -> str:
        """Note a reading; return the name of the sensor that has become blind, or sees again; "" where none has."""
        match reading:
            case Evidence(what="sensor") if READABLE in reading.values:
                return self._note(KERNEL_LOG, "" if reading.values[READABLE] else reading.text)
            case NvmlStatus(state=NvmlState.ENDED):
                self._deaths.append(reading.at)
                if len(self._deaths) == DEATHS_MAX and reading.at <= self._deaths[0] + DEATHS_WITHIN_S:
                    return self._note(NVML, f"NVML's process dies again and again: {reading.detail}")
            case NvmlStatus(state=NvmlState.READY) | GpuHealth():
                if NVML in self.blind and reading.at > self._deaths[-1] + LASTED_S:
                    return self._note(NVML, "")
            case _:
                pass
        return ""

    def _note(self, sensor: str, why: str) -> str:
        known = sensor in self.blind
        if why:
            self.blind[sensor] = why
        else:
            self.blind.pop(sensor, None)
        return sensor if known != bool(why) else ""
