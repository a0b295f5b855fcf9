"""The agent's sensors and its socket: started together, stopped together; none of them decides."""

from __future__ import annotations

import threading
from typing import Protocol

import structlog

from stepkeeper import __version__
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.node_agent import evaluate
from stepkeeper.node_agent.config import NodeConfig
from stepkeeper.node_agent.core.state import Mode, State
from stepkeeper.node_agent.protocol import Seen
from stepkeeper.node_agent.sensors import evidence, kernel_log
from stepkeeper.node_agent.sensors.kernel_log import DEVICE, KernelLog, Position
from stepkeeper.node_agent.sensors.nvml import NvmlProcess
from stepkeeper.node_agent.sensors.readings import KernelRecord, Reading
from stepkeeper.node_agent.service import Inbox
from stepkeeper.node_agent.socket.place import PlaceError
from stepkeeper.node_agent.socket.requests import LookRequest
from stepkeeper.node_agent.socket.server import AgentSocket
from stepkeeper.slurm.nodes import NodeClient

CAUGHT_UP_WITHIN_S = 10.0
EVIDENCE_EVERY_S = 60.0
JOURNALCTL_ENDS_WITHIN_S = 2.0


class Jobs(Protocol):
    """What the socket needs of the agent."""

    def seen(self) -> list[Seen]:
        """Return the open incidents."""
        ...

    def look(self, request: LookRequest) -> None:
        """Look anew; `answer_look` comes."""
        ...


class Sources:
    """Everything that puts readings into the inbox, and the way out to jobs."""

    def __init__(
        self,
        config: NodeConfig,
        state: State,
        *,
        client: NodeClient,
        jobs: Jobs,
        inbox: Inbox,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._inbox = inbox
        self._kernel_log = KernelLog(
            self._take_line,
            path=config.test.kernel_log,
            resume=Position(boot_id=state.boot_id, sequence=state.known_sequence),
            allow_injected=config.test.allow_injected,
            boot=state.boot_id,
            on_failure=inbox.fail,
        )
        self._evidence = evidence.EvidenceReader(
            inbox.put, every_s=EVIDENCE_EVERY_S, on_failure=lambda error: inbox.failed("evidence", error)
        )
        self._stopped = threading.Event()
        self._journal: threading.Thread | None = None
        self._nvml_lock = threading.Lock()
        self._nvml: NvmlProcess | None = None
        self._socket = AgentSocket(
            str(config.socket_path),
            node=config.name,
            acts=config.mode is Mode.ACT,
            client=client,
            on_look=jobs.look,
            open_incidents=jobs.seen,
            log=log,
            version=__version__,
            on_failure=inbox.fail,
        )

    def start(self) -> None:
        """Start all, and wait until the kernel log that is there has been read.

        Raises:
            StepkeeperError: the socket's place is taken or not safe.
        """
        try:
            self._socket.start()
        except PlaceError as error:
            raise StepkeeperError(str(error), ExitCode.USAGE) from error
        self._kernel_log.start()
        self.resume_nvml()
        self._evidence.start()
        if self._config.test.previous_journal and self._config.test.kernel_log == DEVICE:
            self._journal = self._inbox.run_optional(
                "journal", lambda: kernel_log.previous_boot(self._take_line, stopped=self._stopped)
            )
        self._kernel_log.caught_up.wait(CAUGHT_UP_WITHIN_S)

    def stop(self) -> None:
        """Stop all, each within its own limit."""
        self._stopped.set()
        self.pause_nvml()
        self._kernel_log.stop()
        self._evidence.stop(evidence.ENDS_WITHIN_S)
        self._socket.close()
        if self._journal is not None:
            self._journal.join(JOURNALCTL_ENDS_WITHIN_S)

    @property
    def alive(self) -> bool:
        """Whether the socket's threads work."""
        return self._socket.alive

    def publish(self, seen: Seen) -> None:
        """Tell the jobs on the node."""
        self._socket.publish(seen)

    def answer_look(self, request: LookRequest, found: int) -> None:
        """Answer a job that asked for a look."""
        self._socket.answer_look(request, found)

    def pause_nvml(self) -> None:
        """End the NVML process: while it lives, it holds the GPUs open."""
        with self._nvml_lock:
            if self._nvml is not None:
                self._nvml.stop()
                self._nvml = None

    def resume_nvml(self) -> None:
        """Start the NVML process, if it is wanted."""
        with self._nvml_lock:
            if self._config.test.nvml and self._nvml is None:
                every_s = self._config.test.limits.health_every_s
                self._nvml = NvmlProcess(self._inbox.put, health_every_s=every_s, on_failure=self._inbox.fail)
                self._nvml.start()

    def _take_line(self, reading: Reading) -> None:
        """Pass on what may be a fault: of a thousand other lines none reaches the loop."""
        if not isinstance(reading, KernelRecord) or evaluate.concerns(reading):
            self._inbox.put_patiently(reading)
